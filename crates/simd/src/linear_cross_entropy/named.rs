//! Every pass by name.

use super::choice::{self, CertificateMut, Choice, Limits};
use super::cut::{Cut, SweepSpec};
use super::gradient::Pull;
use super::gradients::{Factors, Head, in_place, is_apart};
use super::kept::Kept;
use super::logits::{Link, Wanted};
use super::operands::{Cotangents, Gradients, Operands, Outputs, SecondOutputs};
use super::output::write;
use super::partial::Partial;
use super::second::motion::Motion;
use super::second::{self, gradient::pull_motion};
use super::sweeps::sweeps;
use super::tokens::{Token, Tokens};
use super::totals::Sweep;
use super::{cut, pack};
use crate::known::Known;
use crate::named::Inputs;
use crate::parallel::share;
use crate::tiles::tiles;
use crate::workspace::{Lists, Parts, Region};
use crate::{Options, Workspace};
use etalon_problem::{Error, LinearCrossEntropy, Pass, Views, ViewsMut};
use ndarray::s;
use std::ops::Range;

/// Tokens of a task that has no sum over classes.
const LOT: usize = 1024;

/// Runs a pass; its inputs and the places of its outputs have been checked.
pub fn run(
    workspace: &Workspace,
    known: &Known,
    problem: &LinearCrossEntropy,
    inputs: &Views<'_>,
    out: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    run_filtered(workspace, known, problem, inputs, out, None, options)
}

/// As [`run`], with a filter and its certificate, if there is one: that of a backward pass.
pub fn run_filtered(
    workspace: &Workspace,
    known: &Known,
    problem: &LinearCrossEntropy,
    inputs: &Views<'_>,
    out: &mut ViewsMut<'_>,
    filter: Option<(Limits, CertificateMut<'_>)>,
    options: &Options,
) -> Result<(), Error> {
    let operands = Operands::new(Inputs(inputs))?;
    let cotangents = match known.pass {
        Pass::Forward => Cotangents::default(),
        _ => Cotangents::new(Inputs(inputs))?,
    };
    let second = match known.pass {
        Pass::DoubleBackward => Some(Cotangents::second(Inputs(inputs))?),
        _ => None,
    };
    let outputs = match known.pass {
        Pass::Backward | Pass::DoubleBackward => Outputs::default(),
        _ => Outputs::new(out)?,
    };
    let motions = match second {
        Some(_) => SecondOutputs::new(out)?,
        None => SecondOutputs::default(),
    };
    let mut gradients = Gradients::new(out, known.pass)?;
    let spec = SweepSpec {
        totals: false,
        dh: gradients.dh.is_some(),
        dw: gradients.dw.is_some(),
        dbias: gradients.dbias.is_some(),
        dw_apart: is_apart(&mut gradients),
        second: second.is_some(),
        ddh: operands.ddh.is_some(),
        ddw: operands.ddw.is_some(),
        filter: filter.is_some(),
        bf16: operands.bf16(options) && filter.is_none(),
        pieces: options.precision.pieces(),
    };
    let lists = workspace.lists(lists_bytes(problem, spec), "the tokens that count")?;
    let tokens = Tokens::new(problem, &operands, &lists)?;
    let sweeps = sweeps(problem, options, spec);
    let tokens = &tokens;
    let pass = Call { operands, cotangents, second, tokens, link: Link::new(problem) };
    pass.run(workspace, &lists, sweeps, filter, (outputs, motions, gradients))
}

/// Bytes of what is kept of every token, and of every tile; with a filter also of what that keeps.
pub fn lists_bytes(problem: &LinearCrossEntropy, spec: SweepSpec) -> usize {
    let first = size_of::<Token>() + size_of::<Partial>() + size_of::<Pull>();
    let second = size_of::<Motion>() + size_of::<Pull>();
    let token = if spec.second { first + second } else { first };
    let tiles = problem.vocab.div_ceil(cut::TILE).saturating_mul(size_of::<f32>());
    let filter = if spec.filter { choice::lists_bytes(problem) } else { 0 };
    let tokens = problem.tokens.saturating_mul(token);
    tokens.saturating_add(tiles).saturating_add(filter).saturating_add(256)
}

/// The memory of a sweep.
pub fn room(workspace: &Workspace, bytes: usize) -> Result<Region, Error> {
    let what = "packed operands, logits, sums and the scratch of threads";
    workspace.room(bytes / size_of::<f32>(), what)
}

/// A pass.
pub struct Call<'t, 'a> {
    pub operands: Operands<'a>,
    pub cotangents: Cotangents<'a>,
    /// The cotangents of the second order, in that.
    pub second: Option<Cotangents<'a>>,
    pub tokens: &'t Tokens<'a>,
    pub link: Link,
}

/// Numbers that are kept of the tokens that count.
pub struct PerToken<'l> {
    pub totals: &'l mut [Partial],
    /// Of a pass with gradients.
    pub pulls: &'l mut [Pull],
    /// Of the second order.
    pub motions: &'l mut [Motion],
    /// Of the second order with gradients.
    pub pull_motions: &'l mut [Pull],
}

