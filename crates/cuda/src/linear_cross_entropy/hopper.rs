//! The kernels of linear_cross_entropy for the tensor cores of compute capability 9.0:
//! `kernels/linear_cross_entropy/sm90a_products.cu`.

use super::args::{CrossEntropyArgs, NODE, ProductArgs};
use super::plan::{Plan, TILE};
use super::prepared::Steps;
use crate::family::Family;
use crate::tensor_map::TensorMap;
use crate::variant::Variant;
use etalon_problem::Result;

/// Tiles of a node of the tree that waits for others.
pub(crate) const GROUP: usize = 32;

/// Threads of a block of a product.
const THREADS: u32 = 384;

/// Tokens and threads of a block of the kernel `tree`.
const TREE_TOKENS: usize = 32;
const TREE_THREADS: u32 = 512;

pub(super) struct Products<'a> {
    steps: &'a Steps<'a>,
    args: &'a CrossEntropyArgs,
}

impl<'a> Products<'a> {
    /// None where other kernels multiply.
    pub fn of(steps: &'a Steps<'a>, args: &'a CrossEntropyArgs) -> Option<Self> {
        steps.prepared.spec.tensor.then_some(Products { steps, args })
    }

    /// Classes whose leaves of the tree a plane holds: whole groups, or all of them.
    pub fn leaf_columns(&self) -> usize {
        let (args, plane) = (self.args, self.steps.prepared.plan.plane);
        // A leaf is m and l, or `Node` of `linear_cross_entropy/problem.cuh`.
        let short = args.entropy == 0 && args.smoothing == 0.0 && args.argmax.0 == 0;
        let leaf = if short { 8 } else { NODE[0] };
        let (rows, vocab) = (args.rows.max(1) as usize, args.vocab as usize);
        let groups = plane / rows / (leaf * GROUP);
        if plane / rows / leaf >= vocab.div_ceil(TILE) {
            return vocab;
        }
        groups.max(1).saturating_mul(GROUP * TILE).min(vocab)
    }

    /// The rows of h of the chunk, if all tokens count.
    fn in_place(&self) -> u64 {
        self.args.h.0 + 2 * self.args.first_token as u64 * self.args.dim as u64
    }

    fn scale(&self) -> u64 {
        let chunk = (self.args.first_token / self.args.rows) as u64;
        self.steps.prepared.scales.map_or(0, |range| self.steps.at(range) + 4 * chunk)
    }

    /// A dense matrix, in boxes of 64 columns and `height` rows.
    fn map(&self, address: u64, [rows, columns]: [i32; 2], height: u32) -> TensorMap {
        let [rows, columns] = [rows, columns].map(|x| x as u64);
        TensorMap::new(self.steps.prepared.storage, address, [columns, rows], [2 * columns, 0], [64, height])
    }

    /// da, in boxes of 64 classes and so many tokens.
    fn gradients(&self, height: u32) -> TensorMap {
        self.map(self.args.z.0, [self.args.count, self.args.columns], height)
    }

    /// h, where its rows lie side by side, and h in place, in boxes of so many tokens.
    fn rows(&self, height: u32) -> [TensorMap; 2] {
        let h = self.steps.prepared.packed.map_or(self.in_place(), |range| self.steps.at(range));
        [h, self.in_place()].map(|address| self.map(address, [self.args.count, self.args.dim], height))
    }

    /// The rows of w, or of its gradient, in boxes of so many classes.
    fn classes(&self, matrix: u64, height: u32) -> TensorMap {
        let CrossEntropyArgs { first_class, classes, dim, .. } = *self.args;
        self.map(matrix + 2 * first_class as u64 * dim as u64, [classes, dim], height)
    }

    fn arguments(&self) -> ProductArgs {
        ProductArgs { c: *self.args, ..ProductArgs::default() }
    }

    fn scaled(&self) -> ProductArgs {
        ProductArgs { scale: self.scale().into(), ..self.arguments() }
    }

