//! Masks by name.

use crate::memory;
use crate::outcome::Failure;
use etalon_problem::{Mask, NamedArray};

/// The name, if it is that of a mask.
pub fn named(name: &str) -> Result<String, String> {
    match mask(name, 1, 1) {
        Ok(_) => Ok(name.to_string()),
        Err(Failure(reason)) => Err(reason),
    }
}

/// The mask of a name for `batch` sequences of `length` queries and keys.
pub fn mask(name: &str, batch: usize, length: usize) -> Result<Mask, Failure> {
    let number =
        |text: &str| text.parse::<usize>().map_err(|error| Failure(format!("{name}: {error}")));
    // Each array is made, and then shared.
    let array_of = |rows: usize, bytes: usize| {
        let bytes = rows as u128 * length as u128 * 2 * bytes as u128;
        memory::afford(&format!("the mask {name}"), bytes)
    };
    let positive = |text: &str| match number(text)? {
        0 => Err(Failure(format!("{name}: expected at least 1 key"))),
        number => Ok(number),
    };
    Ok(match name.split_once('=') {
        None if name == "full" => Mask::Full,
        None if name == "causal" => Mask::causal(),
        Some(("window", reach)) => Mask::window(number(reach)?, 0),
        Some(("segments", keys)) => {
            array_of(batch, size_of::<i64>())?;
            segments(positive(keys)?, batch, length)
        }
        Some(("array", keys)) => {
            array_of(length, size_of::<bool>())?;
            array(positive(keys)?, length)
        }
        _ => {
            let known = "one of full, causal, window=KEYS, segments=KEYS, array=KEYS";
            return Err(Failure(known.to_string()));
        }
    })
}

/// Causal within segments of `size` queries and keys.
fn segments(size: usize, batch: usize, length: usize) -> Mask {
    let ids: Vec<i64> = (0..batch * length).map(|i| (i % length / size) as i64).collect();
    let [query, key] = ["query_ids", "key_ids"]
        .map(|name| NamedArray::new(name, &[batch, length], ids.as_slice()));
    Mask::And(vec![Mask::causal(), Mask::Segments { query, key }])
}

/// The same, pair by pair.
fn array(size: usize, length: usize) -> Mask {
    let seen = |(i, j): (usize, usize)| j <= i && i / size == j / size;
    let pairs: Vec<bool> =
        (0..length * length).map(|at| seen((at / length, at % length))).collect();
    Mask::Array(NamedArray::new("pairs", &[1, 1, length, length], pairs))
}
