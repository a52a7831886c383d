//! The kernels of linear_cross_entropy for the tensor cores of compute capability 9.0:
//! `kernels/sm90a_cross_entropy.cu`.

use crate::cross_entropy::call::Call;
use crate::cross_entropy::plan::{Plan, TILE};
use crate::gpu::Kernels;
use crate::old_map::{EncodedBox, EncodedMap};
use crate::parts::Parts;
use crate::queue::Queue;
use crate::room::{Layout, Room, memory};
use crate::variant::{Variant, shared_bytes};
use cudarc::driver::DeviceRepr;
use etalon_problem::{Dtype, Error, LinearCrossEntropy, Pass};
use std::sync::Arc;

/// The architecture of the kernels.
const ARCHITECTURE: &str = "sm_90a";

/// Bytes of a leaf of the tree: m and l, or `Node` of `cross_entropy.cuh`.
fn leaf(call: &Call) -> usize {
    let short = call.entropy == 0 && call.smoothing == 0.0 && call.argmax == 0;
    if short { 8 } else { 28 }
}

/// Tiles of a node of the tree that waits for others.
pub(crate) const GROUP: usize = 32;

/// Threads of a block of a product.
const THREADS: u32 = 384;

/// Tokens and threads of a block of the kernel `tree`.
const TREE_TOKENS: u64 = 32;
const TREE_THREADS: u32 = 512;

/// The kernels of a pass, and where they find h.
#[derive(Debug)]
pub(crate) struct Hopper {
    kernels: Arc<Kernels>,
    variant: Variant,
    storage: Dtype,
    /// A copy of the rows of h of a chunk of tokens; without it they lie side by side in h.
    pub packed: Option<Room>,
    /// Of f16, what da of each chunk of tokens is multiplied by: numbers of f32.
    pub scales: Option<Room>,
}

/// `Product` of `sm90a_cross_entropy.cu`.
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy)]
struct Product {
    a: EncodedMap,
    b: EncodedMap,
    out: EncodedMap,
    in_place: EncodedMap,
    call: Call,
    leaves: u64,
    from: u64,
    to: u64,
    scale: u64,
    block: u32,
}

// SAFETY: the fields, their types and their order are those of `Product` in `sm90a_cross_entropy.cu`, and it
// holds no reference of the host.
unsafe impl DeviceRepr for Product {}

impl Product {
    fn new(call: &Call) -> Product {
        let none = EncodedMap::default();
        Product {
            a: none,
            b: none,
            out: none,
            in_place: none,
            call: *call,
            leaves: 0,
            from: 0,
            to: 0,
            scale: 0,
            block: 0,
        }
    }
}

/// Where the rows of h of a chunk lie if all tokens count.
fn in_place(call: &Call) -> u64 {
    call.h + 2 * call.first_token as u64 * call.dim as u64
}

/// What a product is of: its rows, its columns, and how many of these a tile has.
struct Tiles {
    name: &'static str,
    rows: i32,
    columns: i32,
    wide: usize,
}

