//! Sequences: which rows of the arrays belong together.

use crate::Error;

/// How the rows of the arrays divide into sequences. A query sees keys of its own sequence only,
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
    /// `key[b]` keys. What lies beyond is never read; outputs there are 0 (lse: −∞).
    Lengths {
        /// Queries per batch element.
        query: Vec<usize>,
        /// Keys per batch element.
        key: Vec<usize>,
    },
    /// Sequences laid end to end in one batch element (batch = 1): sequence s holds the queries
    /// `cu_query[s]..cu_query[s+1]` and the keys `cu_key[s]..cu_key[s+1]`. Rows after the last
    /// offset belong to no sequence and are treated as padding.
    Packed {
        /// Offsets of the queries: 0, then ascending.
        cu_query: Vec<usize>,
        /// Offsets of the keys: 0, then ascending.
        cu_key: Vec<usize>,
    },
}

/// One sequence: where its rows lie in the arrays.
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
                    return Err(Error::value(
                        "sequences.cu_key",
                        format!("as many offsets as cu_query ({})", cu_query.len()),
                        cu_key.len(),
                    ));
                }
                check_offsets("sequences.cu_query", cu_query, queries)?;
                check_offsets("sequences.cu_key", cu_key, keys)
            }
        }
    }

    /// The sequences in the order of their rows. The problem must have passed its check.
    pub(crate) fn list(&self, batch: usize, queries: usize, keys: usize) -> Vec<Sequence> {
        match self {
            Sequences::Dense => (0..batch)
                .map(|batch| Sequence { batch, query_start: 0, queries, key_start: 0, keys })
                .collect(),
            Sequences::Lengths { query, key } => query
                .iter()
                .zip(key)
                .enumerate()
                .map(|(batch, (&queries, &keys))| Sequence {
                    batch,
                    query_start: 0,
                    queries,
                    key_start: 0,
                    keys,
                })
                .collect(),
            Sequences::Packed { cu_query, cu_key } => cu_query
                .windows(2)
                .zip(cu_key.windows(2))
                .map(|(q, k)| Sequence {
                    batch: 0,
                    query_start: q[0],
                    queries: q[1] - q[0],
                    key_start: k[0],
                    keys: k[1] - k[0],
                })
                .collect(),
        }
    }
}

pub(crate) fn check_lengths(
    name: &str,
    lengths: &[usize],
    batch: usize,
    rows: usize,
) -> Result<(), Error> {
    if lengths.len() != batch {
        return Err(Error::value(
            name,
            format!("{batch} lengths, one per batch element"),
            lengths.len(),
        ));
    }
    match lengths.iter().find(|&&length| length > rows) {
        Some(length) => Err(Error::value(name, format!("lengths of at most {rows}"), length)),
        None => Ok(()),
    }
}

pub(crate) fn check_offsets(name: &str, offsets: &[usize], rows: usize) -> Result<(), Error> {
    if offsets.first() != Some(&0) {
        return Err(Error::value(
            name,
            "offsets that begin with 0",
            format!("{:?}", offsets.first()),
        ));
    }
    if let Some(pair) = offsets.windows(2).find(|pair| pair[0] > pair[1]) {
        return Err(Error::value(
            name,
            "ascending offsets",
            format!("{} before {}", pair[0], pair[1]),
        ));
    }
    match offsets.last() {
        Some(&last) if last > rows => {
            Err(Error::value(name, format!("offsets of at most {rows}"), last))
        }
        _ => Ok(()),
    }
}
