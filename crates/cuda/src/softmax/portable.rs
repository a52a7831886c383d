//! The portable kernels of attention and attention_lse: `kernels/portable.cu`.

use crate::gpu::Kernels;
use crate::moves::Place;
use crate::parts::absent;

use crate::softmax::Job;
use crate::softmax::prepared::Prepared;
use crate::variant::{self, Family, Variant, shared_bytes, width};
use cudarc::driver::DeviceRepr;
use etalon_problem::{Dtype, Error, Pass, Scores};

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

    /// Over other tiles.
    pub fn over(self, tasks: u64) -> Call {
        Call { tasks, ..self }
    }

    pub fn new(job: &Job<'_>) -> Call {
        let prepared = job.prepared;
        let (scores, tables) = (job.scores(), &prepared.tables);
        let (e, allowed) = (&scores.extents, prepared.rows.allowed.as_ref());
        let pairs = (e.queries * e.keys) as i64;
        let heads = allowed.map_or(1, |allowed| allowed.heads) as i64;
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
            delta: job.at(prepared.delta),
            dlse: job.address("dlse"),
            sinks: job.address("sinks"),
            dsinks: job.address("dsinks"),
            allowed: allowed.map_or(0, |_| job.table(tables.allowed)),
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
pub(crate) fn refuses_tensor(prepared: &Prepared<'_>) -> Option<&'static str> {
    let (dim, value_dim) = (prepared.scores.extents.dim, prepared.value_dim.unwrap_or(0));
    match prepared.pass {
        _ if !matches!(prepared.storage, Dtype::Bf16 | Dtype::F16) => {
            Some("its tensor cores multiply bf16 and f16")
        }
        Pass::Forward if dim > 256 => Some("dim must be at most 256 for sm80"),
        Pass::Backward if dim.max(value_dim) > 128 => {
            Some("dim and value_dim must be at most 128 for the backward pass of sm80")
        }
        Pass::Forward | Pass::Backward => None,
        _ => Some("the second order is not written yet for sm80"),
    }
}

/// The kernels of the level sm80 for a pass.
pub(crate) fn tensor_variant(prepared: &Prepared<'_>) -> Variant {
    let (dim, options) = (prepared.scores.extents.dim, has_options(prepared));
    Variant::tensor(prepared.storage, dim, prepared.value_dim, options, has_whole_rows(prepared))
}

/// Whether rows of q, k, v and dout begin and end at multiples of 16 bytes, of elements of 2.
pub(crate) fn has_whole_rows(prepared: &Prepared<'_>) -> bool {
    let whole = |name: &&str| {
        prepared.part(name).is_none_or(|part| {
            let place = part.place(0);
            let strides = place.extents.iter().zip(place.strides).take(3);
            (prepared.aligned || !part.is_direct())
                && place.extents[3] % 8 == 0
                && strides.filter(|(extent, _)| **extent > 1).all(|(_, stride)| stride % 8 == 0)
        })
    };
    ["q", "k", "v", "dout"].iter().all(whole)
}

/// Whether the problem has a softcap, a bias or an array of flags.
pub(crate) fn has_options(prepared: &Prepared<'_>) -> bool {
    let Scores { softcap, bias, .. } = &*prepared.scores;
    softcap.is_some() || bias.is_some() || prepared.rows.allowed.is_some()
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

/// Launches a kernel that walks tiles: that of the level sm80 where the pass was prepared with it.
fn walk(job: &Job<'_>, name: &str, blocks: usize, call: &Call) -> Result<(), Error> {
    match &job.prepared.tensor {
        None => launch(job, kernels(job)?, name, blocks, call),
        Some((kernels, variant)) => {
            let block = (TENSOR_THREADS, shared_bytes(variant, name));
            job.queue.launch(kernels.get(name)?, blocks as u64, block, call)
        }
    }
}

/// o, if it has a place, and lse.
pub(crate) fn forward(job: &Job<'_>) -> Result<(), Error> {
    let call = Call::new(job);
    let blocks = job.prepared.rows.by_queries.len() * job.scores().extents.query_heads;
    let columns = job.prepared.value_dim.filter(|_| call.o.data != 0).unwrap_or(1);
    let at_once =
        if job.prepared.tensor.is_some() { width(columns).min(128) } else { width(columns) };
    for first_value in (0..columns).step_by(at_once) {
        walk(job, "forward", blocks, &call.at(0, first_value as i32))?;
    }
    Ok(())
}

/// ∂lse/∂q of attention_lse, from the lse that the forward pass has just written: dq of a dlse of 1.
pub(crate) fn gradient_of_lse(job: &Job<'_>) -> Result<(), Error> {
    let dq = tensor(job, "gradient");
    let call = Call { dq, delta: 0, wide: 1, ..Call::new(job) };
    each_dq(job, |blocks, part| launch(job, kernels(job)?, "queries", blocks, &call.at(part, 0)))
}

/// Calls `launch` with the number of blocks of the gradient of q and the first column of each part of it.
fn each_dq(job: &Job<'_>, launch: impl Fn(usize, i32) -> Result<(), Error>) -> Result<(), Error> {
    let e = &job.scores().extents;
    let blocks = job.prepared.rows.by_queries.len() * e.query_heads;
    parts(e.dim).try_for_each(|part| launch(blocks, part))
}

/// The gradients that have places. With the address of a number, kernels do nothing where that is 0.
pub(crate) fn backward(job: &Job<'_>, found: u64) -> Result<(), Error> {
    let (kernels, e) = (kernels(job)?, &job.scores().extents);
    let call = Call { found, ..Call::new(job) };
    let rows = e.batch * e.query_heads * e.queries;
    launch(job, kernels, "delta", rows.div_ceil(threads(job) as usize / 32), &call)?;
    if call.dq.data != 0 {
        each_dq(job, |blocks, part| walk(job, "queries", blocks, &call.at(part, 0)))?;
    }
    dk_and_dv(job, &call)?;
    if call.dsinks != 0 {
        launch(job, kernels, "dsinks", e.query_heads, &call)?;
    }
    if call.dbias.data != 0 {
        let blocks = job.prepared.rows.by_pairs.len() * call.bias_heads as usize;
        let tasks = job.table(job.prepared.tables.by_pairs);
        launch(job, kernels, "dbias", blocks, &call.over(tasks))?;
    }
    Ok(())
}

/// The gradient of the sinks alone, if it has a place.
pub(crate) fn dsinks(job: &Job<'_>) -> Result<(), Error> {
    let (call, e) = (Call::new(job), &job.scores().extents);
    if call.dsinks == 0 {
        return Ok(());
    }
    let kernels = kernels(job)?;
    let rows = e.batch * e.query_heads * e.queries;
    launch(job, kernels, "delta", rows.div_ceil(threads(job) as usize / 32), &call)?;
    launch(job, kernels, "dsinks", e.query_heads, &call)
}

fn dk_and_dv(job: &Job<'_>, call: &Call) -> Result<(), Error> {
    let wanted = |data: u64, columns: usize| if data == 0 { 0 } else { columns };
    let (e, all_values) = (&job.scores().extents, job.prepared.value_dim.unwrap_or(0));
    let dims = wanted(call.dk.data, e.dim);
    let values = wanted(call.dv.data, all_values);
    let blocks = job.prepared.rows.by_keys.len() * e.key_heads;
    let tasks = job.table(job.prepared.tables.by_keys);
    let (mut dims, mut values) = (parts(dims), parts(values));
    loop {
        let (dim, value) = (dims.next(), values.next());
        if dim.is_none() && value.is_none() {
            return Ok(());
        }
        // A part that is not wanted any more begins beyond the last column.
        let first_dim = dim.unwrap_or(e.dim as i32);
        let first_value = value.unwrap_or(all_values as i32);
        walk(job, "keys", blocks, &call.over(tasks).at(first_dim, first_value))?;
    }
}
