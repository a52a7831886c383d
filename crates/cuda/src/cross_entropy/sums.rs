//! What shards of the classes return, put together along the tree: `combine` and `sum` of
//! `kernels/cross_entropy_shards.cu`.

use crate::cross_entropy::shard::NODE;
use crate::gpu::Kernels;
use crate::job::Job;
use crate::parts::{Holds, Parts};
use crate::queue::Queue;
use crate::ready;
use crate::room::Layout;
use crate::variant::Variant;
use crate::workspace::Held;
use cudarc::driver::DeviceRepr;
use etalon_problem::linear_cross_entropy::shard::{Partial, depth, merges};
use etalon_problem::{Dtype, Error, LinearCrossEntropy, Pass, Table};
use std::ops::Range;
use std::sync::Arc;

/// `Fold` of `cross_entropy_shards.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Told {
    partials: u64,
    totals: u64,
    sums: u64,
    dh: u64,
    merges: u64,
    count: i64,
    parts: i32,
    whole: i32,
    wide: i32,
    entropy: i32,
    smoothing: i32,
    argmax: i32,
}

// SAFETY: the fields, their types and their order are those of `Fold` in `cross_entropy_shards.cu`, and it holds no
// reference of the host.
unsafe impl DeviceRepr for Told {}

/// The totals of partials, or dh of its parts, which may be enqueued.
#[derive(Debug)]
pub(crate) struct Sums {
    parts: Parts,
    kernels: Arc<Kernels>,
    merges: Vec<u32>,
    /// With what a call does not change.
    told: Told,
    /// Threads of a block of the kernel, and the bytes of each for what waits.
    threads: u32,
    bytes: usize,
    scratch_bytes: usize,
}

impl Sums {
    /// Of parts that hold these classes: `partials` and `totals` of a table, or `parts` and `dh`.
    pub fn new(
        held: Arc<Held>,
        problem: &LinearCrossEntropy,
        (classes, storage): (&[Range<usize>], Dtype),
        table: &Table,
        holds: Holds<'_>,
    ) -> Result<Sums, Error> {
        let mut layout = Layout::default();
        let call = (Pass::Forward, storage);
        let mut parts = Parts::new(held, call, table, holds, |_| false, &mut layout)?;
        parts.load_moves(false)?;
        let device = parts.device();
        let kernels =
            device.kernels(Variant::cross_entropy_shards(storage), &device.architecture())?;
        let of = |name: &str| parts.part(name).map_or(0, |part| part.operand.len());
        let is_dh = parts.has("dh");
        let count = if is_dh { of("dh") } else { of("totals") / Partial::WORDS };
        let told = Told {
            partials: 0,
            totals: 0,
            sums: 0,
            dh: 0,
            merges: 0,
            count: count as i64,
            parts: classes.len() as i32,
            whole: i32::from(count.is_multiple_of(4) && parts.begin_aligned(&["parts"])),
            wide: i32::from(parts.part("dh").is_some_and(|part| part.bytes == 4)),
            entropy: i32::from(problem.outputs.entropy),
            smoothing: i32::from(problem.label_smoothing > 0.0),
            argmax: i32::from(problem.outputs.argmax),
        };
        let (threads, bytes) = if is_dh { (64, 16) } else { (32, NODE) };
        let merges = merges(classes);
        let bytes = bytes * depth(&merges).max(1);
        let scratch_bytes = layout.bytes();
        Ok(Sums { parts, kernels, merges, told, threads, bytes, scratch_bytes })
    }
}

impl ready::Ready for Sums {
    fn parts(&self) -> &Parts {
        &self.parts
    }

    fn table_bytes(&self) -> usize {
        4 * self.merges.len()
    }

    fn scratch_bytes(&self) -> usize {
        self.scratch_bytes
    }

    fn upload(&self, queue: &Queue<'_>, tables: u64) -> Result<(), Error> {
        queue.upload(tables, bytemuck::cast_slice(&self.merges))
    }

    fn compute(&self, job: &Job<'_, Parts>) -> Result<(), Error> {
        let told = Told {
            partials: job.address("partials"),
            totals: job.address("totals"),
            sums: job.address("parts"),
            dh: job.address("dh"),
            merges: job.tables,
            ..self.told
        };
        let (name, each) = if self.parts.has("dh") { ("sum", 4) } else { ("combine", 1) };
        let blocks = (told.count as u64).div_ceil(each * u64::from(self.threads));
        let shared = self.threads * self.bytes as u32;
        job.queue.launch(self.kernels.get(name)?, blocks, (self.threads, shared), &told)
    }

    fn into_owned(self: Box<Self>) -> Box<dyn ready::Ready> {
        self
    }
}
