//! Passes of lazy_attention, and its statistics.

use crate::job;
use crate::options::{Level, Options};
use crate::parts::{Holds, Parts};
use crate::queue::Queue;
use crate::ready;
use crate::room::{Layout, Room};
use crate::softmax::Job;
use crate::softmax::given::GivenArray;
use crate::softmax::hopper_lazy::LazyPlan;
use crate::softmax::lazy::{Memory, Passes};
use crate::softmax::prepared::Prepared;
use crate::variant::Variant;
use crate::workspace::Held;
use etalon_problem::{Blocking, DistanceBias, Dtype, Error, Pass, Problem, Table};
use std::sync::Arc;

/// A pass that may be enqueued.
#[derive(Debug)]
pub(crate) struct LazyReady<'a> {
    prepared: Prepared<'a>,
    bias: Option<DistanceBias>,
    memory: Memory,
    plan: Option<LazyPlan>,
    scratch_bytes: usize,
}

impl<'a> LazyReady<'a> {
    /// As [`Prepared::new`], with kernels that are compiled or loaded.
    pub fn new(
        held: Arc<Held>,
        (problem, bias): (&'a Problem, Option<DistanceBias>),
        call: (Pass, Dtype),
        table: &Table,
        (holds, given): (Holds<'_>, &[GivenArray]),
        options: &Options,
    ) -> Result<LazyReady<'a>, Error> {
        let mut layout = Layout::default();
        let mut prepared = Prepared::new(held, problem, call, table, (holds, given), &mut layout)?;
        let memory = Memory::new(&prepared, bias, options.assume_finite, &mut layout)?;
        let (dim, value_dim) = (prepared.scores.extents.dim, prepared.value_dim.unwrap_or(1));
        let has_options = bias.is_some() || prepared.counts.flags.is_some();
        let mut plan = match choose(&prepared, options)? {
            Way::Hopper(plan) => Some(*plan),
            Way::Tensor => {
                let (storage, whole) = (prepared.storage, prepared.has_whole_rows());
                let variant = Variant::lazy_tensor(storage, dim, value_dim, has_options, whole);
                prepared.tensor = Some(prepared.load(variant)?);
                None
            }
            Way::Portable => None,
        };
        if let Some(plan) = &mut plan {
            plan.reserve(&prepared, &mut layout)?;
            plan.load(&prepared)?;
        }
        let own = Variant::lazy(prepared.storage, dim, value_dim, has_options);
        prepared.portable = Some(prepared.load(own)?.0);
        let fills = prepared.leaves_rows() || plan.is_some();
        prepared.parts.load_moves(fills)?;
        Ok(LazyReady { prepared, bias, memory, plan, scratch_bytes: layout.bytes() })
    }

    fn owned(self) -> LazyReady<'static> {
        let LazyReady { prepared, bias, memory, plan, scratch_bytes } = self;
        LazyReady { prepared: prepared.into_owned(), bias, memory, plan, scratch_bytes }
    }
}

impl ready::Ready for LazyReady<'_> {
    fn parts(&self) -> &Parts {
        &self.prepared.parts
    }

    fn table_bytes(&self) -> usize {
        self.prepared.table_bytes()
    }

    fn scratch_bytes(&self) -> usize {
        self.scratch_bytes
    }

    fn upload(&self, queue: &Queue<'_>, tables: u64) -> Result<(), Error> {
        self.prepared.upload(queue, tables)
    }

    fn into_owned(self: Box<Self>) -> Box<dyn ready::Ready> {
        Box::new(self.owned())
    }

    fn compute(&self, job: &job::Job<'_, Parts>) -> Result<(), Error> {
        let job: &Job<'_> = &Prepared::begin(job.of(&self.prepared))?;
        if self.prepared.leaves_rows() {
            job.fill_results()?;
        }
        let passes = Passes::new(job, &self.memory, self.bias, self.plan.as_ref())?;
        match self.prepared.pass {
            Pass::Backward => passes.backward(),
            _ => passes.forward(),
        }
    }
}

