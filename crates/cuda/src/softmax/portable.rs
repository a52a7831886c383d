//! The portable kernels of attention and attention_lse: `kernels/portable.cu`.

use crate::family::Family;
use crate::gpu::Kernels;
use crate::moves::Place;
use crate::options::{Options, Precision};
use crate::parts::absent;
use crate::softmax::asked::Asked;
use crate::softmax::slots::{By, Slots};
use crate::softmax::{Job, blocks};
use crate::variant::{self, Variant, shared_bytes, width};
use cudarc::driver::DeviceRepr;
use etalon_problem::{Dtype, Error, Mode, Pass};
use std::sync::Arc;

/// Threads of a block.
fn threads(job: &Job<'_>) -> u32 {
    variant::threads(Family::Portable, job.scores().extents.dim, job.prepared.value_dim)
}

/// Threads of a block of the level sm80.
pub(crate) const TENSOR_THREADS: u32 = 128;

/// A tensor of four axes whose rows lie side by side: `Tensor` of `pairs.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tensor {
    data: u64,
    batch: i64,
    head: i64,
    row: i64,
}

/// What a kernel is told: `Call` of `pairs.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Call {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    o: Tensor,
    dout: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dbias: Tensor,
    lse: u64,
    delta: u64,
    dlse: u64,
    sinks: u64,
    dsinks: u64,
    allowed: u64,
    allowed_batch: i64,
    allowed_head: i64,
    sequences: u64,
    spans: u64,
    tiles: u64,
    tasks: u64,
    found: u64,
    batch: i32,
    heads: i32,
    key_heads: i32,
    queries: i32,
    keys: i32,
    dim: i32,
    value_dim: i32,
    bias_heads: i32,
    first_dim: i32,
    first_value: i32,
    scale: f32,
    cap: f32,
    wide: i32,
    blocks: i32,
}

// SAFETY: the fields, their types and their order are those of `Call` in `pairs.cuh`, and it holds no
// reference of the host.
unsafe impl DeviceRepr for Call {}

impl Tensor {
    /// At an address, with the strides of its batch, head and row.
    pub fn new(data: u64, [batch, head, row]: [i64; 3]) -> Self {
        Tensor { data, batch, head, row }
    }

    pub fn is_there(&self) -> bool {
        self.data != 0
    }
}

impl Call {
    /// The launch whose accumulators begin at these columns.
    pub fn at(self, first_dim: i32, first_value: i32) -> Call {
        Call { first_dim, first_value, ..self }
    }

    /// Where the number at an address is 0 there is nothing to do.
    pub fn unless(self, found: u64) -> Call {
        Call { found, ..self }
    }

    /// With another place for the gradient of q.
    pub fn with_dq(self, dq: Tensor) -> Call {
        Call { dq, ..self }
    }

    /// Over other tiles.
    pub fn over(self, tasks: u64) -> Call {
        Call { tasks, ..self }
    }

    pub fn new(job: &Job<'_>) -> Call {
        let prepared = job.prepared;
        let (scores, tables) = (job.scores(), &prepared.tables);
        let (e, flags) = (&scores.extents, prepared.counts.flags);
        let pairs = (e.queries * e.keys) as i64;
        let heads = flags.unwrap_or(1) as i64;
        // Lazy attention has a bias of another shape.
        let by_pair = |name| scores.bias.map_or(Tensor::default(), |_| tensor(job, name));
        Call {
            q: tensor(job, "q"),
            k: tensor(job, "k"),
            v: tensor(job, "v"),
            bias: by_pair("bias"),
            o: tensor(job, "o"),
            dout: tensor(job, "dout"),
            dq: tensor(job, "dq"),
            dk: tensor(job, "dk"),
            dv: tensor(job, "dv"),
            dbias: by_pair("dbias"),
            lse: job.address("lse"),
            delta: prepared.delta.map_or(0, |room| job.at(room)),
            dlse: job.address("dlse"),
            sinks: job.address("sinks"),
            dsinks: job.address("dsinks"),
            allowed: flags.map_or(0, |_| job.table(tables.allowed)),
            allowed_batch: heads * pairs,
            allowed_head: if heads > 1 { pairs } else { 0 },
            sequences: job.table(tables.sequences),
            spans: job.table(tables.spans),
            tiles: job.table(tables.tiles),
            tasks: job.table(tables.by_queries),
            found: 0,
            batch: e.batch as i32,
            heads: e.query_heads as i32,
            key_heads: e.key_heads as i32,
            queries: e.queries as i32,
            keys: e.keys as i32,
            dim: e.dim as i32,
            value_dim: prepared.value_dim.unwrap_or(0) as i32,
            bias_heads: scores.bias.map_or(0, |bias| bias.heads as i32),
            first_dim: 0,
            first_value: 0,
            scale: scores.scale() as f32,
            cap: scores.softcap.unwrap_or(0.0) as f32,
            wide: 0,
            blocks: 0,
        }
    }
}

