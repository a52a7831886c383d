//! The kernels of a pass in their order: `kernels/cross_entropy.cu`, or on tensor cores
//! `kernels/sm90a_cross_entropy.cu`.
//!
//! Chunks of tokens go outside, chunks of classes within: first for the totals of the tokens, then for
//! gradients. Where dw must be summed in less than f32, and tokens come in several chunks, it has a sweep of
//! its own in which classes go outside.

use crate::cross_entropy::call::{Call, PerToken};
use crate::cross_entropy::hopper::{GROUP, Hopper};
use crate::cross_entropy::plan::{SIDE, TILE};
use crate::cross_entropy::prepared::Prepared;
use crate::job;
use crate::parts::Part;
use etalon_problem::{Error, LseSquareWeight, NothingLeft, Pass, Reduction};
use std::ops::Range;

type Job<'a> = job::Job<'a, Prepared<'a>>;

/// A call of a pass, and what its kernels are told.
pub(super) struct Run<'j, 'a> {
    pub job: &'j Job<'a>,
    pub call: Call,
    /// Whether dh is f32, whatever the type of the other gradients.
    pub wide_hidden: bool,
    /// Where sums of dbias wait for the next chunk of tokens.
    pub head_bias: u64,
}

/// Enqueues the pass.
pub(crate) fn run(job: &Job<'_>) -> Result<(), Error> {
    clear(job)?;
    let run = Run::new(job);
    run.launch("tokens", 1, 1024, &run.call)?;
    if let Some(filter) = &job.prepared.filter {
        filter.begin((&job.queue, &job.prepared.kernels), &run.call, job.scratch)?;
    }
    run.by_tokens()?;
    if job.prepared.plan.apart {
        run.by_classes()?;
    }
    run.launch("loss", 1, 256, &run.call)
}

/// Fills what kernels leave out: what ignored tokens have of each result, and all gradients where there is no
/// token.
pub(super) fn clear(job: &Job<'_>) -> Result<(), Error> {
    let Prepared { parts, ignores, problem, .. } = job.prepared;
    let leaves = |part: &Part| match part.operand.name {
        "dw" | "dbias" | "gw" | "gbias" => problem.tokens == 0,
        // What `loss` writes, whatever counts.
        "loss" => problem.reduction == Reduction::None && (*ignores || problem.tokens == 0),
        "n_valid" | "normaliser" => false,
        "partials" => false, // whose numbers for ignored tokens are not all 0
        _ => *ignores || problem.tokens == 0,
    };
    for part in parts.list.iter().filter(|part| part.wanted && leaves(part)) {
        let nothing = if part.operand.name == "argmax" { u32::MAX } else { 0 };
        let place = job.place(part.operand.name);
        match parts.moves() {
            Ok(moves) if part.bytes == 2 => moves.fill(&job.queue, 2, place, 0)?,
            // Memory of this call begins and ends with whole words.
            _ => job.queue.fill(place.address, part.bytes * place.elements(), nothing)?,
        }
    }
    Ok(())
}

fn call(job: &Job<'_>) -> Call {
    let Prepared { parts, problem, filter, asked, plan, rooms, hopper, .. } = job.prepared;
    let at = |name: &str| job.address(name);
    let pass = |forward: &'static str, second: &'static str| match parts.pass {
        Pass::DoubleBackward => at(second),
        _ => at(forward),
    };
    let first = PerToken::new(["dloss", "dlse", "dlogprob", "dentropy"], at);
    let second = PerToken::new(["cot_loss", "cot_lse", "cot_logprob", "cot_entropy"], at);
    let outputs = PerToken::new(["loss", "lse", "logprob", "entropy"], at);
    let motions = PerToken::new(["gdloss", "gdlse", "gdlogprob", "gdentropy"], at);
    let entropies = [first.entropy, second.entropy, outputs.entropy, motions.entropy];
    let call = Call {
        h: at("h"),
        w: at("w"),
        bias: at("bias"),
        ddh: at("ddh"),
        ddw: at("ddw"),
        ddbias: at("ddbias"),
        class_weights: at("class_weights"),
        first,
        second,
        outputs,
        motions,
        argmax: at("argmax"),
        n_valid: at("n_valid"),
        normaliser: at("normaliser"),
        dh: pass("dh", "gh"),
        dw: pass("dw", "gw"),
        dbias: pass("dbias", "gbias"),
        targets: at("targets"),
        token_weights: at("token_weights"),
        tokens: job.at(rooms.tokens),
        common: job.at(rooms.common),
        z: job.at(rooms.z),
        motion: job.at(rooms.motion),
        picked: job.at(rooms.picked),
        nodes: job.at(rooms.nodes),
        pulls: if asked.gradients() { job.at(rooms.pulls) } else { 0 },
        terms: job.at(rooms.terms),
        hidden: job.at(rooms.hidden),
        left_out: filter.map_or(0, |filter| job.at(filter.left_out)),
        ignore_index: problem.ignore_index,
        divisor: if let Reduction::By { normaliser } = problem.reduction {
            normaliser
        } else {
            1.0
        },
        square: problem.lse_square_scale,
        smoothing: problem.label_smoothing,
        dim: problem.dim as i32,
        vocab: problem.vocab as i32,
        all: problem.tokens as i32,
        rows: plan.rows as i32,
        columns: plan.columns as i32,
        leaf: if hopper.is_some() { GROUP * TILE } else { TILE } as i32,
        mean: i32::from(problem.reduction == Reduction::Mean),
        nan_of_nothing: i32::from(problem.nothing_left != NothingLeft::Zero),
        each: i32::from(problem.reduction == Reduction::None),
        square_weighted: i32::from(problem.lse_square_weight == LseSquareWeight::ClassWeight),
        entropy: i32::from(entropies.iter().any(|&entropy| entropy != 0)),
        whole: i32::from(problem.dim % 4 == 0 && parts.begin_aligned(&["h", "w", "ddh", "ddw"])),
        wide: i32::from(asked.wide),
        ..Call::default()
    };
    call.linked(problem)
}

