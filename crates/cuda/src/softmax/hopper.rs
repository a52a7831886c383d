//! The kernels of attention and attention_lse for the tensor cores of compute capability 9.0, and the forward pass:
//! `kernels/attention/sm90a_forward.cu`.

use crate::args::{KernelArgs, filled, int};
use crate::memory::{Layout, MemoryRange};
use crate::parts::Part;
use crate::softmax::counts::SIDE;
use crate::softmax::hopper_args::{ForwardArgs, Packed, ScoreOptions, Shape, SpanTables, tensor_map};
use crate::softmax::prepared::Prepared;
use crate::softmax::spec::Spec;
use crate::softmax::variants::{Hopper, Lengths, Visible};
use crate::softmax::window::Window;
use crate::softmax::{Steps, fallback, modules};
use crate::step::Work;
use crate::strided::StridedTensor;
use crate::tensor_map::TensorMap;
use crate::variant::Variant;
use etalon_problem::{Blocking, Dtype, Error, Extents, Pass};

/// Choices of these kernels for a pass, and their memory.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The columns of every operand: D and E, rounded up to 64 or 128.
    pub width: usize,
    window: Window,
    /// The choices at compile time.
    pub hopper: Hopper,
    /// Queries and keys of a tile, forward.
    pub tile: Blocking,
    /// Rows of lse2 and delta of a head.
    stats: usize,
    storage: Dtype,
    wide: Vec<Wide>,
    pub lse2: MemoryRange,
    pub delta: MemoryRange,
}

/// The name of copies in plans.
const COPIES: &str = "operands and results in whole columns";

/// An operand, as the tensor cores find it.
#[derive(Debug)]
struct Wide {
    name: &'static str,
    /// A copy with whole columns; without it the copy engine takes the operand where it lies.
    copy: Option<MemoryRange>,
}

impl Plan {
    /// Takes ranges for what the kernels of attention need beside the operands.
    pub fn new(prepared: &Prepared<'_>, layout: &mut Layout) -> Result<Plan, Error> {
        let (spec, backward) = (&prepared.spec, prepared.pass == Pass::Backward);
        let mut plan = Plan::of(spec, spec.hopper());
        plan.reserve_operands(prepared, layout)?;
        if backward {
            let numbers = plan.stat_rows(&spec.extents);
            let mut numbers = || layout.named("lse and delta of rows", 4 * numbers);
            (plan.lse2, plan.delta) = (numbers()?, numbers()?);
        }
        Ok(plan)
    }

    /// Takes ranges for what those of lazy_attention need of these: copies of operands.
    pub fn lazy(prepared: &Prepared<'_>, layout: &mut Layout) -> Result<Plan, Error> {
        // Sequences are those of the arrays, or listed; and any scale will do.
        let hopper = Hopper { options: true, ..prepared.spec.hopper() }.within();
        let mut plan = Plan::of(&prepared.spec, hopper);
        plan.reserve_operands(prepared, layout)?;
        Ok(plan)
    }

    fn of(spec: &Spec, hopper: Hopper) -> Plan {
        let none = MemoryRange::default();
        Plan {
            width: hopper.width,
            window: spec.window.unwrap_or(Window::ALL),
            hopper,
            tile: modules::chosen(&modules::of_hopper(spec, hopper), spec.options.blocking),
            stats: match spec.hopper().lengths {
                Lengths::Listed => SIDE * (spec.counts.by_queries + 1),
                _ => padded(spec.extents.queries),
            },
            storage: spec.storage,
            wide: Vec::new(),
            lse2: none,
            delta: none,
        }
    }

