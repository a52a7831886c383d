//! The kernels of a pass in their order: `kernels/linear_cross_entropy/portable_products.cu`, or on tensor cores
//! `kernels/linear_cross_entropy/sm90a_products.cu`.
//!
//! Chunks of tokens go outside, chunks of classes within: first for the totals of the tokens, then for
//! gradients. Where dw must be summed in less than f32, and tokens come in several chunks, it has a sweep of
//! its own in which classes go outside.

use super::args::{Cotangents, CrossEntropyArgs, Outputs, behind};
use super::hopper::{GROUP, Hopper};
use super::plan::{SIDE, TILE};
use super::prepared::Prepared;
use crate::args::{KernelArgs, filled, int};
use crate::parts::Part;
use crate::step;
use etalon_problem::{Error, LinearCrossEntropy, LseSquareWeight, NothingLeft, Reduction};
use std::ops::Range;

pub(super) type Steps<'a> = step::Steps<'a, Prepared<'a>>;

/// The steps of a pass, and the arguments of its kernels.
pub(super) struct Run<'a> {
    pub steps: &'a Steps<'a>,
    pub args: CrossEntropyArgs,
    /// dh is f32, whatever the type of the other gradients.
    pub wide_hidden: bool,
    /// The address at which sums of dbias wait for the next chunk of tokens.
    pub head_bias: u64,
}

/// Adds the steps of a pass.
pub(crate) fn run(steps: &Steps<'_>) -> Result<(), Error> {
    clear(steps)?;
    let run = Run::new(steps);
    run.launch("tokens", 1, 1024, &run.args)?;
    if let Some(filter) = &steps.prepared.filter {
        filter.begin(steps, &steps.prepared.kernels, &run.args)?;
    }
    run.by_tokens()?;
    if steps.prepared.plan.apart {
        run.by_classes()?;
    }
    run.launch("loss", 1, 256, &run.args)
}

/// Fills what kernels leave out: what ignored tokens have of each result, and all gradients where there is no
/// token.
pub(super) fn clear(steps: &Steps<'_>) -> Result<(), Error> {
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
    let Prepared { parts, problem, filter, spec, plan, ranges, hopper, .. } = steps.prepared;
    let (at, range) = (|name: &str| steps.address(name), |range| steps.at(range));
    let pass = |forward, second| at(if spec.second { second } else { forward }).into();
    let first = Cotangents::new(["dloss", "dlse", "dlogprob", "dentropy"], at);
    let second = Cotangents::new(["cot_loss", "cot_lse", "cot_logprob", "cot_entropy"], at);
    let outputs = Outputs::new(["loss", "lse", "logprob", "entropy"], at);
    let motions = Outputs::new(["gdloss", "gdlse", "gdlogprob", "gdentropy"], at);
    let entropies = [first.entropy.0, second.entropy.0, outputs.entropy.0, motions.entropy.0];
    let args = CrossEntropyArgs {
        first,
        second,
        outputs,
        motions,
        dh: pass("dh", "gh"),
        dw: pass("dw", "gw"),
        dbias: pass("dbias", "gbias"),
        pulls: if spec.gradients() { steps.at(ranges.pulls) } else { 0 }.into(),
        left_out: filter.map_or(0, |filter| steps.at(filter.left_out)).into(),
        rows: int(plan.rows),
        columns: int(plan.columns),
        leaf: if hopper.is_some() { GROUP * TILE } else { TILE } as i32,
        entropy: i32::from(entropies.iter().any(|&entropy| entropy != 0)),
        whole: i32::from(problem.dim % 4 == 0 && parts.begin_aligned(&["h", "w", "ddh", "ddw"])),
        wide: i32::from(spec.wide),
        ..filled!(CrossEntropyArgs:
            names(at) [h w bias ddh ddw ddbias class_weights argmax n_valid normaliser targets token_weights]
            fields(ranges, range) [tokens common z motion picked nodes terms hidden]
        )
    };
    linked(settings(args, problem), problem)
}

