//! The kernels of linear_cross_entropy for the tensor cores of compute capability 9.0:
//! `kernels/linear_cross_entropy/sm90a_products.cu`.

use super::args::{CrossEntropyArgs, NODE, ProductArgs};
use super::plan::{Plan, TILE};
use crate::memory::{Layout, MemoryRange};
use crate::step::Steps;
use crate::tensor_map::TensorMap;
use crate::variant::Variant;
use etalon_problem::{Dtype, Error};

/// Bytes of a leaf of the tree: m and l, or `Node` of `linear_cross_entropy/problem.cuh`.
fn leaf(args: &CrossEntropyArgs) -> usize {
    let short = args.entropy == 0 && args.smoothing == 0.0 && args.argmax.0 == 0;
    if short { 8 } else { NODE[0] }
}

/// Tiles of a node of the tree that waits for others.
pub(crate) const GROUP: usize = 32;

/// Threads of a block of a product.
const THREADS: u32 = 384;

/// Tokens and threads of a block of the kernel `tree`.
const TREE_TOKENS: usize = 32;
const TREE_THREADS: u32 = 512;

/// The kernels of a pass, and where they find h.
#[derive(Debug)]
pub(crate) struct Hopper {
    variant: Variant,
    storage: Dtype,
    /// A copy of the rows of h of a chunk of tokens; without it they lie side by side in h.
    pub packed: Option<MemoryRange>,
    /// Of f16, the factor of da of each chunk of tokens: numbers of f32.
    pub scales: Option<MemoryRange>,
}

/// The address of the rows of h of a chunk if all tokens count.
fn in_place(args: &CrossEntropyArgs) -> u64 {
    args.h.0 + 2 * args.first_token as u64 * args.dim as u64
}

impl Hopper {
    /// With scratch memory for so many tokens of so many elements.
    pub fn new(
        storage: Dtype,
        (tokens, dim, _): (usize, usize, usize),
        plan: &Plan,
        ignores: bool,
        layout: &mut Layout,
    ) -> Result<Hopper, Error> {
        let packed = layout.array_if(ignores, 2, &[plan.rows, dim])?;
        let scales = &[tokens.div_ceil(plan.rows)];
        let scales = layout.array_if(storage == Dtype::F16, 4, scales)?;
        let variant = Variant::hopper_cross_entropy(storage);
        Ok(Hopper { variant, storage, packed, scales })
    }

    /// Classes whose leaves a plane of so many bytes holds: whole groups, or all of them.
    pub fn leaf_columns(args: &CrossEntropyArgs, plane: usize) -> usize {
        let (leaf, rows, vocab) = (leaf(args), args.rows.max(1) as usize, args.vocab as usize);
        let groups = plane / rows / (leaf * GROUP);
        if plane / rows / leaf >= vocab.div_ceil(TILE) {
            return vocab;
        }
        groups.max(1).saturating_mul(GROUP * TILE).min(vocab)
    }

    /// A matrix with so many rows and columns, and elements from row to row, in boxes of 64 columns and `height` rows.
    fn map(&self, address: u64, [rows, columns, stride]: [i32; 3], height: u32) -> TensorMap {
        let [rows, columns, stride] = [rows, columns, stride].map(|x| x as u64);
        let (extents, strides) = ([columns, rows], [2 * stride, 0]);
        TensorMap::new(self.storage, address, extents, strides, [64, height])
    }

    /// da of a chunk, in boxes of 64 classes and so many tokens.
    fn gradients(&self, args: &CrossEntropyArgs, height: u32) -> TensorMap {
        self.map(args.z.0, [args.count, args.columns, args.columns], height)
    }

    /// h of a chunk, and h in place, in boxes of so many tokens.
    fn rows(&self, args: &CrossEntropyArgs, h: u64, height: u32) -> [TensorMap; 2] {
        let shape = [args.count, args.dim, args.dim];
        [h, in_place(args)].map(|address| self.map(address, shape, height))
    }

    /// w of a chunk, in boxes of so many classes.
    fn classes(&self, args: &CrossEntropyArgs, height: u32) -> TensorMap {
        let w = args.w.0 + 2 * args.first_class as u64 * args.dim as u64;
        self.map(w, [args.classes, args.dim, args.dim], height)
    }

    fn launch<P>(
        &self,
        steps: &Steps<'_, P>,
        name: &'static str,
        grid: (usize, u32),
        args: &ProductArgs,
    ) -> Result<(), Error> {
        steps.launch((&self.variant, name), grid, args)
    }

