//! The kernels of attention and attention_lse for the tensor cores of compute capability 9.0, and the forward pass:
//! `kernels/sm90a_forward.cu`.

use crate::gpu::Kernels;
use crate::moves::{Place, When};
use crate::old_map::EncodedMap;
use crate::options::Options;
use crate::parts::{Part, absent};
use crate::room::{Layout, Room};
use crate::softmax::asked::Asked;
use crate::softmax::counts::SIDE;
use crate::softmax::hopper_call::{Forward, Packed, Scored, Shape, tensor_map};
use crate::softmax::prepared::Prepared;
use crate::softmax::variants::{Hopper, Lengths, Results};
use crate::softmax::window::{LONGEST, OPEN, Window, window};
use crate::softmax::{Job, blocks};
use crate::variant::{Variant, shared_bytes};
use cudarc::driver::DeviceRepr;
use etalon_problem::{Blocking, Dtype, Error, Extents, Pass, Sequences};
use std::sync::Arc;

/// The architecture of the kernels.
pub(super) const ARCHITECTURE: &str = "sm_90a";

/// How these kernels compute a pass, and where they keep what they need.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The columns of every operand: D and E, rounded up to 64 or 128.
    pub width: usize,
    window: Window,
    pub variant: Hopper,
    /// Queries and keys of a tile, forward.
    pub tile: Blocking,
    /// Rows of lse2 and delta of a head.
    stats: usize,
    storage: Dtype,
    /// Whether operands may hold what is not finite, in the backward pass.
    pub guarded: bool,
    wide: Vec<Wide>,
    pub lse2: Room,
    pub delta: Room,
    /// Whether a number was found that is not finite; counters from which blocks draw tiles, one for each
    /// kernel; and what was found of each key head of each sequence.
    pub found: Room,
    forward: Option<Module>,
    /// The gradients that are computed together, of attention_lse all.
    pub backward: Option<Module>,
    /// dk or dv without the other.
    pub alone: Option<Module>,
}

/// Kernels, and which ones they are.
pub(crate) type Module = (Arc<Kernels>, Variant);

/// Where the tensor cores find an operand.
#[derive(Debug)]
struct Wide {
    name: &'static str,
    /// A copy with whole columns; without it the copy engine takes the operand where it lies.
    copy: Option<Room>,
    /// In the backward pass, the copy in which NaN is 0, or of what was computed from such.
    clean: Option<Room>,
}