/// With the extents of a problem, and the numbers of its loss.
fn settings(args: CrossEntropyArgs, problem: &LinearCrossEntropy) -> CrossEntropyArgs {
    CrossEntropyArgs {
        ignore_index: problem.ignore_index,
        divisor: match problem.reduction {
            Reduction::By { normaliser } => normaliser,
            _ => 1.0,
        },
        square: problem.lse_square_scale,
        smoothing: problem.label_smoothing,
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

/// With the link of a problem, (C2) and (C11).
fn linked(args: CrossEntropyArgs, problem: &LinearCrossEntropy) -> CrossEntropyArgs {
    let LinearCrossEntropy { logit_scale, temperature, softcap, .. } = *problem;
    let factor = softcap.map_or(logit_scale / temperature, |cap| logit_scale / cap);
    CrossEntropyArgs {
        factor: factor as f32,
        ratio: softcap.map_or(0.0, |cap| (cap / temperature) as f32),
        slope: (logit_scale / temperature) as f32,
        ..args
    }
}

/// The parts of so many elements, each as long as the first.
fn chunks(all: usize, each: usize) -> impl Iterator<Item = Range<usize>> {
    (0..all).step_by(each).map(move |first| first..all.min(first + each))
}

impl<'a> Run<'a> {
    /// Over all classes of the problem.
    pub fn new(steps: &'a Steps<'a>) -> Self {
        let Prepared { spec, ranges, .. } = steps.prepared;
        let head_bias = steps.at(ranges.head_bias);
        Run { steps, args: arguments(steps), wide_hidden: spec.wide, head_bias }
    }

    pub fn launch<A: KernelArgs>(
        &self,
        name: &'static str,
        blocks: usize,
        threads: u32,
        args: &A,
    ) -> Result<(), Error> {
        self.steps.launch((&self.steps.prepared.kernels, name), (blocks, threads), args)
    }

    pub fn tokens(&self) -> impl Iterator<Item = Range<usize>> {
        chunks(self.args.all as usize, self.steps.prepared.plan.rows)
    }

    fn classes(&self) -> impl Iterator<Item = Range<usize>> {
        chunks(self.args.vocab as usize, self.steps.prepared.plan.columns)
    }

    /// The arguments of kernels of a chunk.
    pub fn chunk(&self, tokens: &Range<usize>, classes: &Range<usize>) -> CrossEntropyArgs {
        CrossEntropyArgs {
            first_token: tokens.start as i32,
            count: tokens.len() as i32,
            first_class: classes.start as i32,
            classes: classes.len() as i32,
            ..self.args
        }
    }

    /// The address at which tensor cores find the rows of h of a chunk of tokens.
    pub fn rows(&self, tokens: &Range<usize>) -> Result<u64, Error> {
        let Some(hopper) = &self.steps.prepared.hopper else { return Ok(0) };
        let packed = hopper.packed.map(|range| self.steps.at(range));
        hopper.gather(self.steps, &self.chunk(tokens, &(0..0)), packed)
    }

    /// Totals, outputs and what tokens pull with, dh, and dw and dbias unless they are summed apart.
    fn by_tokens(&self) -> Result<(), Error> {
        for tokens in self.tokens() {
            let h = self.rows(&tokens)?;
            self.totals(&tokens, h)?;
            let all = self.chunk(&tokens, &(0..0));
            self.launch("finish", tokens.len().div_ceil(128), 128, &all)?;
            self.scale(&all)?;
            self.pull(&tokens, h)?;
        }
        Ok(())
    }

    /// The gradients of a chunk of tokens, from what these pull with.
    pub fn pull(&self, tokens: &Range<usize>, h: u64) -> Result<(), Error> {
        let Prepared { spec, plan, filter, kernels, .. } = self.steps.prepared;
        let head = spec.head() && !plan.apart;
        if !(spec.dh || head || filter.is_some()) {
            return Ok(());
        }
        for classes in self.classes() {
            let args = self.chunk(tokens, &classes);
            self.gradients(&args, h, plan.keeps)?;
            if let Some(filter) = filter {
                filter.choose(self.steps, kernels, &args)?;
            }
            if spec.dh {
                self.hidden(&args, &classes)?;
            }
            if head {
                self.head(&args, h, tokens, &classes)?;
            }
        }
        Ok(())
    }

    /// The address of the factor of da of a chunk of tokens; 0 without one.
    fn scale_of(&self, args: &CrossEntropyArgs) -> u64 {
        let range = self.steps.prepared.hopper.as_ref().and_then(|hopper| hopper.scales);
        range.map_or(0, |range| self.steps.at(range) + 4 * (args.first_token / args.rows) as u64)
    }

    /// Finds it.
    pub fn scale(&self, args: &CrossEntropyArgs) -> Result<(), Error> {
        match (self.scale_of(args), &self.steps.prepared.hopper) {
            (0, _) | (_, None) => Ok(()),
            _ if !self.steps.prepared.spec.gradients() => Ok(()),
            (scale, Some(hopper)) => hopper.scale(self.steps, args, scale),
        }
    }

    /// dw and dbias, whose sums wait beside them for the next chunk of tokens.
    pub fn by_classes(&self) -> Result<(), Error> {
        for classes in self.classes() {
            for tokens in self.tokens() {
                let (args, h) = (self.chunk(&tokens, &classes), self.rows(&tokens)?);
                self.gradients(&args, h, false)?;
                self.head(&args, h, &tokens, &classes)?;
            }
        }
        Ok(())
    }

    /// (C33), (C34) of all classes.
    pub fn totals(&self, tokens: &Range<usize>, h: u64) -> Result<(), Error> {
        let Prepared { plan, hopper, .. } = self.steps.prepared;
        let Some(hopper) = hopper else {
            for classes in self.classes() {
                let args = self.chunk(tokens, &classes);
                self.logits(&args)?;
                self.launch("totals", tokens.len(), 256, &args)?;
            }
            return Ok(());
        };
        let vocab = self.args.vocab as usize;
        let each = Hopper::leaf_columns(&self.args, plan.plane);
        chunks(vocab, each).try_for_each(|classes| hopper.totals(self.steps, &self.chunk(tokens, &classes), h))
    }

    /// (C1), (C2), and in the second order (C21).
    fn logits(&self, args: &CrossEntropyArgs) -> Result<(), Error> {
        let tiles = |x: i32| (x as usize).div_ceil(SIDE);
        let blocks = tiles(args.count) * tiles(args.classes);
        self.launch("logits", blocks, 256, args)?;
        if self.steps.prepared.spec.second {
            self.launch("motions", blocks, 256, args)?;
        }
        Ok(())
    }

    /// (C16), and in the second order (C27); of logits that are `kept`, or computed now.
    fn gradients(&self, args: &CrossEntropyArgs, h: u64, kept: bool) -> Result<(), Error> {
        if let Some(hopper) = &self.steps.prepared.hopper {
            return hopper.gradient(self.steps, args, [h, self.scale_of(args)]);
        }
        if !kept {
            self.logits(args)?;
        }
        let parts = (args.columns as usize).div_ceil(1024);
        self.launch("gradients", args.count as usize * parts, 256, args)
    }

    /// (C17) or (C28).
    fn hidden(&self, args: &CrossEntropyArgs, classes: &Range<usize>) -> Result<(), Error> {
        let tiles = |x: i32| (x as usize).div_ceil(SIDE);
        let begins = i32::from(classes.start == 0);
        let ends = i32::from(classes.end == args.vocab as usize);
        let args = CrossEntropyArgs { begins, ends, wide: i32::from(self.wide_hidden), ..*args };
        match &self.steps.prepared.hopper {
            Some(hopper) => {
                let Prepared { spec, plan, .. } = self.steps.prepared;
                let wide = spec.columns_of_hidden(plan.rows, args.dim as usize);
                hopper.hidden(self.steps, &args, self.scale_of(&args), (wide, plan.block))
            }
            None => self.launch("hidden", tiles(args.count) * tiles(args.dim), 256, &args),
        }
    }

    /// (C18) and (C19), or (C29) and (C30).
    fn head(
        &self,
        args: &CrossEntropyArgs,
        h: u64,
        tokens: &Range<usize>,
        classes: &Range<usize>,
    ) -> Result<(), Error> {
        let Prepared { spec, plan, ranges, hopper, .. } = self.steps.prepared;
        let tiles = |x: i32| (x as usize).div_ceil(SIDE);
        let first = 4 * classes.start;
        // In f32 the sums wait in place.
        let head = match plan.apart {
            true => self.steps.at(ranges.head),
            false => behind(args.dw.0, first * args.dim as usize),
        };
        let bias = if spec.wide { args.dbias.0 } else { self.head_bias };
        let args = CrossEntropyArgs {
            head: head.into(),
            head_bias: behind(bias, first).into(),
            begins: i32::from(tokens.start == 0),
            ends: i32::from(tokens.end == args.all as usize),
            ..*args
        };
        if spec.dw {
            match hopper {
                Some(hopper) => hopper.head(self.steps, &args, [h, self.scale_of(&args)])?,
                None => {
                    let blocks = tiles(args.classes) * tiles(args.dim);
                    self.launch("head", blocks, 256, &args)?;
                }
            }
        }
        if spec.dbias {
            match hopper {
                Some(hopper) => hopper.bias(self.steps, &args, self.scale_of(&args))?,
                None => self.launch("bias", (args.classes as usize).div_ceil(32), 256, &args)?,
            }
        }
        Ok(())
    }
}

const _: () = assert!(TILE.is_multiple_of(SIDE));
