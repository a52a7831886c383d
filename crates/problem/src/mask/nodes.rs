//! A mask as a list of nodes, for devices: [`Mask::nodes`].

use super::{Align, Mask, NamedArray};

/// The kinds of nodes. A device knows them by their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum NodeKind {
    /// i′ − left ≤ j ≤ i′ + right.
    Window,
    /// j ≤ i′ in the same chunk, of `left` keys.
    Chunk,
    /// Equal ids that are not negative.
    Segments,
    /// An array of flags.
    Flags,
    /// Begins a list of which all must hold.
    All,
    /// Begins a list of which one must hold.
    Any,
    /// Ends the innermost list.
    End,
}

/// The arrays that a node looks at.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum NodeArrays<'a> {
    /// None: it looks at positions.
    None,
    /// Ids of queries and of keys: `[batch, queries]` and `[batch, keys]`.
    Ids {
        /// The ids of queries.
        query: &'a NamedArray<i64>,
        /// The ids of keys.
        key: &'a NamedArray<i64>,
    },
    /// Flags: `[batch or 1, query_heads or 1, queries, keys]`.
    Flags(&'a NamedArray<bool>),
}

/// A node of a mask. A list stands between the node that begins it and its [`NodeKind::End`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MaskNode<'a> {
    /// Its kind.
    pub kind: NodeKind,
    /// The alignment of queries, of a window or a chunk.
    pub align: Align,
    /// The reach to the left, open if there is none; or the length of a chunk.
    pub left: Option<usize>,
    /// The reach to the right, open if there is none.
    pub right: Option<usize>,
    /// Its arrays.
    pub arrays: NodeArrays<'a>,
}

impl MaskNode<'_> {
    /// A node without numbers and arrays.
    pub(super) fn of(kind: NodeKind) -> Self {
        let (align, arrays) = (Align::TopLeft, NodeArrays::None);
        MaskNode { kind, align, left: None, right: None, arrays }
    }
}

/// The nodes of a list of masks.
pub(super) fn list(kind: NodeKind, masks: &[Mask]) -> Vec<MaskNode<'_>> {
    let begin = std::iter::once(MaskNode::of(kind));
    let end = std::iter::once(MaskNode::of(NodeKind::End));
    begin.chain(masks.iter().flat_map(Mask::nodes)).chain(end).collect()
}
