//! The kernels of a pass in their order: `kernels/linear_cross_entropy/portable_products.cu`, or on tensor cores
//! `kernels/linear_cross_entropy/sm90a_products.cu`.
//!
//! Chunks of tokens go outside, chunks of classes within: first for the totals of the tokens, then for
//! gradients. Where dw must be summed in less than f32, and tokens come in several chunks, it has a sweep of
//! its own in which classes go outside.

use super::args::{Cotangents, CrossEntropyArgs, Outputs, behind};
use super::hopper::{GROUP, Products};
use super::plan::{SIDE, TILE};
use super::prepared::{Filtering, Prepared, Steps};
use crate::args::{Field, filled, int};
use crate::call::PassCall;
use crate::family::Family;
use crate::memory::MemoryRange;
use crate::parts::Part;
use crate::pass::PassPlan;
use crate::variant::Variant;
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{LinearCrossEntropy, LseSquareWeight, NothingLeft, Reduction, Result};
use std::convert::identity;
use std::ops::Range;

pub(super) struct Run<'a> {
    pub steps: &'a Steps<'a>,
    pub args: CrossEntropyArgs,
    /// dh is f32, whatever the type of the other gradients.
    pub wide_hidden: bool,
    /// The address at which sums of dbias wait for the next chunk of tokens.
    pub head_bias: u64,
}

pub(crate) fn draft(problem: &LinearCrossEntropy, call: &PassCall<'_, '_>) -> Result<PassPlan<'static>> {
    plan(Prepared::new((problem, None), call)?)
}

/// The same with a filter; the ranges of its results in scratch memory: the tiles that are left out, B and C.
pub(crate) fn draft_filtered(
    (problem, filter): (&LinearCrossEntropy, Filter),
    call: &PassCall<'_, '_>,
) -> Result<(PassPlan<'static>, [MemoryRange; 3])> {
    let mut prepared = Prepared::new((problem, None), call)?;
    let filter = Filtering::new(filter, &mut prepared)?;
    prepared.filter = Some(filter);
    Ok((plan(prepared)?, [filter.left_out, filter.dh, filter.dw]))
}

