//! The backward pass of attention and attention_lse for the tensor cores of compute capability 9.0:
//! `kernels/attention/sm90a_backward.cuh` says which kernels there are.

use crate::moves::{Place, When};
use crate::softmax::hopper::{
    Plan, by_keys, heads_in, launch, map_of, options, packed, padded, shape, spans,
};
use crate::softmax::hopper_args::{BackwardArgs, Cleansed, MendArgs, Merged};
use crate::softmax::variants::{Lengths, Results};
use crate::softmax::{Steps, portable};
use crate::tensor_map::TensorMap;
use crate::variant::Variant;
use etalon_problem::Error;

/// The kernels do not look at what was found.
const ALWAYS: u32 = u32::MAX;

/// The gradients that have places.
pub(crate) fn backward(steps: &Steps<'_>, plan: &Plan) -> Result<(), Error> {
    if steps.prepared.has_gradient() && steps.address("dq") != 0 {
        portable::scaled_gradient(steps)?;
    }
    let Some(pass) = BackwardPass::new(steps, plan) else {
        return portable::dsinks_and_dbias(steps);
    };
    for name in READ.into_iter().chain(["o"]).filter(|name| plan.reads(steps.prepared, name)) {
        plan.widen(steps, name)?;
    }
    steps.fill(steps.at(plan.found), plan.found.bytes, 0);
    WRITTEN.into_iter().for_each(|name| plan.clear(steps, name));
    let rows = plan.stat_rows(&steps.scores().extents);
    let grid = ((rows * plan.width / 8).div_ceil(256), 256);
    launch(steps, (&pass.some(), "delta"), grid, &pass.args, 0)?;
    pass.gradients(&|name| plan.place(steps, name), ALWAYS)?;
    let when = if plan.guarded { When::Is(steps.at(plan.found), 0) } else { When::Always };
    for name in WRITTEN {
        plan.narrow(steps, name, when)?;
    }
    portable::dsinks_and_dbias(steps)?;
    if plan.guarded { pass.not_finite() } else { Ok(()) }
}

/// Operands of the tensor cores in the backward pass, and their results.
const READ: [&str; 4] = ["q", "k", "v", "dout"];
const WRITTEN: [&str; 3] = ["dq", "dk", "dv"];

/// Whether a result is wanted of these kernels; dq is not where it is a multiple of a `gradient` that is given.
fn writes(steps: &Steps<'_>, name: &str) -> bool {
    steps.address(name) != 0 && !(name == "dq" && steps.prepared.has_gradient())
}

/// A backward pass on its way.
struct BackwardPass<'a> {
    steps: &'a Steps<'a>,
    plan: &'a Plan,
    /// Whether some gradients are computed together, of attention_lse all; else dk or dv is without the other.
    together: bool,
    args: BackwardArgs,
}

impl<'a> BackwardPass<'a> {
    /// None, where no gradient is wanted of these kernels.
    fn new(steps: &'a Steps<'a>, plan: &'a Plan) -> Option<Self> {
        let [dq, dk, dv] = WRITTEN.map(|name| writes(steps, name));
        let (e, values) = (&steps.scores().extents, steps.prepared.value_dim.is_some());
        let together = dq || dk && (dv || !values);
        if !(together || values && dk != dv) {
            return None;
        }
        let heads = heads_in(16 << 20, steps, plan).min(e.batch * e.key_heads);
        let read = |name| match plan.reads(steps.prepared, name) {
            true => plan.place(steps, name),
            false => Place::NOWHERE,
        };
        let args = BackwardArgs {
            lse2: steps.at(plan.lse2).into(),
            delta: steps.at(plan.delta).into(),
            lse: steps.address("lse").into(),
            dlse: steps.address("dlse").into(),
            o: read("o").into(),
            dout_rows: read("dout").into(),
            found: steps.at(plan.found).into(),
            when: ALWAYS,
            shape: shape(steps, plan, heads),
            packed: packed(steps, plan),
            options: options(steps),
            spans: spans(steps, plan),
            ..BackwardArgs::default()
        };
        Some(BackwardPass { steps, plan, together, args })
    }

    /// A module that has what all have.
    fn some(&self) -> Variant {
        self.module(self.together)
    }

    /// That of the gradients that are computed together, or of one alone.
    fn module(&self, together: bool) -> Variant {
        let results = match (together, self.steps.prepared.value_dim) {
            (false, _) => Results::Alone,
            (true, Some(_)) => Results::All,
            (true, None) => Results::Lse,
        };
        Variant::hopper_backward(self.plan.hopper, results)
    }

