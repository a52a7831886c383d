//! The backward pass of attention and attention_lse for the tensor cores of compute capability 9.0:
//! `kernels/attention/sm90a_backward.cuh` says which kernels there are.

use crate::args::filled;
use crate::softmax::fallback::{self, writes};
use crate::softmax::hopper::{Plan, heads_in, launch, map_of, options, packed, padded, shape, spans};
use crate::softmax::hopper_args::BackwardArgs;
use crate::softmax::pair_args::PairArgs;
use crate::softmax::variants::{Lengths, Results};
use crate::softmax::{Steps, portable};
use crate::strided::StridedTensor;
use crate::tensor_map::TensorMap;
use crate::variant::Variant;
use etalon_problem::Error;

/// The gradients that have places.
pub(crate) fn backward(steps: &Steps<'_>, plan: &Plan) -> Result<(), Error> {
    if steps.prepared.has_gradient() && steps.is_there("dq") {
        portable::scaled_gradient(steps)?;
    }
    let gradients = WRITTEN.into_iter().any(|name| writes(steps, name));
    let sums = ["dsinks", "dbias"].into_iter().any(|name| steps.is_there(name));
    let pass = BackwardPass { steps, plan, args: arguments(steps, plan) };
    if gradients || sums {
        delta(steps, plan, &pass.args)?;
    }
    if gradients {
        for name in READ.into_iter().filter(|name| plan.reads(steps.prepared, name)) {
            // `delta` has read dout.
            if name != "dout" {
                plan.widen(steps, name)?;
            }
        }
        WRITTEN.into_iter().for_each(|name| plan.clear(steps, name));
        pass.gradients()?;
        WRITTEN.into_iter().try_for_each(|name| plan.narrow(steps, name))?;
        fallback::backward(steps)?;
    }
    portable::sinks_and_bias(steps, &PairArgs::new(steps))
}

/// Operands of the tensor cores in the backward pass, and their results.
const READ: [&str; 4] = ["q", "k", "v", "dout"];
const WRITTEN: [&str; 3] = ["dq", "dk", "dv"];

/// The module of the gradients that are computed together, or of one alone.
fn module(steps: &Steps<'_>, plan: &Plan, together: bool) -> Variant {
    let results = match (together, steps.prepared.value_dim) {
        (false, _) => Results::Alone,
        (true, Some(_)) => Results::All,
        (true, None) => Results::Lse,
    };
    Variant::hopper_backward(plan.hopper, results)
}

/// True where some gradients are computed together, of attention_lse all; else dk or dv is without the other.
fn are_together(steps: &Steps<'_>) -> bool {
    let [dq, dk, dv] = WRITTEN.map(|name| writes(steps, name));
    dq || dk == dv || steps.prepared.value_dim.is_none()
}

/// lse and δ of rows as kernels read them, and flags that nobody has raised.
fn delta(steps: &Steps<'_>, plan: &Plan, args: &BackwardArgs) -> Result<(), Error> {
    let prepared = steps.prepared;
    for name in ["o", "dout"].into_iter().filter(|name| plan.reads(prepared, name)) {
        plan.widen(steps, name)?;
    }
    steps.clear_flags();
    let grid = ((plan.stat_rows(&steps.scores().extents) * plan.width / 8).div_ceil(256), 256);
    let module = module(steps, plan, are_together(steps));
    launch(steps, (&module, "delta"), grid, args, 0)
}

/// The arguments that all kernels read.
fn arguments(steps: &Steps<'_>, plan: &Plan) -> BackwardArgs {
    let e = &steps.scores().extents;
    let heads = heads_in(16 << 20, steps, plan).min(e.batch * e.key_heads);
    let read = |name| match plan.reads(steps.prepared, name) {
        true => plan.place(steps, name),
        false => StridedTensor::NOWHERE,
    };
    let address = |name| steps.address(name);
    BackwardArgs {
        lse2: steps.at(plan.lse2).into(),
        delta: steps.at(plan.delta).into(),
        delta_rows: steps.range(steps.prepared.delta).into(),
        o: read("o").into(),
        dout_rows: read("dout").into(),
        flags: steps.group_flags().into(),
        shape: shape(steps, plan, heads),
        packed: packed(steps, plan),
        options: options(steps),
        spans: spans(steps, plan),
        ..filled!(BackwardArgs: names(address) [lse dlse sinks])
    }
}

/// A backward pass on its way.
struct BackwardPass<'a> {
    steps: &'a Steps<'a>,
    plan: &'a Plan,
    args: BackwardArgs,
}

impl BackwardPass<'_> {
    /// One of the kernels that claim tiles: as many blocks as there are multiprocessors, if there are as many tiles.
    fn claim(
        &self,
        kernel: (&Variant, &'static str),
        counter: u64,
        tiles: usize,
        args: BackwardArgs,
        terms: usize,
    ) -> Result<(), Error> {
        let counter = self.steps.counter(counter).into();
        let args = BackwardArgs { tiles: tiles as i32, counter, ..args };
        let grid = (tiles.min(self.steps.multiprocessors()), 384);
        launch(self.steps, kernel, grid, &args, terms)
    }

    /// dk, dv and dq, those that are wanted.
    fn gradients(&self) -> Result<(), Error> {
        let (steps, plan) = (self.steps, self.plan);
        let (e, values) = (&steps.scores().extents, steps.prepared.value_dim.unwrap_or(0));
        let place = |name: &str| plan.place(steps, name);
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
            ..self.args
        };
        if dk || dv {
            let lse = steps.prepared.value_dim.is_none();
            let module = module(steps, plan, dk && (dv || lse));
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
            self.claim((&module, name), 0, tiles * e.key_heads, args, terms)?;
        }
        if dq {
            let (dq, dq_rows) = (map("dq", 128), place("dq").into());
            let args = BackwardArgs { dq, dq_rows, ..operands(128) };
            let tiles = match plan.hopper.lengths {
                Lengths::Listed => steps.prepared.counts.by_queries,
                _ => padded(e.queries) / 128 * e.batch,
            };
            let module = module(steps, plan, true);
            self.claim((&module, "queries"), 1, tiles * e.query_heads, args, 2 * e.dim + values)?;
        }
        Ok(())
    }
}