/// An operand of four axes. An axis of extent 1 has the stride 0: a shared bias.
pub(crate) fn tensor(job: &Job<'_>, name: &str) -> Tensor {
    let Place { address, extents, strides } = job.place(name);
    let stride = |axis: usize| if extents[axis] == 1 { 0 } else { strides[axis] };
    Tensor { data: address, batch: stride(0), head: stride(1), row: strides[2] }
}

/// Why the kernels of the level sm80 cannot compute a pass, if so.
pub(crate) fn refuses_tensor(asked: &Asked<'_>, mode: Mode) -> Option<&'static str> {
    let (dim, value_dim) = (asked.scores.extents.dim, asked.value_dim.unwrap_or(0));
    let f32 = asked.storage == Dtype::F32;
    match asked.pass {
        Pass::Forward if f32 && dim > 128 => Some("dim must be at most 128 for f32 on sm80"),
        Pass::Backward if f32 && dim.max(value_dim) > 128 => {
            Some("dim and value_dim must be at most 128 for the backward pass of f32 on sm80")
        }
        Pass::Forward if dim > 256 => Some("dim must be at most 256 for sm80"),
        Pass::Backward if dim.max(value_dim) > 256 => {
            Some("dim and value_dim must be at most 256 for the backward pass of sm80")
        }
        _ if asked.insists(mode) && f32 => {
            Some("the mode `fused` is not written for f32 on sm80, which computes it in two sweeps")
        }
        _ if asked.insists(mode) && asked.is_wide() => {
            Some("dim and value_dim must be at most 128 for the mode `fused` of sm80")
        }
        Pass::Forward | Pass::Backward => None,
        _ => Some("the second order is not written yet for sm80"),
    }
}

/// The kernels of the level sm80 for a backward pass of wide operands: their tiles have as many stages as fit
/// so many bytes of shared memory.
pub(crate) fn wide_variant(asked: &Asked<'_>, most: u32) -> Option<Variant> {
    if asked.pass != Pass::Backward || !asked.is_wide() {
        return None;
    }
    let flags = [asked.has_options(), asked.whole];
    let (dim, storage) = (asked.scores.extents.dim, asked.storage);
    let of = |stages| Variant::tensor_wide(storage, dim, asked.value_dim, flags, stages);
    Some(if of(2).shared() <= most { of(2) } else { of(1) })
}

/// The kernels of the second order on tensor cores, where they compute it.
pub(crate) fn tensor_second_variant(asked: &Asked<'_>) -> Option<Variant> {
    let flags = [asked.has_options(), asked.whole];
    let dim = asked.scores.extents.dim;
    let serves = asked.storage == Dtype::Bf16 && !asked.is_wide();
    serves.then(|| Variant::tensor_second(dim, asked.value_dim, flags))
}

/// The kernels of the level sm80 for the forward pass, and for the backward pass that is not wide.
pub(crate) fn tensor_variant(asked: &Asked<'_>, options: &Options) -> Variant {
    let (dim, flags) = (asked.scores.extents.dim, [asked.has_options(), asked.whole]);
    if asked.storage == Dtype::F32 {
        let bf16x3 = options.precision == Precision::Bf16x3;
        return Variant::tensor_f32(bf16x3, dim, asked.value_dim, flags);
    }
    let variant = Variant::tensor(asked.storage, dim, asked.value_dim, flags[0], flags[1]);
    variant.with("TILES", blocks::number(asked, options))
}

/// Those for its pass by keys with what these add to dq.
pub(crate) fn fused_variant(asked: &Asked<'_>) -> Variant {
    let flags = [asked.has_options(), asked.whole];
    Variant::tensor_fused(asked.storage, asked.scores.extents.dim, asked.value_dim, flags)
}

fn kernels<'a>(job: &Job<'a>) -> Result<&'a Kernels, Error> {
    job.prepared.portable.as_deref().ok_or_else(|| absent("the level portable"))
}

/// The first columns of the launches that together cover so many.
pub(crate) fn parts(columns: usize) -> impl Iterator<Item = i32> {
    (0..columns).step_by(width(columns)).map(|first| first as i32)
}

