//! The kernels of lazy_attention for the tensor cores of compute capability 9.0: `kernels/sm90a_lazy*`.

use crate::gpu::Kernels;
use crate::moves::When;
use crate::old_map::EncodedMap;
use crate::options::Options;
use crate::parts::absent;
use crate::room::{Layout, Room};
use crate::softmax::Job;
use crate::softmax::hopper::{self, Plan};
use crate::softmax::hopper_call::{Elements, Packed, Shape};
use crate::softmax::portable::{Tensor, tensor};
use crate::softmax::prepared::Prepared;
use crate::softmax::variants::{Hopper, Lengths};
use crate::variant::{Variant, shared_bytes};
use cudarc::driver::DeviceRepr;
use etalon_problem::{Align, DistanceBias, Error, Pass};
use std::sync::Arc;

/// How these kernels compute a pass, and where they keep what they need.
#[derive(Debug)]
pub(crate) struct LazyPlan {
    operands: Plan,
    /// Which stripes of keys may hold an active pair, of every 16 rows of a tile of queries and head.
    active: Room,
    forward: Option<Module>,
    backward: Option<Module>,
}

type Module = (Arc<Kernels>, Variant);

/// `Call` of `sm90a_lazy.cuh`.
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy, Default)]
struct Call {
    q: EncodedMap,
    k: EncodedMap,
    v: EncodedMap,
    o: EncodedMap,
    dout: EncodedMap,
    dq: EncodedMap,
    dk: EncodedMap,
    dv: EncodedMap,
    q_rows: Elements,
    k_rows: Elements,
    v_rows: Elements,
    o_rows: Elements,
    dout_rows: Elements,
    dq_rows: Elements,
    dk_rows: Elements,
    dv_rows: Elements,
    pv: Tensor,
    lse: u64,
    dlse: u64,
    windows: u64,
    bias: u64,
    tau: u64,
    numbers: u64,
    active: u64,
    odd: u64,
    counter: u64,
    width: i32,
    bottom: i32,
    columns: i32,
    reach: i32,
    tiles: i32,
    means: i32,
    wants_dq: i32,
    wants_dk: i32,
    wants_dv: i32,
    shape: Shape,
    packed: Packed,
}

// SAFETY: the fields, their types and their order are those of `Call` in `sm90a_lazy.cuh`, and it holds no
// reference of the host.
unsafe impl DeviceRepr for Call {}

/// Kernels, by their counters.
pub(crate) const KERNELS: [&str; 5] = ["scores", "values", "sums", "queries", "keys"];

/// What the passes of every level keep: where the numbers of the rows lie, whether some number is not finite and behind it
/// the counters from which blocks draw tiles, what the tiles of keys add to dbias (0: nothing), and how many distances occur.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kept {
    pub numbers: u64,
    pub odd: u64,
    pub windows: u64,
    pub reach: i32,
}

