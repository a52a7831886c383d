//! The backward pass of attention and attention_lse for sm90a: `kernels/attention/sm90a_backward.cuh` lists the
//! kernels.

use super::fallback::{self, writes};
use super::hopper::HopperSteps;
use super::hopper_args::{BackwardArgs, Elements};
use super::pair_args::PairArgs;
use super::portable;
use super::variants::Results;
use super::window::Window;
use crate::args::filled;
use crate::memory::MemoryRange;
use crate::strided::StridedTensor;
use crate::tensor_map::TensorMap;
use crate::variant::Variant;
use etalon_problem::Result;

/// The gradients that have places.
pub(crate) fn backward(steps: HopperSteps<'_>) -> Result<()> {
    let pairs = PairArgs::new(&steps);
    if steps.prepared.has_gradient() && pairs.dq.is_there() {
        portable::scale(&steps, &pairs)?;
    }
    let gradients = WRITTEN.into_iter().any(|name| writes(&steps, name));
    let sums = ["dsinks", "dbias"].into_iter().any(|name| steps.is_there(name));
    let pass = BackwardPass { steps, args: arguments(steps) };
    if gradients || sums {
        delta(steps, &pass.args)?;
    }
    let has_dbias = steps.plan.writes_dbias(steps.prepared);
    if gradients || has_dbias {
        // `delta` has read dout.
        for name in ["q", "k", "v", "bias"].into_iter().filter(|name| steps.prepared.reads(name)) {
            steps.widen(name)?;
        }
        WRITTEN.into_iter().for_each(|name| steps.clear_copy(name));
        pass.gradients()?;
        WRITTEN.into_iter().try_for_each(|name| steps.narrow(name))?;
    }
    if gradients {
        fallback::backward(&steps)?;
    }
    portable::sinks(&steps, &pairs)?;
    if has_dbias {
        steps.narrow("dbias")?;
    }
    portable::bias(&steps, &pairs, has_dbias)
}

/// Results of the tensor cores.
const WRITTEN: [&str; 3] = ["dq", "dk", "dv"];

/// The module of the gradients that are computed together, or of one alone.
fn module(steps: HopperSteps<'_>, together: bool) -> Variant {
    let results = match (together, steps.prepared.spec.value_dim) {
        (false, _) => Results::Alone,
        (true, Some(_)) => Results::All,
        (true, None) => Results::Lse,
    };
    Variant::hopper_backward(steps.plan.hopper, results)
}

/// lse and δ of rows as kernels read them, and flags that nobody has raised.
fn delta(steps: HopperSteps<'_>, args: &BackwardArgs) -> Result<()> {
    for name in ["o", "dout"].into_iter().filter(|name| steps.prepared.reads(name)) {
        steps.widen(name)?;
    }
    steps.clear_flags();
    // Of attention_lse there is no o: a thread has a row.
    let threads = if steps.prepared.spec.value_dim.is_some() { steps.plan.hopper.values / 8 } else { 1 };
    let grid = ((steps.plan.stat_rows(steps.extents()) * threads).div_ceil(256), 256);
    // Some gradients are computed together, of attention_lse all; else dk or dv is without the other.
    let [dq, dk, dv] = WRITTEN.map(|name| writes(&steps, name));
    let module = module(steps, dq || dk == dv || steps.prepared.spec.value_dim.is_none());
    steps.launch_terms((&module, "delta"), grid, args, 0)
}

fn arguments(steps: HopperSteps<'_>) -> BackwardArgs {
    let e = steps.extents();
    let read = |name| if steps.prepared.reads(name) { steps.wide(name) } else { StridedTensor::NOWHERE };
    let address = |name| steps.address(name);
    BackwardArgs {
        lse2: steps.at(steps.plan.lse2).into(),
        delta: steps.at(steps.plan.delta).into(),
        delta_rows: steps.range(steps.prepared.delta).into(),
        o: read("o").into(),
        dout_rows: read("dout").into(),
        flags: steps.group_flags().into(),
        shape: steps.shape(steps.heads_in(16 << 20).min(e.batch * e.key_heads)),
        packed: steps.packed(),
        options: steps.options(),
        spans: steps.spans(),
        ..filled!(BackwardArgs: names(address) [lse dlse sinks])
    }
}

struct BackwardPass<'a> {
    steps: HopperSteps<'a>,
    args: BackwardArgs,
}

