//! The kernels of attention and attention_lse for sm90a, and the forward pass: `kernels/attention/sm90a_forward.cu`.

use super::counts::SIDE;
use super::hopper_args::{ForwardArgs, Packed, ScoreOptions, Shape, SpanTables, pair_map, tensor_map};
use super::prepared::Prepared;
use super::variants::{Hopper, Lengths, Visible};
use super::window::Window;
use super::{Steps, fallback, modules};
use crate::args::{filled, int};
use crate::memory::{Layout, MemoryRange};
use crate::parts::Part;
use crate::read_as::read_as;
use crate::strided::StridedTensor;
use crate::tensor_map::TensorMap;
use crate::variant::Variant;
use etalon_problem::{Blocking, Extents, Pass, Result};

#[derive(Debug)]
pub(crate) struct Plan {
    pub window: Window,
    pub hopper: Hopper,
    /// Queries and keys of a tile, forward.
    pub tile: Blocking,
    /// Rows of lse2 and delta of a head.
    stats: usize,
    copies: Copies,
    pub lse2: MemoryRange,
    pub delta: MemoryRange,
    /// Sums of dq, where the pass by keys adds to them.
    pub dq_sums: Option<MemoryRange>,
}

const COPIES: &str = "operands and results in whole columns";

impl Plan {
    pub fn new(prepared: &Prepared<'_>, layout: &mut Layout) -> Result<Plan> {
        let mut plan = Plan::of(prepared, prepared.spec.hopper(), layout)?;
        if prepared.pass == Pass::Backward {
            let bytes = 4 * plan.stat_rows(&prepared.spec.extents);
            let mut numbers = || layout.named("lse and delta of rows", bytes);
            (plan.lse2, plan.delta) = (numbers()?, numbers()?);
            if prepared.spec.fuses_sm90a() {
                let bytes = prepared.spec.sums_of_rows().saturating_mul(4 * 64 * plan.hopper.width);
                plan.dq_sums = Some(layout.named("sums of dq", bytes)?);
            }
        }
        Ok(plan)
    }

    /// The same of lazy_attention: copies of operands alone.
    pub fn lazy(prepared: &Prepared<'_>, layout: &mut Layout) -> Result<Plan> {
        // Sequences are those of the arrays, or listed; and any scale will do.
        let hopper = Hopper { options: true, boxes: false, ..prepared.spec.hopper() }.within();
        Plan::of(prepared, hopper, layout)
    }

    fn of(prepared: &Prepared<'_>, hopper: Hopper, layout: &mut Layout) -> Result<Plan> {
        let spec = &prepared.spec;
        Ok(Plan {
            window: spec.window.unwrap_or(Window::ALL),
            hopper,
            tile: modules::chosen(&modules::of_hopper(spec, hopper), spec.options.blocking),
            stats: match spec.hopper().lengths {
                Lengths::Listed => SIDE * (spec.counts.by_queries + 1),
                _ => spec.extents.queries.next_multiple_of(128),
            },
            copies: copies(prepared, hopper, layout)?,
            lse2: MemoryRange::default(),
            delta: MemoryRange::default(),
            dq_sums: None,
        })
    }

    /// Numbers of lse2, and of delta.
    pub fn stat_rows(&self, e: &Extents) -> usize {
        let batch = if self.hopper.lengths == Lengths::Listed { 1 } else { e.batch };
        batch * e.query_heads * self.stats
    }

    /// True if the kernel of all gradients writes that of the bias.
    pub fn writes_dbias(&self, prepared: &Prepared<'_>) -> bool {
        self.dq_sums.is_some() && self.hopper.boxes && prepared.spec.has_own_dbias
    }

    /// The place of an operand's copy, if it has one, and its extents.
    fn copy(&self, name: &str) -> Option<(MemoryRange, [usize; 4])> {
        self.copies.iter().find(|copy| copy.0 == name).map(|copy| (copy.1, copy.2))
    }
}