    /// Takes ranges for copies of operands.
    fn reserve_operands(&mut self, prepared: &Prepared<'_>, layout: &mut Layout) -> Result<(), Error> {
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
            let lies = |part: &Part| self.takes(part.place(0), prepared.aligned || !part.is_direct());
            let direct = part.is_some_and(lies);
            let bytes = 2 * e.batch * heads * rows * self.width;
            let copy = if direct { None } else { Some(layout.named(COPIES, bytes)?) };
            self.wide.push(Wide { name, copy });
        }
        Ok(())
    }

    /// True if the kernels of a backward pass read an operand, if it is one: for dv alone neither o nor v, of
    /// attention_lse none of values.
    pub fn reads(&self, prepared: &Prepared<'_>, name: &str) -> bool {
        let values = prepared.value_dim.is_some();
        match name {
            "dout" => values,
            "o" | "v" => values && prepared.reads_o,
            _ => true,
        }
    }

    /// True if the copy engine takes a tensor where it lies.
    fn takes(&self, place: StridedTensor, aligned: bool) -> bool {
        aligned && place.extents[3] == self.width && place.has_whole_rows() && place.has_boxes()
    }

    /// Numbers of lse2, and of delta.
    pub fn stat_rows(&self, e: &Extents) -> usize {
        let batch = if self.hopper.lengths == Lengths::Listed { 1 } else { e.batch };
        batch * e.query_heads * self.stats
    }

    fn find(&self, name: &str) -> Option<&Wide> {
        self.wide.iter().find(|wide| wide.name == name)
    }

    /// A dense range of whole columns for an operand.
    fn in_range(&self, steps: &Steps<'_>, name: &str, range: MemoryRange) -> StridedTensor {
        let e = &steps.scores().extents;
        let (heads, rows) = rows_of(e, name);
        StridedTensor::dense(steps.at(range), [e.batch, heads, rows, self.width])
    }

    /// The place in which the tensor cores find an operand.
    pub(super) fn place(&self, steps: &Steps<'_>, name: &str) -> StridedTensor {
        match self.find(name).and_then(|wide| wide.copy) {
            Some(range) => self.in_range(steps, name, range),
            None => steps.place(name),
        }
    }

    /// Puts 0 into the copy of a result in which kernels leave rows of no sequence out.
    pub(super) fn clear(&self, steps: &Steps<'_>, name: &str) {
        let leaves = self.hopper.lengths == Lengths::Listed && steps.prepared.leaves_rows();
        if let Some(range) = self.find(name).and_then(|wide| wide.copy).filter(|_| leaves) {
            steps.clear(range);
        }
    }

    /// Copies an operand to its wide copy, if it has one. The columns beyond are 0.
    pub(super) fn widen(&self, steps: &Steps<'_>, name: &str) -> Result<(), Error> {
        let (from, to) = (steps.place(name), self.place(steps, name));
        if from == to {
            return Ok(());
        }
        steps.copy(2, from, to)
    }

    /// Copies a wide copy, if there is one, to its operand.
    pub(super) fn narrow(&self, steps: &Steps<'_>, name: &str) -> Result<(), Error> {
        let (from, to) = (self.place(steps, name), steps.place(name));
        if from == to || to.address == 0 {
            return Ok(());
        }
        steps.copy(2, from, to)
    }
}

