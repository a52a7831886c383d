//! Sequences of queries and keys: which rows of the arrays belong together.

use crate::Error;
use crate::tokens::{TokenSequence, check_lengths, check_offsets, packed, per_element};
use std::iter::repeat_n;

/// Division of the rows of the arrays into sequences. A query sees keys of its own sequence only,
/// and every mask counts positions within the sequence.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case", deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Sequences {
    /// One sequence per batch element, as long as the arrays.
    #[default]
    Dense,
    /// One sequence per batch element, padded on the right: element b has `query[b]` queries and
    /// `key[b]` keys. The rows beyond are never read; outputs there are 0 (lse: −∞).
    Lengths {
        /// Queries per batch element.
        #[cfg_attr(feature = "schema", schemars(with = "crate::offsets::Offsets"))]
        query: Vec<usize>,
        /// Keys per batch element.
        #[cfg_attr(feature = "schema", schemars(with = "crate::offsets::Offsets"))]
        key: Vec<usize>,
    },
    /// Sequences laid end to end in one batch element (batch = 1): sequence s holds the queries
    /// `cu_query[s]..cu_query[s+1]` and the keys `cu_key[s]..cu_key[s+1]`. Rows after the last
    /// offset belong to no sequence: they are padding.
    Packed {
        /// Offsets of the queries: 0, then ascending.
        #[cfg_attr(feature = "schema", schemars(with = "crate::offsets::Offsets"))]
        cu_query: Vec<usize>,
        /// Offsets of the keys: 0, then ascending.
        #[cfg_attr(feature = "schema", schemars(with = "crate::offsets::Offsets"))]
        cu_key: Vec<usize>,
    },
}

/// One sequence, and the rows of the arrays that hold it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sequence {
    /// The batch element that holds it.
    pub batch: usize,
    /// Its first query in the arrays.
    pub query_start: usize,
    /// n: its number of queries.
    pub queries: usize,
    /// Its first key in the arrays.
    pub key_start: usize,
    /// m: its number of keys.
    pub keys: usize,
}

impl Sequences {
    /// Fails unless the lengths or offsets fit arrays of `batch` × `queries` and × `keys`.
    pub(crate) fn check(&self, batch: usize, queries: usize, keys: usize) -> Result<(), Error> {
        match self {
            Sequences::Dense => Ok(()),
            Sequences::Lengths { query, key } => {
                check_lengths("sequences.query", query, batch, queries)?;
                check_lengths("sequences.key", key, batch, keys)
            }
            Sequences::Packed { cu_query, cu_key } => {
                if batch != 1 {
                    return Err(Error::value("batch", "1 with packed sequences", batch));
                }
                if cu_query.len() != cu_key.len() {
                    let expected = format!("as many offsets as cu_query ({})", cu_query.len());
                    return Err(Error::value("sequences.cu_key", expected, cu_key.len()));
                }
                check_offsets("sequences.cu_query", cu_query, queries)?;
                check_offsets("sequences.cu_key", cu_key, keys)
            }
        }
    }

    /// The sequences in the order of their rows. The problem must have passed its check.
    pub(crate) fn list(&self, batch: usize, queries: usize, keys: usize) -> Vec<Sequence> {
        let (query, key) = match self {
            Sequences::Dense => {
                (per_element(repeat_n(queries, batch)), per_element(repeat_n(keys, batch)))
            }
            Sequences::Lengths { query, key } => {
                (per_element(query.iter().copied()), per_element(key.iter().copied()))
            }
            Sequences::Packed { cu_query, cu_key } => (packed(cu_query), packed(cu_key)),
        };
        let join = |(query, key): (TokenSequence, TokenSequence)| Sequence {
            batch: query.batch,
            query_start: query.start,
            queries: query.tokens,
            key_start: key.start,
            keys: key.tokens,
        };
        query.into_iter().zip(key).map(join).collect()
    }
}