impl BackwardPass<'_> {
    fn claim(
        &self,
        kernel: (&Variant, &'static str),
        counter: u64,
        tiles: usize,
        args: BackwardArgs,
        terms: usize,
    ) -> Result<()> {
        let counter = self.steps.counter(counter).into();
        let args = BackwardArgs { tiles: tiles as i32, counter, ..args };
        // `fused` of narrow operands has a third warpgroup, for dq.
        let groups = if kernel.1 == "fused" && self.steps.plan.hopper.width == 64 { 3 } else { 2 };
        self.steps.launch_terms(kernel, self.steps.grid(tiles, groups), &args, terms)
    }

    /// Operands, those of queries and of keys in boxes of so many rows.
    fn operands(&self, [rows, keys]: [usize; 2]) -> BackwardArgs {
        let steps = self.steps;
        let read = |name: &str, rows: usize| match steps.prepared.reads(name) {
            true => steps.map(name, rows),
            false => TensorMap::default(),
        };
        let (q, k) = (steps.map("q", rows), steps.map("k", keys));
        BackwardArgs { q, k, v: read("v", keys), dout: read("dout", rows), ..self.args }
    }

    /// The same with places of dk and dv, if they are wanted.
    fn by_keys(&self, rows: usize) -> BackwardArgs {
        let steps = self.steps;
        let mut args = self.operands([rows, 128]);
        if writes(&steps, "dk") {
            (args.dk, args.dk_rows) = (steps.map("dk", 128), steps.wide("dk").into());
        }
        if writes(&steps, "dv") {
            (args.dv, args.dv_rows) = (steps.map("dv", 128), steps.wide("dv").into());
        }
        args
    }

    /// dk, dv and dq, those that are wanted.
    fn gradients(&self) -> Result<()> {
        let steps = self.steps;
        if let Some(sums) = steps.plan.dq_sums {
            return self.fused(sums);
        }
        if steps.plan.hopper.is_wide() {
            return self.wide();
        }
        let (dim, values) = (steps.extents().dim, steps.values());
        let [dq, dk, dv] = WRITTEN.map(|name| writes(&steps, name));
        if dk || dv {
            let lse = steps.prepared.spec.value_dim.is_none();
            let module = module(steps, dk && (dv || lse));
            let (name, rows, terms) = match (dk, lse) {
                (true, false) if dv => ("keys", 64, 2 * (dim + values)),
                (true, false) => ("keys", 64, 2 * dim + values),
                (true, true) => ("keys", 128, 2 * dim),
                (false, _) => ("values", 128, dim + values),
            };
            self.claim((&module, name), 0, steps.key_tiles(128), self.by_keys(rows), terms)?;
        }
        if dq {
            let (dq, dq_rows) = (steps.map("dq", 128), steps.wide("dq").into());
            let args = BackwardArgs { dq, dq_rows, ..self.operands([128; 2]) };
            let module = module(steps, true);
            self.claim((&module, "queries"), 1, steps.query_tiles(128), args, 2 * dim + values)?;
        }
        Ok(())
    }

    /// The same where D or E is above 128: each by a kernel of its own.
    fn wide(&self) -> Result<()> {
        let steps = self.steps;
        let (dim, values, module) = (steps.extents().dim, steps.values(), module(steps, true));
        let rows = |name| if writes(&steps, name) { steps.wide(name).into() } else { Elements::default() };
        for (name, kernel, terms) in
            [("dk", "keys", 2 * dim + values), ("dv", "values", dim + values), ("dq", "queries", 2 * dim + values)]
        {
            let (boxes, tiles, counter) = match name {
                "dq" => ([128, 64], steps.query_tiles(128), 1),
                _ => ([64, 128], steps.key_tiles(128), 0), // which the kernel before leaves at 0
            };
            if writes(&steps, name) {
                let (dq_rows, dk_rows, dv_rows) = (rows("dq"), rows("dk"), rows("dv"));
                let args = BackwardArgs { dq_rows, dk_rows, dv_rows, ..self.operands(boxes) };
                self.claim((&module, kernel), counter, tiles, args, terms)?;
            }
        }
        Ok(())
    }

    /// All of them in one pass by keys, with the sums of dq.
    fn fused(&self, sums: MemoryRange) -> Result<()> {
        let steps = self.steps;
        let e = steps.extents();
        // Measured: of fewer key heads beside each other more tiles wait for their turns at the begin, of more the
        // sums of dq leave the L2 cache between two parts. Fewer are better with a window where D = 128, and where
        // every tile walks many queries.
        let (device, group, window) = (steps.multiprocessors(), e.query_heads / e.key_heads, steps.plan.window);
        let has_left = e.dim > 64 && window.left != Window::ALL.left;
        let takes_few = has_left || (window == Window::ALL && e.queries >= 4096);
        let together = (device / 2 / group).min(device / if takes_few { 8 } else { 4 }).max(4);
        let args = BackwardArgs {
            bias: steps.pair_map("bias", 64),
            dq_rows: steps.wide("dq").into(),
            dq_sums: steps.at(sums).into(),
            turns: steps.turns().into(),
            shape: steps.shape(together.min(e.batch * e.key_heads)),
            ..self.by_keys(64)
        };
        let has_dbias = steps.plan.writes_dbias(steps.prepared);
        let args = match has_dbias {
            true => {
                BackwardArgs { dbias: steps.wide("dbias").into(), dbias_boxes: steps.pair_map("dbias", 64), ..args }
            }
            false => args,
        };
        let module = module(steps, true);
        self.claim((&module, "fused"), 0, steps.key_tiles(128), args, 3 * e.dim + 2 * steps.values())?;
        let blocks = (steps.prepared.spec.sums_of_rows(), 256);
        // A mask that shows every pair leaves none.
        if has_dbias && steps.plan.window != Window::ALL {
            steps.launch_terms((&module, "unseen"), blocks, &args, 0)?;
        }
        if writes(&steps, "dq") { steps.launch_terms((&module, "collect"), blocks, &args, 0) } else { Ok(()) }
    }
}
