//! The kernels of lazy_attention for the tensor cores of compute capability 9.0: `kernels/lazy_attention/sm90a*`.

use crate::args::{ConstPtr, Declaration, Ptr, declaration, filled, int, kernel_args};
use crate::memory::{Layout, MemoryRange};
use crate::softmax::Steps;
use crate::softmax::hopper::{self, Plan};
use crate::softmax::hopper_args::{Elements, Packed, Shape, SpanTables};
use crate::softmax::pair_args::Numbers;
use crate::softmax::prepared::Prepared;
use crate::softmax::variants::Lengths;
use crate::tensor_args::strided_args;
use crate::tensor_map::TensorMap;
use crate::variant::Variant;
use etalon_problem::{Align, DistanceBias, Error};

/// Choices of these kernels for a pass, and their memory.
#[derive(Debug)]
pub(crate) struct LazyPlan {
    operands: Plan,
    /// Stripes of keys that may hold an active pair, of every 16 rows of a tile of queries and head.
    active: MemoryRange,
}

strided_args! {
    /// Rows of f32.
    struct FloatRows as "FloatRows" { f32, batch, head, row }
}

kernel_args! {
    /// The arguments of all of them.
    struct HopperLazyArgs as "HopperLazyArgs" {
        q, k, v, o, dout, dq, dk, dv: TensorMap,
        /// As the maps say.
        o_rows: Elements,
        dq_rows, dk_rows, dv_rows: Elements,
        /// Σ a P v (E47).
        pv: FloatRows,
        lse: Ptr<f32>,
        /// 0: none.
        dlse: ConstPtr<f32>,
        /// `[tasks by keys, heads, reach]`: what each adds to dbias; 0: not wanted.
        windows: Ptr<f32>,
        /// `[heads, width]`; 0: no bias.
        bias: ConstPtr<f32>,
        /// `[heads]`.
        tau: ConstPtr<f32>,
        /// `[batch, heads, queries]`.
        numbers: Ptr<Numbers>,
        /// Stripes of keys that may hold an active pair: forward of every 16 rows of a head, backward of 64.
        active: Ptr<u32>,
        /// Of all groups together, and then of each: a result is not finite.
        flags: Ptr<u32>,
        /// Of tiles, 0 between launches.
        counter: Ptr<u32>,
        /// W.
        width: i32,
        /// True if distances are counted from the last query and key.
        bottom: i32,
        /// E.
        columns: i32,
        /// The distances that occur below W.
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

/// Kernel arguments that `lazy_attention/sm90a.cuh` names.
pub(crate) const ARGUMENTS: &[Declaration] = &[declaration::<HopperLazyArgs>()];

/// Addresses that the passes of every level share: of the numbers of the rows, and of the parts of dbias by tiles of
/// keys (0: none); and the number of distances that occur.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kept {
    pub numbers: Ptr<Numbers>,
    pub windows: u64,
    pub reach: i32,
}

impl LazyPlan {
    /// Takes ranges for what the kernels need beside the operands.
    pub fn new(prepared: &Prepared<'_>, layout: &mut Layout) -> Result<LazyPlan, Error> {
        let operands = Plan::lazy(prepared, layout)?;
        let heads = prepared.scores.extents.query_heads;
        Ok(LazyPlan { operands, active: layout.range(16 * prepared.counts.tiles * heads)? })
    }
}

/// The launches of these kernels.
pub(crate) struct HopperPass<'a> {
    plan: &'a Plan,
    steps: &'a Steps<'a>,
    /// The arguments that every kernel has.
    args: HopperLazyArgs,
}

impl<'a> HopperPass<'a> {
    pub fn new(
        LazyPlan { operands: plan, active }: &'a LazyPlan,
        steps: &'a Steps<'a>,
        bias: Option<DistanceBias>,
        kept: Kept,
    ) -> Self {
        let e = &steps.scores().extents;
        // Measured of attention: causal masks like as many heads beside each other.
        let together = hopper::heads_in(32 << 20, steps, plan) * steps.scores().group();
        let address = |name| steps.address(name);
        let rows = |name: &str| plan.place(steps, name.trim_end_matches("_rows"));
        let args = HopperLazyArgs {
            k: hopper::map_of(plan, plan.place(steps, "k"), 128),
            windows: kept.windows.into(),
            numbers: kept.numbers,
            active: steps.at(*active).into(),
            flags: steps.group_flags().into(),
            counter: steps.counter(0).into(),
            width: int(bias.map_or(0, |bias| bias.width)),
            bottom: bias.is_some_and(|bias| bias.align == Align::BottomRight).into(),
            columns: int(steps.prepared.value_dim.unwrap_or(0)),
            reach: kept.reach,
            shape: hopper::shape(steps, plan, together.min(e.batch * e.query_heads)),
            packed: hopper::packed(steps, plan),
            spans: hopper::spans(steps, plan),
            ..filled!(HopperLazyArgs:
                names(rows) [o_rows dq_rows dk_rows dv_rows]
                names(address) [lse bias tau dlse]
            )
        };
        HopperPass { plan, steps, args }
    }

