//! Which kernels compute a pass of attention or attention_lse, and in which order.

use crate::job;
use crate::options::Options;
use crate::parts::{Holds, Parts};
use crate::queue::Queue;
use crate::ready;
use crate::room::Layout;
use crate::softmax::given::GivenArray;
use crate::softmax::prepared::Prepared;
use crate::softmax::second::{self, Between};
use crate::softmax::slots::Slots;
use crate::softmax::way::{self, Way};
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
        (holds, given): (Holds<'_>, &[GivenArray]),
        options: &Options,
    ) -> Result<Ready<'a>, Error> {
        let mut layout = Layout::default();
        let mut prepared = Prepared::new(held, problem, call, table, (holds, given), &mut layout)?;
        let between = match prepared.pass {
            Pass::DoubleBackward | Pass::Jvp => Some(Between::new(&prepared, &mut layout)?),
            _ => None,
        };
        let way = way::choose(&prepared.asked(), options)?;
        let shares = way.shares(&prepared.asked(), options);
        prepared.slots = shares
            .map(|shares| Slots::new(shares, &prepared.asked(), way.is_tensor(), &mut layout))
            .transpose()?;
        let plan = match way {
            Way::Portable => None,
            Way::Tensor => {
                let variants = way::tensor_variants(&prepared.asked(), options);
                let forward = prepared.computes_forward();
                let tensor = Some(variants.tensor).filter(|_| variants.wide.is_none() || forward);
                prepared.tensor = tensor.map(|variant| prepared.load(variant)).transpose()?;
                prepared.wide = variants.wide.map(|variant| prepared.load(variant)).transpose()?;
                let fused = prepared.slots.map(|_| portable::fused_variant(&prepared.asked()));
                prepared.fused = fused.map(|variant| prepared.load(variant)).transpose()?;
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
        let options_of_scores = prepared.asked().has_options();
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
            let asked = prepared.asked();
            let variant = portable::tensor_variant(&asked, options);
            if variant.kernels().contains(&"dbias") && !asked.is_wide() {
                prepared.by_pairs = Some(prepared.load(variant)?);
            }
        }
        if self.between.is_some() {
            let variant =
                Variant::second(prepared.storage, dim, prepared.value_dim, options_of_scores);
            prepared.second = Some(device.kernels(variant, &architecture)?);
            if let Some(variant) = portable::tensor_second_variant(&prepared.asked()) {
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
        self.prepared.table_bytes()
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
        let job: &Job<'_> = &Prepared::begin(job.of(&self.prepared))?;
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
