//! Which kernels compute a pass of linear_attention.

use super::prepared::{Modules, Prepared, Rooms, TensorModules};
use super::tables::Tables;
use super::{Job, passes, second};
use crate::job;
use crate::options::Options;
use crate::parts::{Holds, Parts};
use crate::queue::Queue;
use crate::ready;
use crate::room::Layout;
use crate::workspace::Held;
use etalon_problem::{Dtype, Error, LinearAttention, Operand, Pass, Table};
use std::borrow::Cow;
use std::sync::Arc;

/// A pass that may be enqueued.
#[derive(Debug)]
pub(crate) struct Ready<'a> {
    prepared: Prepared<'a>,
    scratch_bytes: usize,
}

impl<'a> Ready<'a> {
    /// A pass that has passed [`Table::check_call`], with kernels that are compiled or loaded.
    pub fn new(
        held: Arc<Held>,
        problem: &'a LinearAttention,
        (pass, storage): (Pass, Dtype),
        table: &Table,
        holds: Holds<'_>,
        options: &Options,
    ) -> Result<Ready<'a>, Error> {
        let on_tensor_cores = choose(problem, (pass, storage), options)?;
        let mut layout = Layout::default();
        // A step reads its new state again.
        let made = |operand: &Operand| pass == Pass::Step && operand.name == "final_state";
        let mut parts = Parts::new(held.clone(), (pass, storage), table, holds, made, &mut layout)?;
        if pass == Pass::Step && !parts.has("initial_state") {
            // The place of the new state holds the old one.
            let state = parts.list.iter_mut().find(|part| part.operand.name == "final_state");
            state.into_iter().for_each(|state| state.given = true);
        }
        let first = Modules::load(&held, problem, storage, false)?;
        let second = match pass {
            Pass::DoubleBackward => Some(Modules::load(&held, problem, storage, true)?),
            _ => None,
        };
        let (tables, rooms) = (Tables::new(problem)?, Rooms::default());
        let problem = Cow::Borrowed(problem);
        let watches = !options.assume_finite;
        let mut prepared =
            Prepared { parts, problem, tables, rooms, first, second, tensor: None, watches };
        if on_tensor_cores {
            let whole = prepared.have_whole_rows(&["q", "k", "v", "dout"]);
            prepared.tensor = Some(TensorModules::load(&held, &prepared.problem, storage, whole)?);
        }
        prepared.rooms = prepared.reserve(&mut layout)?;
        let fills = prepared.has_padding();
        prepared.parts.load_moves(fills)?;
        Ok(Ready { prepared, scratch_bytes: layout.bytes() })
    }

    /// 0 at tokens of no sequence.
    fn fill(&self, job: &Job<'_>) -> Result<(), Error> {
        for part in self.prepared.list.iter().filter(|part| !part.given) {
            self.prepared.moves()?.fill(&job.queue, part.bytes, job.place_of(part), 0)?;
        }
        let Rooms { by_scale, by_gate, .. } = self.prepared.rooms;
        let sums = [by_scale, by_gate].into_iter().flatten();
        sums.into_iter().try_for_each(|room| job.queue.fill(job.at(room), room.bytes, 0))
    }
}

/// Whether tensor cores compute the pass. Fails where the level that is asked for cannot.
fn choose(
    problem: &LinearAttention,
    (pass, storage): (Pass, Dtype),
    options: &Options,
) -> Result<bool, Error> {
    let (dim, value_dim) = (problem.extents.dim, problem.value_dim);
    let elements = dim.checked_mul(value_dim);
    if elements.is_none_or(|elements| elements > i32::MAX as usize) {
        return Err(Error::Unsupported {
            what: format!("a state of {dim} × {value_dim}"),
            reason: "the cuda tier counts in 32 bits".to_string(),
        });
    }
    let refused = match pass {
        _ if storage == Dtype::F32 => Some("its tensor cores multiply bf16 and f16"),
        Pass::DoubleBackward => Some("the second order is not written yet for sm80"),
        Pass::Forward | Pass::Backward if dim.max(value_dim) > 128 => {
            Some("dim and value_dim must be at most 128 for linear_attention of sm80")
        }
        _ => None,
    };
    let refused = options.precision.refuses_tensor_cores().or(refused);
    // A step has no product of matrices. What a block takes of shared memory fits 99 KiB.
    Ok(options.level.takes_tensor_cores(refused)? && pass != Pass::Step)
}

impl ready::Ready for Ready<'_> {
    fn parts(&self) -> &Parts {
        &self.prepared.parts
    }

    fn table_bytes(&self) -> usize {
        self.prepared.tables.bytes
    }

    fn scratch_bytes(&self) -> usize {
        self.scratch_bytes
    }

    fn upload(&self, queue: &Queue<'_>, tables: u64) -> Result<(), Error> {
        self.prepared.tables.upload(queue, tables)
    }

    fn into_owned(self: Box<Self>) -> Box<dyn ready::Ready> {
        let Ready { prepared, scratch_bytes } = *self;
        let problem = Cow::Owned(prepared.problem.into_owned());
        Box::new(Ready { prepared: Prepared { problem, ..prepared }, scratch_bytes })
    }

    fn compute(&self, job: &job::Job<'_, Parts>) -> Result<(), Error> {
        let job: &Job<'_> = &job.of(&self.prepared);
        if self.prepared.pass != Pass::Step && self.prepared.has_padding() {
            self.fill(job)?;
        }
        match self.prepared.pass {
            Pass::Forward => passes::forward(job),
            Pass::Backward => passes::backward(job),
            Pass::Step => passes::step(job),
            _ => second::double_backward(job),
        }
    }
}
