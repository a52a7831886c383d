//! The second order: `kernels/attention/{portable,sm80,sm90a}_second_order.cu`.

use super::Steps;
use super::pair_args::{Numbers, PairArgs, PartialArgs, wanted};
use super::portable::{columns, part, parts};
use super::prepared::Prepared;
use crate::args::{ConstPtr, Ptr, filled, kernel_args};
use crate::family::Family;
use crate::memory::{Layout, MemoryRange};
use crate::step::Work;
use crate::strided::TensorArgs;
use crate::variant::{KernelOf, Variant};
use etalon_problem::{Pass, Result};

/// Numbers of every row between kernels of the second order, in f32.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Between {
    /// Σ P (U v + ddv) and o.
    sum: MemoryRange,
    o: MemoryRange,
    /// δ, u, z, and whether the row sees a key.
    numbers: MemoryRange,
}

impl Between {
    pub fn new(prepared: &Prepared<'_>, layout: &mut Layout) -> Result<Between> {
        let rows = prepared.spec.rows();
        let elements = 4 * rows * prepared.spec.value_dim.unwrap_or(0);
        Ok(Between {
            sum: layout.named("sums of rows", elements)?,
            o: layout.named("sums of rows", elements)?,
            numbers: layout.named("numbers of rows", 4 * 4 * rows)?,
        })
    }
}

kernel_args! {
    pub(super) struct SecondArgs as "SecondArgs" {
        c: PairArgs,
        ddq, ddk, ddv, ddbias, cot_o, gq, gk, gv, gbias, gdout: TensorArgs,
        /// f32: Σ P (U v + ddv) and o.
        sum, o32: TensorArgs,
        ddsinks, cot_lse: ConstPtr<f32>,
        gdlse, gsinks: Ptr<f32>,
        /// `[batch, heads, queries]`.
        numbers: Ptr<Numbers>,
    }

    /// Arguments of the pass by keys that leaves partial sums.
    pub(super) struct FusedSecondArgs as "FusedSecondArgs" {
        a: SecondArgs,
        slots: PartialArgs,
    }
}

impl SecondArgs {
    /// Of double_backward, or of jvp: there the tangents stand for the cotangents of the gradients.
    fn new(steps: &Steps<'_>, between: &Between) -> Self {
        let name = |second: &'static str, tangent: &'static str| match steps.prepared.pass {
            Pass::Jvp => tangent,
            _ => second,
        };
        let rows = |range: MemoryRange| {
            let e = steps.extents();
            TensorArgs::dense(steps.at(range), [e.batch, e.query_heads, e.queries, steps.values()])
        };
        let (tensor, address) = (|name| steps.tensor(name), |name| steps.address(name));
        SecondArgs {
            c: PairArgs::new(steps),
            ddq: tensor(name("ddq", "tq")),
            ddk: tensor(name("ddk", "tk")),
            ddv: tensor(name("ddv", "tv")),
            ddbias: tensor(name("ddbias", "tbias")),
            gdout: tensor(name("gdout", "to")),
            sum: rows(between.sum),
            o32: rows(between.o),
            ddsinks: address(name("ddsinks", "tsinks")).into(),
            gdlse: address(name("gdlse", "tlse")).into(),
            numbers: steps.at(between.numbers).into(),
            ..filled!(SecondArgs: names(tensor) [cot_o gq gk gv gbias] names(address) [cot_lse gsinks])
        }
    }

    fn at(self, columns: [usize; 2]) -> Self {
        SecondArgs { c: self.c.at(columns), ..self }
    }

    fn over(self, tasks: u64) -> Self {
        SecondArgs { c: self.c.over(tasks), ..self }
    }
}

struct SecondPass<'a> {
    steps: &'a Steps<'a>,
    portable: Variant,
    /// The variant on tensor cores, which computes what is finite.
    tensor: Option<Variant>,
}

impl SecondPass<'_> {
    /// A portable kernel, which computes so many terms of each pair if no other does.
    fn launch(&self, kernel: KernelOf<'_>, blocks: usize, args: &SecondArgs, terms: usize) -> Result<()> {
        let work = Work::of(kernel.0, if self.tensor.is_some() { 0 } else { terms });
        self.steps.launch_work(kernel, (blocks, kernel.0.threads()), args, work)
    }

    /// A portable kernel and that of its name on tensor cores, whose blocks leave what is not theirs.
    fn both(&self, kernel: KernelOf<'_>, blocks: usize, args: &SecondArgs, terms: usize) -> Result<()> {
        if let Some(variant) = &self.tensor {
            self.steps.launch_terms((variant, kernel.1), (blocks, variant.threads()), args, terms)?;
        }
        self.launch(kernel, blocks, args, terms)
    }

    fn sinks_and_bias(&self, args: &SecondArgs) -> Result<()> {
        let (steps, e, portable) = (self.steps, self.steps.extents(), &self.portable);
        if args.gsinks.0 != 0 {
            self.launch((portable, "gsinks"), e.query_heads, args, 0)?;
        }
        if args.gbias.is_there() {
            let heads = steps.scores().bias.map_or(0, |bias| bias.heads);
            let by_pairs = args.over(steps.table(steps.prepared.tables.by_pairs));
            let blocks = steps.prepared.spec.counts.by_pairs * heads;
            self.launch((portable, "gbias"), blocks, &by_pairs, e.dim + steps.values())?;
        }
        Ok(())
    }
}

/// The outputs of double_backward or jvp that have places.
pub(crate) fn run(steps: &Steps<'_>, between: &Between) -> Result<()> {
    let (prepared, spec) = (steps.prepared, &steps.prepared.spec);
    let (dim, values) = (steps.extents().dim, steps.values());
    let (portable, light) = (spec.shape().portable(Family::AttentionPortableSecondOrder), &spec.shape().light_second());
    let pass = SecondPass { steps, portable, tensor: prepared.tensor_second() };
    let portable = &pass.portable;
    let args = SecondArgs::new(steps, between);
    steps.clear_flags();
    // S and u of three products, dP and T of three; then what they add to.
    let (scores, sums) = (3 * dim, 3 * values);
    for first in parts(prepared.spec.value_dim.unwrap_or(1)) {
        pass.both((light, "tangents"), steps.query_blocks(), &args.at([0, first]), scores + 2 * part(values, first))?;
    }
    let warps = portable.threads() as usize / 32;
    pass.launch((portable, "rows"), prepared.spec.rows().div_ceil(warps), &args, 0)?;
    let by_keys = args.over(steps.table(prepared.tables.by_keys));
    if let Some(partials) = &prepared.partials {
        let work = Work { partials: 4.0, ..Work::of(light, scores + sums + 4 * dim + 2 * values) };
        let with = |slots| vec![FusedSecondArgs { a: by_keys, slots }];
        partials.run(steps, (light, work), with, PairArgs { dq: args.gq, ..args.c })?;
        return pass.sinks_and_bias(&args);
    }
    if args.gq.is_there() {
        for first in parts(dim) {
            let terms = scores + sums + 2 * part(dim, first);
            pass.both((portable, "queries"), steps.query_blocks(), &args.at([first, 0]), terms)?;
        }
    }
    let wanted = [wanted(args.gk, dim), wanted(args.gv, values)];
    for at in columns(wanted, [dim, values]) {
        let terms = scores + sums + 2 * part(wanted[0], at[0]) + 2 * part(wanted[1], at[1]);
        pass.both((portable, "keys"), steps.key_blocks(), &by_keys.at(at), terms)?;
    }
    pass.sinks_and_bias(&args)
}