    /// Where a number is not finite, the portable kernels have all results. In key heads of a sequence without
    /// an infinite one, the results of the tensor cores, with 0 for what is not finite, take the places of
    /// those that are finite.
    fn not_finite(&self) -> Result<(), Error> {
        let (steps, plan) = (self.steps, self.plan);
        portable::backward(steps, steps.at(plan.found))?;
        let operand = |name| match plan.reads(steps.prepared, name) {
            true => Cleansed::new(plan.place(steps, name), plan.clean(steps, name), by_keys(name)),
            false => Cleansed::new(Place::NOWHERE, Place::NOWHERE, by_keys(name)),
        };
        let result = |name| {
            let to = if writes(steps, name) { steps.place(name) } else { Place::NOWHERE };
            Merged::new(plan.clean(steps, name), to, by_keys(name))
        };
        let mend = MendArgs {
            operands: READ.map(operand),
            results: WRITTEN.map(result),
            lse2: self.args.lse2,
            delta: self.args.delta,
            stats: plan.stat_rows(&steps.scores().extents) as i64,
            found: self.args.found,
            shape: self.args.shape,
            packed: self.args.packed,
            sequences: steps.prepared.counts.sequences as i32,
        };
        // Some blocks for each multiprocessor: each walks what is left.
        let grid = (4 * steps.multiprocessors(), 256);
        launch(steps, (&self.some(), "cleanse"), grid, &mend, 0)?;
        self.gradients(&|name| plan.clean(steps, name), 1)?;
        launch(steps, (&self.some(), "merge"), grid, &mend, 0)
    }

    /// One of the kernels that draw tiles: as many blocks as there are multiprocessors, if there are as many tiles.
    fn draw(
        &self,
        kernel: (&Variant, &'static str),
        counter: u64,
        tiles: usize,
        args: BackwardArgs,
        terms: usize,
    ) -> Result<(), Error> {
        let counter = self.plan.counter(self.steps, counter).into();
        let args = BackwardArgs { tiles: tiles as i32, counter, ..args };
        // Nothing, where all is finite.
        let terms = if args.when == ALWAYS { terms } else { 0 };
        let grid = (tiles.min(self.steps.multiprocessors()), 384);
        launch(self.steps, kernel, grid, &args, terms)
    }

    /// dk, dv and dq, those that are wanted, of operands and in places that a function names.
    fn gradients(&self, place: &dyn Fn(&str) -> Place, when: u32) -> Result<(), Error> {
        let (steps, plan) = (self.steps, self.plan);
        let (e, values) = (&steps.scores().extents, steps.prepared.value_dim.unwrap_or(0));
        let map = |name: &str, rows: u32| map_of(plan, place(name), rows);
        let [dq, dk, dv] = WRITTEN.map(|name| writes(steps, name));
        let read = |name: &str, rows: u32| match plan.reads(steps.prepared, name) {
            true => map(name, rows),
            false => TensorMap::default(),
        };
        // Operands, those of queries in boxes of so many rows.
        let operands = |rows: u32| BackwardArgs {
            q: map("q", rows),
            k: map("k", 128),
            v: read("v", 128),
            dout: read("dout", rows),
            when,
            ..self.args
        };
        if dk || dv {
            let lse = steps.prepared.value_dim.is_none();
            let module = self.module(dk && (dv || lse));
            let (name, rows, terms) = match (dk, lse) {
                (true, false) if dv => ("keys", 64, 2 * (e.dim + values)),
                (true, false) => ("keys", 64, 2 * e.dim + values),
                (true, true) => ("keys", 128, 2 * e.dim),
                (false, _) => ("values", 128, e.dim + values),
            };
            let mut args = operands(rows);
            if dk {
                (args.dk, args.dk_rows) = (map("dk", 128), place("dk").into());
            }
            if dv {
                (args.dv, args.dv_rows) = (map("dv", 128), place("dv").into());
            }
            let tiles = match plan.hopper.lengths {
                Lengths::Listed => steps.prepared.counts.by_keys,
                _ => e.keys.div_ceil(128) * e.batch,
            };
            self.draw((&module, name), 0, tiles * e.key_heads, args, terms)?;
        }
        if dq {
            let (dq, dq_rows) = (map("dq", 128), place("dq").into());
            let args = BackwardArgs { dq, dq_rows, ..operands(128) };
            let tiles = match plan.hopper.lengths {
                Lengths::Listed => steps.prepared.counts.by_queries,
                _ => padded(e.queries) / 128 * e.batch,
            };
            let module = self.module(true);
            self.draw((&module, "queries"), 1, tiles * e.query_heads, args, 2 * e.dim + values)?;
        }
        Ok(())
    }
}
