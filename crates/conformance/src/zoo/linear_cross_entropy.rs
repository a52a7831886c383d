//! The host of linear_cross_entropy: tiles of classes in a streaming softmax, the logits made again
//! for the gradients.

use super::host::{Job, Results, Softmax, through_bf16};
use super::mutant::Mutant;
use crate::bounds::values;
use etalon_problem::{Error, LinearCrossEntropy, LseSquareWeight, NothingLeft, Pass, Reduction};

/// The outputs of a request.
pub(super) fn results(problem: &LinearCrossEntropy, job: &Job<'_>) -> Result<Results, Error> {
    let pass = job.request.pass;
    let inputs = values(job.request.problem, pass, job.request.inputs)?;
    let list = |name: &str| -> Option<Vec<f32>> {
        Some(inputs.get(name)?.iter().map(|&x| x as f32).collect())
    };
    let host = Host {
        problem,
        job,
        h: list("h").unwrap_or_default(),
        w: list("w").unwrap_or_default(),
        bias: list("bias"),
        targets: inputs["targets"].iter().map(|&y| y as i64).collect(),
        class_weights: list("class_weights"),
        token_weights: list("token_weights"),
        cotangents: ["dloss", "dlse", "dlogprob", "dentropy"].map(list),
    };
    Ok(if pass == Pass::Forward { host.forward() } else { host.backward() })
}

struct Host<'a> {
    problem: &'a LinearCrossEntropy,
    job: &'a Job<'a>,
    h: Vec<f32>,
    w: Vec<f32>,
    bias: Option<Vec<f32>>,
    targets: Vec<i64>,
    class_weights: Option<Vec<f32>>,
    token_weights: Option<Vec<f32>>,
    /// Of the loss, of lse, of logprob and of the entropy.
    cotangents: [Option<Vec<f32>>; 4],
}

/// What a row's logits come to.
struct Row {
    lse: f32,
    logprob: f32,
    entropy: f32,
    /// Σ cw (lse − z)
    spread: f32,
    argmax: usize,
}