/// Copies of operands that the copy engine does not take, with their extents.
type Copies = Vec<(&'static str, MemoryRange, [usize; 4])>;

fn copies(prepared: &Prepared<'_>, hopper: Hopper, layout: &mut Layout) -> Result<Copies> {
    let e = &prepared.scores.extents;
    let computes_forward = prepared.computes_forward();
    let mut copies = Vec::new();
    let mut copy = |name, extents: [usize; 4]| {
        let bytes = extents.iter().fold(2, |n: usize, &extent| n.saturating_mul(extent));
        copies.push((name, layout.named(COPIES, bytes)?, extents));
        Ok(())
    };
    for name in ["q", "k", "v", "o", "dout", "dq", "dk", "dv"] {
        let (part, columns) = (prepared.part(name), hopper.columns(name));
        // o and lse are computed together.
        let beside = name == "o" && prepared.spec.value_dim.is_some() && computes_forward;
        let used = match name {
            "dq" => !prepared.has_gradient(),
            _ => prepared.pass != Pass::Backward || computes_forward || prepared.reads(name),
        };
        if (part.is_some() || beside) && used && !part.is_some_and(|part| lies(prepared, part, columns)) {
            let (heads, rows) = rows_of(e, name);
            copy(name, [e.batch, heads, rows, columns])?;
        }
    }
    // Numbers of pairs, of which the copy engine wants rows that begin at multiples of 16 bytes.
    let has_boxes = |name: &str| hopper.boxes && (name == "bias" || prepared.spec.has_own_dbias);
    for name in ["bias", "dbias"].into_iter().filter(|name| has_boxes(name)) {
        let Some(part) = prepared.part(name) else { continue };
        let [batch, heads, queries, keys] = part.place(0).extents;
        if !lies(prepared, part, keys) {
            copy(name, [batch, heads, queries, keys.next_multiple_of(8)])?;
        }
    }
    Ok(copies)
}

/// True if the copy engine finds an operand of so many columns where it lies.
fn lies(prepared: &Prepared<'_>, part: &Part, columns: usize) -> bool {
    let (place, aligned) = (part.place(0), prepared.aligned || !part.is_direct());
    aligned && place.extents[3] == columns && place.has_whole_rows() && place.has_boxes()
}

fn rows_of(e: &Extents, name: &str) -> (usize, usize) {
    match name {
        "k" | "v" | "dk" | "dv" => (e.key_heads, e.keys),
        _ => (e.query_heads, e.queries),
    }
}

#[derive(Clone, Copy)]
pub(super) struct HopperSteps<'a> {
    pub steps: &'a Steps<'a>,
    pub plan: &'a Plan,
}

