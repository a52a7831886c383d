//! Linear_cross_entropy: its cases, and its host: tiles of classes in a streaming softmax.

mod bugs;
mod cases;
pub(crate) mod filter;

pub(crate) use bugs::MUTANTS;
pub use cases::Point;

use crate::zoo::job::{Bug, Job, Softmax};
use crate::zoo::rows::{Results, Rows, add, dot, larger, through_bf16};
use etalon_problem::{Error, LinearCrossEntropy, LseSquareWeight, NothingLeft, Pass, Reduction};
use filter::{Filtering, tiles_of};
use std::ops::Range;

/// The results of a forward or backward pass. Fails at a target that is no class.
pub(super) fn results(job: &Job, problem: &LinearCrossEntropy) -> Result<Results, Error> {
    let host = Host { problem, job };
    host.check_targets()?;
    Ok(if job.pass == Pass::Forward { host.forward() } else { host.backward() })
}

struct Host<'a> {
    problem: &'a LinearCrossEntropy,
    job: &'a Job,
}

/// A logit, and its derivative by the product h · w.
struct Logit {
    z: f32,
    slope: f32,
}

/// Sums over the logits of a row.
struct Row {
    lse: f32,
    logprob: f32,
    entropy: f32,
    /// Σ cw (lse − z)
    spread: f32,
    argmax: usize,
}

