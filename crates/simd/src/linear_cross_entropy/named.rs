//! Every pass by name.

use super::choice::{self, CertificateMut, Choice, Limits};
use super::cut::{Asked, Cut};
use super::gradient::Pull;
use super::gradients::{Kept, in_place, is_apart};
use super::logits::{Link, Wanted};
use super::operands::{Cotangents, Gradients, Operands, Outputs};
use super::output::write;
use super::partial::Partial;
use super::sweeps::sweeps;
use super::tokens::{Token, Tokens};
use super::totals::Sweep;
use super::{cut, pack};
use crate::known::Known;
use crate::named::Inputs;
use crate::parallel::share;
use crate::tiles::tiles;
use crate::workspace::{Lists, Parts};
use crate::{Options, Workspace};
use etalon_problem::{Error, LinearCrossEntropy, Pass, Views, ViewsMut};
use ndarray::s;

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
    let outputs = match known.pass {
        Pass::Backward => Outputs::default(),
        _ => Outputs::new(out)?,
    };
    let mut gradients = Gradients::new(out, known.pass)?;
    let asked = Asked {
        totals: false,
        dh: gradients.dh.is_some(),
        dw: gradients.dw.is_some(),
        dbias: gradients.dbias.is_some(),
        dw_apart: is_apart(&mut gradients),
        filter: filter.is_some(),
    };
    let more = if filter.is_some() { choice::lists_bytes(problem) } else { 0 };
    let bytes = lists_bytes(problem).saturating_add(more);
    let lists = workspace.lists(bytes, "the tokens that count")?;
    let tokens = Tokens::new(problem, &operands, &lists)?;
    let sweeps = sweeps(problem, options, asked);
    let pass = First { operands, cotangents, tokens: &tokens, link: Link::new(problem) };
    pass.run(workspace, &lists, sweeps, filter, (outputs, gradients))
}

/// Bytes of what is kept of every token, and of every tile.
pub fn lists_bytes(problem: &LinearCrossEntropy) -> usize {
    let token = size_of::<Token>() + size_of::<Partial>() + size_of::<Pull>();
    let tiles = problem.vocab.div_ceil(cut::TILE).saturating_mul(size_of::<f32>());
    problem.tokens.saturating_mul(token).saturating_add(tiles).saturating_add(256)
}

/// A forward or backward pass, or both at once.
pub struct First<'t, 'a> {
    pub operands: Operands<'a>,
    pub cotangents: Cotangents<'a>,
    pub tokens: &'t Tokens<'a>,
    pub link: Link,
}