fn launch(
    job: &Job<'_>,
    kernels: &Kernels,
    name: &str,
    blocks: usize,
    call: &Call,
) -> Result<(), Error> {
    let kernel = kernels.get(name)?;
    job.queue.launch(kernel, blocks as u64, (threads(job), 0), call)
}

/// Launches a kernel whose blocks may do the work of several: where it may have nothing to do, there are few.
fn launch_few(
    job: &Job<'_>,
    kernels: &Kernels,
    name: &str,
    blocks: usize,
    call: &Call,
) -> Result<(), Error> {
    let most = if call.found == 0 { blocks } else { 4 * job.queue.device.multiprocessors };
    launch(job, kernels, name, blocks.min(most), &Call { blocks: blocks as i32, ..*call })
}

/// Launches a kernel that walks tiles: that of the level sm80 where the pass was prepared with it.
fn walk(job: &Job<'_>, name: &str, blocks: usize, call: &Call) -> Result<(), Error> {
    let has = |module: &&Module| module.1.kernels().contains(&name);
    let (wide, tensor) = (&job.prepared.wide, &job.prepared.tensor);
    match wide.iter().chain(tensor).find(has) {
        None => launch_few(job, kernels(job)?, name, blocks, call),
        Some(module) => launch_tensor(job, module, name, blocks, call),
    }
}

/// A module, and which one it is.
type Module = (Arc<Kernels>, Variant);

fn launch_tensor(
    job: &Job<'_>,
    (kernels, variant): &Module,
    name: &str,
    blocks: usize,
    call: &Call,
) -> Result<(), Error> {
    let block = (TENSOR_THREADS, shared_bytes(variant, name));
    job.queue.launch(kernels.get(name)?, blocks as u64, block, call)
}

/// o, if it has a place, and lse.
pub(crate) fn forward(job: &Job<'_>) -> Result<(), Error> {
    let call = Call::new(job);
    let blocks = job.prepared.counts.by_queries * job.scores().extents.query_heads;
    let columns = job.prepared.value_dim.filter(|_| call.o.data != 0).unwrap_or(1);
    let at_once =
        if job.prepared.tensor.is_none() { width(columns) } else { width(columns).min(128) };
    for first_value in (0..columns).step_by(at_once) {
        walk(job, "forward", blocks, &call.at(0, first_value as i32))?;
    }
    Ok(())
}

/// ∂lse/∂q of attention_lse, from the lse that the forward pass has just written: dq of a dlse of 1.
pub(crate) fn gradient_of_lse(job: &Job<'_>) -> Result<(), Error> {
    let dq = tensor(job, "gradient");
    let call = Call { dq, delta: 0, wide: 1, ..Call::new(job) };
    each_dq(job, |blocks, part| {
        launch_few(job, kernels(job)?, "queries", blocks, &call.at(part, 0))
    })
}

/// Calls `launch` with the number of blocks of the gradient of q and the first column of each part of it.
fn each_dq(job: &Job<'_>, launch: impl Fn(usize, i32) -> Result<(), Error>) -> Result<(), Error> {
    let e = &job.scores().extents;
    let blocks = job.prepared.counts.by_queries * e.query_heads;
    parts(e.dim).try_for_each(|part| launch(blocks, part))
}

/// The gradients that have places. With the address of a number, kernels do nothing where that is 0.
pub(crate) fn backward(job: &Job<'_>, found: u64) -> Result<(), Error> {
    let call = Call::new(job).unless(found);
    delta(job, &call)?;
    match &job.prepared.slots {
        Some(slots) => fused(job, slots, &call)?,
        None => {
            if call.dq.data != 0 && job.prepared.has_gradient() {
                scale(job, &call)?;
            } else if call.dq.data != 0 {
                each_dq(job, |blocks, part| walk(job, "queries", blocks, &call.at(part, 0)))?;
            }
            dk_and_dv(job, &call)?;
        }
    }
    sinks_and_bias(job, &call)
}

/// Blocks of kernels that have a row for each warp.
fn by_rows(job: &Job<'_>) -> usize {
    job.scores().row_shape().iter().product::<usize>().div_ceil(threads(job) as usize / 32)
}

/// δ of every row, if something needs it.
fn delta(job: &Job<'_>, call: &Call) -> Result<(), Error> {
    let needed = call.delta != 0;
    if needed { launch_few(job, kernels(job)?, "delta", by_rows(job), call) } else { Ok(()) }
}

/// dq of attention_lse from the `gradient` that is given.
fn scale(job: &Job<'_>, call: &Call) -> Result<(), Error> {
    let call = Call { q: tensor(job, "gradient"), ..*call };
    launch(job, kernels(job)?, "scale", by_rows(job), &call)
}

