//! Which kernels compute a pass of attention or attention_lse, and in which order.

use crate::job;
use crate::options::{Level, Options};
use crate::parts::{Holds, Parts};
use crate::queue::Queue;
use crate::ready;
use crate::room::Layout;
use crate::softmax::prepared::{Prepared, Slots};
use crate::softmax::second::{self, Between};
use crate::softmax::variants::CONSUMER;
use crate::softmax::{Job, hopper, hopper_backward, portable};
use crate::variant::Variant;
use crate::workspace::Held;
use etalon_problem::{Dtype, Error, Pass, Problem, Table};
use std::sync::Arc;

/// A pass that may be enqueued.
#[derive(Debug)]
pub(crate) struct Ready<'a> {
    prepared: Prepared<'a>,
    plan: Option<hopper::Plan>,
    between: Option<Between>,
    scratch_bytes: usize,
}

impl<'a> Ready<'a> {
    /// As [`Prepared::new`], with kernels that are compiled or loaded.
    pub fn new(
        held: Arc<Held>,
        problem: &'a Problem,
        call: (Pass, Dtype),
        table: &Table,
        holds: Holds<'_>,
        options: &Options,
    ) -> Result<Ready<'a>, Error> {
        let mut layout = Layout::default();
        let mut prepared = Prepared::new(held, problem, call, table, holds, &mut layout)?;
        let between = match prepared.pass {
            Pass::DoubleBackward | Pass::Jvp => {
                Some(Between::new(&prepared.scores, prepared.value_dim, &mut layout)?)
            }
            _ => None,
        };
        let plan = match choose(&prepared, options)? {
            Way::Portable => {
                prepared.slots = slots(&prepared, &mut layout)?;
                None
            }
            Way::Tensor => {
                let most = match options.level {
                    Level::Sm80Narrow => CONSUMER,
                    _ => prepared.device().shared_memory,
                };
                let wide = portable::wide_variant(&prepared, most);
                if wide.is_none() || prepared.computes_forward() {
                    prepared.tensor = Some(
                        prepared.load(portable::tensor_variant(&prepared, options.precision))?,
                    );
                }
                prepared.wide = wide.map(|variant| prepared.load(variant)).transpose()?;
                None
            }
            Way::Hopper(mut plan) => {
                plan.reserve(&prepared, options.assume_finite, &mut layout)?;
                plan.load(&prepared)?;
                Some(*plan)
            }
        };
        let mut ready = Ready { prepared, plan, between, scratch_bytes: layout.bytes() };
        ready.load(options)?;
        Ok(ready)
    }

    fn load(&mut self, options: &Options) -> Result<(), Error> {
        let prepared = &mut self.prepared;
        let held = prepared.held.clone();
        let device = &held.device;
        let architecture = device.architecture();
        let dim = prepared.scores.extents.dim;
        let options_of_scores = portable::has_options(prepared);
        let tensor_cores = prepared.tensor.is_some() || prepared.wide.is_some();
        let makes = match &self.plan {
            None if tensor_cores => prepared.pass == Pass::Backward,
            None => prepared.computes_forward() || prepared.pass == Pass::Backward,
            // The tensor cores hand over what is not finite, and the gradients of sinks and bias.
            Some(_) => {
                let apart = ["dsinks", "dbias"].into_iter().any(|name| prepared.has(name));
                prepared.pass == Pass::Backward && (!options.assume_finite || apart)
            }
        };
        if makes || prepared.has("gradient") {
            let variant =
                Variant::portable(prepared.storage, dim, prepared.value_dim, options_of_scores);
            prepared.portable = Some(device.kernels(variant, &architecture)?);
        }
        if (self.plan.is_some() || tensor_cores) && prepared.has("dbias") {
            let variant = portable::tensor_variant(prepared, options.precision);
            if variant.kernels().contains(&"dbias") && !portable::is_wide(prepared) {
                prepared.by_pairs = Some(prepared.load(variant)?);
            }
        }
        if self.between.is_some() {
            let variant =
                Variant::second(prepared.storage, dim, prepared.value_dim, options_of_scores);
            prepared.second = Some(device.kernels(variant, &architecture)?);
            if let Some(variant) = portable::tensor_second_variant(prepared) {
                prepared.tensor_second = Some(prepared.load(variant)?);
            }
        }
        let fills = self.prepared.leaves_rows() || self.plan.is_some();
        self.prepared.parts.load_moves(fills)
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
        self.prepared.upload(queue, tables)
    }

    fn into_owned(self: Box<Self>) -> Box<dyn ready::Ready> {
        let Ready { prepared, plan, between, scratch_bytes } = *self;
        Box::new(Ready { prepared: prepared.into_owned(), plan, between, scratch_bytes })
    }

    fn compute(&self, job: &job::Job<'_, Parts>) -> Result<(), Error> {
        let job: &Job<'_> = &job.of(&self.prepared);
        if self.prepared.leaves_rows() {
            job.fill_results()?;
        }
        if self.prepared.computes_forward() {
            match &self.plan {
                Some(plan) => hopper::forward(job, plan)?,
                None => portable::forward(job)?,
            }
        }
        match (self.prepared.pass, &self.plan, &self.between) {
            (Pass::Forward, ..) if job.address("gradient") != 0 => portable::gradient_of_lse(job)?,
            (Pass::Backward, Some(plan), _) => hopper_backward::backward(job, plan)?,
            (Pass::Backward, None, _) => portable::backward(job, 0)?,
            (_, _, Some(between)) => second::run(job, between, self.prepared.pass)?,
            _ => {}
        }
        Ok(())
    }
}

/// Slots for the gradient of q, where the portable kernels alone compute it.
fn slots(prepared: &Prepared<'_>, layout: &mut Layout) -> Result<Option<Slots>, Error> {
    let (own, others) = match prepared.pass {
        Pass::Backward => ("dq", ["dk", "dv"]),
        Pass::DoubleBackward => ("gq", ["gk", "gv"]),
        _ => return Ok(None),
    };
    let on_tensor_cores = prepared.pass == Pass::DoubleBackward
        && portable::tensor_second_variant(prepared).is_some();
    if on_tensor_cores || !prepared.has(own) {
        return Ok(None);
    }
    Slots::new(prepared, others, layout)
}

/// Whose kernels compute a pass.
enum Way {
    Portable,
    Tensor,
    Hopper(Box<hopper::Plan>),
}

/// Fails where the level that is asked for cannot compute the pass.
fn choose(prepared: &Prepared<'_>, options: &Options) -> Result<Way, Error> {
    let flash = options.precision.refuses_tensor_cores().map_or(Ok(()), Err);
    let narrow = match prepared.storage {
        Dtype::F32 if options.precision.narrows_f32() => Ok(()),
        Dtype::F32 => Err("tensor cores multiply f32 with the precisions `tf32` and `bf16x3`"),
        _ => flash,
    };
    let tensor =
        || narrow.and_then(|()| portable::refuses_tensor(prepared).map_or(Ok(Way::Tensor), Err));
    let hopper = |judged| {
        let plan = flash.and_then(|()| hopper::Plan::new(prepared, judged));
        plan.map(|plan| Way::Hopper(Box::new(plan)))
    };
    let way = match options.level {
        Level::Portable => Ok(Way::Portable),
        Level::Auto => Ok(hopper(true).or_else(|_| tensor()).unwrap_or(Way::Portable)),
        Level::Sm80 | Level::Sm80Narrow => tensor(),
        Level::Sm90a | Level::Sm90aSegments => hopper(false),
    };
    way.map_err(|reason| options.level.refusal(reason))
}