impl LazyPlan {
    /// How to compute a pass, or why these kernels cannot.
    pub fn new(prepared: &Prepared<'_>, options: &Options) -> Result<LazyPlan, &'static str> {
        let mut operands = Plan::new(&prepared.asked(), options)?;
        // Sequences are those of the arrays, or listed; and any scale will do.
        operands.variant = Hopper { options: true, ..operands.variant }.within();
        Ok(LazyPlan { operands, active: Room::default(), forward: None, backward: None })
    }

    /// Takes rooms for what the kernels need beside the operands.
    pub fn reserve(&mut self, prepared: &Prepared<'_>, layout: &mut Layout) -> Result<(), Error> {
        self.operands.reserve_operands(prepared, layout)?;
        let heads = prepared.scores.extents.query_heads;
        self.active = layout.room(16 * prepared.counts.tiles * heads)?;
        Ok(())
    }

    /// Compiles or loads the kernels.
    pub fn load(&mut self, prepared: &Prepared<'_>) -> Result<(), Error> {
        let Hopper { storage, width, lengths, .. } = self.operands.variant;
        let load = |backward: bool| -> Result<Option<Module>, Error> {
            let listed = lengths == Lengths::Listed;
            let variant = Variant::hopper_lazy(storage, width, listed, backward);
            let kernels = prepared.device().kernels(variant.clone(), hopper::ARCHITECTURE)?;
            Ok(Some((kernels, variant)))
        };
        if prepared.pass == Pass::Forward || !prepared.is_given("lse") {
            self.forward = load(false)?;
        }
        if prepared.pass == Pass::Backward {
            self.backward = load(true)?;
        }
        Ok(())
    }

    /// What every kernel is told.
    fn call(&self, job: &Job<'_>, bias: Option<DistanceBias>, kept: Kept) -> Result<Call, Error> {
        let (plan, e) = (&self.operands, &job.scores().extents);
        // Measured of attention: causal masks like as many heads beside each other.
        let together = hopper::heads_in(32 << 20, job, plan) * job.scores().group();
        let rows = |name: &str| Elements::from(plan.place(job, name));
        Ok(Call {
            k: hopper::map_of(job, plan, plan.place(job, "k"), 128)?,
            q_rows: rows("q"),
            k_rows: rows("k"),
            v_rows: rows("v"),
            o_rows: rows("o"),
            dout_rows: rows("dout"),
            dq_rows: rows("dq"),
            dk_rows: rows("dk"),
            dv_rows: rows("dv"),
            lse: job.address("lse"),
            bias: job.address("bias"),
            tau: job.address("tau"),
            dlse: job.address("dlse"),
            windows: kept.windows,
            numbers: kept.numbers,
            active: job.at(self.active),
            odd: kept.odd,
            width: bias.map_or(0, |bias| bias.width) as i32,
            bottom: bias.is_some_and(|bias| bias.align == Align::BottomRight).into(),
            columns: job.prepared.value_dim.unwrap_or(0) as i32,
            reach: kept.reach,
            shape: hopper::shape(job, plan, together.min(e.batch * e.query_heads)),
            packed: hopper::packed(job, plan),
            ..Call::default()
        })
    }

    /// One of the kernels, which draw tiles: as many blocks as there are multiprocessors, if there are as many tiles.
    fn launch(&self, job: &Job<'_>, name: &str, call: Call) -> Result<(), Error> {
        let module =
            if ["queries", "keys"].contains(&name) { &self.backward } else { &self.forward };
        let (kernels, variant) = module.as_ref().ok_or_else(|| absent("the level sm90a"))?;
        let (plan, e, counts) = (&self.operands, &job.scores().extents, &job.prepared.counts);
        let listed = plan.variant.lengths == Lengths::Listed;
        let groups = variant.lazy_groups(name);
        let own = 64 * groups;
        let (tiles, boxed) = match (name, listed) {
            ("keys", true) => (counts.by_keys * e.key_heads, 64),
            ("keys", false) => (e.keys.div_ceil(own) * e.key_heads * e.batch, 64),
            (_, true) => (counts.by_queries * e.query_heads, own),
            (_, false) => (e.queries.div_ceil(own) * e.query_heads * e.batch, own),
        };
        let map = |name: &str| hopper::map_of(job, plan, plan.place(job, name), boxed as u32);
        let at = KERNELS.iter().position(|kernel| *kernel == name).unwrap_or(0);
        let call = Call {
            q: map("q")?,
            dout: if self.backward.is_some() { map("dout")? } else { call.dout },
            counter: call.odd + 4 * (1 + at as u64),
            tiles: tiles as i32,
            ..call
        };
        let blocks = tiles.min(job.queue.device.multiprocessors);
        let block = (128 * (groups as u32 + 1), shared_bytes(variant, name));
        job.queue.launch(kernels.get(name)?, blocks as u64, block, &call)
    }

    /// lse, the numbers of every row, and the stripes that may hold an active pair.
    pub fn scores(
        &self,
        job: &Job<'_>,
        bias: Option<DistanceBias>,
        kept: Kept,
    ) -> Result<(), Error> {
        self.operands.widen(job, "q")?;
        self.operands.widen(job, "k")?;
        let call = self.call(job, bias, kept)?;
        self.launch(job, "scores", call)
    }

    /// lse, and those of o and Σ a P v that have places.
    pub fn forward(
        &self,
        job: &Job<'_>,
        bias: Option<DistanceBias>,
        kept: Kept,
    ) -> Result<(), Error> {
        let plan = &self.operands;
        let (o, pv) = (job.address("o") != 0, tensor(job, "pv_sum"));
        self.scores(job, bias, kept)?;
        if !o && !pv.is_there() {
            return Ok(());
        }
        plan.widen(job, "v")?;
        let call = self.call(job, bias, kept)?;
        let v = hopper::map_of(job, plan, plan.place(job, "v"), 128)?;
        if o {
            plan.clear(job, "o")?;
            let to = hopper::map_of(job, plan, plan.place(job, "o"), 64)?;
            self.launch(job, "values", Call { v, o: to, ..call })?;
            plan.narrow(job, "o", When::Always)?;
        }
        if pv.is_there() {
            self.launch(job, "sums", Call { v, pv, ..call })?;
        }
        Ok(())
    }

    /// The gradients of q, k and v that have places, Δ and Σ a g of every row, and what the tiles of keys add to dbias,
    /// after lse and n.
    pub fn backward(
        &self,
        job: &Job<'_>,
        bias: Option<DistanceBias>,
        kept: Kept,
    ) -> Result<(), Error> {
        let plan = &self.operands;
        for name in ["q", "k", "v", "dout"] {
            plan.widen(job, name)?;
        }
        let wants = |name: &str| job.address(name) != 0;
        let any = |names: &[&str]| names.iter().any(|name| wants(name));
        let mut call = Call {
            v: hopper::map_of(job, plan, plan.place(job, "v"), 128)?,
            means: any(&["dq", "dk", "dbias", "dtau"]).into(),
            wants_dq: wants("dq").into(),
            wants_dk: wants("dk").into(),
            wants_dv: wants("dv").into(),
            ..self.call(job, bias, kept)?
        };
        for (name, to) in [("dq", &mut call.dq), ("dk", &mut call.dk), ("dv", &mut call.dv)] {
            if wants(name) {
                plan.clear(job, name)?;
                *to = hopper::panel_map_of(job, plan, plan.place(job, name))?;
            }
        }
        self.launch(job, "queries", call)?;
        if any(&["dk", "dv", "dbias"]) {
            self.launch(job, "keys", call)?;
        }
        ["dq", "dk", "dv"].into_iter().try_for_each(|name| plan.narrow(job, name, When::Always))
    }
}