    fn launch(&self, name: &'static str, grid: (usize, u32), args: &ProductArgs) -> Result<()> {
        let variant = Variant::cross_entropy(Family::CrossEntropySm90a, self.steps.prepared.storage, false);
        self.steps.launch((&variant, name), grid, args)
    }

    /// Launches a product, over tiles of 128 rows and `wide` columns, in clusters of two blocks.
    fn product(&self, name: &'static str, wide: usize, shape: [i32; 2], args: &ProductArgs) -> Result<()> {
        let [rows, columns] = shape.map(|x| x as usize);
        let all = 2 * rows.div_ceil(256) * columns.div_ceil(wide);
        let blocks = all.min(self.steps.multiprocessors() / 2 * 2);
        self.launch(name, (blocks, THREADS), args)
    }

    /// Copies the rows of h side by side if some tokens may be ignored.
    pub fn gather(&self) -> Result<()> {
        let Some(to) = self.steps.prepared.packed else { return Ok(()) };
        let pieces = self.args.count as usize * (self.args.dim / 8) as usize;
        // As many as run side by side: where all tokens count there is nothing for them to do.
        let blocks = pieces.div_ceil(256).min(8 * self.steps.multiprocessors());
        let (from, to) = (self.args.h, self.steps.at(to).into());
        self.launch("gather", (blocks, 256), &ProductArgs { from, to, ..self.arguments() })
    }

    /// With h, in boxes of so many rows, and the rows of w, as the logits take them.
    fn logits(&self, args: ProductArgs, height: u32) -> ProductArgs {
        let [a, in_place] = self.rows(height);
        ProductArgs { a, b: self.classes(self.args.w.0, 128), in_place, ..args }
    }

    /// (C33), (C34): the leaves of a chunk, put into the tree.
    pub fn totals(&self, args: &CrossEntropyArgs) -> Result<()> {
        let chunk = Products { args, ..*self };
        let leaves = args.z.0.into();
        let product = chunk.logits(ProductArgs { leaves, ..chunk.arguments() }, 64);
        self.product("leaves", TILE, [args.count, args.classes], &product)?;
        self.launch("tree", ((args.count as usize).div_ceil(TREE_TOKENS), TREE_THREADS), &product)
    }

    /// The factor of (C16) of a chunk of tokens before it is stored, from their pulls, if there is one.
    pub fn find_scale(&self) -> Result<()> {
        if self.scale() == 0 { Ok(()) } else { self.launch("scale", (1, 1024), &self.scaled()) }
    }

    /// (C16), in the storage type.
    pub fn gradient(&self) -> Result<()> {
        let product = self.logits(ProductArgs { out: self.gradients(64), ..self.scaled() }, 128);
        self.product("gradient", TILE, [self.args.count, self.args.classes], &product)
    }

    /// (C17), in blocks of classes.
    pub fn hidden(&self) -> Result<()> {
        let Plan { rows, block, .. } = self.steps.prepared.plan;
        let wide = self.steps.prepared.spec.columns_of_hidden(rows);
        let (a, b) = (self.gradients(128), self.classes(self.args.w.0, 64));
        let product = ProductArgs { a, b, block: block as u32, ..self.scaled() };
        let name = if wide == TILE { "hidden" } else { "hidden_192" };
        self.product(name, wide, [self.args.count, self.args.dim], &product)
    }

    /// (C18)
    pub fn head(&self) -> Result<()> {
        let [b, in_place] = self.rows(64);
        let out = match self.args.wide {
            0 => self.classes(self.args.dw.0, 64),
            _ => TensorMap::default(), // threads write f32
        };
        let product = ProductArgs { a: self.gradients(64), b, in_place, out, ..self.scaled() };
        self.product("head", TILE, [self.args.classes, self.args.dim], &product)
    }

    /// (C19)
    pub fn bias(&self) -> Result<()> {
        let product = ProductArgs { from: self.args.z.0.into(), ..self.scaled() };
        self.launch("bias", ((self.args.classes as usize).div_ceil(32), 256), &product)
    }
}