/// The parts of so many elements, each as long as the first.
fn chunks(all: usize, each: usize) -> impl Iterator<Item = Range<usize>> {
    (0..all).step_by(each).map(move |first| first..all.min(first + each))
}

impl<'j, 'a> Run<'j, 'a> {
    /// Of all classes of the problem.
    pub fn new(job: &'j Job<'a>) -> Self {
        let call = call(job);
        let head_bias = job.at(job.prepared.rooms.head_bias);
        Run { job, call, wide_hidden: job.prepared.asked.wide, head_bias }
    }
}

impl Run<'_, '_> {
    pub fn launch(
        &self,
        name: &str,
        blocks: usize,
        threads: u32,
        call: &Call,
    ) -> Result<(), Error> {
        let kernel = self.job.prepared.kernels.get(name)?;
        self.job.queue.launch(kernel, blocks as u64, (threads, 0), call)
    }

    pub fn tokens(&self) -> impl Iterator<Item = Range<usize>> {
        chunks(self.call.all as usize, self.job.prepared.plan.rows)
    }

    fn classes(&self) -> impl Iterator<Item = Range<usize>> {
        chunks(self.call.vocab as usize, self.job.prepared.plan.columns)
    }

    /// What the kernels of a chunk are told.
    pub fn chunk(&self, tokens: &Range<usize>, classes: &Range<usize>) -> Call {
        Call {
            first_token: tokens.start as i32,
            count: tokens.len() as i32,
            first_class: classes.start as i32,
            classes: classes.len() as i32,
            ..self.call
        }
    }

    /// Where the tensor cores find the rows of h of a chunk of tokens.
    pub fn rows(&self, tokens: &Range<usize>) -> Result<u64, Error> {
        let Some(hopper) = &self.job.prepared.hopper else { return Ok(0) };
        let packed = hopper.packed.map(|room| self.job.at(room));
        hopper.gather(&self.job.queue, &self.chunk(tokens, &(0..0)), packed)
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
        let Prepared { asked, plan, filter, kernels, .. } = self.job.prepared;
        let head = asked.head() && !plan.apart;
        if !(asked.dh || head || filter.is_some()) {
            return Ok(());
        }
        for classes in self.classes() {
            let call = self.chunk(tokens, &classes);
            self.gradients(&call, h, plan.keeps)?;
            if let Some(filter) = filter {
                filter.choose((&self.job.queue, kernels), &call, self.job.scratch)?;
            }
            if asked.dh {
                self.hidden(&call, &classes)?;
            }
            if head {
                self.head(&call, h, tokens, &classes)?;
            }
        }
        Ok(())
    }

    /// Where what da of a chunk of tokens is multiplied by lies; 0 if it is not.
    fn scale_of(&self, call: &Call) -> u64 {
        let room = self.job.prepared.hopper.as_ref().and_then(|hopper| hopper.scales);
        room.map_or(0, |room| self.job.at(room) + 4 * (call.first_token / call.rows) as u64)
    }

    /// Finds it.
    pub fn scale(&self, call: &Call) -> Result<(), Error> {
        match (self.scale_of(call), &self.job.prepared.hopper) {
            (0, _) | (_, None) => Ok(()),
            _ if !self.job.prepared.asked.gradients() => Ok(()),
            (scale, Some(hopper)) => hopper.scale(&self.job.queue, call, scale),
        }
    }

