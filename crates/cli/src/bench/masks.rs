//! Masks by name.

use etalon_problem::{Mask, NamedArray};

/// A mask and its name.
#[derive(Debug, Clone)]
pub struct Named {
    /// As it was asked for.
    pub name: String,
    pub pattern: Pattern,
}

#[derive(Debug, Clone)]
pub enum Pattern {
    Mask(Mask),
    /// Causal within segments of so many queries and keys.
    Segments(usize),
    /// The same, pair by pair.
    Array(usize),
}

/// Reads a mask.
pub fn mask(name: &str) -> Result<Named, String> {
    let number = |text: &str| text.parse::<usize>().map_err(|error| format!("{name}: {error}"));
    let positive = |text: &str| match number(text)? {
        0 => Err(format!("{name}: expected at least 1 key")),
        number => Ok(number),
    };
    let pattern = match name.split_once('=') {
        None if name == "full" => Pattern::Mask(Mask::Full),
        None if name == "causal" => Pattern::Mask(Mask::causal()),
        Some(("window", reach)) => Pattern::Mask(Mask::window(number(reach)?, 0)),
        Some(("segments", keys)) => Pattern::Segments(positive(keys)?),
        Some(("array", keys)) => Pattern::Array(positive(keys)?),
        _ => {
            return Err("one of full, causal, window=KEYS, segments=KEYS, array=KEYS".to_string());
        }
    };
    Ok(Named { name: name.to_string(), pattern })
}

impl Pattern {
    /// The mask for `batch` sequences of `length` queries and keys.
    pub fn mask(&self, batch: usize, length: usize) -> Mask {
        match *self {
            Pattern::Mask(ref mask) => mask.clone(),
            Pattern::Segments(size) => {
                let ids: Vec<i64> =
                    (0..batch * length).map(|i| (i % length / size) as i64).collect();
                let [query, key] = ["query_ids", "key_ids"]
                    .map(|name| NamedArray::new(name, &[batch, length], ids.as_slice()));
                Mask::And(vec![Mask::causal(), Mask::Segments { query, key }])
            }
            Pattern::Array(size) => {
                let seen = |at: usize| {
                    let (i, j) = (at / length, at % length);
                    j <= i && i / size == j / size
                };
                let pairs: Vec<bool> = (0..length * length).map(seen).collect();
                Mask::Array(NamedArray::new("pairs", &[1, 1, length, length], pairs))
            }
        }
    }
}
