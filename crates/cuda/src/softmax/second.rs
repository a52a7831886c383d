//! The second order: `kernels/portable_second.cu`, and on tensor cores `kernels/sm80_second.cu`.

use crate::family::Family;
use crate::gpu::Kernels;
use crate::moves::Place;
use crate::parts::absent;
use crate::room::{Layout, Room};
use crate::softmax::Job;
use crate::softmax::portable::{Call, TENSOR_THREADS, Tensor, parts, tensor};
use crate::softmax::prepared::Prepared;
use crate::softmax::slots::By;
use crate::variant::{self, Variant, shared_bytes};
use cudarc::driver::DeviceRepr;
use etalon_problem::{Error, Pass};
use std::sync::Arc;

/// What the second order keeps of every row between its kernels, in f32.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Between {
    /// Σ P (U v + ddv) and o.
    sum: Room,
    o: Room,
    /// δ, u, z, and whether the row sees a key.
    numbers: Room,
    /// Of which key heads of each sequence an operand of the tensor cores holds a number that is not finite.
    found: Room,
}

impl Between {
    pub fn new(prepared: &Prepared<'_>, layout: &mut Layout) -> Result<Between, Error> {
        let (scores, sequences) = (&prepared.scores, prepared.counts.sequences);
        let rows = scores.row_shape().iter().product::<usize>();
        let elements = 4 * rows * prepared.value_dim.unwrap_or(0);
        Ok(Between {
            sum: layout.room(elements)?,
            o: layout.room(elements)?,
            numbers: layout.room(4 * 4 * rows)?,
            found: layout.room(4 * sequences * scores.extents.key_heads)?,
        })
    }
}

/// What a kernel is told: `Second` of `portable_second.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Second {
    call: Call,
    ddq: Tensor,
    ddk: Tensor,
    ddv: Tensor,
    ddbias: Tensor,
    cot_o: Tensor,
    gq: Tensor,
    gk: Tensor,
    gv: Tensor,
    gbias: Tensor,
    gdout: Tensor,
    sum: Tensor,
    o: Tensor,
    ddsinks: u64,
    cot_lse: u64,
    gdlse: u64,
    gsinks: u64,
    numbers: u64,
}

// SAFETY: the fields, their types and their order are those of `Second` in `portable_second.cu`, and it
// holds no reference of the host.
unsafe impl DeviceRepr for Second {}

impl Second {
    /// Of double_backward, or of jvp: there the tangents stand for the cotangents of the gradients.
    fn new(job: &Job<'_>, between: &Between, pass: Pass) -> Second {
        let name = |second: &'static str, tangent: &'static str| match pass {
            Pass::Jvp => tangent,
            _ => second,
        };
        let rows = |room: Room| {
            let (e, width) = (&job.scores().extents, job.prepared.value_dim.unwrap_or(0));
            let head = e.queries * width;
            let strides = [e.query_heads * head, head, width].map(|x| x as i64);
            Tensor::new(job.at(room), strides)
        };
        Second {
            call: Call::new(job),
            ddq: tensor(job, name("ddq", "tq")),
            ddk: tensor(job, name("ddk", "tk")),
            ddv: tensor(job, name("ddv", "tv")),
            ddbias: tensor(job, name("ddbias", "tbias")),
            cot_o: tensor(job, "cot_o"),
            gq: tensor(job, "gq"),
            gk: tensor(job, "gk"),
            gv: tensor(job, "gv"),
            gbias: tensor(job, "gbias"),
            gdout: tensor(job, name("gdout", "to")),
            sum: rows(between.sum),
            o: rows(between.o),
            ddsinks: job.address(name("ddsinks", "tsinks")),
            cot_lse: job.address("cot_lse"),
            gdlse: job.address(name("gdlse", "tlse")),
            gsinks: job.address("gsinks"),
            numbers: job.at(between.numbers),
        }
    }

    /// The launch whose accumulators begin at these columns.
    fn at(self, first_dim: i32, first_value: i32) -> Second {
        Second { call: self.call.at(first_dim, first_value), ..self }
    }

    /// Over other tiles.
    fn over(self, tasks: u64) -> Second {
        Second { call: self.call.over(tasks), ..self }
    }
}

/// `Inspected` of `sm80_second.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Inspected {
    tensor: Tensor,
    found: u64,
    sequences: u64,
    batch: i32,
    heads: i32,
    key_heads: i32,
    rows: i32,
    columns: i32,
    count: i32,
    by_keys: i32,
}

// SAFETY: as above.
unsafe impl DeviceRepr for Inspected {}