impl Call<'_, '_> {
    fn run(
        &self,
        workspace: &Workspace,
        lists: &Lists,
        sweeps: [Option<Cut>; 3],
        filter: Option<(Limits, CertificateMut<'_>)>,
        (outputs, motions, mut gradients): (Outputs<'_>, SecondOutputs<'_>, Gradients<'_>),
    ) -> Result<(), Error> {
        let (problem, counted) = (self.tokens.problem, self.tokens.counted);
        let tiles = problem.vocab.div_ceil(cut::TILE);
        let weights = self.tile_weights(lists.repeat(tiles, 0.0, "weights of tiles")?);
        let mut rows = self.per_token(lists, &sweeps)?;
        let choice = filter.map(|filter| Choice::new(lists, (counted.len(), tiles), filter));
        let mut choice = choice.transpose()?;
        let bytes = sweeps.iter().flatten().map(Cut::bytes).max().unwrap_or(0);
        let mut room = room(workspace, bytes)?;
        // From here on nothing fails.
        clear(&mut gradients, counted.len() < problem.tokens, counted.is_empty());
        let wanted = Wanted {
            u: outputs.entropy.is_some() || motions.gdentropy.is_some() || self.pulls_entropy(),
            s: problem.label_smoothing > 0.0,
            argmax: outputs.argmax.is_some(),
        };
        if let Some(choice) = &mut choice {
            choice.read(&self.operands, counted, rayon::current_num_threads());
        }
        for cut in sweeps.iter().flatten() {
            let link = self.link;
            let sweep = Sweep { cut, operands: &self.operands, link, wanted, weights };
            let (shared, scratch) = room.split_at_mut(cut.shared_bytes() / size_of::<f32>());
            let choice = choice.as_mut();
            self.sweep(&sweep, (shared, scratch), &mut rows, &mut gradients, choice);
        }
        write(self.tokens, rows.totals, outputs);
        second::output::write(self.tokens, rows.totals, rows.motions, motions);
        Ok(())
    }

    /// Room for what is kept of the tokens that count.
    fn per_token<'l>(
        &self,
        lists: &'l Lists,
        sweeps: &[Option<Cut>; 3],
    ) -> Result<PerToken<'l>, Error> {
        let second = self.second.is_some();
        let gradients = sweeps.iter().flatten().any(|cut| cut.spec.gradients());
        let count = |wanted: bool| if wanted { self.tokens.counted.len() } else { 0 };
        let pulls = |wanted| lists.repeat(count(wanted), Pull::default(), "what tokens pull with");
        Ok(PerToken {
            totals: lists.repeat(count(true), Partial::default(), "the totals of tokens")?,
            pulls: pulls(gradients)?,
            motions: lists.repeat(count(second), Motion::default(), "the motions of totals")?,
            pull_motions: pulls(gradients && second)?,
        })
    }

    /// True if some entropy has a cotangent, of either order.
    fn pulls_entropy(&self) -> bool {
        let all = [Some(&self.cotangents), self.second.as_ref()];
        all.into_iter().flatten().any(|cotangents| cotangents.dentropy.is_some())
    }

