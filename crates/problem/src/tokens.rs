//! Sequences of tokens: which rows of one array belong together.

use crate::Error;
use std::iter::repeat_n;

/// Division of the tokens of the arrays into sequences. A state never passes from one sequence to
/// another.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case", deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum TokenSequences {
    /// One sequence per batch element, as long as the arrays.
    #[default]
    Dense,
    /// One sequence per batch element, padded on the right: element b has `tokens[b]` tokens. The
    /// tokens beyond are never read; outputs there are 0.
    Lengths {
        /// Tokens per batch element.
        #[cfg_attr(feature = "schema", schemars(with = "crate::offsets::Offsets"))]
        tokens: Vec<usize>,
    },
    /// Sequences laid end to end in one batch element (batch = 1): sequence s holds the tokens
    /// `cu_tokens[s]..cu_tokens[s+1]`. Tokens after the last offset belong to no sequence: they
    /// are padding.
    Packed {
        /// Offsets: 0, then ascending.
        #[cfg_attr(feature = "schema", schemars(with = "crate::offsets::Offsets"))]
        cu_tokens: Vec<usize>,
    },
}

/// One sequence, and the tokens of the arrays that it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenSequence {
    /// Its number among the sequences: the index of its states.
    pub index: usize,
    /// The batch element that holds it.
    pub batch: usize,
    /// Its first token in the arrays.
    pub start: usize,
    /// Its number of tokens.
    pub tokens: usize,
}

impl TokenSequences {
    /// S: the number of sequences, and so of states. The problem must have passed its check.
    pub(crate) fn count(&self, batch: usize) -> usize {
        match self {
            TokenSequences::Dense | TokenSequences::Lengths { .. } => batch,
            TokenSequences::Packed { cu_tokens } => cu_tokens.len().saturating_sub(1),
        }
    }

    /// Fails unless the lengths or offsets fit arrays of `batch` × `tokens`.
    pub(crate) fn check(&self, batch: usize, rows: usize) -> Result<(), Error> {
        match self {
            TokenSequences::Dense => Ok(()),
            TokenSequences::Lengths { tokens } => {
                check_lengths("sequences.tokens", tokens, batch, rows)
            }
            TokenSequences::Packed { .. } if batch != 1 => {
                Err(Error::value("batch", "1 with packed sequences", batch))
            }
            TokenSequences::Packed { cu_tokens } => {
                check_offsets("sequences.cu_tokens", cu_tokens, rows)
            }
        }
    }

    /// The sequences in the order of their tokens. The problem must have passed its check.
    pub(crate) fn list(&self, batch: usize, rows: usize) -> Vec<TokenSequence> {
        match self {
            TokenSequences::Dense => per_element(repeat_n(rows, batch)),
            TokenSequences::Lengths { tokens } => per_element(tokens.iter().copied()),
            TokenSequences::Packed { cu_tokens } => packed(cu_tokens),
        }
    }
}

/// One sequence per batch element, of these lengths.
pub(crate) fn per_element(lengths: impl IntoIterator<Item = usize>) -> Vec<TokenSequence> {
    let sequence = |(b, tokens)| TokenSequence { index: b, batch: b, start: 0, tokens };
    lengths.into_iter().enumerate().map(sequence).collect()
}

/// Sequences between these offsets, all in one batch element.
pub(crate) fn packed(offsets: &[usize]) -> Vec<TokenSequence> {
    let sequence = |(index, cu): (usize, &[usize])| TokenSequence {
        index,
        batch: 0,
        start: cu[0],
        tokens: cu[1] - cu[0],
    };
    offsets.windows(2).enumerate().map(sequence).collect()
}

/// Fails unless there is one length per batch element, and none exceeds the `rows` of an array.
pub(crate) fn check_lengths(
    name: &str,
    lengths: &[usize],
    batch: usize,
    rows: usize,
) -> Result<(), Error> {
    if lengths.len() != batch {
        let lengths_of = if batch == 1 { "length" } else { "lengths" };
        let expected = format!("{batch} {lengths_of}, one per batch element");
        return Err(Error::value(name, expected, lengths.len()));
    }
    match lengths.iter().find(|&&length| length > rows) {
        Some(length) => Err(Error::value(name, format!("lengths of at most {rows}"), length)),
        None => Ok(()),
    }
}

/// Fails unless the offsets begin with 0, ascend, and end within the `rows` of an array.
pub(crate) fn check_offsets(name: &str, offsets: &[usize], rows: usize) -> Result<(), Error> {
    if offsets.first() != Some(&0) {
        let found = offsets.first().map_or("none".to_string(), usize::to_string);
        return Err(Error::value(name, "offsets that begin with 0", found));
    }
    if let Some(pair) = offsets.windows(2).find(|pair| pair[0] > pair[1]) {
        let found = format!("{} before {}", pair[0], pair[1]);
        return Err(Error::value(name, "ascending offsets", found));
    }
    match offsets.last() {
        Some(&last) if last > rows => {
            Err(Error::value(name, format!("offsets of at most {rows}"), last))
        }
        _ => Ok(()),
    }
}