    /// dw and dbias, whose sums wait beside them for the next chunk of tokens.
    pub fn by_classes(&self) -> Result<(), Error> {
        for classes in self.classes() {
            for tokens in self.tokens() {
                let (call, h) = (self.chunk(&tokens, &classes), self.rows(&tokens)?);
                self.gradients(&call, h, false)?;
                self.head(&call, h, &tokens, &classes)?;
            }
        }
        Ok(())
    }

    /// (C33), (C34) of all classes.
    pub fn totals(&self, tokens: &Range<usize>, h: u64) -> Result<(), Error> {
        let Prepared { plan, hopper, .. } = self.job.prepared;
        let Some(hopper) = hopper else {
            for classes in self.classes() {
                let call = self.chunk(tokens, &classes);
                self.logits(&call)?;
                self.launch("totals", tokens.len(), 256, &call)?;
            }
            return Ok(());
        };
        let vocab = self.call.vocab as usize;
        let each = Hopper::leaf_columns(&self.call, plan.plane);
        chunks(vocab, each).try_for_each(|classes| {
            hopper.totals(&self.job.queue, &self.chunk(tokens, &classes), h)
        })
    }

    /// (C1), (C2), and in the second order (C21).
    fn logits(&self, call: &Call) -> Result<(), Error> {
        let tiles = |x: i32| (x as usize).div_ceil(SIDE);
        let blocks = tiles(call.count) * tiles(call.classes);
        self.launch("logits", blocks, 256, call)?;
        if self.job.prepared.asked.second {
            self.launch("motions", blocks, 256, call)?;
        }
        Ok(())
    }

    /// (C16), and in the second order (C27); of logits that are `kept`, or computed now.
    fn gradients(&self, call: &Call, h: u64, kept: bool) -> Result<(), Error> {
        if let Some(hopper) = &self.job.prepared.hopper {
            return hopper.gradient(&self.job.queue, call, [h, self.scale_of(call)]);
        }
        if !kept {
            self.logits(call)?;
        }
        let parts = (call.columns as usize).div_ceil(1024);
        self.launch("gradients", call.count as usize * parts, 256, call)
    }

    /// (C17) or (C28).
    fn hidden(&self, call: &Call, classes: &Range<usize>) -> Result<(), Error> {
        let tiles = |x: i32| (x as usize).div_ceil(SIDE);
        let begins = i32::from(classes.start == 0);
        let ends = i32::from(classes.end == call.vocab as usize);
        let call = Call { begins, ends, wide: i32::from(self.wide_hidden), ..*call };
        match &self.job.prepared.hopper {
            Some(hopper) => {
                let Prepared { asked, plan, .. } = self.job.prepared;
                let wide = asked.columns_of_hidden(plan.rows, call.dim as usize);
                hopper.hidden(&self.job.queue, &call, self.scale_of(&call), (wide, plan.block))
            }
            None => self.launch("hidden", tiles(call.count) * tiles(call.dim), 256, &call),
        }
    }

    /// (C18) and (C19), or (C29) and (C30).
    fn head(
        &self,
        call: &Call,
        h: u64,
        tokens: &Range<usize>,
        classes: &Range<usize>,
    ) -> Result<(), Error> {
        let Prepared { asked, plan, rooms, hopper, .. } = self.job.prepared;
        let tiles = |x: i32| (x as usize).div_ceil(SIDE);
        let first = 4 * classes.start as u64;
        // Where f32 is stored, the sums wait in place.
        let head = match plan.apart {
            true => self.job.at(rooms.head),
            false => call.dw + first * call.dim as u64,
        };
        let bias = if asked.wide { call.dbias } else { self.head_bias };
        let call = Call {
            head,
            head_bias: bias + first,
            begins: i32::from(tokens.start == 0),
            ends: i32::from(tokens.end == call.all as usize),
            ..*call
        };
        if asked.dw {
            match hopper {
                Some(hopper) => hopper.head(&self.job.queue, &call, [h, self.scale_of(&call)])?,
                None => {
                    let blocks = tiles(call.classes) * tiles(call.dim);
                    self.launch("head", blocks, 256, &call)?;
                }
            }
        }
        if asked.dbias {
            match hopper {
                Some(hopper) => hopper.bias(&self.job.queue, &call, self.scale_of(&call))?,
                None => self.launch("bias", (call.classes as usize).div_ceil(32), 256, &call)?,
            }
        }
        Ok(())
    }
}

const _: () = assert!(TILE.is_multiple_of(SIDE));
