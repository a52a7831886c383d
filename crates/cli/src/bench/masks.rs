//! Masks by name.

use etalon_problem::{Mask, NamedArray};

/// The name, if it is that of a mask.
pub fn named(name: &str) -> Result<String, String> {
    mask(name, 1, 1).map(|_| name.to_string())
}

/// The mask of a name for `batch` sequences of `length` queries and keys.
pub fn mask(name: &str, batch: usize, length: usize) -> Result<Mask, String> {
    let number = |text: &str| text.parse::<usize>().map_err(|error| format!("{name}: {error}"));
    let positive = |text: &str| match number(text)? {
        0 => Err(format!("{name}: expected at least 1 key")),
        number => Ok(number),
    };
    Ok(match name.split_once('=') {
        None if name == "full" => Mask::Full,
        None if name == "causal" => Mask::causal(),
        Some(("window", reach)) => Mask::window(number(reach)?, 0),
        Some(("segments", keys)) => segments(positive(keys)?, batch, length),
        Some(("array", keys)) => array(positive(keys)?, length),
        _ => {
            return Err("one of full, causal, window=KEYS, segments=KEYS, array=KEYS".to_string());
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
