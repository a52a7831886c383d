//! The kernels of attention and attention_lse for the tensor cores of compute capability 9.0:
//! `kernels/sm90a_forward.cu`, `kernels/sm90a_backward.cu`.

use crate::gpu::{Device, Kernels};
use crate::job::Job;
use crate::lane::{Lane, Layout, Room};
use crate::portable;
use crate::variant::{Variant, shared_bytes};
use crate::window::{LONGEST, OPEN, Window, window};
use cudarc::driver::{DeviceRepr, sys};
use etalon_problem::{Dtype, Error, Pass, Scores, Sequence, Sequences};
use std::sync::Arc;

/// The architecture of the kernels.
const ARCHITECTURE: &str = "sm_90a";

/// How these kernels compute a pass, and where they keep what they need.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The columns of every operand: D and E, rounded up to 64 or 128.
    width: usize,
    window: Window,
    storage: Dtype,
    backward: bool,
    /// Copies that are `width` columns wide.
    copies: Vec<(&'static str, Room)>,
    lse2: Room,
    delta: Room,
    /// The counter from which blocks draw tiles, and whether a number was found that is not finite.
    counter: Room,
    found: Room,
    /// Queries and keys of each batch element, where they have lengths of their own.
    lengths: Room,
}

impl Plan {
    /// How to compute a pass, or why these kernels cannot.
    pub fn new(
        device: &Device,
        scores: &Scores,
        value_dim: Option<usize>,
        pass: Pass,
        storage: Dtype,
    ) -> Result<Plan, &'static str> {
        let e = &scores.extents;
        if !device.is_hopper() {
            return Err("the device is not of compute capability 9.0");
        }
        if !matches!(storage, Dtype::Bf16 | Dtype::F16) {
            return Err("its tensor cores multiply bf16 and f16");
        }
        if !matches!(pass, Pass::Forward | Pass::Backward) {
            return Err("the second order is not written yet for sm90a");
        }
        if pass == Pass::Backward && value_dim.is_none() {
            return Err("the backward pass of attention_lse is not written yet for sm90a");
        }
        let columns = e.dim.max(value_dim.unwrap_or(1));
        if columns > 128 {
            return Err("dim and value_dim must be at most 128 for sm90a");
        }
        if scores.softcap.is_some() || scores.bias.is_some() {
            return Err("softcap and bias are not written yet for sm90a");
        }
        if matches!(scores.sequences, Sequences::Packed { .. }) {
            return Err("packed sequences are not written yet for sm90a");
        }
        if scores.scale() as f32 <= 0.0 {
            return Err("softmax_scale must be above 0 for sm90a");
        }
        if e.batch == 0 || e.query_heads == 0 || e.queries == 0 || e.keys == 0 {
            return Err("an extent is 0, and there is nothing for sm90a to compute");
        }
        if e.queries.max(e.keys) > LONGEST {
            return Err("sequences must have at most 2²⁸ rows for sm90a");
        }
        let window = window(&scores.mask, e.queries, e.keys);
        let window = window.ok_or("only full, causal and windowed masks are written for sm90a")?;
        let none = Room::default();
        Ok(Plan {
            width: if columns <= 64 { 64 } else { 128 },
            window,
            storage,
            backward: pass == Pass::Backward,
            copies: Vec::new(),
            lse2: none,
            delta: none,
            counter: none,
            found: none,
            lengths: none,
        })
    }

    /// Takes rooms for what the kernels need beside the operands.
    pub fn reserve(
        &mut self,
        job: &Scores,
        values: bool,
        layout: &mut Layout,
    ) -> Result<(), Error> {
        let e = &job.extents;
        let forward = [("q", true), ("k", true), ("v", values), ("o", values)];
        let backward = ["dout", "dq", "dk", "dv"].map(|name| (name, self.backward));
        for (name, wanted) in forward.into_iter().chain(backward) {
            if wanted {
                let rows = match name {
                    "k" | "v" | "dk" | "dv" => e.batch * e.key_heads * e.keys,
                    _ => e.batch * e.query_heads * e.queries,
                };
                self.copies.push((name, layout.room(rows * self.width * 2)?));
            }
        }
        if self.backward {
            let numbers = e.batch * e.query_heads * padded(e.queries);
            (self.lse2, self.delta) = (layout.room(4 * numbers)?, layout.room(4 * numbers)?);
        }
        (self.counter, self.found) = (layout.room(4)?, layout.room(4)?);
        if job.sequences != Sequences::Dense {
            self.lengths = layout.room(8 * e.batch)?;
        }
        Ok(())
    }

    /// Copies what the kernels need beside the operands to the device.
    pub fn upload(&self, scores: &Scores, lane: &mut Lane, device: &Device) -> Result<(), Error> {
        let pair = |s: Sequence| [s.queries as i32, s.keys as i32];
        let lengths: Vec<[i32; 2]> = scores.sequences().into_iter().map(pair).collect();
        let wanted = self.lengths.bytes > 0;
        let lengths = if wanted { bytemuck::cast_slice(&lengths) } else { &[] };
        lane.upload(device, self.lengths, lengths)
    }

    /// The compile-time choices that depend on the mask and the sequences.
    fn flags(&self) -> [bool; 2] {
        [self.is_windowed(), self.lengths.bytes > 0]
    }

    fn is_windowed(&self) -> bool {
        self.window.left != OPEN || self.window.right != OPEN
    }

    fn copy(&self, name: &str) -> Room {
        self.copies.iter().find(|(other, _)| *other == name).map_or(Room::default(), |(_, x)| *x)
    }

    /// Copies an operand of the job to the columns of its wide copy. The columns beyond are 0.
    fn widen(&self, job: &Job<'_>, name: &str) -> Result<(), Error> {
        let (room, shape) = (self.copy(name), job.shape(name));
        let columns = shape.last().copied().unwrap_or(0);
        if columns < self.width {
            job.lane.fill(job.device, room, 0)?;
        }
        let rows = shape.iter().rev().skip(1).product();
        let (from, to) = ((job.room(name), 2 * columns), (room, 2 * self.width));
        job.lane.copy_rows(job.device, from, to, 2 * columns, rows)
    }

    /// Copies the columns of a wide copy to the result of the job, if that has a place.
    fn narrow(&self, job: &Job<'_>, name: &str) -> Result<(), Error> {
        if job.address(name) == 0 {
            return Ok(());
        }
        let shape = job.shape(name);
        let columns = shape.last().copied().unwrap_or(0);
        let rows = shape.iter().rev().skip(1).product();
        let (from, to) = ((self.copy(name), 2 * self.width), (job.room(name), 2 * columns));
        job.lane.copy_rows(job.device, from, to, 2 * columns, rows)
    }

    /// The copy engine's map of a wide copy, in boxes of `rows` rows.
    fn map(&self, job: &Job<'_>, name: &str, rows: u32) -> Result<TensorMap, Error> {
        let e = &job.scores.extents;
        let (heads, length) = match name {
            "k" | "v" | "dk" | "dv" => (e.key_heads, e.keys),
            _ => (e.query_heads, e.queries),
        };
        let width = self.width as u64;
        let [length, heads, batch] = [length, heads, e.batch].map(|x| x as u64);
        let dims = [64, length, width / 64, heads, batch];
        let strides = [2 * width, 128, 2 * width * length, 2 * width * length * heads];
        let boxes = [64, rows, width as u32 / 64, 1, 1];
        let mut map = TensorMap::default();
        let element = match self.storage {
            Dtype::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            _ => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        };
        // SAFETY: the map has the alignment and the size that the driver asks for; the arrays hold five
        // numbers, the strides four, and live until the call returns.
        let encoded = unsafe {
            sys::cuTensorMapEncodeTiled(
                (&raw mut map).cast(),
                element,
                5,
                job.lane.address(self.copy(name)) as *mut _,
                dims.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                [1u32; 5].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        encoded.result().map_err(|error| job.device.failed("describing a tensor", error))?;
        Ok(map)
    }
}

/// Queries rounded up to whole tiles.
fn padded(queries: usize) -> usize {
    queries.next_multiple_of(128)
}

/// `CUtensorMap`.
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy, Default)]
struct TensorMap([u64; 16]);