/// Looks whether all that the tensor cores multiply is finite.
fn inspect(
    job: &Job<'_>,
    (kernels, _): &(Arc<Kernels>, Variant),
    pass: Pass,
    found: Room,
) -> Result<(), Error> {
    let key_heads = job.scores().extents.key_heads as i32;
    job.queue.fill(job.at(found), found.bytes, 0)?;
    let found = job.at(found);
    let sequences = job.table(job.prepared.tables.sequences);
    let count = job.prepared.counts.sequences as i32;
    let moved = if pass == Pass::Jvp { ["tq", "tk", "tv"] } else { ["ddq", "ddk", "ddv"] };
    for name in ["q", "k", "v", "dout", "cot_o"].into_iter().chain(moved) {
        let Place { address, extents, .. } = job.place(name);
        if address == 0 {
            continue;
        }
        let [batch, heads, rows, columns] = extents.map(|x| x as i32);
        let tensor = tensor(job, name);
        let by_keys = i32::from(matches!(name, "k" | "v" | "ddk" | "ddv" | "tk" | "tv"));
        let call = Inspected {
            tensor,
            found,
            sequences,
            batch,
            heads,
            key_heads,
            rows,
            columns,
            count,
            by_keys,
        };
        let blocks = (extents[0] * extents[1] * extents[2]).div_ceil(TENSOR_THREADS as usize / 32);
        job.queue.launch(kernels.get("inspect")?, blocks as u64, (TENSOR_THREADS, 0), &call)?;
    }
    Ok(())
}

/// The outputs of double_backward or jvp that have places.
pub(crate) fn run(job: &Job<'_>, between: &Between, pass: Pass) -> Result<(), Error> {
    let (e, counts) = (&job.scores().extents, &job.prepared.counts);
    let kernels = job.prepared.second.as_deref().ok_or_else(|| absent("the second order"))?;
    let threads = variant::threads(Family::Second, e.dim, job.prepared.value_dim);
    let launch = |name: &str, blocks: usize, call: Second| {
        job.queue.launch(kernels.get(name)?, blocks as u64, (threads, 0), &call)
    };
    let call = Second::new(job, between, pass);
    let tensor = job.prepared.tensor_second.as_ref();
    let call = match tensor {
        Some(module) => {
            inspect(job, module, pass, between.found)?;
            Second { call: call.call.unless(job.at(between.found)), ..call }
        }
        None => call,
    };
    // Blocks of either leave what is not theirs.
    let both = |name: &str, blocks: usize, call: Second| {
        if let Some((kernels, variant)) = tensor {
            let block = (TENSOR_THREADS, shared_bytes(variant, name));
            job.queue.launch(kernels.get(name)?, blocks as u64, block, &call)?;
        }
        launch(name, blocks, call)
    };
    let by_queries = counts.by_queries * e.query_heads;
    for first in parts(job.prepared.value_dim.unwrap_or(1)) {
        both("tangents", by_queries, call.at(0, first))?;
    }
    let numbers = e.batch * e.query_heads * e.queries;
    launch("rows", numbers.div_ceil(threads as usize / 32), call)?;
    let by_keys = call.over(job.table(job.prepared.tables.by_keys));
    if let Some(slots) = &job.prepared.slots {
        let (fused, collect) = (kernels.get("fused")?, kernels.get("collect")?);
        let by = By { fused, collect, threads, shared: 0 };
        slots.run(job, &by, &[by_keys], call.call.with_dq(call.gq))?;
        return sinks_and_bias(job, kernels, threads, call);
    }
    if call.gq.is_there() {
        for first in parts(e.dim) {
            both("queries", by_queries, call.at(first, 0))?;
        }
    }
    let wanted = |tensor: Tensor, columns: usize| if tensor.is_there() { columns } else { 0 };
    let values = job.prepared.value_dim.unwrap_or(0);
    let blocks = counts.by_keys * e.key_heads;
    let mut dims = parts(wanted(call.gk, e.dim));
    let mut columns = parts(wanted(call.gv, values));
    loop {
        let (dim, value) = (dims.next(), columns.next());
        if dim.is_none() && value.is_none() {
            break;
        }
        // A part that is not wanted any more begins beyond the last column.
        let at = by_keys.at(dim.unwrap_or(e.dim as i32), value.unwrap_or(values as i32));
        both("keys", blocks, at)?;
    }
    sinks_and_bias(job, kernels, threads, call)
}

/// The gradients of the sinks and of the bias, if they have places.
fn sinks_and_bias(
    job: &Job<'_>,
    kernels: &Kernels,
    threads: u32,
    call: Second,
) -> Result<(), Error> {
    let launch = |name: &str, blocks: usize, call: Second| {
        job.queue.launch(kernels.get(name)?, blocks as u64, (threads, 0), &call)
    };
    if call.gsinks != 0 {
        launch("gsinks", job.scores().extents.query_heads, call)?;
    }
    if call.gbias.is_there() {
        let heads = job.scores().bias.map_or(0, |bias| bias.heads);
        let by_pairs = call.over(job.table(job.prepared.tables.by_pairs));
        launch("gbias", job.prepared.counts.by_pairs * heads, by_pairs)?;
    }
    Ok(())
}