    /// Launches a product of so many rows and columns, over tiles of 128 rows and `wide` columns, in clusters of two
    /// blocks.
    fn product<P>(
        &self,
        steps: &Steps<'_, P>,
        (name, wide): (&'static str, usize),
        shape: [i32; 2],
        product: &ProductArgs,
    ) -> Result<(), Error> {
        let [rows, columns] = shape.map(|x| x as usize);
        let all = 2 * rows.div_ceil(256) * columns.div_ceil(wide);
        let blocks = all.min(steps.multiprocessors() / 2 * 2);
        self.launch(steps, name, (blocks, THREADS), product)
    }

    /// The address at which the rows of h of a chunk lie side by side; copies them there if some tokens may be
    /// ignored.
    pub fn gather<P>(&self, steps: &Steps<'_, P>, args: &CrossEntropyArgs, packed: Option<u64>) -> Result<u64, Error> {
        let Some(to) = packed else {
            return Ok(in_place(args));
        };
        let product = ProductArgs { c: *args, from: args.h, to: to.into(), ..ProductArgs::default() };
        let pieces = args.count as usize * (args.dim / 8) as usize;
        // As many as run side by side: where all tokens count there is nothing for them to do.
        let blocks = pieces.div_ceil(256).min(8 * steps.multiprocessors());
        self.launch(steps, "gather", (blocks, 256), &product)?;
        Ok(to)
    }

    /// h, in boxes of so many rows, and the rows of w of a chunk, as the logits take them.
    fn logits(&self, args: &CrossEntropyArgs, (h, height): (u64, u32)) -> ProductArgs {
        let [a, in_place] = self.rows(args, h, height);
        let b = self.classes(args, 128);
        ProductArgs { a, b, in_place, c: *args, ..ProductArgs::default() }
    }

    /// (C33), (C34): the leaves of a chunk, put into the tree.
    pub fn totals<P>(&self, steps: &Steps<'_, P>, args: &CrossEntropyArgs, h: u64) -> Result<(), Error> {
        let product = ProductArgs { leaves: args.z.0.into(), ..self.logits(args, (h, 64)) };
        self.product(steps, ("leaves", TILE), [args.count, args.classes], &product)?;
        let blocks = (args.count as usize).div_ceil(TREE_TOKENS);
        self.launch(steps, "tree", (blocks, TREE_THREADS), &product)
    }

    /// The factor of (C16) of a chunk of tokens before it is stored, from their pulls.
    pub fn scale<P>(&self, steps: &Steps<'_, P>, args: &CrossEntropyArgs, scale: u64) -> Result<(), Error> {
        let product = ProductArgs { c: *args, scale: scale.into(), ..ProductArgs::default() };
        self.launch(steps, "scale", (1, 1024), &product)
    }

    /// (C16) of a chunk, in the storage type.
    pub fn gradient<P>(
        &self,
        steps: &Steps<'_, P>,
        args: &CrossEntropyArgs,
        [h, scale]: [u64; 2],
    ) -> Result<(), Error> {
        let out = self.gradients(args, 64);
        let product = ProductArgs { out, scale: scale.into(), ..self.logits(args, (h, 128)) };
        self.product(steps, ("gradient", TILE), [args.count, args.classes], &product)
    }

    /// (C17), in tiles of so many columns, and blocks of so many classes.
    pub fn hidden<P>(
        &self,
        steps: &Steps<'_, P>,
        args: &CrossEntropyArgs,
        scale: u64,
        (wide, block): (usize, usize),
    ) -> Result<(), Error> {
        let product = ProductArgs {
            a: self.gradients(args, 128),
            b: self.classes(args, 64),
            c: *args,
            scale: scale.into(),
            block: block as u32,
            ..ProductArgs::default()
        };
        let name = if wide == TILE { "hidden" } else { "hidden_192" };
        self.product(steps, (name, wide), [args.count, args.dim], &product)
    }

    /// (C18)
    pub fn head<P>(&self, steps: &Steps<'_, P>, args: &CrossEntropyArgs, [h, scale]: [u64; 2]) -> Result<(), Error> {
        let [b, in_place] = self.rows(args, h, 64);
        let dw = args.dw.0 + 2 * args.first_class as u64 * args.dim as u64;
        let out = match args.wide {
            0 => self.map(dw, [args.classes, args.dim, args.dim], 64),
            _ => TensorMap::default(), // threads write f32
        };
        let a = self.gradients(args, 64);
        let scale = scale.into();
        let product = ProductArgs { a, b, in_place, out, c: *args, scale, ..ProductArgs::default() };
        self.product(steps, ("head", TILE), [args.classes, args.dim], &product)
    }

    /// (C19)
    pub fn bias<P>(&self, steps: &Steps<'_, P>, args: &CrossEntropyArgs, scale: u64) -> Result<(), Error> {
        let (from, scale) = (args.z.0.into(), scale.into());
        let product = ProductArgs { c: *args, from, scale, ..ProductArgs::default() };
        self.launch(steps, "bias", ((args.classes as usize).div_ceil(32), 256), &product)
    }
}