impl Plan {
    /// How to compute a pass, or why these kernels cannot.
    pub fn new(asked: &Asked<'_>, options: &Options) -> Result<Plan, &'static str> {
        let (scores, pass, storage) = (asked.scores, asked.pass, asked.storage);
        let e = &scores.extents;
        if !asked.target.is_hopper() {
            return Err("the device is not of compute capability 9.0");
        }
        if !matches!(storage, Dtype::Bf16 | Dtype::F16) {
            return Err("its tensor cores multiply bf16 and f16");
        }
        if !matches!(pass, Pass::Forward | Pass::Backward) {
            return Err("the second order is not written yet for sm90a");
        }
        if asked.insists(options.mode) {
            return Err("the backward pass of sm90a has one mode, `separate`");
        }
        let columns = asked.columns();
        if columns > 128 {
            return Err("dim and value_dim must be at most 128 for sm90a");
        }
        let counts = asked.counts;
        let empty = e.batch == 0 || e.query_heads == 0 || e.queries == 0 || e.keys == 0;
        if empty || counts.by_queries == 0 || counts.by_keys == 0 {
            return Err("there are no queries or no keys, and nothing for sm90a to compute");
        }
        if e.queries.max(e.keys) > LONGEST {
            return Err("sequences must have at most 2²⁸ rows for sm90a");
        }
        let window = window(&scores.mask, e.queries, e.keys);
        let window = window.ok_or("only full, causal and windowed masks are written for sm90a")?;
        let none = Room::default();
        let lengths = match scores.sequences {
            Sequences::Dense => Lengths::Equal,
            Sequences::Lengths { .. } => Lengths::Own,
            Sequences::Packed { .. } => Lengths::Listed,
        };
        // Maxima are those of scores: a scale that turns their order is an option.
        let scored =
            scores.softcap.is_some() || scores.bias.is_some() || scores.scale() as f32 <= 0.0;
        let width = if columns <= 64 { 64 } else { 128 };
        let windowed = window.left != OPEN || window.right != OPEN;
        let variant = Hopper { storage, width, windowed, lengths, options: scored }.within();
        let tile = blocks::chosen(&blocks::of_hopper(asked, variant), options.blocking);
        Ok(Plan {
            width,
            window,
            variant,
            tile,
            stats: match variant.lengths {
                Lengths::Listed => SIDE * (counts.by_queries + 1),
                _ => padded(e.queries),
            },
            storage,
            guarded: false,
            wide: Vec::new(),
            lse2: none,
            delta: none,
            found: none,
            forward: None,
            backward: None,
            alone: None,
        })
    }

    /// Takes rooms for what the kernels need beside the operands.
    pub fn reserve(
        &mut self,
        prepared: &Prepared<'_>,
        finite: bool,
        layout: &mut Layout,
    ) -> Result<(), Error> {
        let backward = prepared.pass == Pass::Backward;
        self.guarded = backward && !finite;
        self.reserve_operands(prepared, layout)?;
        if backward {
            let numbers = self.stat_rows(&prepared.scores.extents);
            (self.lse2, self.delta) = (layout.room(4 * numbers)?, layout.room(4 * numbers)?);
        }
        let key_heads = prepared.scores.extents.key_heads;
        let groups = if backward { prepared.counts.sequences * key_heads } else { 0 };
        self.found = layout.room(4 * (3 + groups))?;
        Ok(())
    }

    /// Takes rooms for copies of operands.
    pub(super) fn reserve_operands(
        &mut self,
        prepared: &Prepared<'_>,
        layout: &mut Layout,
    ) -> Result<(), Error> {
        let e = &prepared.scores.extents;
        let backward = prepared.pass == Pass::Backward;
        for name in ["q", "k", "v", "o", "dout", "dq", "dk", "dv"] {
            let part = prepared.part(name);
            // o and lse are computed together.
            let beside = name == "o" && prepared.value_dim.is_some() && prepared.computes_forward();
            let used = match name {
                "dq" => !prepared.has_gradient(),
                _ => !backward || prepared.computes_forward() || self.reads(prepared, name),
            };
            if part.is_none() && !beside || !used {
                continue;
            }
            let (heads, rows) = rows_of(e, name);
            let mut room = || layout.room(2 * e.batch * heads * rows * self.width);
            let lies =
                |part: &Part| self.takes(part.place(0), prepared.aligned || !part.is_direct());
            let direct = part.is_some_and(lies);
            let copy = if direct { None } else { Some(room()?) };
            let clean = match copy {
                _ if !self.guarded || name == "o" => None,
                None => Some(room()?),
                copy => copy,
            };
            self.wide.push(Wide { name, copy, clean });
        }
        Ok(())
    }

    /// Compiles or loads the kernels.
    pub fn load(&mut self, prepared: &Prepared<'_>) -> Result<(), Error> {
        let load = |variant: Variant| -> Result<Option<Module>, Error> {
            let kernels = prepared.device().kernels(variant.clone(), ARCHITECTURE)?;
            Ok(Some((kernels, variant)))
        };
        if prepared.computes_forward() {
            let values = prepared.value_dim.is_some();
            self.forward = load(Variant::hopper_forward_of(self.variant, values, self.tile))?;
        }
        if prepared.pass == Pass::Backward {
            let of = self.variant;
            let load = |results| load(Variant::hopper_backward(of, results));
            let [dq, dk, dv] = ["dq", "dk", "dv"].map(|name| prepared.has(name));
            let dq = dq && !prepared.has_gradient();
            let values = prepared.value_dim.is_some();
            if dq || dk && (dv || !values) {
                self.backward = load(if values { Results::All } else { Results::Lse })?;
            }
            if values && dk != dv {
                self.alone = load(Results::Alone)?;
            }
        }
        Ok(())
    }

    /// Whether the kernels of a backward pass read an operand, if it is one: for dv alone neither o nor v, of
    /// attention_lse none of values.
    pub fn reads(&self, prepared: &Prepared<'_>, name: &str) -> bool {
        let values = prepared.value_dim.is_some();
        match name {
            "dout" => values,
            "o" | "v" => values && prepared.reads_o,
            _ => true,
        }
    }

    /// Whether the copy engine takes a tensor where it lies.
    fn takes(&self, place: Place, aligned: bool) -> bool {
        let whole = |axis: usize| {
            let (extent, stride) = (place.extents[axis], place.strides[axis]);
            extent == 1 || (stride > 0 && stride % 8 == 0 && stride < 1 << 38)
        };
        aligned && place.extents[3] == self.width && place.has_whole_rows() && (0..3).all(whole)
    }

    /// Numbers of lse2, and of delta.
    pub fn stat_rows(&self, e: &Extents) -> usize {
        let batch = if self.variant.lengths == Lengths::Listed { 1 } else { e.batch };
        batch * e.query_heads * self.stats
    }

    /// The counter of a kernel.
    pub fn counter(&self, job: &Job<'_>, kernel: u64) -> u64 {
        job.at(self.found) + 4 * (1 + kernel)
    }

    fn find(&self, name: &str) -> Option<&Wide> {
        self.wide.iter().find(|wide| wide.name == name)
    }

    /// A dense room of whole columns for an operand.
    fn in_room(&self, job: &Job<'_>, name: &str, room: Room) -> Place {
        let e = &job.scores().extents;
        let (heads, rows) = rows_of(e, name);
        Place::dense(job.at(room), [e.batch, heads, rows, self.width])
    }

    /// Where the tensor cores find an operand.
    pub(super) fn place(&self, job: &Job<'_>, name: &str) -> Place {
        match self.find(name).and_then(|wide| wide.copy) {
            Some(room) => self.in_room(job, name, room),
            None => job.place(name),
        }
    }

    /// Where they find it without what is not finite.
    pub fn clean(&self, job: &Job<'_>, name: &str) -> Place {
        match self.find(name).and_then(|wide| wide.clean) {
            Some(room) => self.in_room(job, name, room),
            None => job.place(name),
        }
    }

    /// Puts 0 into the copies of a result in which kernels leave rows of no sequence out.
    pub(super) fn clear(&self, job: &Job<'_>, name: &str) -> Result<(), Error> {
        let Some(wide) = self.find(name).filter(|_| self.variant.lengths == Lengths::Listed) else {
            return Ok(());
        };
        let rooms = [wide.copy, wide.clean];
        rooms.into_iter().flatten().try_for_each(|room| job.queue.fill(job.at(room), room.bytes, 0))
    }

    /// Copies an operand to its wide copy, if it has one. The columns beyond are 0.
    pub(super) fn widen(&self, job: &Job<'_>, name: &str) -> Result<(), Error> {
        let (from, to) = (job.place(name), self.place(job, name));
        if from == to {
            return Ok(());
        }
        job.prepared.moves()?.copy(&job.queue, 2, from, to, When::Always)
    }

    /// Copies a wide copy, if there is one, to its operand.
    pub(super) fn narrow(&self, job: &Job<'_>, name: &str, when: When) -> Result<(), Error> {
        let (from, to) = (self.place(job, name), job.place(name));
        if from == to || to.address == 0 {
            return Ok(());
        }
        job.prepared.moves()?.copy(&job.queue, 2, from, to, when)
    }
}

/// Whether the rows of an operand are those of k.
pub(super) fn by_keys(name: &str) -> bool {
    matches!(name, "k" | "v" | "dk" | "dv")
}

/// Heads and rows of an operand.
pub(crate) fn rows_of(e: &Extents, name: &str) -> (usize, usize) {
    if by_keys(name) { (e.key_heads, e.keys) } else { (e.query_heads, e.queries) }
}

/// Queries rounded up to whole tiles.
pub(crate) fn padded(queries: usize) -> usize {
    queries.next_multiple_of(128)
}

/// The copy engine's map of a tensor of whole columns.
pub(super) fn map_of(
    job: &Job<'_>,
    plan: &Plan,
    place: Place,
    rows: u32,
) -> Result<EncodedMap, Error> {
    tensor_map(job.queue.device, plan.storage, place, rows, false)
}

/// The same in boxes of 64 rows and 64 columns.
pub(super) fn panel_map_of(job: &Job<'_>, plan: &Plan, place: Place) -> Result<EncodedMap, Error> {
    tensor_map(job.queue.device, plan.storage, place, 64, true)
}

pub(super) fn shape(job: &Job<'_>, plan: &Plan, heads_per_group: usize) -> Shape {
    let e = &job.scores().extents;
    Shape {
        batch: e.batch as i32,
        heads: e.query_heads as i32,
        key_heads: e.key_heads as i32,
        queries: e.queries as i32,
        keys: e.keys as i32,
        left: plan.window.left,
        right: plan.window.right,
        offset: plan.window.offset,
        scale: job.scores().scale() as f32,
        heads_per_group: heads_per_group as i32,
        padded: plan.stats as i32,
        bottom: i32::from(plan.window.bottom),
        lengths: job.table(job.prepared.tables.lengths),
    }
}

/// The tables of packed sequences.
pub(super) fn packed(job: &Job<'_>, plan: &Plan) -> Packed {
    let (counts, tables) = (&job.prepared.counts, &job.prepared.tables);
    match plan.variant.lengths {
        Lengths::Listed => Packed {
            sequences: job.table(tables.sequences),
            by_queries: job.table(tables.by_queries),
            by_keys: job.table(tables.by_keys),
            tasks: counts.by_queries as i32,
            key_tasks: counts.by_keys as i32,
        },
        _ => Packed::default(),
    }
}

/// What scores are made of beside products.
pub(super) fn options(job: &Job<'_>) -> Scored {
    let scale = job.scores().scale() as f32;
    let cap = job.scores().softcap.unwrap_or(0.0) as f32;
    Scored::new(job.place("bias"), scale, cap)
}

/// The key heads whose k and v share so many bytes of the L2 cache.
pub(super) fn heads_in(bytes: usize, job: &Job<'_>, plan: &Plan) -> usize {
    (bytes / (4 * job.scores().extents.keys * plan.width)).max(1)
}

pub(super) fn launch<A: DeviceRepr>(
    job: &Job<'_>,
    module: &Option<Module>,
    name: &str,
    (blocks, threads): (usize, u32),
    call: &A,
) -> Result<(), Error> {
    let (kernels, variant) = module.as_ref().ok_or_else(|| absent("the level sm90a"))?;
    let shape = (threads, shared_bytes(variant, name));
    job.queue.launch(kernels.get(name)?, blocks as u64, shape, call)
}

/// o and lse.
pub(crate) fn forward(job: &Job<'_>, plan: &Plan) -> Result<(), Error> {
    let (e, values) = (&job.scores().extents, job.prepared.value_dim.is_some());
    plan.widen(job, "q")?;
    plan.widen(job, "k")?;
    plan.clear(job, "o")?;
    job.queue.fill(job.at(plan.found), plan.found.bytes, 0)?;
    let (_, variant) = plan.forward.as_ref().ok_or_else(|| absent("the level sm90a"))?;
    let groups = variant.define("GROUPS");
    let rows = 64 * groups;
    // Measured: causal masks like more heads beside each other than full ones.
    let l2 = if plan.variant.windowed { 32 << 20 } else { 8 << 20 };
    let together = heads_in(l2, job, plan) * job.scores().group();
    let map = |name: &str, rows: u32| map_of(job, plan, plan.place(job, name), rows);
    let mut call = Forward {
        q: map("q", rows as u32)?,
        k: map("k", 128)?,
        lse: job.address("lse"),
        sinks: job.address("sinks"),
        counter: plan.counter(job, 0),
        shape: shape(job, plan, together.min(e.batch * e.query_heads)),
        packed: packed(job, plan),
        options: options(job),
        o_rows: plan.place(job, "o").into(),
        ..Forward::default()
    };
    if values {
        plan.widen(job, "v")?;
        call.v = map("v", 128)?;
        call.o = map("o", 64)?;
    }
    let tiles = match plan.variant.lengths {
        Lengths::Listed => job.prepared.counts.by_queries * e.query_heads,
        _ => e.queries.div_ceil(rows) * e.query_heads * e.batch,
    };
    let blocks = tiles.min(job.queue.device.multiprocessors);
    launch(job, &plan.forward, "forward", (blocks, 128 * (groups as u32 + 1)), &call)?;
    if values { plan.narrow(job, "o", When::Always) } else { Ok(()) }
}