impl Hopper {
    /// Why these kernels cannot compute a pass, if so.
    pub fn refuses(parts: &Parts, problem: &LinearCrossEntropy) -> Option<&'static str> {
        match parts.storage {
            _ if !parts.device().is_hopper() => {
                return Some("the device is not of compute capability 9.0");
            }
            Dtype::Bf16 | Dtype::F16 => {}
            _ => return Some("its tensor cores multiply bf16 and f16"),
        }
        match parts.pass {
            Pass::Forward | Pass::Backward | Pass::ForwardBackward => {}
            _ => return Some("the second order is not written yet for sm90a"),
        }
        if !problem.dim.is_multiple_of(8) {
            return Some("dim must be a multiple of 8 for sm90a");
        }
        let begin = parts.begin_aligned(&["h", "w", "dh", "dw"]);
        (!begin).then_some("h, w, dh and dw must begin at multiples of 16 bytes for sm90a")
    }

    /// Compiles or loads the kernels.
    pub fn new(parts: &Parts) -> Result<Hopper, Error> {
        let variant = Variant::hopper_cross_entropy(parts.storage);
        let kernels = parts.device().kernels(variant.clone(), ARCHITECTURE)?;
        Ok(Hopper { kernels, variant, storage: parts.storage, packed: None, scales: None })
    }

    /// With scratch memory for so many tokens of so many elements.
    pub fn with_scratch(
        self,
        (tokens, dim, _): (usize, usize, usize),
        plan: &Plan,
        ignores: bool,
        layout: &mut Layout,
    ) -> Result<Hopper, Error> {
        let rows = dim.checked_mul(2 * plan.rows).ok_or_else(|| memory(usize::MAX))?;
        let packed = ignores.then(|| layout.room(rows)).transpose()?;
        let scales =
            (self.storage == Dtype::F16).then(|| layout.room(4 * tokens.div_ceil(plan.rows)));
        Ok(Hopper { packed, scales: scales.transpose()?, ..self })
    }

    /// Classes whose leaves a plane of so many bytes holds: whole groups, or all of them.
    pub fn leaf_columns(call: &Call, plane: usize) -> usize {
        let (leaf, rows, vocab) = (leaf(call), call.rows.max(1) as usize, call.vocab as usize);
        let groups = plane / rows / (leaf * GROUP);
        if plane / rows / leaf >= vocab.div_ceil(TILE) {
            return vocab;
        }
        groups.max(1).saturating_mul(GROUP * TILE).min(vocab)
    }

    /// The map of a matrix with so many rows and columns, and elements from row to row, in boxes of 64 columns and
    /// `height` rows.
    fn map(
        &self,
        queue: &Queue<'_>,
        address: u64,
        [rows, columns, stride]: [i32; 3],
        height: u32,
    ) -> Result<EncodedMap, Error> {
        let [rows, columns, stride] = [rows, columns, stride].map(|x| x as u64);
        let (extents, strides) = ([columns, rows], [2 * stride, 0]);
        let boxed = EncodedBox { address, extents, strides, extents_of_box: [64, height] };
        boxed.map(queue.device, self.storage)
    }

    /// The map of da of a chunk, in boxes of 64 classes and so many tokens.
    fn gradients(&self, queue: &Queue<'_>, call: &Call, height: u32) -> Result<EncodedMap, Error> {
        self.map(queue, call.z, [call.count, call.columns, call.columns], height)
    }

    /// Launches a product over tiles of 128 rows, in clusters of two blocks.
    fn product(&self, queue: &Queue<'_>, tiles: &Tiles, product: &Product) -> Result<(), Error> {
        let pairs = (tiles.rows as usize).div_ceil(256);
        let all = 2 * pairs * (tiles.columns as usize).div_ceil(tiles.wide);
        let blocks = all.min(queue.device.multiprocessors / 2 * 2);
        let block = (THREADS, shared_bytes(&self.variant, tiles.name));
        queue.launch(self.kernels.get(tiles.name)?, blocks as u64, block, product)
    }

    /// Where the rows of h of the tokens of a chunk lie side by side; copies them there if some may be ignored, and are.
    pub fn gather(
        &self,
        queue: &Queue<'_>,
        call: &Call,
        packed: Option<u64>,
    ) -> Result<u64, Error> {
        let Some(to) = packed else {
            return Ok(in_place(call));
        };
        let product = Product { from: call.h, to, ..Product::new(call) };
        let pieces = call.count as usize * (call.dim / 8) as usize;
        // As many as run side by side: where all tokens count there is nothing for them to do.
        let blocks = pieces.div_ceil(256).min(8 * queue.device.multiprocessors) as u64;
        queue.launch(self.kernels.get("gather")?, blocks, (256, 0), &product)?;
        Ok(to)
    }

    /// The maps of h, in boxes of so many rows, and of the rows of w of a chunk, as the logits take them.
    fn logits(
        &self,
        queue: &Queue<'_>,
        call: &Call,
        (h, height): (u64, u32),
    ) -> Result<Product, Error> {
        let w = call.w + 2 * call.first_class as u64 * call.dim as u64;
        let shape = [call.count, call.dim, call.dim];
        let a = self.map(queue, h, shape, height)?;
        let in_place = self.map(queue, in_place(call), shape, height)?;
        let b = self.map(queue, w, [call.classes, call.dim, call.dim], 128)?;
        Ok(Product { a, b, in_place, ..Product::new(call) })
    }

    /// (C33), (C34): the leaves of a chunk, put into the tree.
    pub fn totals(&self, queue: &Queue<'_>, call: &Call, h: u64) -> Result<(), Error> {
        let product = Product { leaves: call.z, ..self.logits(queue, call, (h, 64))? };
        let tiles = Tiles { name: "leaves", rows: call.count, columns: call.classes, wide: TILE };
        self.product(queue, &tiles, &product)?;
        let blocks = (call.count as u64).div_ceil(TREE_TOKENS);
        queue.launch(self.kernels.get("tree")?, blocks, (TREE_THREADS, 0), &product)
    }

    /// What (C16) of a chunk of tokens is multiplied by before it is stored, from their pulls.
    pub fn scale(&self, queue: &Queue<'_>, call: &Call, scale: u64) -> Result<(), Error> {
        let product = Product { scale, ..Product::new(call) };
        queue.launch(self.kernels.get("scale")?, 1, (1024, 0), &product)
    }

    /// (C16) of a chunk, in the storage type.
    pub fn gradient(
        &self,
        queue: &Queue<'_>,
        call: &Call,
        [h, scale]: [u64; 2],
    ) -> Result<(), Error> {
        let out = self.gradients(queue, call, 64)?;
        let product = Product { out, scale, ..self.logits(queue, call, (h, 128))? };
        let tiles = Tiles { name: "gradient", rows: call.count, columns: call.classes, wide: TILE };
        self.product(queue, &tiles, &product)
    }

    /// (C17), in tiles of so many columns, and blocks of so many classes.
    pub fn hidden(
        &self,
        queue: &Queue<'_>,
        call: &Call,
        scale: u64,
        (wide, block): (usize, usize),
    ) -> Result<(), Error> {
        let w = call.w + 2 * call.first_class as u64 * call.dim as u64;
        let a = self.gradients(queue, call, 128)?;
        let b = self.map(queue, w, [call.classes, call.dim, call.dim], 64)?;
        let name = if wide == TILE { "hidden" } else { "hidden_192" };
        let tiles = Tiles { name, rows: call.count, columns: call.dim, wide };
        self.product(
            queue,
            &tiles,
            &Product { a, b, scale, block: block as u32, ..Product::new(call) },
        )
    }

    /// (C18)
    pub fn head(&self, queue: &Queue<'_>, call: &Call, [h, scale]: [u64; 2]) -> Result<(), Error> {
        let a = self.gradients(queue, call, 64)?;
        let shape = [call.count, call.dim, call.dim];
        let b = self.map(queue, h, shape, 64)?;
        let in_place = self.map(queue, in_place(call), shape, 64)?;
        let product = Product { a, b, in_place, scale, ..Product::new(call) };
        let dw = call.dw + 2 * call.first_class as u64 * call.dim as u64;
        let product = match call.wide {
            0 => Product {
                out: self.map(queue, dw, [call.classes, call.dim, call.dim], 64)?,
                ..product
            },
            _ => product, // threads write f32
        };
        let tiles = Tiles { name: "head", rows: call.classes, columns: call.dim, wide: TILE };
        self.product(queue, &tiles, &product)
    }

    /// (C19)
    pub fn bias(&self, queue: &Queue<'_>, call: &Call, scale: u64) -> Result<(), Error> {
        let blocks = (call.classes as u64).div_ceil(32);
        let product = Product { from: call.z, scale, ..Product::new(call) };
        queue.launch(self.kernels.get("bias")?, blocks, (256, 0), &product)
    }
}
