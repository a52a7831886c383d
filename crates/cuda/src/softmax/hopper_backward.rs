//! The backward pass of attention and attention_lse for the tensor cores of compute capability 9.0:
//! `kernels/sm90a_backward.cuh` says which kernels there are.

use crate::moves::{Place, When};
use crate::old_map::EncodedMap;
use crate::softmax::hopper::{
    Module, Plan, by_keys, heads_in, launch, map_of, options, packed, padded, shape,
};
use crate::softmax::hopper_call::Backward;
use crate::softmax::mend::{Cleansed, Mend, Merged};
use crate::softmax::variants::Lengths;
use crate::softmax::{Job, portable};
use etalon_problem::Error;

/// The kernels do not look at what was found.
const ALWAYS: u32 = u32::MAX;

/// The gradients that have places.
pub(crate) fn backward(job: &Job<'_>, plan: &Plan) -> Result<(), Error> {
    if job.prepared.has_gradient() && job.address("dq") != 0 {
        portable::scaled_gradient(job)?;
    }
    if plan.backward.is_none() && plan.alone.is_none() {
        return portable::dsinks_and_dbias(job);
    }
    let e = &job.scores().extents;
    for name in READ.into_iter().chain(["o"]).filter(|name| plan.reads(job.prepared, name)) {
        plan.widen(job, name)?;
    }
    let together = heads_in(16 << 20, job, plan).min(e.batch * e.key_heads);
    let read =
        |name| if plan.reads(job.prepared, name) { plan.place(job, name) } else { Place::NOWHERE };
    let call = Backward {
        lse2: job.at(plan.lse2),
        delta: job.at(plan.delta),
        lse: job.address("lse"),
        dlse: job.address("dlse"),
        o: read("o").into(),
        dout_rows: read("dout").into(),
        found: job.at(plan.found),
        when: ALWAYS,
        shape: shape(job, plan, together),
        packed: packed(job, plan),
        options: options(job),
        ..Backward::default()
    };
    let pass = BackwardPass { job, plan, call };
    job.queue.fill(job.at(plan.found), plan.found.bytes, 0)?;
    WRITTEN.into_iter().try_for_each(|name| plan.clear(job, name))?;
    let rows = plan.stat_rows(e);
    let some = pass.some();
    launch(job, some, "delta", ((rows * plan.width / 8).div_ceil(256), 256), &call)?;
    pass.gradients(&|name| plan.place(job, name), ALWAYS)?;
    let when = if plan.guarded { When::Is(job.at(plan.found), 0) } else { When::Always };
    for name in WRITTEN {
        plan.narrow(job, name, when)?;
    }
    portable::dsinks_and_dbias(job)?;
    if plan.guarded { pass.not_finite() } else { Ok(()) }
}

/// What the tensor cores read in the backward pass, and what they write.
const READ: [&str; 4] = ["q", "k", "v", "dout"];
const WRITTEN: [&str; 3] = ["dq", "dk", "dv"];

/// Whether a result is wanted of these kernels; dq is not where it is a multiple of a `gradient` that is given.
fn pass_writes(job: &Job<'_>, name: &str) -> bool {
    job.address(name) != 0 && !(name == "dq" && job.prepared.has_gradient())
}

/// A backward pass on its way.
struct BackwardPass<'a> {
    job: &'a Job<'a>,
    plan: &'a Plan,
    call: Backward,
}