/// The same as a pass on tensor cores computes it.
pub(crate) fn scaled_gradient(job: &Job<'_>) -> Result<(), Error> {
    scale(job, &Call::new(job))
}

/// dq beside dk and dv, from slots.
fn fused(job: &Job<'_>, slots: &Slots, call: &Call) -> Result<(), Error> {
    let over = call.over(job.table(job.prepared.tables.by_keys));
    let dims = job.scores().extents.dim;
    let calls: Vec<Call> =
        by_keys(job, call, dims).map(|[dim, value]| over.at(dim, value)).collect();
    let by = match &job.prepared.fused {
        Some((kernels, variant)) => By {
            fused: kernels.get("fused")?,
            collect: kernels.get("collect")?,
            threads: TENSOR_THREADS,
            shared: shared_bytes(variant, "fused"),
        },
        None => {
            let (kernels, threads) = (kernels(job)?, threads(job));
            By {
                fused: kernels.get("fused")?,
                collect: kernels.get("collect")?,
                threads,
                shared: 0,
            }
        }
    };
    slots.run(job, &by, &calls, call.with_dq(call.dq))?;
    let Some(odd) = slots.odd(job) else { return Ok(()) };
    // Blocks of key heads whose keys are finite have nothing to do.
    each_dq(job, |blocks, part| walk(job, "queries", blocks, &call.unless(odd).at(part, 0)))
}

/// The gradients of the sinks and of the bias, if they have places.
pub(crate) fn dsinks_and_dbias(job: &Job<'_>) -> Result<(), Error> {
    if job.address("dsinks") == 0 && job.address("dbias") == 0 {
        return Ok(());
    }
    let call = Call::new(job);
    delta(job, &call)?;
    sinks_and_bias(job, &call)
}

/// The same, from the δ of every row.
fn sinks_and_bias(job: &Job<'_>, call: &Call) -> Result<(), Error> {
    let kernels = kernels(job)?;
    if call.dsinks != 0 {
        launch(job, kernels, "dsinks", job.scores().extents.query_heads, call)?;
    }
    if call.dbias.data != 0 {
        let blocks = job.prepared.counts.by_pairs * call.bias_heads as usize;
        let tasks = job.table(job.prepared.tables.by_pairs);
        match &job.prepared.by_pairs {
            Some(module) => launch_tensor(job, module, "dbias", blocks, &call.over(tasks))?,
            None => launch(job, kernels, "dbias", blocks, &call.over(tasks))?,
        }
    }
    Ok(())
}

fn dk_and_dv(job: &Job<'_>, call: &Call) -> Result<(), Error> {
    let (e, values) = (&job.scores().extents, wanted(call.dv, job.prepared.value_dim.unwrap_or(0)));
    let dims = wanted(call.dk, e.dim);
    let blocks = job.prepared.counts.by_keys * e.key_heads;
    let over = call.over(job.table(job.prepared.tables.by_keys));
    let apart = |module: &Module| module.1.kernels().contains(&"values");
    let (wide, tensor) = (&job.prepared.wide, &job.prepared.tensor);
    if wide.as_ref().is_some_and(apart) || dims == 0 && tensor.as_ref().is_some_and(apart) {
        // Of wide operands each has its own kernel, and dv where dk is not asked for.
        if dims > 0 {
            walk(job, "keys", blocks, &over)?;
        }
        return if values > 0 { walk(job, "values", blocks, &over) } else { Ok(()) };
    }
    let mut launches = by_keys(job, call, dims);
    launches.try_for_each(|[dim, value]| walk(job, "keys", blocks, &over.at(dim, value)))
}

/// The columns of what is wanted.
fn wanted(tensor: Tensor, columns: usize) -> usize {
    if tensor.is_there() { columns } else { 0 }
}

/// The first columns of D and of E of the launches that together cover so many of D, and those of dv. A part that is not wanted
/// any more begins beyond the last column.
fn by_keys(job: &Job<'_>, call: &Call, dims: usize) -> impl Iterator<Item = [i32; 2]> + use<> {
    let (dim, value_dim) = (job.scores().extents.dim, job.prepared.value_dim.unwrap_or(0));
    let (mut dims, mut values) = (parts(dims), parts(wanted(call.dv, value_dim)));
    std::iter::from_fn(move || match (dims.next(), values.next()) {
        (None, None) => None,
        (first, value) => Some([first.unwrap_or(dim as i32), value.unwrap_or(value_dim as i32)]),
    })
}
