//! Plans: the work of a pass, and the memory that it takes.

use crate::Mode;
use etalon_problem::Blocking;

/// Ways to compute the gradients of linear cross-entropy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// All logits of some tokens are kept, and become gradients in their place: a product for the logits
    /// and one for each of dh and dw.
    OnePass,
    /// The logits are computed twice: for lse, and then for the gradients, those of some tokens and classes
    /// at a time. One product more, and the memory is that of a few tiles.
    Recompute,
    /// As `Recompute`, and once more: dh and dw each have a sweep of their own, where sums of both would
    /// not fit at once.
    Separate,
}

impl Strategy {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Strategy::OnePass => "one pass",
            Strategy::Recompute => "recompute",
            Strategy::Separate => "separate",
        }
    }
}

/// The work of a pass with the given options in the current pool of threads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Queries and keys in a tile; of linear cross-entropy tokens and classes whose logits are kept at the
    /// same time.
    pub blocking: Blocking,
    /// Organisation of a backward pass: never [`Mode::Auto`].
    pub mode: Option<Mode>,
    /// Products of tiles that are computed for every pair of tiles in which a query sees a key. Of
    /// those, some may be computed more than once.
    pub products: usize,
    /// Of linear attention, the chunks of a span of the longest sequence: from one state that a backward
    /// pass keeps to the next, and what threads share out among them.
    pub interval: Option<usize>,
    /// Of the gradients of linear cross-entropy, whether logits are kept or computed again.
    pub strategy: Option<Strategy>,
    /// Sequences and key heads whose operands are packed at the same time.
    pub together: usize,
    /// Memory that is allocated beside operands and results. Bytes are rounded up where they depend on how
    /// threads meet.
    pub buffers: Vec<Buffer>,
}

/// Memory that a pass allocates, and what for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buffer {
    /// Its contents.
    pub name: &'static str,
    /// Its size.
    pub bytes: usize,
    /// The parts of one size that it consists of: one for every thread, slot or tile that has its own.
    pub count: usize,
}

impl Buffer {
    /// `count` parts of `each` bytes.
    pub(crate) fn parts(name: &'static str, count: usize, each: usize) -> Self {
        Buffer { name, bytes: count.saturating_mul(each), count }
    }

    /// Bytes of a part.
    pub fn each(&self) -> usize {
        self.bytes / self.count.max(1)
    }
}

impl Plan {
    /// The most bytes that the pass holds at once beside operands and results.
    pub fn workspace_bytes(&self) -> usize {
        self.buffers.iter().fold(0, |sum, buffer| sum.saturating_add(buffer.bytes))
    }
}