impl First<'_, '_> {
    fn run(
        &self,
        workspace: &Workspace,
        lists: &Lists,
        sweeps: [Option<Cut>; 3],
        filter: Option<(Limits, CertificateMut<'_>)>,
        (outputs, mut gradients): (Outputs<'_>, Gradients<'_>),
    ) -> Result<(), Error> {
        let (problem, counted) = (self.tokens.problem, self.tokens.counted);
        let tiles = problem.vocab.div_ceil(cut::TILE);
        let weights = self.tile_weights(lists.repeat(tiles, 0.0, "weights of tiles")?);
        let zero = Partial { m: 0.0, l: 0.0, u: 0.0, s: 0.0, target: 0.0, argmax: 0 };
        let totals = lists.repeat(counted.len(), zero, "the totals of tokens")?;
        let pulls = match sweeps.iter().flatten().any(|cut| cut.asked.gradients()) {
            true => lists.repeat(counted.len(), Pull::default(), "what tokens pull with")?,
            false => &mut [],
        };
        let choice = filter.map(|filter| Choice::new(lists, (counted.len(), tiles), filter));
        let mut choice = choice.transpose()?;
        let bytes = sweeps.iter().flatten().map(Cut::bytes).max().unwrap_or(0);
        let what = "packed operands, logits, sums and the scratch of threads";
        let mut room = workspace.room(bytes / size_of::<f32>(), what)?;
        // From here on nothing fails.
        clear(&mut gradients, counted.len() < problem.tokens, counted.is_empty());
        let wanted = Wanted {
            u: outputs.entropy.is_some() || self.cotangents.dentropy.is_some(),
            s: problem.label_smoothing > 0.0,
            argmax: outputs.argmax.is_some(),
        };
        if let Some(choice) = &mut choice {
            choice.read(&self.operands, counted, rayon::current_num_threads());
        }
        for cut in sweeps.iter().flatten() {
            let sweep = Sweep { cut, operands: &self.operands, link: self.link, wanted, weights };
            let (shared, scratch) = room.split_at_mut(cut.shared_bytes() / size_of::<f32>());
            let choice = choice.as_mut();
            self.sweep(&sweep, (shared, scratch), (totals, pulls), &mut gradients, choice);
        }
        write(self.tokens, totals, outputs);
        Ok(())
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
        (totals, pulls): (&mut [Partial], &mut [Pull]),
        gradients: &mut Gradients<'_>,
        mut filter: Option<&mut Choice<'_, '_>>,
    ) {
        let (cut, counted) = (sweep.cut, self.tokens.counted);
        let shared = &mut cut.shared(&mut Parts::of(room));
        if let Some(sums) = cut.asked.dbias.then_some(&mut *shared.dbias) {
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
            let store = cut.asked.gradients().then_some(&mut *shared.store);
            sweep.logits(tokens, span.clone(), shared.across, store, shared.nodes, scratch);
            if cut.asked.totals {
                sweep.totals(tokens, shared.nodes, &mut totals[here.clone()]);
                let pulls = pulls.get_mut(here.clone());
                self.pull(cut.threads, tokens, &totals[here.clone()], pulls);
            }
            if cut.asked.gradients() {
                let entropy = self.cotangents.dentropy.is_some();
                let mut kept = Kept {
                    tokens,
                    pulls: &pulls[here.clone()],
                    totals: &totals[here.clone()],
                    span: span.clone(),
                    entropy,
                    chosen: None,
                };
                sweep.logit_gradients(&kept, shared.store);
                if let Some(choice) = filter.as_deref_mut() {
                    let tokens = (tokens, here.start);
                    kept.chosen = Some(choice.choose(cut, tokens, span, shared.store, measures));
                }
                self.gradients(sweep, &kept, (chunk, chunks), shared, scratch, gradients);
            }
        }
        self.finish(sweep, shared, gradients);
    }

    fn pack(&self, cut: &Cut, tokens: &[Token], shared: &mut cut::Shared<'_>) {
        pack::across(self.operands.h, tokens, cut.cols, cut.threads, shared.across);
        if cut.asked.dw {
            let shape = (cut.chunk, cut.cols);
            pack::along(self.operands.h, tokens, shape, cut.threads, shared.along);
        }
    }

    /// (C12)–(C14), where there are places for them.
    pub fn pull(
        &self,
        threads: usize,
        tokens: &[Token],
        totals: &[Partial],
        pulls: Option<&mut [Pull]>,
    ) {
        let tasks = tokens.chunks(1024).zip(totals.chunks(1024));
        let tasks = tasks.zip(pulls.unwrap_or_default().chunks_mut(1024));
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
    }

    /// What the gradients of the logits of some tokens and tiles add to those of the operands.
    fn gradients(
        &self,
        sweep: &Sweep<'_, '_>,
        kept: &Kept<'_>,
        (chunk, chunks): (usize, usize),
        shared: &mut cut::Shared<'_>,
        scratch: &mut [f32],
        gradients: &mut Gradients<'_>,
    ) {
        let (cut, asked) = (sweep.cut, sweep.cut.asked);
        let classes = kept.span.start * cut::TILE..cut.vocab.min(kept.span.end * cut::TILE);
        if asked.dw || asked.dbias {
            let dw = match gradients.dw.as_mut().filter(|_| asked.dw) {
                None => None,
                Some(_) if asked.dw_apart => {
                    let stride = cut.dim.next_multiple_of(cut.cols);
                    let first = if cut.classes_outside { 0 } else { classes.start };
                    Some((&mut shared.dw[first * stride..][..classes.len() * stride], stride))
                }
                Some(dw) => in_place(dw)
                    .map(|dw| (&mut dw[classes.start * cut.dim..classes.end * cut.dim], cut.dim)),
            };
            let dbias = asked.dbias.then_some(&mut *shared.dbias);
            sweep.head_gradients(
                kept,
                (shared.store, shared.along),
                dw,
                dbias,
                chunk == 0,
                scratch,
            );
        }
        if asked.dw_apart && asked.dw && cut.classes_outside && chunk + 1 == chunks {
            let dw = gradients.dw.as_mut().map(|dw| dw.view_mut().slice(s![classes, ..]));
            dw.into_iter().for_each(|dw| sweep.write_head(shared.dw, dw));
        }
        let Some(dh) = gradients.dh.as_mut().filter(|_| asked.dh) else { return };
        let sums = match cut.classes_outside {
            true => {
                let each = shared.dh.len() / cut.tokens.div_ceil(cut.chunk).max(1);
                &mut shared.dh[chunk * each..][..each]
            }
            false => &mut *shared.dh,
        };
        sweep.hidden_gradient(kept, shared.store, sums, scratch);
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
        let asked = sweep.cut.asked;
        if self.tokens.counted.is_empty() {
            return;
        }
        if let Some(dw) = gradients.dw.as_mut().filter(|_| asked.dw && asked.dw_apart)
            && !sweep.cut.classes_outside
        {
            sweep.write_head(shared.dw, dw.view_mut());
        }
        if let Some(dbias) = gradients.dbias.as_mut().filter(|_| asked.dbias) {
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