/// True if the rows of an operand are those of k.
fn by_keys(name: &str) -> bool {
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

/// A tensor of whole columns for the copy engine.
pub(super) fn map_of(plan: &Plan, place: StridedTensor, rows: u32) -> TensorMap {
    tensor_map(plan.storage, place, rows, false)
}

/// The same in boxes of 64 rows and 64 columns.
pub(super) fn panel_map_of(plan: &Plan, place: StridedTensor) -> TensorMap {
    tensor_map(plan.storage, place, 64, true)
}

pub(super) fn shape(steps: &Steps<'_>, plan: &Plan, heads_per_group: usize) -> Shape {
    let e = &steps.scores().extents;
    Shape {
        heads: int(e.query_heads),
        scale: steps.scores().scale() as f32,
        heads_per_group: int(heads_per_group),
        padded: int(plan.stats),
        lengths: steps.table(steps.prepared.tables.lengths).into(),
        ..filled!(Shape:
            fields(e, int) [batch key_heads queries keys]
            fields(plan.window, i32::from) [left right offset bottom]
        )
    }
}

/// The tables of packed sequences.
pub(super) fn packed(steps: &Steps<'_>, plan: &Plan) -> Packed {
    let (counts, tables) = (&steps.prepared.counts, &steps.prepared.tables);
    let table = |range| steps.table(range);
    match plan.hopper.lengths {
        Lengths::Listed => Packed {
            tasks: int(counts.by_queries),
            key_tasks: int(counts.by_keys),
            ..filled!(Packed: fields(tables, table) [sequences by_queries by_keys])
        },
        _ => Packed::default(),
    }
}

/// The tables of a mask that is no window.
pub(super) fn spans(steps: &Steps<'_>, plan: &Plan) -> SpanTables {
    let (tables, table) = (&steps.prepared.tables, |range| steps.table(range));
    match plan.hopper.visible {
        Visible::Spans => filled!(SpanTables: fields(tables, table) [spans tiles common seen_by]),
        _ => SpanTables::default(),
    }
}

/// The bias, the unit and the softcap of scores.
pub(super) fn options(steps: &Steps<'_>) -> ScoreOptions {
    let scale = steps.scores().scale() as f32;
    let cap = steps.scores().softcap.unwrap_or(0.0) as f32;
    ScoreOptions::new(steps.place("bias"), scale, cap)
}

/// The key heads whose k and v share so many bytes of the L2 cache.
pub(super) fn heads_in(bytes: usize, steps: &Steps<'_>, plan: &Plan) -> usize {
    (bytes / (4 * steps.scores().extents.keys * plan.width)).max(1)
}

/// Adds a launch of a kernel that computes so many terms of each pair.
pub(super) fn launch<A: KernelArgs>(
    steps: &Steps<'_>,
    kernel: (&Variant, &'static str),
    grid: (usize, u32),
    args: &A,
    terms: usize,
) -> Result<(), Error> {
    steps.launch_work(kernel, grid, args, Work::of(kernel.0, terms))
}

/// o and lse.
pub(crate) fn forward(steps: &Steps<'_>, plan: &Plan) -> Result<(), Error> {
    let (e, values) = (&steps.scores().extents, steps.prepared.value_dim);
    plan.widen(steps, "q")?;
    plan.widen(steps, "k")?;
    plan.clear(steps, "o");
    steps.clear_flags();
    let variant = Variant::hopper_forward_of(plan.hopper, values.is_some(), plan.tile);
    let groups = variant.define("GROUPS");
    let rows = 64 * groups;
    // Measured: causal masks like more heads beside each other than full ones.
    let l2 = if plan.hopper.visible == Visible::All { 8 << 20 } else { 32 << 20 };
    let together = heads_in(l2, steps, plan) * steps.scores().group();
    let map = |name: &str, rows: u32| map_of(plan, plan.place(steps, name), rows);
    let mut args = ForwardArgs {
        q: map("q", rows as u32),
        k: map("k", 128),
        lse: steps.address("lse").into(),
        sinks: steps.address("sinks").into(),
        counter: steps.counter(0).into(),
        flags: steps.group_flags().into(),
        shape: shape(steps, plan, together.min(e.batch * e.query_heads)),
        packed: packed(steps, plan),
        options: options(steps),
        o_rows: plan.place(steps, "o").into(),
        spans: spans(steps, plan),
        ..ForwardArgs::default()
    };
    if values.is_some() {
        plan.widen(steps, "v")?;
        args.v = map("v", 128);
        args.o = map("o", 64);
    }
    let tiles = match plan.hopper.lengths {
        Lengths::Listed => steps.prepared.counts.by_queries * e.query_heads,
        _ => e.queries.div_ceil(rows) * e.query_heads * e.batch,
    };
    let grid = (tiles.min(steps.multiprocessors()), 128 * (groups as u32 + 1));
    launch(steps, (&variant, "forward"), grid, &args, e.dim + values.unwrap_or(0))?;
    if values.is_some() {
        plan.narrow(steps, "o")?;
        fallback::forward(steps)?;
    }
    Ok(())
}
