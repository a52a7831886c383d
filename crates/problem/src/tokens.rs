//! Tokens: which rows of one array belong together.

use crate::Error;
use crate::sequences::{check_lengths, check_offsets};

/// How the tokens of the arrays divide into sequences. A state never passes from one sequence to
/// another.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case", deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum TokenSequences {
    /// One sequence per batch element, as long as the arrays.
    #[default]
    Dense,
    /// One sequence per batch element, padded on the right: element b has `tokens[b]` tokens. What
    /// lies beyond is never read; outputs there are 0.
    Lengths {
        /// Tokens per batch element.
        tokens: Vec<usize>,
    },
    /// Sequences laid end to end in one batch element (batch = 1): sequence s holds the tokens
    /// `cu_tokens[s]..cu_tokens[s+1]`. Tokens after the last offset belong to no sequence and are
    /// treated as padding.
    Packed {
        /// Offsets: 0, then ascending.
        cu_tokens: Vec<usize>,
    },
}

/// One sequence: where its tokens lie in the arrays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenSequence {
    /// Which sequence it is, which is also where its states lie.
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
        let element = |(index, tokens)| TokenSequence { index, batch: index, start: 0, tokens };
        match self {
            TokenSequences::Dense => (0..batch).map(|b| element((b, rows))).collect(),
            TokenSequences::Lengths { tokens } => {
                tokens.iter().copied().enumerate().map(element).collect()
            }
            TokenSequences::Packed { cu_tokens } => cu_tokens
                .windows(2)
                .enumerate()
                .map(|(index, cu)| TokenSequence {
                    index,
                    batch: 0,
                    start: cu[0],
                    tokens: cu[1] - cu[0],
                })
                .collect(),
        }
    }
}
