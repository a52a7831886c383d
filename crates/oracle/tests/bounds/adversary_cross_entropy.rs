//! Linear cross-entropy at its worst.

use crate::adversary::{Arithmetic, Found, Granted, Results, operand};
use crate::{Random, numbers};
use etalon_oracle::bounds::{Values, bounds};
use etalon_oracle::profile::Profile;
use etalon_oracle::tensor::{Data, Tensor, Tensors};
use etalon_problem::{
    Dtype, LinearCrossEntropy, Pass, Precision, Problem, Reduction, TokenOutputs,
};

struct Kernel<'a> {
    problem: &'a LinearCrossEntropy,
    values: &'a Values,
    targets: &'a [i64],
    /// Weights are made again from the stored lse, otherwise kept and normalised.
    anew: bool,
}

/// Figures of a token in the forward pass.
struct Row {
    z: Vec<f64>,
    slope: Vec<f64>,
    p: Vec<f64>,
    lse: f64,
    entropy: f64,
}

impl Kernel<'_> {
    fn weight(&self, name: &str, i: usize) -> f64 {
        operand(self.values, name).get(i).copied().unwrap_or(1.0)
    }

    fn cotangent(&self, name: &str, i: usize) -> f64 {
        let all = operand(self.values, name);
        all.get(if all.len() == 1 { 0 } else { i }).copied().unwrap_or(0.0)
    }

    /// z and its slope.
    fn logit(&self, x: &mut Arithmetic<'_>, h: &[f64], w: &[f64], bias: f64) -> (f64, f64) {
        let problem = self.problem;
        let dot = x.dot(h, w);
        let a = x.rounded(dot + x.clone().rounded(bias, 0), 1);
        let scaled = x.rounded(problem.logit_scale * a, 2);
        let (z, bend) = match problem.softcap {
            None => (scaled, 1.0),
            Some(cap) => {
                let quotient = x.rounded(scaled / cap, 2);
                let tau = x.tanh(quotient);
                (x.rounded(cap * tau, 1), 1.0 - x.rounded(tau * tau, 1))
            }
        };
        let slope = problem.logit_scale / problem.temperature * bend;
        (x.rounded(z / problem.temperature, 2), x.rounded(slope, 4))
    }

    fn row(&self, x: &mut Arithmetic<'_>, i: usize) -> Row {
        let LinearCrossEntropy { dim, vocab, .. } = *self.problem;
        let (h, w) = (operand(self.values, "h"), operand(self.values, "w"));
        let bias = operand(self.values, "bias");
        let logits: Vec<_> = (0..vocab)
            .map(|v| {
                let bias = bias.get(v).copied().unwrap_or(0.0);
                self.logit(x, &h[i * dim..][..dim], &w[v * dim..][..dim], bias)
            })
            .collect();
        let (z, slope): (Vec<f64>, Vec<f64>) = logits.into_iter().unzip();
        let m = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let p: Vec<f64> = z.iter().map(|z| x.exp(z - m)).collect();
        let l: f64 = p.iter().map(|p| x.rounded(*p, vocab)).sum();
        let t: f64 = p.iter().zip(&z).map(|(p, z)| x.rounded(p * (z - m), vocab + 1)).sum();
        let ln = x.ln(l);
        let lse = x.rounded(m, 3) + ln;
        let entropy = x.rounded(ln - x.clone().rounded(t / l, 1), 1);
        let p = p.iter().map(|p| x.rounded(p / l, 1)).collect();
        Row { z, slope, p, lse, entropy }
    }

    fn run(&self, granted: Granted, directions: &[f64]) -> (Results, usize) {
        let x = &mut Arithmetic::new(granted, directions);
        let LinearCrossEntropy { tokens, dim, vocab, label_smoothing: alpha, .. } = *self.problem;
        let (h, w) = (operand(self.values, "h"), operand(self.values, "w"));
        let class = |v: usize| self.weight("class_weights", v);
        let token = |i: usize| self.weight("token_weights", i);
        let all: f64 = (0..vocab).map(class).sum();
        let mean = self.problem.reduction == Reduction::Mean;
        let target = |i: usize| self.targets[i] as usize;
        let shares = (0..tokens).map(|i| x.rounded(token(i) * class(target(i)), tokens));
        let normaliser = shares.sum::<f64>();
        let (z, count) = if mean { (normaliser, tokens as f64) } else { (1.0, 1.0) };
        let mut results = Results::new();
        let mut list = |name, y: f64| results.entry(name).or_default().push(y);
        let (mut loss, mut dh) = (0.0, Vec::new());
        let (mut dw, mut dbias) = (vec![0.0; vocab * dim], vec![0.0; vocab]);
        for i in 0..tokens {
            let (row, y) = (self.row(x, i), target(i));
            let (lse, entropy) = (x.wide(row.lse), x.wide(row.entropy));
            let logprob = x.rounded(row.z[y] - row.lse, 1);
            list("lse", lse);
            list("entropy", entropy);
            list("logprob", x.wide(logprob));
            let most = row.z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            list("argmax", row.z.iter().position(|z| *z == most).unwrap() as f64);
            let terms = row.z.iter().enumerate().map(|(v, z)| class(v) * x.rounded(row.lse - z, 2));
            let smooth: f64 = terms.sum();
            let ce = -(1.0 - alpha) * class(y) * logprob + alpha / vocab as f64 * smooth;
            let square = self.problem.lse_square_scale * token(i) * row.lse * row.lse;
            loss += x.rounded(token(i) * ce / z, tokens + 3);
            loss += x.rounded(square / count, tokens + 3);
            // The backward pass, from logits of its own.
            let again = self.row(x, i);
            let dloss = self.cotangent("dloss", i);
            let g = x.rounded(dloss * token(i) / z, 3);
            let gamma = x.rounded(dloss * self.problem.lse_square_scale * token(i) / count, 3);
            let beta = x.rounded(g * (1.0 - alpha) * class(y) - self.cotangent("dlogprob", i), 1);
            let lambda = g * alpha / vocab as f64 * all + 2.0 * gamma * lse;
            let lambda = x.rounded(lambda + self.cotangent("dlse", i), 2);
            let mut gradient = vec![0.0; dim];
            for v in 0..vocab {
                let stored = x.rounded(lse, 2);
                let p = if self.anew { x.exp(again.z[v] - stored) } else { again.p[v] };
                let own = if v == y { 1.0 } else { 0.0 };
                let surprise = x.rounded(again.z[v] - lse + entropy, 2);
                let dz = (p - own) * beta + p * lambda
                    - g * alpha / vocab as f64 * class(v)
                    - self.cotangent("dentropy", i) * p * surprise;
                let da = x.stored_ds(x.clone().rounded(again.slope[v] * dz, 2));
                for c in 0..dim {
                    let product = x.product(da, w[v * dim + c]);
                    gradient[c] += x.rounded(product, vocab);
                    let product = x.product(da, h[i * dim + c]);
                    dw[v * dim + c] += x.rounded(product, tokens);
                }
                dbias[v] += x.rounded(da, tokens);
            }
            dh.extend(gradient);
        }
        list("loss", x.wide(loss));
        if mean {
            list("normaliser", x.wide(normaliser));
        }
        for (name, all) in [("dh", dh), ("dw", dw), ("dbias", dbias)] {
            if name != "dbias" || self.problem.bias {
                all.into_iter().for_each(|y| list(name, x.stored(y)));
            }
        }
        (results, x.operations())
    }
}