/// The statistics of a problem in place of its forward pass.
#[derive(Debug)]
pub(crate) struct LazyStats<'a> {
    pass: LazyReady<'a>,
    tile: Blocking,
    /// Where the kernels leave the figures of every row, and the states of every tile.
    pub figures: Room,
    pub states: Room,
    scratch_bytes: usize,
}

impl<'a> LazyStats<'a> {
    /// Of tiles of this size, with room for so many bytes of figures and of states.
    pub fn new(
        pass: LazyReady<'a>,
        tile: Blocking,
        [figures, states]: [usize; 2],
    ) -> Result<LazyStats<'a>, Error> {
        let mut layout = Layout::default();
        layout.room(pass.scratch_bytes)?; // that of the pass comes first
        let (figures, states) = (layout.room(figures)?, layout.room(states)?);
        Ok(LazyStats { pass, tile, figures, states, scratch_bytes: layout.bytes() })
    }
}

impl ready::Ready for LazyStats<'_> {
    fn parts(&self) -> &Parts {
        self.pass.parts()
    }

    fn table_bytes(&self) -> usize {
        self.pass.table_bytes()
    }

    fn scratch_bytes(&self) -> usize {
        self.scratch_bytes
    }

    fn upload(&self, queue: &Queue<'_>, tables: u64) -> Result<(), Error> {
        self.pass.upload(queue, tables)
    }

    fn into_owned(self: Box<Self>) -> Box<dyn ready::Ready> {
        let LazyStats { pass, tile, figures, states, scratch_bytes } = *self;
        let pass = pass.owned();
        Box::new(LazyStats { pass, tile, figures, states, scratch_bytes })
    }

    fn compute(&self, job: &job::Job<'_, Parts>) -> Result<(), Error> {
        let at = [self.figures, self.states].map(|room| job.at(room));
        for (room, at) in [self.figures, self.states].into_iter().zip(at) {
            job.queue.fill(at, room.bytes, 0)?;
        }
        let LazyReady { prepared, bias, memory, .. } = &self.pass;
        let job: &Job<'_> = &Prepared::begin(job.of(prepared))?;
        Passes::new(job, memory, *bias, None)?.measure(at, self.tile)
    }
}

/// Whose kernels compute a pass.
enum Way {
    Portable,
    Tensor,
    Hopper(Box<LazyPlan>),
}

/// Fails where the level that is asked for cannot compute the pass.
fn choose(prepared: &Prepared<'_>, options: &Options) -> Result<Way, Error> {
    let flash = options.precision.refuses_tensor_cores().map_or(Ok(()), Err);
    let tensor = || flash.and_then(|()| refuses_tensor(prepared).map_or(Ok(Way::Tensor), Err));
    let hopper = || {
        flash
            .and_then(|()| LazyPlan::new(prepared, options).map(|plan| Way::Hopper(Box::new(plan))))
    };
    let way = match options.level {
        Level::Portable => Ok(Way::Portable),
        Level::Auto => Ok(hopper().or_else(|_| tensor()).unwrap_or(Way::Portable)),
        Level::Sm80 | Level::Sm80Narrow => tensor(),
        Level::Sm90a | Level::Sm90aSegments => hopper(),
    };
    way.map_err(|reason| options.level.refusal(reason))
}

/// Why the kernels of the level sm80 cannot compute a pass, if so.
fn refuses_tensor(prepared: &Prepared<'_>) -> Option<&'static str> {
    let (dim, value_dim) = (prepared.scores.extents.dim, prepared.value_dim.unwrap_or(1));
    match prepared.storage {
        Dtype::Bf16 | Dtype::F16 if dim > 128 => Some("dim must be at most 128 for sm80"),
        Dtype::Bf16 | Dtype::F16 if prepared.pass == Pass::Backward && value_dim > 128 => {
            Some("value_dim must be at most 128 for the backward pass of sm80")
        }
        Dtype::Bf16 | Dtype::F16 => None,
        _ => Some("its tensor cores multiply bf16 and f16"),
    }
}