read_as!(HopperSteps<'a>, steps: Steps<'a>, 'a);

impl HopperSteps<'_> {
    /// The place in which the tensor cores find an operand.
    pub fn wide(&self, name: &str) -> StridedTensor {
        let Some((range, extents)) = self.plan.copy(name) else { return self.place(name) };
        StridedTensor::dense(self.at(range), extents)
    }

    /// The same for the copy engine, in boxes of so many rows.
    pub fn map(&self, name: &str, rows: usize) -> TensorMap {
        tensor_map(self.prepared.storage, self.wide(name), rows as u32, false)
    }

    /// The same in boxes of 64 rows and 64 columns.
    pub fn panel_map(&self, name: &str) -> TensorMap {
        tensor_map(self.prepared.storage, self.wide(name), 64, true)
    }

    /// Numbers of pairs in boxes of so many queries; none where kernels read none.
    pub fn pair_map(&self, name: &str, rows: usize) -> TensorMap {
        match self.plan.hopper.boxes {
            true => pair_map(self.prepared.storage, self.wide(name), rows as u32),
            false => TensorMap::default(),
        }
    }

    fn is_listed(&self) -> bool {
        self.plan.hopper.lengths == Lengths::Listed
    }

    /// Clears the copy of a result in which kernels leave rows of no sequence out.
    pub fn clear_copy(&self, name: &str) {
        let leaves = self.is_listed() && self.prepared.leaves_rows();
        if let Some((range, _)) = self.plan.copy(name).filter(|_| leaves) {
            self.clear(range);
        }
    }

    /// Fills the copy of an operand, if it has one. The columns beyond are 0.
    pub fn widen(&self, name: &str) -> Result<()> {
        let (from, to) = (self.place(name), self.wide(name));
        if from == to { Ok(()) } else { self.copy(2, from, to) }
    }

    /// Copies it back to its operand.
    pub fn narrow(&self, name: &str) -> Result<()> {
        let (from, to) = (self.wide(name), self.place(name));
        if from == to || to.address == 0 { Ok(()) } else { self.copy(2, from, to) }
    }

    /// Tiles of so many queries of all heads; of 64 where sequences are listed.
    pub fn query_tiles(&self, rows: usize) -> usize {
        let e = self.extents();
        if self.is_listed() { self.query_blocks() } else { e.queries.div_ceil(rows) * e.query_heads * e.batch }
    }

    /// The same of keys.
    pub fn key_tiles(&self, rows: usize) -> usize {
        let e = self.extents();
        if self.is_listed() { self.key_blocks() } else { e.keys.div_ceil(rows) * e.key_heads * e.batch }
    }

    /// The grid of a kernel that claims tiles, with so many warpgroups beside the one that feeds them.
    pub fn grid(&self, tiles: usize, groups: usize) -> (usize, u32) {
        (tiles.min(self.multiprocessors()), 128 * (groups as u32 + 1))
    }

    pub fn shape(&self, heads_per_group: usize) -> Shape {
        let e = self.extents();
        Shape {
            heads: int(e.query_heads),
            scale: self.scores().scale() as f32,
            heads_per_group: int(heads_per_group),
            padded: int(self.plan.stats),
            lengths: self.table(self.prepared.tables.lengths).into(),
            ..filled!(Shape:
                fields(e, int) [batch key_heads queries keys]
                fields(self.plan.window, i32::from) [left right offset bottom]
            )
        }
    }

    pub fn packed(&self) -> Packed {
        if !self.is_listed() {
            return Packed::default();
        }
        let (counts, tables) = (&self.prepared.spec.counts, &self.prepared.tables);
        let table = |range| self.table(range);
        Packed {
            tasks: int(counts.by_queries),
            key_tasks: int(counts.by_keys),
            ..filled!(Packed: fields(tables, table) [sequences by_queries by_keys])
        }
    }

    pub fn spans(&self) -> SpanTables {
        let (tables, table) = (&self.prepared.tables, |range| self.table(range));
        match self.plan.hopper.visible {
            Visible::Spans => filled!(SpanTables: fields(tables, table) [spans tiles common seen_by]),
            _ => SpanTables::default(),
        }
    }

    pub fn options(&self) -> ScoreOptions {
        let cap = self.scores().softcap.unwrap_or(0.0) as f32;
        ScoreOptions::new(self.place("bias"), self.scores().scale() as f32, cap)
    }

    /// The key heads whose k and v share so many bytes of the L2 cache.
    pub fn heads_in(&self, bytes: usize) -> usize {
        let of = self.plan.hopper;
        (bytes / (2 * self.extents().keys * (of.width + of.values))).max(1)
    }

    /// The same of query heads, at most those of all batch elements.
    pub fn query_heads_in(&self, bytes: usize) -> usize {
        let e = self.extents();
        (self.heads_in(bytes) * self.scores().group()).min(e.batch * e.query_heads)
    }
}

/// o and lse.
pub(crate) fn forward(steps: HopperSteps<'_>) -> Result<()> {
    let (plan, has_values) = (steps.plan, steps.prepared.spec.value_dim.is_some());
    ["q", "k", "bias"].into_iter().try_for_each(|name| steps.widen(name))?;
    steps.clear_copy("o");
    steps.clear_flags();
    let rows = plan.tile.queries;
    let groups = rows / 64;
    let keys = plan.hopper.block_keys(has_values);
    let variant = Variant::hopper_forward(plan.hopper, has_values).with("GROUPS", groups);
    // Measured: causal masks like more heads beside each other than full ones.
    let l2 = if plan.hopper.visible == Visible::All { 8 << 20 } else { 32 << 20 };
    let mut args = ForwardArgs {
        q: steps.map("q", rows),
        k: steps.map("k", keys),
        lse: steps.address("lse").into(),
        sinks: steps.address("sinks").into(),
        counter: steps.counter(0).into(),
        flags: steps.group_flags().into(),
        shape: steps.shape(steps.query_heads_in(l2)),
        packed: steps.packed(),
        options: steps.options(),
        bias: steps.pair_map("bias", rows),
        o_rows: steps.wide("o").into(),
        spans: steps.spans(),
        ..ForwardArgs::default()
    };
    if has_values {
        steps.widen("v")?;
        (args.v, args.o) = (steps.map("v", keys), steps.map("o", 64));
    }
    let grid = steps.grid(steps.query_tiles(rows), groups);
    steps.launch_terms((&variant, "forward"), grid, &args, steps.extents().dim + steps.values())?;
    if has_values {
        steps.narrow("o")?;
        fallback::forward(&steps)?;
    }
    Ok(())
}
