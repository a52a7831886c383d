//! The weights of a register block of queries against a tile of keys, and which products sums grow by.

use super::engine::Engine;
use super::packs::{Keys, Queries};
use super::pair::{Pair, RegisterBlock};
use super::scores::{Strip, VISIBLE};
use super::scratch::{Sums, Target, TileMemory, Weight};
use crate::pack::Packed;

/// The hot part of a sweep: the weights of a register block. Weights and sums have names, so that
/// the products which a sweep takes are a table.
pub trait Body: Copy + Send + Sync {
    /// The products that grow sums of a tile of queries: weights times rows of the keys.
    const ROWS: &'static [Term<OfKeys>];
    /// The products that grow sums of a tile of keys: weights times rows of the queries.
    const COLUMNS: &'static [Term<OfQueries>];
    /// The weights that are summed to the gradient of the bias.
    const BIAS: Weight;
    /// Numbers of bf16 as whose sum a weight is multiplied in tiles, at least.
    const PIECES: usize = 1;
    /// True if kernels of its own compute it in tiles of bf16: those of [`super::bf16_gradient`].
    const HAS_TILES: bool = false;

    /// True if ds is wanted, beside P.
    fn has_ds(&self) -> bool {
        true
    }

    /// The pairs that products with a weight may touch where operands are not finite.
    fn pairs(_: Weight) -> u8 {
        VISIBLE
    }

    /// Computes the weights of a block, into its rows of the memory. Columns outside the returned
    /// strip are zero, if the body has sums of keys or of the bias.
    fn weights<E: Engine>(
        self,
        by: E,
        pair: &Pair<'_>,
        block: &RegisterBlock,
        memory: &mut TileMemory<'_>,
    ) -> Option<Strip>;

    /// Adds the sums of the rows of weights themselves, of rows from `first` on.
    #[inline(always)]
    fn add_numbers<E: Engine>(
        self,
        _by: E,
        _first: usize,
        _strip: &Strip,
        _memory: &TileMemory<'_>,
        _sums: &mut Sums<'_>,
    ) {
    }
}

/// sum += weights · rows, or weightsᵀ · rows.
pub struct Term<R> {
    pub to: Target,
    pub weights: Weight,
    /// The rows, packed along; a term whose rows are not packed is left out.
    pub rows: R,
}

/// Some rows of the keys, or of the queries.
pub type OfKeys = for<'a> fn(&'a Keys<'a>) -> &'a Packed<'a>;
pub type OfQueries = for<'a> fn(&'a Queries<'a>) -> &'a Packed<'a>;