impl Host<'_> {
    fn is(&self, bug: Bug) -> bool {
        self.job.is(bug)
    }

    /// The weight of a class or token; 1 without weights.
    fn weight(&self, name: &str, at: usize) -> f32 {
        self.job.given(name).map_or(1.0, |weights| weights.data[at])
    }

    fn target(&self, i: usize) -> Option<usize> {
        let target = self.job.input("targets").data[i] as i64;
        let class = target.clamp(0, self.problem.vocab as i64 - 1) as usize;
        (target != self.problem.ignore_index).then_some(class)
    }

    fn check_targets(&self) -> Result<(), Error> {
        let ignored = self.problem.ignore_index;
        let targets = self.job.input("targets").data.iter().map(|&target| target as i64);
        let classes = 0..self.problem.vocab as i64;
        match targets.enumerate().find(|(_, y)| *y != ignored && !classes.contains(y)) {
            Some((i, target)) if !self.is(bugs::TARGET_CLAMPED) => {
                Err(Error::value(format!("targets[{i}]"), "a class", target))
            }
            _ => Ok(()),
        }
    }

    /// The tokens that count, with their targets.
    fn counted(&self) -> Vec<(usize, usize)> {
        (0..self.problem.tokens).filter_map(|i| Some((i, self.target(i)?))).collect()
    }

    /// The rows of h or w.
    fn vectors(&self, name: &str) -> std::slice::ChunksExact<'_, f32> {
        self.job.input(name).data.chunks_exact(self.problem.dim)
    }

    /// Every logit of a token.
    fn logits(&self, h: &[f32]) -> Vec<Logit> {
        let bias = self.job.given("bias");
        let product = |(v, w)| dot(h, w) + bias.map_or(0.0, |bias| bias.data[v]);
        self.vectors("w").enumerate().map(product).map(|a| self.link(a)).collect()
    }

    fn link(&self, a: f32) -> Logit {
        let scale = self.problem.logit_scale as f32;
        let late = self.is(bugs::TEMPERATURE_OF_LOGPROB);
        let theta = if late { 1.0 } else { self.problem.temperature as f32 };
        match self.problem.softcap.map(|cap| cap as f32) {
            None => Logit { z: scale * a / theta, slope: scale / theta },
            Some(cap) => {
                let t = (scale * a / cap).tanh();
                let bend = if self.is(bugs::NO_CAP_DERIVATIVE) { 1.0 } else { 1.0 - t * t };
                Logit { z: cap * t / theta, slope: scale * bend / theta }
            }
        }
    }

    /// The tiles of a row, with classes that do not exist where a bug has them.
    fn tiles(&self, logits: &[Logit]) -> Vec<Vec<f32>> {
        let padding = match self.job.bug {
            Some(bugs::PADDED_CLASSES) => Some(0.0),
            Some(bugs::PADDING_CAPPED) => Some(self.link(f32::NEG_INFINITY).z),
            _ => None,
        };
        let filled = |tile: Range<usize>| {
            let mut z: Vec<f32> = logits[tile].iter().map(|logit| logit.z).collect();
            padding.into_iter().for_each(|padding| z.resize(self.job.style.tile, padding));
            z
        };
        self.job.tiles(logits.len()).map(filled).collect()
    }

    fn row(&self, logits: &[Logit], y: usize) -> Row {
        let job = self.job;
        let tiles = self.tiles(logits);
        let maximum = |tile: &Vec<f32>| tile.iter().copied().fold(f32::NEG_INFINITY, larger);
        let mut m = if self.is(bugs::MAXIMUM_STARTS_AT_ZERO) { 0.0 } else { f32::NEG_INFINITY };
        if job.style.softmax == Softmax::TwoPass {
            m = tiles.iter().map(maximum).fold(m, larger);
        }
        // Σ e^(z − m), and Σ e^(z − m) (z − m)
        let (mut l, mut u) = (0.0, 0.0);
        for tile in &tiles {
            let (new, factor) = job.raise(m, maximum(tile));
            if !self.is(bugs::ENTROPY_NOT_RESCALED) {
                u = if factor == 0.0 { 0.0 } else { factor * (u + (m - new) * l) };
            }
            (m, l) = (new, factor * l);
            for z in tile {
                let e = if m == f32::NEG_INFINITY { 0.0 } else { job.exp(*z, m) };
                l += e;
                if e > 0.0 || self.is(bugs::ENTROPY_TIMES_ZERO) {
                    u += e * (z - m);
                }
            }
        }
        let lse = job.lse(m, l);
        let target = match self.is(bugs::TARGET_BY_MASK) {
            true => logits.iter().enumerate().map(|(v, x)| x.z * f32::from(v == y)).sum(),
            false => logits.get(y).map_or(0.0, |x| x.z),
        };
        let late = self.is(bugs::TEMPERATURE_OF_LOGPROB);
        let theta = if late { self.problem.temperature as f32 } else { 1.0 };
        let (spread, argmax) = (self.spread(logits, lse), self.argmax(logits));
        Row { lse, logprob: (target - lse) / theta, entropy: l.ln() - u / l, spread, argmax }
    }

    fn spread(&self, logits: &[Logit], lse: f32) -> f32 {
        let weighted =
            logits.iter().enumerate().map(|(v, x)| (self.weight("class_weights", v), x.z));
        let distance = |z: f32| match self.is(bugs::SMOOTHING_BY_LOG) {
            true => -(z - lse).exp().ln(),
            false => lse - z,
        };
        weighted.filter(|(weight, _)| *weight != 0.0).map(|(weight, z)| weight * distance(z)).sum()
    }

    fn argmax(&self, logits: &[Logit]) -> usize {
        let (mut best, mut argmax) = (f32::NEG_INFINITY, 0);
        for (v, x) in logits.iter().enumerate() {
            if x.z > best || x.z == best && self.is(bugs::LAST_OF_EQUALS) {
                (best, argmax) = (x.z, v);
            }
        }
        argmax
    }

    /// α/V
    fn smooth(&self) -> f32 {
        let local = self.is(bugs::SMOOTHING_OF_TILE) && self.problem.vocab > self.job.style.tile;
        let classes = if local { self.job.style.tile } else { self.problem.vocab };
        self.problem.label_smoothing as f32 / classes as f32
    }

    /// ζ κ_i ω_i
    fn lse_square(&self, i: usize, y: usize) -> f32 {
        let weighted = self.problem.lse_square_weight == LseSquareWeight::ClassWeight;
        let omega = if weighted { self.weight("class_weights", y) } else { 1.0 };
        self.problem.lse_square_scale as f32 * self.weight("token_weights", i) * omega
    }

    /// Z and Z_z.
    fn normalisers(&self) -> (f32, f32) {
        let counted = self.counted();
        let weight = |&(i, y)| self.weight("token_weights", i) * self.weight("class_weights", y);
        match (self.problem.reduction, self.problem.lse_square_weight) {
            (Reduction::None | Reduction::Sum, _) => (1.0, 1.0),
            (Reduction::By { normaliser }, _) => (normaliser as f32, normaliser as f32),
            (Reduction::Mean, of_square) => {
                let z = counted.iter().map(weight).sum();
                let by_number = of_square == LseSquareWeight::Unweighted;
                (z, if by_number { counted.len() as f32 } else { z })
            }
        }
    }

    fn divide(&self, x: f32, z: f32) -> f32 {
        match (z == 0.0, self.problem.nothing_left) {
            (false, _) => x / z,
            (true, NothingLeft::Zero) => 0.0,
            (true, _) => f32::NAN,
        }
    }

    fn forward(&self) -> Results {
        let tokens = self.problem.tokens;
        let (alpha, smooth) = (self.problem.label_smoothing as f32, self.smooth());
        let zeros = || Rows::filled(&[tokens], 0.0);
        let [mut lse, mut logprob, mut entropy, mut argmax] = [(); 4].map(|()| zeros());
        let [mut cross, mut square] = [(); 2].map(|()| vec![0.0; tokens]);
        argmax.data.fill(-1.0);
        for (i, y) in self.counted() {
            let row = self.row(&self.logits(self.vectors("h").nth(i).unwrap_or_default()), y);
            let weight = self.weight("class_weights", y);
            let has_own = alpha < 1.0 && weight != 0.0;
            let own = if has_own { -(1.0 - alpha) * weight * row.logprob } else { 0.0 };
            let spread = if alpha > 0.0 { smooth * row.spread } else { 0.0 };
            cross[i] = self.weight("token_weights", i) * (own + spread);
            square[i] = self.lse_square(i, y) * row.lse * row.lse;
            (lse.data[i], logprob.data[i]) = (row.lse, row.logprob);
            (entropy.data[i], argmax.data[i]) = (row.entropy, row.argmax as f32);
        }
        let (z, z_lse) = self.normalisers();
        let loss = match self.problem.reduction {
            Reduction::None => cross.iter().zip(&square).map(|(a, b)| a + b).collect(),
            _ => vec![self.divide(self.sum(&cross), z) + self.divide(self.sum(&square), z_lse)],
        };
        let loss = Rows { shape: [loss.len(), 1, 1, 1], data: loss };
        Results::from([
            ("loss", loss),
            ("lse", lse),
            ("logprob", logprob),
            ("entropy", entropy),
            ("argmax", argmax),
            ("n_valid", Rows::filled(&[], self.counted().len() as f32)),
            ("normaliser", Rows::filled(&[], z)),
        ])
    }

    fn sum(&self, list: &[f32]) -> f32 {
        if self.job.style.backwards { list.iter().rev().sum() } else { list.iter().sum() }
    }

    /// Element `i` of a cotangent; of the loss, the only one where it is reduced.
    fn cotangent(&self, name: &str, i: usize) -> f32 {
        let list = self.job.input(name);
        list.data.get(i).or(list.data.first()).copied().unwrap_or(0.0)
    }

    fn backward(&self) -> Results {
        let LinearCrossEntropy { tokens, dim, vocab, .. } = *self.problem;
        let mut dh = Rows::filled(&[1, 1, tokens, dim], 0.0);
        let mut dw = Rows::filled(&[1, 1, vocab, dim], 0.0);
        let mut dbias = Rows::filled(&[vocab], 0.0);
        let mut filtering = Filtering::new(self.job, tokens, vocab);
        let w: Vec<&[f32]> = self.vectors("w").collect();
        for i in self.job.order(tokens) {
            let y = match (self.target(i), self.is(bugs::IGNORED_IN_GRADIENT)) {
                (None, false) => continue,
                (y, _) => y.unwrap_or(vocab),
            };
            let h = self.vectors("h").nth(i).unwrap_or_default();
            let gradients = self.logit_gradients(h, i, y);
            for classes in tiles_of(vocab, self.job.style.tile) {
                let (da, w) = (&gradients[classes.clone()], &w[classes.clone()]);
                let left_out =
                    filtering.as_mut().is_some_and(|x| x.leave_out(i, &classes, da, h, w));
                for (v, (&da, w)) in classes.zip(da.iter().zip(w)) {
                    if !(left_out && self.is(bugs::DBIAS_FILTERED)) {
                        dbias.data[v] += da;
                    }
                    if left_out {
                        continue;
                    }
                    add(dh.row_mut([0, 0, i]), da, w);
                    let row = dw.row_mut([0, 0, v]);
                    add(row, da, h);
                    if self.is(bugs::DW_IN_BF16) {
                        row.iter_mut().for_each(|x| *x = through_bf16(*x));
                    }
                }
            }
        }
        let mut results = Results::from([("dh", dh), ("dw", dw), ("dbias", dbias)]);
        filtering.into_iter().for_each(|filtering| results.extend(filtering.results()));
        results
    }

    /// da of one token; `y` = V where it has no target.
    fn logit_gradients(&self, h: &[f32], i: usize, y: usize) -> Vec<f32> {
        let vocab = self.problem.vocab;
        let logits = self.logits(h);
        let row = self.row(&logits, y);
        let (z, z_lse) = self.normalisers();
        let own_weight = if y < vocab { self.weight("class_weights", y) } else { 0.0 };
        let dloss = self.cotangent("dloss", i);
        let (alpha, smooth) = (self.problem.label_smoothing as f32, self.smooth());
        let g = self.divide(dloss * self.weight("token_weights", i), z);
        let square = if y < vocab { dloss * self.lse_square(i, y) } else { 0.0 };
        let [dlse, dlogprob, dentropy] =
            ["dlse", "dlogprob", "dentropy"].map(|name| self.cotangent(name, i));
        let weights: f32 = (0..vocab).map(|v| self.weight("class_weights", v)).sum();
        let beta = g * (1.0 - alpha) * own_weight - dlogprob;
        let lambda = g * smooth * weights + 2.0 * self.divide(square, z_lse) * row.lse + dlse;
        let gradient = |(v, &Logit { z, slope }): (usize, &Logit)| {
            let p = self.job.exp(z, row.lse);
            let pulled = match v == y {
                true if self.is(bugs::TARGET_ROUNDED) => through_bf16(p) - 1.0,
                true => p - 1.0,
                false => p,
            };
            if self.is(bugs::SMALL_TILES_DROPPED) && pulled.abs() < 0.000_244_140_63 {
                return 0.0;
            }
            let surprise = if p > 0.0 { p * (z - row.lse + row.entropy) } else { 0.0 };
            let smoothed = g * smooth * self.weight("class_weights", v);
            slope * (pulled * beta + p * lambda - dentropy * surprise - smoothed)
        };
        logits.iter().enumerate().map(gradient).collect()
    }
}
