//! The kernels of lazy_attention for sm90a: `kernels/lazy_attention/sm90a*`.

use super::Steps;
use super::hopper::{HopperSteps, Plan};
use super::hopper_args::{Elements, Packed, Shape, SpanTables};
use super::lazy_args::LazyArgs;
use super::pair_args::Numbers;
use super::prepared::Prepared;
use crate::args::{ConstPtr, Ptr, filled, int, kernel_args};
use crate::memory::{Layout, MemoryRange};
use crate::strided::strided_args;
use crate::tensor_map::TensorMap;
use crate::variant::Variant;
use etalon_problem::Result;
use std::convert::identity;

#[derive(Debug)]
pub(crate) struct LazyPlan {
    operands: Plan,
    /// As `active` of the arguments.
    active: MemoryRange,
}

strided_args! {
    /// Rows of f32.
    struct FloatRows as "FloatRows" { f32, batch, head, row }
}

kernel_args! {
    pub(super) struct HopperLazyArgs as "HopperLazyArgs" {
        q, k, v, o, dout, dq, dk, dv: TensorMap,
        /// As the maps say.
        o_rows, dq_rows, dk_rows, dv_rows: Elements,
        /// Σ a P v (E47).
        pv: FloatRows,
        lse: Ptr<f32>,
        dlse: ConstPtr<f32>,
        /// As those of [`LazyArgs`].
        windows: Ptr<f32>,
        bias, tau: ConstPtr<f32>,
        numbers: Ptr<Numbers>,
        /// Stripes of keys that may hold an active pair: forward of every 16 rows of a head, backward of 64.
        active: Ptr<u32>,
        flags: Ptr<u32>,
        /// Of tiles, 0 between launches.
        counter: Ptr<u32>,
        width, bottom: i32,
        /// E.
        columns: i32,
        reach: i32,
        /// Of keys.
        tiles: i32,
        /// True if Δ and Σ a g are wanted.
        means: i32,
        wants_dq, wants_dk, wants_dv: i32,
        shape: Shape,
        packed: Packed,
        spans: SpanTables,
    }
}

impl LazyPlan {
    pub fn new(prepared: &Prepared<'_>, layout: &mut Layout) -> Result<LazyPlan> {
        let operands = Plan::lazy(prepared, layout)?;
        let heads = prepared.scores.extents.query_heads;
        Ok(LazyPlan { operands, active: layout.range(16 * prepared.spec.counts.tiles * heads)? })
    }
}

pub(crate) struct HopperPass<'a> {
    steps: HopperSteps<'a>,
    args: HopperLazyArgs,
}

impl<'a> HopperPass<'a> {
    pub fn new(
        LazyPlan { operands: plan, active }: &'a LazyPlan,
        steps: &'a Steps<'a>,
        shared: &LazyArgs,
        windows: u64,
    ) -> Self {
        let steps = HopperSteps { steps, plan };
        let address = |name| steps.address(name);
        let rows = |name: &str| steps.wide(name.trim_end_matches("_rows"));
        let args = HopperLazyArgs {
            k: steps.map("k", 128),
            windows: windows.into(),
            active: steps.at(*active).into(),
            flags: steps.group_flags().into(),
            counter: steps.counter(0).into(),
            columns: int(steps.values()),
            // Measured of attention: causal masks like as many heads beside each other.
            shape: steps.shape(steps.query_heads_in(32 << 20)),
            packed: steps.packed(),
            spans: steps.spans(),
            ..filled!(HopperLazyArgs:
                names(rows) [o_rows dq_rows dk_rows dv_rows]
                names(address) [lse dlse]
                fields(shared, identity) [bias tau numbers width reach bottom]
            )
        };
        HopperPass { steps, args }
    }

    fn launch(&self, name: &'static str, args: HopperLazyArgs) -> Result<()> {
        let steps = self.steps;
        let backward = ["queries", "keys"].contains(&name);
        let variant = Variant::hopper_lazy(steps.plan.hopper, backward);
        let groups = variant.lazy_groups(name);
        let own = 64 * groups;
        let (tiles, boxed) = match name {
            "keys" => (steps.key_tiles(own), 64),
            _ => (steps.query_tiles(own), own),
        };
        let args = HopperLazyArgs {
            q: steps.map("q", boxed),
            dout: if backward { steps.map("dout", boxed) } else { args.dout },
            tiles: tiles as i32,
            ..args
        };
        steps.launch((&variant, name), steps.grid(tiles, groups), &args)
    }

    /// lse, the numbers of every row, and the stripes that may hold an active pair.
    pub fn scores(&self) -> Result<()> {
        self.steps.widen("q")?;
        self.steps.widen("k")?;
        self.launch("scores", self.args)
    }

    /// lse, and those of o and Σ a P v that have places.
    pub fn forward(&self) -> Result<()> {
        let HopperPass { steps, args } = *self;
        let (has_o, pv) = (steps.is_there("o"), steps.place("pv_sum"));
        self.scores()?;
        if !has_o && pv.address == 0 {
            return Ok(());
        }
        steps.widen("v")?;
        let args = HopperLazyArgs { v: steps.map("v", 128), ..args };
        if has_o {
            steps.clear_copy("o");
            self.launch("values", HopperLazyArgs { o: steps.map("o", 64), ..args })?;
            steps.narrow("o")?;
        }
        if pv.address != 0 {
            self.launch("sums", HopperLazyArgs { pv: pv.into(), ..args })?;
        }
        Ok(())
    }

    /// After lse and n: the gradients of q, k and v that have places, Δ and Σ a g of rows, parts of dbias by tiles of
    /// keys.
    pub fn backward(&self) -> Result<()> {
        let HopperPass { steps, args } = *self;
        ["q", "k", "v", "dout"].into_iter().try_for_each(|name| steps.widen(name))?;
        let wants = |name: &str| steps.is_there(name);
        let any = |names: &[&str]| names.iter().any(|name| wants(name));
        let mut args = HopperLazyArgs {
            v: steps.map("v", 128),
            means: any(&["dq", "dk", "dbias", "dtau"]).into(),
            wants_dq: wants("dq").into(),
            wants_dk: wants("dk").into(),
            wants_dv: wants("dv").into(),
            ..args
        };
        for (name, to) in [("dq", &mut args.dq), ("dk", &mut args.dk), ("dv", &mut args.dv)] {
            if wants(name) {
                steps.clear_copy(name);
                *to = steps.panel_map(name);
            }
        }
        self.launch("queries", args)?;
        if any(&["dk", "dv", "dbias"]) {
            self.launch("keys", args)?;
        }
        ["dq", "dk", "dv"].into_iter().try_for_each(|name| steps.narrow(name))
    }
}