    /// One of the kernels, which claim tiles: as many blocks as there are multiprocessors, if there are as many tiles.
    fn launch(&self, name: &'static str, args: HopperLazyArgs) -> Result<(), Error> {
        let HopperPass { plan, steps, .. } = *self;
        let (e, counts) = (&steps.scores().extents, &steps.prepared.counts);
        let listed = plan.hopper.lengths == Lengths::Listed;
        let backward = ["queries", "keys"].contains(&name);
        let variant = Variant::hopper_lazy(plan.hopper, backward);
        let groups = variant.lazy_groups(name);
        let own = 64 * groups;
        let (tiles, boxed) = match (name, listed) {
            ("keys", true) => (counts.by_keys * e.key_heads, 64),
            ("keys", false) => (e.keys.div_ceil(own) * e.key_heads * e.batch, 64),
            (_, true) => (counts.by_queries * e.query_heads, own),
            (_, false) => (e.queries.div_ceil(own) * e.query_heads * e.batch, own),
        };
        let map = |name: &str| hopper::map_of(plan, plan.place(steps, name), boxed as u32);
        let args = HopperLazyArgs {
            q: map("q"),
            dout: if backward { map("dout") } else { args.dout },
            tiles: tiles as i32,
            ..args
        };
        let grid = (tiles.min(steps.multiprocessors()), 128 * (groups as u32 + 1));
        steps.launch((&variant, name), grid, &args)
    }

    /// lse, the numbers of every row, and the stripes that may hold an active pair.
    pub fn scores(&self) -> Result<(), Error> {
        self.plan.widen(self.steps, "q")?;
        self.plan.widen(self.steps, "k")?;
        self.launch("scores", self.args)
    }

    /// lse, and those of o and Σ a P v that have places.
    pub fn forward(&self) -> Result<(), Error> {
        let HopperPass { plan, steps, args } = *self;
        let (o, pv) = (steps.is_there("o"), steps.place("pv_sum"));
        self.scores()?;
        if !o && pv.address == 0 {
            return Ok(());
        }
        plan.widen(steps, "v")?;
        let v = hopper::map_of(plan, plan.place(steps, "v"), 128);
        if o {
            plan.clear(steps, "o");
            let to = hopper::map_of(plan, plan.place(steps, "o"), 64);
            self.launch("values", HopperLazyArgs { v, o: to, ..args })?;
            plan.narrow(steps, "o")?;
        }
        if pv.address != 0 {
            self.launch("sums", HopperLazyArgs { v, pv: pv.into(), ..args })?;
        }
        Ok(())
    }

    /// The gradients of q, k and v that have places, Δ and Σ a g of every row, and parts of dbias by tiles of keys,
    /// after lse and n.
    pub fn backward(&self) -> Result<(), Error> {
        let HopperPass { plan, steps, args } = *self;
        for name in ["q", "k", "v", "dout"] {
            plan.widen(steps, name)?;
        }
        let wants = |name: &str| steps.is_there(name);
        let any = |names: &[&str]| names.iter().any(|name| wants(name));
        let mut args = HopperLazyArgs {
            v: hopper::map_of(plan, plan.place(steps, "v"), 128),
            means: any(&["dq", "dk", "dbias", "dtau"]).into(),
            wants_dq: wants("dq").into(),
            wants_dk: wants("dk").into(),
            wants_dv: wants("dv").into(),
            ..args
        };
        for (name, to) in [("dq", &mut args.dq), ("dk", &mut args.dk), ("dv", &mut args.dv)] {
            if wants(name) {
                plan.clear(steps, name);
                *to = hopper::panel_map_of(plan, plan.place(steps, name));
            }
        }
        self.launch("queries", args)?;
        if any(&["dk", "dv", "dbias"]) {
            self.launch("keys", args)?;
        }
        ["dq", "dk", "dv"].into_iter().try_for_each(|name| plan.narrow(steps, name))
    }
}
