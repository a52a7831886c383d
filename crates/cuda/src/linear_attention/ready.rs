//! Which kernels compute a pass of linear_attention.

use super::hopper_modules::Hopper;
use super::prepared::{Modules, Prepared, Rooms, TensorModules};
use super::tables::Tables;
use super::{Job, hopper, passes, second};
use crate::gpu::Device;
use crate::job;
use crate::options::{Level, Options};
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
        let mut level = choose(&held.device, problem, (pass, storage), options)?;
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
        let (tables, rooms) = (Tables::new(problem, hopper::cut(options.level))?, Rooms::default());
        let problem = Cow::Borrowed(problem);
        let watches = !options.assume_finite;
        let mut prepared = Prepared {
            parts,
            problem,
            tables,
            rooms,
            first,
            second,
            tensor: None,
            hopper: None,
            watches,
        };
        if level == Level::Sm90a && !hopper::takes_all(&prepared) {
            let takes = options.level.takes_tensor_cores(Some(hopper::APART))?;
            level = if takes { level } else { Level::Sm80 };
        }
        match level {
            Level::Sm90a => {
                prepared.hopper = Some(Hopper::load(&held, &prepared.problem, storage)?)
            }
            Level::Sm80 => {
                let whole = prepared.have_whole_rows(&["q", "k", "v", "dout"]);
                let tensor = TensorModules::load(&held, &prepared.problem, storage, whole)?;
                prepared.tensor = Some(tensor);
            }
            _ => {}
        }
        prepared.rooms = prepared.reserve(&mut layout)?;
        if let Some(mut hopper) = prepared.hopper.take() {
            hopper::reserve(&mut hopper, &prepared, &mut layout)?;
            prepared.hopper = Some(hopper);
        }
        let fills = prepared.has_padding();
        prepared.parts.load_moves(fills)?;
        Ok(Ready { prepared, scratch_bytes: layout.bytes() })
    }

    /// 0 at tokens of no sequence.
    fn fill(&self, job: &Job<'_>) -> Result<(), Error> {
        for part in self.prepared.list.iter().filter(|part| !part.given) {
            self.prepared.moves()?.fill(&job.queue, part.bytes, job.place(part.operand.name), 0)?;
        }
        let Rooms { by_scale, by_gate, .. } = self.prepared.rooms;
        let sums = [by_scale, by_gate].into_iter().flatten();
        sums.into_iter().try_for_each(|room| job.queue.fill(job.at(room), room.bytes, 0))
    }
}

/// Whose kernels compute the pass: those of sm90a, of sm80, or the portable ones. Fails where the level that is
/// asked for cannot.
fn choose(
    device: &Device,
    problem: &LinearAttention,
    call: (Pass, Dtype),
    options: &Options,
) -> Result<Level, Error> {
    let (dim, value_dim) = (problem.extents.dim, problem.value_dim);
    let elements = dim.checked_mul(value_dim);
    if elements.is_none_or(|elements| elements > i32::MAX as usize) {
        return Err(Error::Unsupported {
            what: format!("a state of {dim} × {value_dim}"),
            reason: "the cuda tier counts in 32 bits".to_string(),
        });
    }
    let precise = options.precision.refuses_tensor_cores();
    if options.level == Level::Auto || options.level.is_hopper() {
        let refused = precise.or_else(|| hopper::refuses(device, problem, call));
        if options.level.takes_tensor_cores(refused)? {
            return Ok(Level::Sm90a);
        }
    }
    let refused = precise.or_else(|| refused_by_sm80(problem, call));
    // A step has no product of matrices. What a block takes of shared memory fits 99 KiB.
    let takes = options.level.takes_tensor_cores(refused)? && call.0 != Pass::Step;
    Ok(if takes { Level::Sm80 } else { Level::Portable })
}

/// Why the kernels of sm80 cannot compute a pass, if so.
fn refused_by_sm80(
    problem: &LinearAttention,
    (pass, storage): (Pass, Dtype),
) -> Option<&'static str> {
    match pass {
        _ if storage == Dtype::F32 => Some("its tensor cores multiply bf16 and f16"),
        Pass::DoubleBackward => Some("the second order is not written yet for sm80"),
        Pass::Forward | Pass::Backward if problem.extents.dim.max(problem.value_dim) > 128 => {
            Some("dim and value_dim must be at most 128 for linear_attention of sm80")
        }
        _ => None,
    }
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
        match (self.prepared.pass, &self.prepared.hopper) {
            (Pass::Forward, Some(hopper)) => hopper::forward(job, hopper),
            (Pass::Backward, Some(hopper)) => hopper::backward(job, hopper),
            (Pass::Forward, None) => passes::forward(job),
            (Pass::Backward, None) => passes::backward(job),
            (Pass::Step, _) => passes::step(job),
            _ => second::double_backward(job),
        }
    }
}
