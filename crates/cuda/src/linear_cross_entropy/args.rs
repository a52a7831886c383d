//! The arguments of the kernels of linear_cross_entropy.

use crate::args::{Byte, ConstPtr, Declaration, Element, Pointee, Ptr, Untyped, declarations, kernel_args, pointees};
use crate::tensor_map::TensorMap;

pointees! {
    /// A token that counts, with its target and its weights.
    Token = "Token",
    /// Numbers that all tokens share: normalisers, how many count.
    Common = "Common",
    /// The sums of a set of classes for a token (C33).
    Node = "Node",
    /// The factors of the gradients of a token's logits (C12)-(C15), (C26).
    Pull = "Pull",
    /// A node of a shard, as it travels.
    Partial = "Partial",
}

/// Bytes of `Token` and `Common` of `linear_cross_entropy/problem.cuh`.
pub(crate) const TOKEN: usize = 16;
pub(crate) const COMMON: usize = 40;

/// Bytes of `Node`, in the first order and in the second, and of `Pull`.
pub(crate) const NODE: [usize; 2] = [28, 44];
pub(crate) const PULL: [usize; 2] = [28, 56];

kernel_args! {
    /// Cotangents of tokens; 0: counts as 0.
    pub(crate) struct Cotangents as "Cotangents" {
        pub loss, lse, logprob, entropy: ConstPtr<f32>,
    }

    /// Outputs of tokens.
    pub(crate) struct Outputs as "Outputs" {
        pub loss, lse, logprob, entropy: Ptr<f32>,
    }

    /// A problem, its memory, and a chunk of its tokens and classes.
    pub(crate) struct CrossEntropyArgs as "CrossEntropyArgs" {
        pub h, w: ConstPtr<Element>,
        pub bias, ddh, ddw, ddbias: ConstPtr<Element>,
        /// 0: all are 1.
        pub class_weights: ConstPtr<f32>,
        pub first, second: Cotangents,
        /// Of the forward pass; gradients by the first cotangents.
        pub outputs, motions: Outputs,
        pub argmax, n_valid: Ptr<i64>,
        pub normaliser: Ptr<f32>,
        pub dh, dw, dbias: Ptr<Untyped>,
        pub targets: ConstPtr<i64>,
        /// 0: all are 1.
        pub token_weights: ConstPtr<f32>,
        /// Tokens that count.
        pub tokens: Ptr<Token>,
        pub common: Ptr<Common>,
        /// `[rows][columns]`: logits, then gradients; how logits move.
        pub z, motion: Ptr<f32>,
        /// `[tokens][2]`: the logits of targets, and their motions.
        pub picked: Ptr<f32>,
        /// `[levels][rows]`: nodes that wait in the tree.
        pub nodes: Ptr<Node>,
        /// `[tokens]`
        pub pulls: Ptr<Pull>,
        /// `[tokens][2]` of (C9)
        pub terms: Ptr<f64>,
        /// Sums of dh that wait in the tree.
        pub hidden: Ptr<f32>,
        /// `[bands of 128 tokens][tiles of classes]`, of a filter.
        pub left_out: ConstPtr<Byte>,
        /// `[classes][D]` of the chunk: sums over the tokens before; the same of the biases.
        pub head, head_bias: Ptr<f32>,
        pub ignore_index: i64,
        /// Z, unless it is a mean's; ζ; α.
        pub divisor, square, smoothing: f64,
        /// Of the link; a ratio of 0: no cap.
        pub factor, ratio, slope: f32,
        pub dim, vocab: i32,
        /// Tokens, whether they count or not.
        pub all: i32,
        pub rows, columns: i32,
        /// The chunk, of as many tokens as may count.
        pub first_token, count, first_class, classes: i32,
        /// 1: Z is a mean's; it is NaN where nothing is left.
        pub mean, nan_of_nothing: i32,
        /// 1: every token has a loss of its own; ω is cw of the target.
        pub each, square_weighted: i32,
        /// 1: the entropy is wanted, or has a cotangent; rows may be read as vectors; gradients are f32.
        pub entropy, whole, wide: i32,
        /// Classes of the nodes that the tree begins with.
        pub leaf: i32,
        /// 1: the chunk is the first, or the last, that adds to its sums.
        pub begins, ends: i32,
    }

    /// A product of `linear_cross_entropy/sm90a_products.cu`: of the chunk, h and w; da and w; da and h.
    pub(crate) struct ProductArgs as "ProductArgs" {
        pub a, b: TensorMap,
        /// da, of `gradient`; dw, of `head`.
        pub out: TensorMap,
        /// In place of h where all tokens count: its rows need not be copied side by side.
        pub in_place: TensorMap,
        pub c: CrossEntropyArgs,
        /// `[tiles of the chunk][tokens of the chunk]`
        pub leaves: Ptr<Untyped>,
        /// Of `bias`: da; of `gather`: h.
        pub from: ConstPtr<Element>,
        /// Of `gather`.
        pub to: Ptr<Element>,
        /// Of f16: the factor of da of the chunk before it is stored.
        pub scale: Ptr<f32>,
        /// Classes that dh is summed over one after the other; a power of two.
        pub block: u32,
    }

    /// A filter of dh and dw.
    pub(crate) struct FilterArgs as "FilterArgs" {
        pub c: CrossEntropyArgs,
        /// As `left_out` of the pass.
        pub left_out: Ptr<Byte>,
        pub of_tokens, of_classes: Ptr<f32>,
        /// Of the chunk: `[tokens][tiles of classes]`, `[tiles of tokens][columns]`.
        pub by_token, by_class: Ptr<f32>,
        /// B `[T]`, C `[V]`
        pub dh, dw: Ptr<f32>,
        pub eps, most_dh, most_dw: f32,
        /// Of `choose`.
        pub diagonal: i32,
    }

    /// A node of a shard.
    pub(crate) struct ShardArgs as "ShardArgs" {
        /// Of a node its classes are all; of `recall` and `add` they are those of the problem.
        pub c: CrossEntropyArgs,
        /// `[T]` of a node; of `identities` `[nodes][T]`; of `recall` the totals `[T]`.
        pub partials: Ptr<Partial>,
        /// `[T][D]`
        pub sums: Ptr<f32>,
        /// `[T][D]`, added to these.
        pub part: ConstPtr<f32>,
        /// The first class of the node; all classes.
        pub first, vocab: i32,
        pub nodes: i32,
        /// 1: it is wanted.
        pub argmax: i32,
    }

    /// The sums of all parts, along the tree: part k is pushed, and then put together with the `merges[k]` before it.
    pub(crate) struct FoldArgs as "FoldArgs" {
        /// `[parts][count]`
        pub partials: ConstPtr<Partial>,
        /// `[count]`
        pub totals: Ptr<Partial>,
        /// `[parts][count]`
        pub sums: ConstPtr<f32>,
        /// `[count]`
        pub dh: Ptr<Untyped>,
        pub merges: ConstPtr<u32>,
        pub count: i64,
        pub parts: i32,
        /// 1: four numbers may be read at once; dh is f32.
        pub whole, wide: i32,
        pub entropy, smoothing, argmax: i32,
    }
}

pub(crate) const ARGUMENTS: &[Declaration] =
    declarations![CrossEntropyArgs, ProductArgs, FilterArgs, ShardArgs, FoldArgs];

/// An address so many bytes behind another; 0 where that is 0.
pub(crate) fn behind(address: u64, bytes: usize) -> u64 {
    if address == 0 { 0 } else { address + bytes as u64 }
}