impl Host<'_> {
    fn is(&self, mutant: Mutant) -> bool {
        self.job.mutant == Some(mutant)
    }

    fn exp(&self, x: f32) -> f32 {
        if self.job.style.base2 { (x * std::f32::consts::LOG2_E).exp2() } else { x.exp() }
    }

    fn class_weight(&self, v: usize) -> f32 {
        self.class_weights.as_ref().map_or(1.0, |weights| weights[v])
    }

    fn token_weight(&self, i: usize) -> f32 {
        self.token_weights.as_ref().map_or(1.0, |weights| weights[i])
    }

    fn target(&self, i: usize) -> Option<usize> {
        let target = self.targets[i];
        (target != self.problem.ignore_index).then_some(target as usize)
    }

    /// The tokens that count, with their targets.
    fn counted(&self) -> Vec<(usize, usize)> {
        (0..self.problem.tokens).filter_map(|i| Some((i, self.target(i)?))).collect()
    }

    /// θ, as far as it belongs to the logits.
    fn temperature(&self) -> f32 {
        if self.is(Mutant::TemperatureOfLogprob) { 1.0 } else { self.problem.temperature as f32 }
    }

    /// z and dz/da.
    fn logit(&self, i: usize, v: usize) -> (f32, f32) {
        let dim = self.problem.dim;
        let products = self.h[i * dim..][..dim].iter().zip(&self.w[v * dim..][..dim]);
        let dot: f32 = products.map(|(h, w)| h * w).sum();
        self.link(dot + self.bias.as_ref().map_or(0.0, |bias| bias[v]))
    }

    fn link(&self, a: f32) -> (f32, f32) {
        let (scale, theta) = (self.problem.logit_scale as f32, self.temperature());
        match self.problem.softcap.map(|cap| cap as f32) {
            None => (scale * a / theta, scale / theta),
            Some(cap) => {
                let t = (scale * a / cap).tanh();
                let bend = if self.is(Mutant::NoCapDerivative) { 1.0 } else { 1.0 - t * t };
                (cap * t / theta, scale * bend / theta)
            }
        }
    }

    /// The logits of a tile, those of classes that do not exist included where a bug has them.
    fn tile(&self, i: usize, start: usize) -> Vec<f32> {
        let (vocab, width) = (self.problem.vocab, self.job.style.tile);
        let end = vocab.min(start + width);
        let mut z: Vec<f32> = (start..end).map(|v| self.logit(i, v).0).collect();
        if self.is(Mutant::ClassTailDropped) && z.len() < width && start > 0 {
            z.clear();
        }
        if self.is(Mutant::PaddedClasses) {
            z.resize(width, 0.0);
        }
        if self.is(Mutant::PaddingCapped) {
            z.resize(width, self.link(f32::NEG_INFINITY).0);
        }
        z
    }

    fn row(&self, i: usize, y: usize) -> Row {
        let style = self.job.style;
        let starts = || (0..self.problem.vocab).step_by(style.tile);
        let (mut m, mut l, mut u, mut s) = (f32::NEG_INFINITY, 0.0, 0.0, 0.0);
        let (mut best, mut argmax, mut target) = (f32::NEG_INFINITY, 0, 0.0);
        if self.is(Mutant::MaximumStartsAtZero) {
            m = 0.0;
        }
        if style.softmax == Softmax::TwoPass {
            m = starts().flat_map(|start| self.tile(i, start)).fold(m, f32::max);
        }
        for start in starts() {
            let z = self.tile(i, start);
            let new = z.iter().copied().fold(m, f32::max);
            let far = new > m + 5.0 || m == f32::NEG_INFINITY;
            if new > m && (style.softmax != Softmax::Lazy || far) {
                let k = if m == f32::NEG_INFINITY { 0.0 } else { self.exp(m - new) };
                if m > f32::NEG_INFINITY && !self.is(Mutant::EntropyNotRescaled) {
                    u = k * (u + (m - new) * l);
                }
                l *= k;
                m = new;
            }
            for (n, z) in z.into_iter().enumerate() {
                let v = start + n;
                let e = if m == f32::NEG_INFINITY { 0.0 } else { self.exp(z - m) };
                l += e;
                if e > 0.0 || self.is(Mutant::EntropyTimesZero) {
                    u += e * (z - m);
                }
                if v >= self.problem.vocab {
                    continue;
                }
                let weight = self.class_weight(v);
                if weight != 0.0 {
                    s += weight * z;
                }
                let further = if self.is(Mutant::LastOfEquals) { z >= best } else { z > best };
                if further {
                    (best, argmax) = (z, v);
                }
                if self.is(Mutant::TargetByMask) {
                    target += z * if v == y { 1.0 } else { 0.0 };
                } else if v == y {
                    target = z;
                }
            }
        }
        let lse = m + l.ln();
        let weights: f32 = (0..self.problem.vocab).map(|v| self.class_weight(v)).sum();
        let logprob = target - lse;
        let logprob = if self.is(Mutant::TemperatureOfLogprob) {
            logprob / self.problem.temperature as f32
        } else {
            logprob
        };
        Row { lse, logprob, entropy: l.ln() - u / l, spread: weights * lse - s, argmax }
    }

    /// α/V
    fn smooth(&self) -> f32 {
        let local = self.is(Mutant::SmoothingOfTile) && self.problem.vocab > self.job.style.tile;
        let classes = if local { self.job.style.tile } else { self.problem.vocab };
        self.problem.label_smoothing as f32 / classes as f32
    }

    /// ζ κ_i ω_i
    fn lse_square(&self, i: usize, y: usize) -> f32 {
        let weighted = self.problem.lse_square_weight == LseSquareWeight::ClassWeight;
        let omega = if weighted { self.class_weight(y) } else { 1.0 };
        self.problem.lse_square_scale as f32 * self.token_weight(i) * omega
    }

    /// Z and Z_z.
    fn normalisers(&self) -> (f32, f32) {
        let counted = self.counted();
        match self.problem.reduction {
            Reduction::None | Reduction::Sum => (1.0, 1.0),
            Reduction::By { normaliser } => (normaliser as f32, normaliser as f32),
            Reduction::Mean => {
                let n = match self.is(Mutant::MeanOverIgnored) {
                    true => self.problem.tokens as f32,
                    false => counted.len() as f32,
                };
                let unweighted = self.is(Mutant::MeanWithoutWeights)
                    || self.is(Mutant::MeanOverIgnored) && self.class_weights.is_none();
                let weights =
                    counted.iter().map(|&(i, y)| self.token_weight(i) * self.class_weight(y));
                let z = if unweighted { n } else { weights.sum() };
                let by_number = self.problem.lse_square_weight == LseSquareWeight::Unweighted;
                (z, if by_number { n } else { z })
            }
        }
    }

    fn divide(&self, x: f32, z: f32) -> f32 {
        match (z == 0.0 && !self.is(Mutant::NothingOverNothing), self.problem.nothing_left) {
            (false, _) => x / z,
            (true, NothingLeft::Zero) => 0.0,
            (true, _) => f32::NAN,
        }
    }

    fn forward(&self) -> Results {
        let tokens = self.problem.tokens;
        let (alpha, smooth) = (self.problem.label_smoothing as f32, self.smooth());
        let [mut lse, mut logprob, mut entropy] = [(); 3].map(|()| vec![0.0; tokens]);
        let [mut cross, mut square] = [(); 2].map(|()| vec![0.0; tokens]);
        let mut argmax = vec![-1.0; tokens];
        for (i, y) in self.counted() {
            let row = self.row(i, y);
            let weight = self.class_weight(y);
            let own = if alpha < 1.0 && weight != 0.0 {
                -(1.0 - alpha) * weight * row.logprob
            } else {
                0.0
            };
            let spread = if alpha > 0.0 { smooth * row.spread } else { 0.0 };
            cross[i] = self.token_weight(i) * (own + spread);
            square[i] = self.lse_square(i, y) * row.lse * row.lse;
            (lse[i], logprob[i], entropy[i]) = (row.lse, row.logprob, row.entropy);
            argmax[i] = row.argmax as f32;
        }
        let (z, z_lse) = self.normalisers();
        let loss = match self.problem.reduction {
            Reduction::None => cross.iter().zip(&square).map(|(a, b)| a + b).collect(),
            _ => {
                let (cross, square) = (self.sum(&cross), self.sum(&square));
                vec![self.divide(cross, z) + self.divide(square, z_lse)]
            }
        };
        Results::from([
            ("loss", loss),
            ("lse", lse),
            ("logprob", logprob),
            ("entropy", entropy),
            ("argmax", argmax),
            ("n_valid", vec![self.counted().len() as f32]),
            ("normaliser", vec![z]),
        ])
    }

    fn sum(&self, list: &[f32]) -> f32 {
        if self.job.style.backwards { list.iter().rev().sum() } else { list.iter().sum() }
    }

    /// Element `i` of a cotangent; of the loss, the only one where it is reduced.
    fn cotangent(&self, n: usize, i: usize) -> f32 {
        let first = n == 0 && self.is(Mutant::UpstreamOfFirst);
        let list = self.cotangents[n].as_ref();
        list.map_or(0.0, |list| if first || list.len() == 1 { list[0] } else { list[i] })
    }

    fn backward(&self) -> Results {
        let LinearCrossEntropy { tokens, dim, vocab, .. } = *self.problem;
        let mut dh = vec![0.0; tokens * dim];
        let [mut dw, mut dbias] = [vec![0.0; vocab * dim], vec![0.0; vocab]];
        let mut rows = self.counted();
        if self.is(Mutant::IgnoredInGradient) {
            rows = (0..tokens).map(|i| (i, self.target(i).unwrap_or(vocab))).collect();
        }
        if self.job.style.backwards {
            rows.reverse();
        }
        for (i, y) in rows {
            for (v, da) in self.logit_gradients(i, y).into_iter().enumerate() {
                dbias[v] += da;
                for c in 0..dim {
                    dh[i * dim + c] += da * self.w[v * dim + c];
                    let sum = dw[v * dim + c] + da * self.h[i * dim + c];
                    dw[v * dim + c] =
                        if self.is(Mutant::DwInBf16) { through_bf16(sum) } else { sum };
                }
            }
        }
        Results::from([("dh", dh), ("dw", dw), ("dbias", dbias)])
    }

    /// da of one token; `y` = V where it has no target.
    fn logit_gradients(&self, i: usize, y: usize) -> Vec<f32> {
        let vocab = self.problem.vocab;
        let row = self.row(i, y);
        let (z, z_lse) = self.normalisers();
        let own_weight = if y < vocab { self.class_weight(y) } else { 0.0 };
        let dloss = self.cotangent(0, i);
        let (alpha, smooth) = (self.problem.label_smoothing as f32, self.smooth());
        let g = self.divide(dloss * self.token_weight(i), z);
        let mut square = if y < vocab { dloss * self.lse_square(i, y) } else { 0.0 };
        if self.is(Mutant::LseSquareWithoutGradient) {
            square = 0.0;
        }
        let dlogprob = if self.is(Mutant::DlogprobDropped) { 0.0 } else { self.cotangent(2, i) };
        let dlse = if self.is(Mutant::LseCotangentDropped) { 0.0 } else { self.cotangent(1, i) };
        let weights: f32 = (0..vocab).map(|v| self.class_weight(v)).sum();
        let beta = g * (1.0 - alpha) * own_weight - dlogprob;
        let lambda = g * smooth * weights + 2.0 * self.divide(square, z_lse) * row.lse + dlse;
        let dentropy = self.cotangent(3, i);
        let gradient = |v: usize| {
            let (z, slope) = self.logit(i, v);
            let p = self.exp(z - row.lse);
            let mut pulled = if v == y { p - 1.0 } else { p };
            if self.is(Mutant::TargetRounded) && v == y {
                pulled = through_bf16(p) - 1.0;
            }
            if self.is(Mutant::SmallTilesDropped) && pulled.abs() < 0.000_244_140_63 {
                return 0.0;
            }
            let surprise = if p > 0.0 { p * (z - row.lse + row.entropy) } else { 0.0 };
            let smoothed = g * smooth * self.class_weight(v);
            slope * (pulled * beta + p * lambda - dentropy * surprise - smoothed)
        };
        (0..vocab).map(gradient).collect()
    }
}