    /// Σ cw of every tile.
    pub fn tile_weights<'l>(&self, weights: &'l mut [f32]) -> &'l [f32] {
        let classes = self.operands.w.shape()[0];
        for (weight, classes) in weights.iter_mut().zip(tiles(0..classes, cut::TILE)) {
            *weight = match self.operands.class_weights {
                Some(all) => {
                    all.slice(s![classes]).iter().map(|&x| f64::from(x)).sum::<f64>() as f32
                }
                None => classes.len() as f32,
            };
        }
        weights
    }

    /// One sweep over all tokens and classes.
    pub fn sweep(
        &self,
        sweep: &Sweep<'_, '_>,
        (room, scratch): (&mut [f32], &mut [f32]),
        rows: &mut PerToken<'_>,
        gradients: &mut Gradients<'_>,
        mut filter: Option<&mut Choice<'_, '_>>,
    ) {
        let (cut, counted) = (sweep.cut, self.tokens.counted);
        let shared = &mut cut.shared(&mut Parts::of(room));
        if let Some(sums) = cut.spec.dbias.then_some(&mut *shared.dbias) {
            sums.fill(0.0);
        }
        // Another sweep makes the same choices anew.
        filter.iter_mut().for_each(|choice| choice.clear());
        let measures = std::mem::take(&mut shared.measures);
        let chunks = counted.len().div_ceil(cut.chunk);
        let spans = cut.spans();
        let mut packed = None;
        for step in 0..chunks * spans {
            let (chunk, span) = match cut.classes_outside {
                true => (step % chunks, step / chunks),
                false => (step / spans, step % spans),
            };
            let here = chunk * cut.chunk..counted.len().min((chunk + 1) * cut.chunk);
            let tokens = &counted[here.clone()];
            if packed != Some(chunk) {
                self.pack(cut, tokens, shared);
                packed = Some(chunk);
            }
            let span = span * cut.span..cut.tiles.min((span + 1) * cut.span);
            // Gradients follow logits at once if totals are known, but in the second order in f32.
            let SweepSpec { second, bf16, .. } = cut.spec;
            let at_once = cut.spec.gradients() && !cut.spec.totals && (bf16 || !second);
            let known = at_once.then(|| self.kept(rows, here.clone(), span.clone()));
            sweep.logits(tokens, span.clone(), shared, scratch, known.as_ref());
            if cut.spec.totals {
                let motions = rows.motions.get_mut(here.clone()).unwrap_or_default();
                sweep.totals(tokens, shared.nodes, &mut rows.totals[here.clone()], motions);
                self.pull(cut.threads, here.clone(), rows);
            }
            if cut.spec.gradients() {
                let mut kept = self.kept(rows, here.clone(), span.clone());
                if !at_once {
                    sweep.logit_gradients(&kept, (shared.store, shared.motion), scratch);
                }
                if let Some(choice) = filter.as_deref_mut() {
                    let tokens = (tokens, here.start);
                    kept.chosen = Some(choice.choose(cut, tokens, span, shared.store, measures));
                }
                self.gradients(sweep, &kept, (chunk, chunks), shared, scratch, gradients);
            }
        }
        self.finish(sweep, shared, gradients);
    }

    /// Some tokens in a span of tiles.
    fn kept<'k>(
        &'k self,
        rows: &'k PerToken<'_>,
        tokens: Range<usize>,
        span: Range<usize>,
    ) -> Kept<'k> {
        Kept {
            tokens: &self.tokens.counted[tokens.clone()],
            pulls: &rows.pulls[tokens.clone()],
            totals: &rows.totals[tokens.clone()],
            pull_motions: rows.pull_motions.get(tokens.clone()).unwrap_or_default(),
            motions: rows.motions.get(tokens).unwrap_or_default(),
            span,
            entropy: self.pulls_entropy(),
            chosen: None,
        }
    }

    fn pack(&self, cut: &Cut, tokens: &[Token], shared: &mut cut::Shared<'_>) {
        let (shape, threads) = ((cut.chunk, cut.cols), cut.threads);
        if let Some(h) = self.operands.h.bf16().filter(|_| cut.spec.bf16) {
            let ddh = self.operands.ddh.as_ref().and_then(|ddh| ddh.bf16());
            pack::across_tiles(h, tokens, threads, shared.across);
            if let Some(ddh) = ddh {
                pack::across_tiles(ddh, tokens, threads, shared.ddh_across);
            }
            if cut.spec.dw {
                pack::along_tiles((h, ddh), tokens, (cut.chunk, threads), shared.along);
            }
            return;
        }
        pack::across(self.operands.h, tokens, cut.cols, threads, shared.across);
        if cut.spec.dw {
            pack::along(self.operands.h, tokens, shape, threads, shared.along);
        }
        let Some(ddh) = self.operands.ddh else { return };
        pack::across(ddh, tokens, cut.cols, threads, shared.ddh_across);
        if cut.spec.dw {
            pack::along(ddh, tokens, shape, threads, shared.ddh_along);
        }
    }

    /// (C12)–(C14) of some tokens, and how they move, where there are places for them.
    pub fn pull(&self, threads: usize, here: Range<usize>, rows: &mut PerToken<'_>) {
        let (tokens, totals) = (&self.tokens.counted[here.clone()], &rows.totals[here.clone()]);
        let pulls = rows.pulls.get_mut(here.clone()).unwrap_or_default();
        let tasks = tokens.chunks(LOT).zip(totals.chunks(LOT)).zip(pulls.chunks_mut(LOT));
        share(
            0..threads,
            |_| (),
            tasks,
            |((tokens, totals), pulls), ()| {
                for ((token, total), pull) in tokens.iter().zip(totals).zip(pulls) {
                    *pull = Pull::new(self.tokens, &self.cotangents, token, total);
                }
            },
        );
        let Some(second) = &self.second else { return };
        let motions = rows.motions.get(here.clone()).unwrap_or_default();
        let pulls = rows.pull_motions.get_mut(here).unwrap_or_default();
        let lots = tokens.chunks(LOT).zip(totals.chunks(LOT)).zip(motions.chunks(LOT));
        share(
            0..threads,
            |_| (),
            lots.zip(pulls.chunks_mut(LOT)),
            |(((tokens, totals), motions), pulls), ()| {
                let rows = tokens.iter().zip(totals.iter().zip(motions));
                for ((token, total), pull) in rows.zip(pulls) {
                    let cotangents = [&self.cotangents, second];
                    *pull = pull_motion(self.tokens, cotangents, token, total);
                }
            },
        );
    }

    /// Adds the contributions of some tokens and tiles to the gradients of the operands.
    fn gradients(
        &self,
        sweep: &Sweep<'_, '_>,
        kept: &Kept<'_>,
        (chunk, chunks): (usize, usize),
        shared: &mut cut::Shared<'_>,
        scratch: &mut [f32],
        gradients: &mut Gradients<'_>,
    ) {
        let (cut, spec) = (sweep.cut, sweep.cut.spec);
        let factors = Factors { store: shared.store, motion: shared.motion };
        let classes = kept.span.start * cut::TILE..cut.vocab.min(kept.span.end * cut::TILE);
        if spec.dw || spec.dbias {
            let dw = match gradients.dw.as_mut().filter(|_| spec.dw) {
                None => None,
                Some(_) if cut.dw_apart() => {
                    let stride = cut.dim.next_multiple_of(cut.cols);
                    let first = if cut.classes_outside { 0 } else { classes.start };
                    let sums = &mut shared.dw[first * stride..][..classes.len() * stride];
                    Some(Head::Sums(sums, stride))
                }
                Some(dw) if spec.dw_apart => {
                    Some(Head::Result(dw.view_mut().slice(s![classes.clone(), ..])))
                }
                Some(dw) => in_place(dw).map(|dw| {
                    Head::Sums(&mut dw[classes.start * cut.dim..classes.end * cut.dim], cut.dim)
                }),
            };
            let dbias = spec.dbias.then_some(&mut *shared.dbias);
            sweep.head_gradients(
                kept,
                (factors, [&*shared.along, &*shared.ddh_along]),
                dw,
                dbias,
                chunk == 0,
                scratch,
            );
        }
        if cut.dw_apart() && spec.dw && cut.classes_outside && chunk + 1 == chunks {
            let dw = gradients.dw.as_mut().map(|dw| dw.view_mut().slice(s![classes, ..]));
            dw.into_iter().for_each(|dw| sweep.write_head(shared.dw, dw));
        }
        let Some(dh) = gradients.dh.as_mut().filter(|_| spec.dh) else { return };
        let sums = match cut.classes_outside {
            true => {
                let each = shared.dh.len() / cut.tokens.div_ceil(cut.chunk).max(1);
                &mut shared.dh[chunk * each..][..each]
            }
            false => &mut *shared.dh,
        };
        sweep.hidden_gradient(kept, factors, sums, scratch);
        if kept.span.end == cut.tiles {
            sweep.write_hidden(kept.tokens, sums, dh, gradients.dh_adds);
        }
    }

    /// Writes what was summed over all tokens.
    fn finish(
        &self,
        sweep: &Sweep<'_, '_>,
        shared: &cut::Shared<'_>,
        gradients: &mut Gradients<'_>,
    ) {
        let (cut, spec) = (sweep.cut, sweep.cut.spec);
        if self.tokens.counted.is_empty() {
            return;
        }
        if let Some(dw) = gradients.dw.as_mut().filter(|_| spec.dw && cut.dw_apart())
            && !cut.classes_outside
        {
            sweep.write_head(shared.dw, dw.view_mut());
        }
        if let Some(dbias) = gradients.dbias.as_mut().filter(|_| spec.dbias) {
            dbias.view_mut().write(shared.dbias, 1.0);
        }
    }
}

/// Fills what is not written otherwise with 0: rows of ignored tokens, and all where no token counts.
pub fn clear(gradients: &mut Gradients<'_>, some_ignored: bool, all_ignored: bool) {
    let adds = gradients.dh_adds;
    if let Some(dh) = gradients.dh.as_mut().filter(|_| some_ignored && !adds) {
        dh.fill(0.0);
    }
    if all_ignored {
        gradients.dw.iter_mut().for_each(|dw| dw.fill(0.0));
        gradients.dbias.iter_mut().for_each(|dbias| dbias.fill(0.0));
    }
}