impl BackwardPass<'_> {
    /// A module that has what all have.
    fn some(&self) -> &Option<Module> {
        if self.plan.backward.is_some() { &self.plan.backward } else { &self.plan.alone }
    }

    /// Where a number is not finite, the portable kernels have all results. In key heads of a sequence without
    /// an infinite one, the results of the tensor cores, with 0 for what is not finite, take the places of
    /// those that are finite.
    fn not_finite(&self) -> Result<(), Error> {
        let (job, plan) = (self.job, self.plan);
        portable::backward(job, job.at(plan.found))?;
        let operand = |name| match plan.reads(job.prepared, name) {
            true => Cleansed::new(plan.place(job, name), plan.clean(job, name), by_keys(name)),
            false => Cleansed::new(Place::NOWHERE, Place::NOWHERE, by_keys(name)),
        };
        let result = |name| {
            let to = if pass_writes(job, name) { job.place(name) } else { Place::NOWHERE };
            Merged::new(plan.clean(job, name), to, by_keys(name))
        };
        let mend = Mend {
            operands: READ.map(operand),
            results: WRITTEN.map(result),
            lse2: job.at(plan.lse2),
            delta: job.at(plan.delta),
            stats: plan.stat_rows(&job.scores().extents) as i64,
            found: job.at(plan.found),
            shape: self.call.shape,
            packed: self.call.packed,
            sequences: job.prepared.counts.sequences as i32,
        };
        // Some blocks for each multiprocessor: each walks what is left.
        let blocks = 4 * job.queue.device.multiprocessors;
        launch(job, self.some(), "cleanse", (blocks, 256), &mend)?;
        self.gradients(&|name| plan.clean(job, name), 1)?;
        launch(job, self.some(), "merge", (blocks, 256), &mend)
    }

    /// One of the kernels that draw tiles: as many blocks as there are multiprocessors, if there are as many tiles.
    fn draw(
        &self,
        (module, name): (&Option<Module>, &str),
        kernel: u64,
        tiles: usize,
        call: Backward,
    ) -> Result<(), Error> {
        let blocks = tiles.min(self.job.queue.device.multiprocessors);
        let counter = self.plan.counter(self.job, kernel);
        let call = Backward { tiles: tiles as i32, counter, ..call };
        launch(self.job, module, name, (blocks, 384), &call)
    }

    /// dk, dv and dq, those that are wanted, of operands and in places that a function names.
    fn gradients(&self, place: &dyn Fn(&str) -> Place, when: u32) -> Result<(), Error> {
        let (job, plan, e) = (self.job, self.plan, &self.job.scores().extents);
        let map = |name: &str, rows: u32| map_of(job, plan, place(name), rows);
        let [dq, dk, dv] = WRITTEN.map(|name| pass_writes(job, name));
        let read = |name: &str, rows: u32| match plan.reads(job.prepared, name) {
            true => map(name, rows),
            false => Ok(EncodedMap::default()),
        };
        // Operands, those of queries in boxes of so many rows.
        let operands = |rows: u32| -> Result<Backward, Error> {
            Ok(Backward {
                q: map("q", rows)?,
                k: map("k", 128)?,
                v: read("v", 128)?,
                dout: read("dout", rows)?,
                when,
                ..self.call
            })
        };
        if dk || dv {
            let lse = job.prepared.value_dim.is_none();
            let module = if dk && (dv || lse) { &plan.backward } else { &plan.alone };
            let (name, rows) = match (dk, lse) {
                (true, false) => ("keys", 64),
                (true, true) => ("keys", 128),
                (false, _) => ("values", 128),
            };
            let mut call = operands(rows)?;
            if dk {
                (call.dk, call.dk_rows) = (map("dk", 128)?, place("dk").into());
            }
            if dv {
                (call.dv, call.dv_rows) = (map("dv", 128)?, place("dv").into());
            }
            let tiles = match plan.variant.lengths {
                Lengths::Listed => job.prepared.counts.by_keys,
                _ => e.keys.div_ceil(128) * e.batch,
            };
            self.draw((module, name), 0, tiles * e.key_heads, call)?;
        }
        if dq {
            let own = (map("dq", 128)?, place("dq").into());
            let call = Backward { dq: own.0, dq_rows: own.1, ..operands(128)? };
            let tiles = match plan.variant.lengths {
                Lengths::Listed => job.prepared.counts.by_queries,
                _ => padded(e.queries) / 128 * e.batch,
            };
            self.draw((&plan.backward, "queries"), 1, tiles * e.query_heads, call)?;
        }
        Ok(())
    }
}