/// `Call` of `sm90a_forward.cu`.
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy, Default)]
struct Forward {
    q: TensorMap,
    k: TensorMap,
    v: TensorMap,
    o: TensorMap,
    lse: u64,
    sinks: u64,
    counter: u64,
    shape: Shape,
}

/// `Shape` of both sources.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Shape {
    batch: i32,
    heads: i32,
    key_heads: i32,
    queries: i32,
    keys: i32,
    left: i32,
    right: i32,
    offset: i32,
    scale: f32,
    heads_per_group: i32,
    padded: i32,
    bottom: i32,
    lengths: u64,
}

/// `Call` of `sm90a_backward.cu`.
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy, Default)]
struct Backward {
    q: TensorMap,
    k: TensorMap,
    v: TensorMap,
    dout: TensorMap,
    dq: TensorMap,
    dk: TensorMap,
    dv: TensorMap,
    lse2: u64,
    delta: u64,
    lse: u64,
    dlse: u64,
    o: u64,
    dout_rows: u64,
    found: u64,
    elements: u64,
    pieces: u64,
    result: u64,
    columns: i64,
    shape: Shape,
}

// SAFETY: the fields, their types and their order are those of `Call` in `sm90a_forward.cu`.
unsafe impl DeviceRepr for Forward {}
// SAFETY: as above, in `sm90a_backward.cu`.
unsafe impl DeviceRepr for Backward {}