fn plan(prepared: Prepared<'_>) -> Result<PassPlan<'static>> {
    let steps = Steps::new(&prepared)?;
    clear(&steps)?;
    let run = Run::new(&steps);
    run.launch("tokens", (1, 1024), &run.args)?;
    if let Some(filter) = &prepared.filter {
        filter.begin(&run)?;
    }
    run.by_tokens()?;
    if prepared.plan.apart {
        run.by_classes()?;
    }
    run.launch("loss", (1, 256), &run.args)?;
    let steps = steps.finish()?;
    Ok(prepared.plan(steps))
}

/// Fills what kernels leave out: results of ignored tokens, and all gradients where there is no token.
pub(super) fn clear(steps: &Steps<'_>) -> Result<()> {
    let Prepared { parts, ignores, problem, whole_words, .. } = steps.prepared;
    let leaves = |part: &Part| match part.operand.name {
        "dw" | "dbias" | "gw" | "gbias" => problem.tokens == 0,
        // `loss` writes the others, whatever counts.
        "loss" => problem.reduction == Reduction::None && (*ignores || problem.tokens == 0),
        "n_valid" | "normaliser" => false,
        "partials" => false, // whose numbers for ignored tokens are not all 0
        _ => *ignores || problem.tokens == 0,
    };
    for part in parts.list.iter().filter(|part| part.wanted && leaves(part)) {
        let nothing = if part.operand.name == "argmax" { u32::MAX } else { 0 };
        let place = steps.place(part.operand.name);
        if part.bytes == 2 && !whole_words {
            steps.fill_part(part, 0)?;
        } else {
            steps.fill(place.address, part.bytes * place.elements(), nothing);
        }
    }
    Ok(())
}

/// The arguments of kernels that see all tokens and classes.
fn arguments(steps: &Steps<'_>) -> CrossEntropyArgs {
    let Prepared { parts, problem, filter, spec, plan, memory, .. } = steps.prepared;
    let at = |name: &str| steps.address(name);
    let pass = |forward, second| at(if spec.second { second } else { forward }).into();
    let named = |prefix: &'static str| move |name: &str| steps.address(&format!("{prefix}{name}"));
    let first = filled!(Cotangents: names(named("d")) [loss lse logprob entropy]);
    let second = filled!(Cotangents: names(named("cot_")) [loss lse logprob entropy]);
    let outputs = filled!(Outputs: names(at) [loss lse logprob entropy]);
    let motions = filled!(Outputs: names(named("gd")) [loss lse logprob entropy]);
    let entropies = [first.entropy.0, second.entropy.0, outputs.entropy.0, motions.entropy.0];
    let args = CrossEntropyArgs {
        first,
        second,
        outputs,
        motions,
        dh: pass("dh", "gh"),
        dw: pass("dw", "gw"),
        dbias: pass("dbias", "gbias"),
        left_out: filter.map_or(0, |filter| steps.at(filter.left_out)).into(),
        rows: int(plan.rows),
        columns: int(plan.columns),
        leaf: if spec.tensor { GROUP * TILE } else { TILE } as i32,
        entropy: i32::from(entropies.iter().any(|&entropy| entropy != 0)),
        whole: i32::from(problem.dim % 4 == 0 && parts.begin_aligned(&["h", "w", "ddh", "ddw"])),
        wide: i32::from(spec.wide),
        ..filled!(CrossEntropyArgs:
            names(at) [h w bias ddh ddw ddbias class_weights argmax n_valid normaliser targets token_weights]
            fields(memory, identity) [tokens common z motion picked nodes pulls terms hidden]
        )
    };
    settings(args, problem)
}

/// The extents, the link, (C2) and (C11), and the numbers of the loss.
fn settings(args: CrossEntropyArgs, problem: &LinearCrossEntropy) -> CrossEntropyArgs {
    let LinearCrossEntropy { logit_scale, temperature, softcap, .. } = *problem;
    CrossEntropyArgs {
        ignore_index: problem.ignore_index,
        divisor: match problem.reduction {
            Reduction::By { normaliser } => normaliser,
            _ => 1.0,
        },
        square: problem.lse_square_scale,
        smoothing: problem.label_smoothing,
        factor: softcap.map_or(logit_scale / temperature, |cap| logit_scale / cap) as f32,
        ratio: softcap.map_or(0.0, |cap| (cap / temperature) as f32),
        slope: (logit_scale / temperature) as f32,
        dim: problem.dim as i32,
        vocab: problem.vocab as i32,
        all: problem.tokens as i32,
        mean: i32::from(problem.reduction == Reduction::Mean),
        nan_of_nothing: i32::from(problem.nothing_left != NothingLeft::Zero),
        each: i32::from(problem.reduction == Reduction::None),
        square_weighted: i32::from(problem.lse_square_weight == LseSquareWeight::ClassWeight),
        ..args
    }
}

/// Parts of `each` elements, of so many.
fn chunks(all: usize, each: usize) -> impl Iterator<Item = Range<usize>> {
    (0..all).step_by(each).map(move |first| first..all.min(first + each))
}

/// Blocks of a product: the tiles of so many rows and columns.
fn tiles(rows: i32, columns: i32) -> usize {
    (rows as usize).div_ceil(SIDE) * (columns as usize).div_ceil(SIDE)
}

impl<'a> Run<'a> {
    pub fn new(steps: &'a Steps<'a>) -> Self {
        let Prepared { spec, memory, .. } = steps.prepared;
        Run { steps, args: arguments(steps), wide_hidden: spec.wide, head_bias: memory.head_bias.0 }
    }

    pub fn launch(&self, name: &'static str, grid: (usize, u32), args: &impl Field) -> Result<()> {
        let Prepared { parts, spec, .. } = self.steps.prepared;
        let variant = Variant::cross_entropy(Family::CrossEntropyPortable, parts.storage, spec.second);
        self.steps.launch((&variant, name), grid, args)
    }

    pub fn tokens(&self) -> impl Iterator<Item = Range<usize>> {
        chunks(self.args.all as usize, self.steps.prepared.plan.rows)
    }

    fn classes(&self) -> impl Iterator<Item = Range<usize>> {
        chunks(self.args.vocab as usize, self.steps.prepared.plan.columns)
    }

    pub fn chunk(&self, tokens: &Range<usize>, classes: &Range<usize>) -> CrossEntropyArgs {
        CrossEntropyArgs {
            first_token: tokens.start as i32,
            count: tokens.len() as i32,
            first_class: classes.start as i32,
            classes: classes.len() as i32,
            ..self.args
        }
    }

    pub fn of_tokens(&self, tokens: &Range<usize>) -> CrossEntropyArgs {
        self.chunk(tokens, &(0..0))
    }

    pub fn gather(&self, tokens: &Range<usize>) -> Result<()> {
        Products::of(self.steps, &self.of_tokens(tokens)).map_or(Ok(()), |products| products.gather())
    }

    /// Totals, outputs and what tokens pull with, dh, and dw and dbias unless they are summed apart.
    fn by_tokens(&self) -> Result<()> {
        for tokens in self.tokens() {
            self.gather(&tokens)?;
            self.totals(&tokens)?;
            let all = self.of_tokens(&tokens);
            self.launch("finish", (tokens.len().div_ceil(128), 128), &all)?;
            self.scale(&all)?;
            self.pull(&tokens)?;
        }
        Ok(())
    }

    /// The gradients of a chunk of tokens, from what these pull with.
    pub fn pull(&self, tokens: &Range<usize>) -> Result<()> {
        let Prepared { spec, plan, filter, .. } = self.steps.prepared;
        let head = (spec.dw || spec.dbias) && !plan.apart;
        if !(spec.dh || head || filter.is_some()) {
            return Ok(());
        }
        for classes in self.classes() {
            let args = self.chunk(tokens, &classes);
            self.gradients(&args, plan.keeps)?;
            if let Some(filter) = filter {
                filter.choose(self, &args)?;
            }
            if spec.dh {
                self.hidden(&args)?;
            }
            if head {
                self.head(&args)?;
            }
        }
        Ok(())
    }

    pub fn scale(&self, args: &CrossEntropyArgs) -> Result<()> {
        let products = Products::of(self.steps, args).filter(|_| self.steps.prepared.spec.gradients());
        products.map_or(Ok(()), |products| products.find_scale())
    }

    /// dw and dbias, whose sums wait beside them for the next chunk of tokens.
    pub fn by_classes(&self) -> Result<()> {
        for classes in self.classes() {
            for tokens in self.tokens() {
                self.gather(&tokens)?;
                let args = self.chunk(&tokens, &classes);
                self.gradients(&args, false)?;
                self.head(&args)?;
            }
        }
        Ok(())
    }

    /// (C33), (C34) of all classes.
    pub fn totals(&self, tokens: &Range<usize>) -> Result<()> {
        if let Some(products) = Products::of(self.steps, &self.args) {
            let mut parts = chunks(self.args.vocab as usize, products.leaf_columns());
            return parts.try_for_each(|classes| products.totals(&self.chunk(tokens, &classes)));
        }
        for classes in self.classes() {
            let args = self.chunk(tokens, &classes);
            self.logits(&args)?;
            self.launch("totals", (tokens.len(), 256), &args)?;
        }
        Ok(())
    }

    /// (C1), (C2), and in the second order (C21).
    fn logits(&self, args: &CrossEntropyArgs) -> Result<()> {
        let blocks = tiles(args.count, args.classes);
        self.launch("logits", (blocks, 256), args)?;
        if self.steps.prepared.spec.second {
            self.launch("motions", (blocks, 256), args)?;
        }
        Ok(())
    }

    /// (C16), and in the second order (C27); of logits that are `kept`, or computed now.
    fn gradients(&self, args: &CrossEntropyArgs, kept: bool) -> Result<()> {
        if let Some(products) = Products::of(self.steps, args) {
            return products.gradient();
        }
        if !kept {
            self.logits(args)?;
        }
        let parts = (args.columns as usize).div_ceil(1024);
        self.launch("gradients", (args.count as usize * parts, 256), args)
    }

    /// (C17) or (C28).
    fn hidden(&self, args: &CrossEntropyArgs) -> Result<()> {
        let begins = i32::from(args.first_class == 0);
        let ends = i32::from(args.first_class + args.classes == args.vocab);
        let args = CrossEntropyArgs { begins, ends, wide: i32::from(self.wide_hidden), ..*args };
        match Products::of(self.steps, &args) {
            Some(products) => products.hidden(),
            None => self.launch("hidden", (tiles(args.count, args.dim), 256), &args),
        }
    }

    /// (C18) and (C19), or (C29) and (C30).
    fn head(&self, args: &CrossEntropyArgs) -> Result<()> {
        let Prepared { spec, plan, memory, .. } = self.steps.prepared;
        let first = 4 * args.first_class as usize;
        // In f32 the sums wait in place.
        let head = match plan.apart {
            true => memory.head,
            false => behind(args.dw.0, first * args.dim as usize).into(),
        };
        let bias = if spec.wide { args.dbias.0 } else { self.head_bias };
        let args = CrossEntropyArgs {
            head,
            head_bias: behind(bias, first).into(),
            begins: i32::from(args.first_token == 0),
            ends: i32::from(args.first_token + args.count == args.all),
            ..*args
        };
        let products = Products::of(self.steps, &args);
        if spec.dw {
            match &products {
                Some(products) => products.head()?,
                None => self.launch("head", (tiles(args.classes, args.dim), 256), &args)?,
            }
        }
        match products {
            _ if !spec.dbias => Ok(()),
            Some(products) => products.bias(),
            None => self.launch("bias", ((args.classes as usize).div_ceil(32), 256), &args),
        }
    }
}

const _: () = assert!(TILE.is_multiple_of(SIDE));