fn problem(random: &mut Random) -> LinearCrossEntropy {
    let (tokens, dim, vocab) = (1 + random.below(2), 1 + random.below(3), 2 + random.below(5));
    let mut problem = LinearCrossEntropy::new(tokens, dim, vocab);
    problem.outputs = TokenOutputs { lse: true, logprob: true, entropy: true, argmax: true };
    let some = |random: &mut Random| random.below(3) == 0;
    problem.reduction = if some(random) { Reduction::Sum } else { Reduction::Mean };
    problem.bias = some(random);
    problem.class_weights = some(random);
    problem.token_weights = some(random);
    problem.softcap = some(random).then_some(10.0);
    problem.label_smoothing = if some(random) { 0.3 } else { 0.0 };
    problem.lse_square_scale = if some(random) { 0.1 } else { 0.0 };
    problem.temperature = if some(random) { 0.7 } else { 1.0 };
    problem
}

/// Operands of logits of this deviation.
fn operands(
    problem: &Problem,
    (dim, tokens, vocab): (usize, usize, usize),
    storage: Dtype,
    random: &mut Random,
    peak: f64,
) -> (Values, Vec<i64>) {
    let mut values = Values::new();
    for operand in problem.operands(Pass::Backward).iter().filter(|x| x.role.is_given()) {
        let stored = match operand.precision {
            Precision::Integer => continue,
            Precision::Storage => storage,
            Precision::Wide => Dtype::F32,
        };
        let scale = if operand.name == "h" { peak / (dim as f64).sqrt() } else { 1.0 };
        let number = |random: &mut Random| match operand.name {
            "class_weights" | "token_weights" => 0.5 + random.uniform(),
            _ => scale * random.normal(),
        };
        let list: Vec<f64> = (0..operand.len()).map(|_| stored.round(number(random))).collect();
        values.insert(operand.name.to_string(), numbers(&list, &operand.shape));
    }
    (values, (0..tokens).map(|_| random.below(vocab) as i64).collect())
}

/// Kernels as wrong as their profiles let them be never cross a bound.
#[test]
fn the_worst_cross_entropy_stays_within_its_bounds() {
    let cases = [
        ("f32-strict", Dtype::F32),
        ("f32-bf16x3", Dtype::F32),
        ("f32-tf32", Dtype::F32),
        ("f16-flash", Dtype::F16),
        ("bf16-split2", Dtype::Bf16),
        ("bf16-flash", Dtype::Bf16),
    ];
    let mut random = Random(42);
    for (name, storage) in cases {
        let profile = Profile::by_name(name).unwrap();
        let mut found = Found::default();
        for trial in 0..200 {
            let peak = [1.0, 4.0, 12.0, 30.0][trial % 4];
            let problem = problem(&mut random);
            let all = Problem::from(problem.clone());
            let extents = (problem.dim, problem.tokens, problem.vocab);
            let (values, targets) = operands(&all, extents, storage, &mut random, peak);
            let mut inputs: Tensors = crate::tensors(&values);
            let tensor = Tensor { shape: vec![problem.tokens], data: Data::I64(targets.clone()) };
            inputs.insert("targets".to_string(), tensor);
            let of = |pass| bounds(&all, pass, storage, &profile, &inputs).unwrap();
            let both = [of(Pass::Forward), of(Pass::Backward)];
            let anew = random.below(2) == 0;
            let kernel = Kernel { problem: &problem, values: &values, targets: &targets, anew };
            let granted = Granted { profile, storage };
            let what = (&problem, &values, &targets, name, anew);
            found.climb(&what, &both, &mut random, 200, |all| kernel.run(granted, all));
        }
        assert!(found.kernels >= 10_000, "{name}");
        assert_eq!(found.bounded, found.elements, "{name}");
        for output in ["loss", "lse", "entropy", "dh", "dw"] {
            assert!(found.margins[output] > 0.15, "{name} {output}: {:?}", found.margins);
        }
    }
}