fn shape(job: &Job<'_>, plan: &Plan, heads_per_group: usize) -> Shape {
    let e = &job.scores.extents;
    Shape {
        batch: e.batch as i32,
        heads: e.query_heads as i32,
        key_heads: e.key_heads as i32,
        queries: e.queries as i32,
        keys: e.keys as i32,
        left: plan.window.left,
        right: plan.window.right,
        offset: plan.window.offset,
        scale: job.scores.scale() as f32,
        heads_per_group: heads_per_group as i32,
        padded: padded(e.queries) as i32,
        bottom: i32::from(plan.window.bottom),
        lengths: job.lane.address(plan.lengths),
    }
}

/// The key heads whose k and v share so many bytes of the L2 cache.
fn heads_in(bytes: usize, job: &Job<'_>, plan: &Plan) -> usize {
    (bytes / (4 * job.scores.extents.keys * plan.width)).max(1)
}

fn launch<A: DeviceRepr>(
    job: &Job<'_>,
    (kernels, variant): &(Arc<Kernels>, Variant),
    name: &str,
    (blocks, threads): (usize, u32),
    call: &A,
) -> Result<(), Error> {
    let shape = (threads, shared_bytes(variant, name));
    job.lane.launch(job.device, kernels.get(name)?, blocks as u64, shape, call)
}

/// o and lse.
pub(crate) fn forward(job: &Job<'_>, plan: &Plan) -> Result<(), Error> {
    let (e, values) = (&job.scores.extents, job.value_dim.is_some());
    let variant = Variant::hopper_forward(plan.storage, plan.width, plan.flags(), values);
    let kernels = (job.device.kernels(variant.clone(), ARCHITECTURE)?, variant);
    plan.widen(job, "q")?;
    plan.widen(job, "k")?;
    job.lane.fill(job.device, plan.counter, 0)?;
    let groups = if plan.width == 128 { 2 } else { 3 };
    let rows = 64 * groups;
    // Measured: causal masks like more heads beside each other than full ones.
    let l2 = if plan.is_windowed() { 32 << 20 } else { 8 << 20 };
    let together = heads_in(l2, job, plan) * job.scores.group();
    let mut call = Forward {
        q: plan.map(job, "q", rows as u32)?,
        k: plan.map(job, "k", 128)?,
        lse: job.address("lse"),
        sinks: job.address("sinks"),
        counter: job.lane.address(plan.counter),
        shape: shape(job, plan, together.min(e.batch * e.query_heads)),
        ..Forward::default()
    };
    if values {
        plan.widen(job, "v")?;
        call.v = plan.map(job, "v", 128)?;
        call.o = plan.map(job, "o", 64)?;
    }
    let tiles = e.queries.div_ceil(rows) * e.query_heads * e.batch;
    let blocks = tiles.min(job.device.multiprocessors()?);
    launch(job, &kernels, "forward", (blocks, 128 * (groups as u32 + 1)), &call)?;
    if values { plan.narrow(job, "o") } else { Ok(()) }
}

/// The gradients that have places.
pub(crate) fn backward(job: &Job<'_>, plan: &Plan) -> Result<(), Error> {
    let (e, device) = (&job.scores.extents, job.device);
    let variant = Variant::hopper_backward(plan.storage, plan.width, plan.flags());
    let kernels = (device.kernels(variant.clone(), ARCHITECTURE)?, variant);
    for name in ["q", "k", "v", "o", "dout"] {
        plan.widen(job, name)?;
    }
    let together = heads_in(16 << 20, job, plan).min(e.batch * e.key_heads);
    let call = Backward {
        lse2: job.lane.address(plan.lse2),
        delta: job.lane.address(plan.delta),
        lse: job.address("lse"),
        dlse: job.address("dlse"),
        o: job.lane.address(plan.copy("o")),
        dout_rows: job.lane.address(plan.copy("dout")),
        found: job.lane.address(plan.found),
        shape: shape(job, plan, together),
        ..Backward::default()
    };
    let pass = BackwardPass { job, plan, kernels, call };
    job.lane.fill(device, plan.found, 0)?;
    pass.each_piece("inspect")?;
    let rows = e.batch * e.query_heads * padded(e.queries);
    pass.launch("delta", (rows * plan.width / 8).div_ceil(256), 256, &call)?;
    let merges = pass.found()? != 0;
    if merges {
        portable::backward(job)?;
        pass.each_piece("cleanse")?;
        pass.launch("cleanse_rows", rows.div_ceil(256), 256, &call)?;
        if pass.found()? > 1 {
            return Ok(());
        }
    }
    pass.dk_and_dv(merges)?;
    pass.dq(merges)?;
    if merges { Ok(()) } else { portable::dsinks(job) }
}

/// A backward pass on its way. Where an operand holds NaN, the results of the portable kernels are there
/// already, and these kernels' results take the places of those that are finite.
struct BackwardPass<'a> {
    job: &'a Job<'a>,
    plan: &'a Plan,
    kernels: (Arc<Kernels>, Variant),
    call: Backward,
}

impl BackwardPass<'_> {
    fn launch(
        &self,
        name: &str,
        blocks: usize,
        threads: u32,
        call: &Backward,
    ) -> Result<(), Error> {
        launch(self.job, &self.kernels, name, (blocks, threads), call)
    }

    /// Runs a kernel over all elements of the operands.
    fn each_piece(&self, kernel: &str) -> Result<(), Error> {
        for name in ["q", "k", "v", "dout"] {
            let room = self.plan.copy(name);
            let pieces = room.bytes / 16;
            // Some blocks for each multiprocessor: each walks what is left.
            let blocks = pieces.div_ceil(256 * 8).min(4 * self.job.device.multiprocessors()?);
            let elements = self.job.lane.address(room);
            let call = Backward { elements, pieces: pieces as u64, ..self.call };
            self.launch(kernel, blocks, 256, &call)?;
        }
        Ok(())
    }

    /// What the kernels have found so far: 0, or 1 where a number is not finite, 3 where one is infinite.
    fn found(&self) -> Result<u32, Error> {
        let (job, mut found) = (self.job, [0; 4]);
        job.lane.download(job.device, self.plan.found, &mut found)?;
        job.lane.finish(job.device)?;
        Ok(u32::from_ne_bytes(found))
    }

    fn dk_and_dv(&self, merges: bool) -> Result<(), Error> {
        let (job, plan, e) = (self.job, self.plan, &self.job.scores.extents);
        if job.address("dk") == 0 && job.address("dv") == 0 {
            return Ok(());
        }
        let call = Backward {
            q: plan.map(job, "q", 64)?,
            k: plan.map(job, "k", 128)?,
            v: plan.map(job, "v", 128)?,
            dout: plan.map(job, "dout", 64)?,
            dk: plan.map(job, "dk", 64)?,
            dv: plan.map(job, "dv", 64)?,
            ..self.call
        };
        let blocks = e.keys.div_ceil(128) * e.batch * e.key_heads;
        self.launch("keys", blocks, 384, &call)?;
        self.settle("dk", merges)?;
        self.settle("dv", merges)
    }

    fn dq(&self, merges: bool) -> Result<(), Error> {
        let (job, plan, e) = (self.job, self.plan, &self.job.scores.extents);
        if job.address("dq") == 0 {
            return Ok(());
        }
        let call = Backward {
            q: plan.map(job, "q", 128)?,
            k: plan.map(job, "k", 128)?,
            v: plan.map(job, "v", 128)?,
            dout: plan.map(job, "dout", 128)?,
            dq: plan.map(job, "dq", 64)?,
            ..self.call
        };
        let blocks = padded(e.queries) / 128 * e.batch * e.query_heads;
        self.launch("queries", blocks, 384, &call)?;
        self.settle("dq", merges)
    }

    /// Writes a wide copy to its result.
    fn settle(&self, name: &str, merges: bool) -> Result<(), Error> {
        let result = self.job.address(name);
        if !merges || result == 0 {
            return self.plan.narrow(self.job, name);
        }
        let shape = self.job.shape(name);
        let (elements, columns) = (shape.iter().product::<usize>(), shape[shape.len() - 1]);
        let call = Backward {
            elements: self.job.lane.address(self.plan.copy(name)),
            pieces: elements as u64,
            result,
            columns: columns as i64,
            ..self.call
        };
        self.launch("merge", elements.div_ceil(256), 256, &call)
    }
}
