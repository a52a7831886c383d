//! Attention and attention_lse at their worst.

use crate::adversary::{Arithmetic, Found, Granted, Results, operand};
use crate::{Random, bounds_of, inputs};
use etalon_oracle::bounds::Values;
use etalon_oracle::profile::Profile;
use etalon_problem::{
    Attention, AttentionLse, Dtype, Extents, LazyAttention, Mask, Problem, Scores,
};

/// Choices that a kernel makes for itself.
#[derive(Debug, Clone, Copy)]
struct Choices {
    /// δ as Σ P dP instead of dout·o.
    summed_delta: bool,
    /// attention_lse: dq from the gradient that the forward pass left.
    forward_gradient: bool,
}

/// A causal kernel of one batch element and one key head.
struct Kernel<'a> {
    scores: &'a Scores,
    choices: Choices,
    lazy: bool,
    width: usize,
    get: [Vec<f64>; 9],
}

const NAMES: [&str; 9] = ["q", "k", "v", "sinks", "bias", "dout", "dlse", "tau", ""];

impl<'a> Kernel<'a> {
    fn new(problem: &'a Problem, values: &Values, choices: Choices) -> Self {
        let (lazy, width) = match problem {
            Problem::Attention(attention) => (false, attention.value_dim),
            Problem::LazyAttention(attention) => (true, attention.value_dim),
            _ => (false, 0),
        };
        let scores = problem.scores().unwrap();
        Kernel { scores, choices, lazy, width, get: NAMES.map(|name| operand(values, name)) }
    }

    fn row(&self, name: &str, row: usize, width: usize) -> &[f64] {
        let list = &self.get[NAMES.iter().position(|x| *x == name).unwrap()];
        if list.is_empty() { &[] } else { &list[row * width..(row + 1) * width] }
    }

    /// S and S′ of a pair.
    fn score(&self, x: &mut Arithmetic<'_>, row: usize, key: usize) -> (f64, f64) {
        let (e, scores) = (&self.scores.extents, self.scores);
        let dot = x.dot(self.row("q", row, e.dim), self.row("k", key, e.dim));
        // σ, its product and, to base 2, log₂ e and the product with it.
        let (mut s, mut slope) = (x.rounded(scores.scale() * dot, 4), 1.0);
        if let Some(cap) = scores.softcap {
            let quotient = x.rounded(s / cap, 2);
            let tau = x.tanh(quotient);
            s = x.rounded(cap * tau, 2);
            let square = x.rounded(tau * tau, 1);
            slope = x.rounded(1.0 - square, 1);
        }
        if scores.bias.is_some() {
            let bias = self.row("bias", row * e.keys + key, 1)[0];
            s = x.rounded(s + x.clone().rounded(bias, 2), 1);
        }
        (s, slope)
    }

    /// The sink's logit, to base 2.
    fn sink(&self, x: &mut Arithmetic<'_>, head: usize) -> Option<f64> {
        self.scores.sinks.then(|| x.rounded(self.row("sinks", head, 1)[0], 2))
    }

    /// Σ P y of the visible keys, and lse, from scores of its own.
    fn forward(
        &self,
        x: &mut Arithmetic<'_>,
        (head, row): (usize, usize),
        (keys, width): (usize, usize),
        values: impl Fn(usize, f64) -> Vec<f64>,
    ) -> (Vec<f64>, f64) {
        let sink = self.sink(x, head);
        let scores: Vec<_> = (0..keys).map(|key| self.score(x, row, key)).collect();
        let max = scores.iter().map(|s| s.0).fold(sink.unwrap_or(f64::NEG_INFINITY), f64::max);
        let (mut l, mut sums) = (0.0, vec![0.0; width]);
        for (key, (s, slope)) in scores.into_iter().enumerate() {
            let p = x.exp(s - max);
            l += x.rounded(p, keys);
            let p = x.stored_weight(p);
            for (sum, value) in sums.iter_mut().zip(values(key, slope)) {
                let product = x.product(p, value);
                *sum += x.rounded(product, keys);
            }
        }
        if let Some(sink) = sink {
            let p = x.exp(sink - max);
            l += x.rounded(p, keys);
        }
        let divided = |sum: &f64| if l > 0.0 { x.rounded(sum / l, 1) } else { 0.0 };
        let averages = sums.iter().map(divided).collect();
        let max = x.rounded(max, 3);
        (averages, max + x.ln(l))
    }

    /// Both passes; also how many directions were read.
    fn run(&self, granted: Granted, directions: &[f64]) -> (Results, usize) {
        let (x, e) = (&mut Arithmetic::new(granted, directions), self.scores.extents);
        let (d, width) = (e.dim, self.width);
        let zeros = |n: usize| vec![0.0; n];
        let (mut dk, mut dv) = (zeros(e.keys * d), zeros(e.keys * width));
        let (mut o, mut lses, mut dq) = (Vec::new(), Vec::new(), Vec::new());
        let (mut by_head, mut dbias) = (zeros(e.query_heads), Vec::new());
        for head in 0..e.query_heads {
            let (mut head_dk, mut head_dv) = (zeros(e.keys * d), zeros(e.keys * width));
            for i in 0..e.queries {
                let row = head * e.queries + i;
                let keys = (i + 1 + e.keys).saturating_sub(e.queries).min(e.keys);
                let pulled = self.pull(x, (head, row), keys);
                for key in 0..e.keys {
                    let ds = pulled.ds.get(key).copied().unwrap_or(0.0);
                    for (sum, q) in head_dk[key * d..][..d].iter_mut().zip(self.row("q", row, d)) {
                        let product = x.product(ds, *q);
                        *sum += x.rounded(product, e.queries);
                    }
                    let p = pulled.p.get(key).copied().unwrap_or(0.0);
                    let dout = self.row("dout", row, width);
                    for (sum, dout) in head_dv[key * width..][..width].iter_mut().zip(dout) {
                        let p = x.stored_weight(p);
                        let product = x.product(p, *dout);
                        *sum += x.rounded(product, e.queries);
                    }
                }
                if self.scores.bias.is_some() {
                    dbias.extend((0..e.keys).map(|j| pulled.raw.get(j).copied().unwrap_or(0.0)));
                }
                by_head[head] += pulled.head;
                o.extend(pulled.o);
                lses.push(pulled.lse);
                dq.extend(pulled.dq);
            }
            let several = e.query_heads > 1;
            let mut join = |all: &mut [f64], own: &[f64], factor: f64| {
                for (sum, own) in all.iter_mut().zip(own) {
                    let own = x.rounded(factor * own, 1);
                    *sum += if several { x.stored_head(own) } else { own };
                }
            };
            join(&mut dk, &head_dk, self.scores.scale());
            join(&mut dv, &head_dv, 1.0);
        }
        let mut results = Results::from([("lse", lses)]);
        let mut stored = |name, list: Vec<f64>, has: bool| {
            let list = list.into_iter().map(|y| x.stored(y)).collect::<Vec<_>>();
            has.then(|| results.insert(name, list));
        };
        let (has_v, biased) = (width > 0, self.scores.bias.is_some());
        stored("dq", dq, true);
        stored("dk", dk, true);
        stored("dv", dv, has_v);
        stored("dbias", dbias, biased);
        has_v.then(|| results.insert("o", o)); // it is stored already
        let wide = by_head.iter().map(|y| x.wide(*y)).collect();
        if self.lazy {
            results.insert("dtau", wide);
        } else if self.scores.sinks {
            results.insert("dsinks", wide);
        }
        (results, x.operations())
    }

    /// One row of both passes.
    fn pull(&self, x: &mut Arithmetic<'_>, (head, row): (usize, usize), keys: usize) -> Pulled {
        let (d, width) = (self.scores.extents.dim, self.width);
        let value = |key: usize, _: f64| self.row("v", key, width).to_vec();
        let (o, lse) = self.forward(x, (head, row), (keys, width), value);
        let lse = x.wide(lse);
        let (dout, dlse) = (self.row("dout", row, width), self.row("dlse", row, 1));
        let dlse = dlse.first().copied().unwrap_or(0.0);
        let offset = if self.lazy { self.row("tau", head, 1)[0] / keys as f64 } else { 0.0 };
        let pairs: Vec<_> = (0..keys)
            .map(|key| {
                let (s, slope) = self.score(x, row, key);
                let stored = x.rounded(lse, 2);
                let p = x.exp(s - stored);
                (p, slope, x.dot(dout, self.row("v", key, width)))
            })
            .collect();
        let weight = |x: &mut Arithmetic<'_>, p: f64| {
            let offset = x.rounded(offset, 2);
            if self.lazy { x.rounded(p + offset, 1).max(0.0) } else { p }
        };
        let p: Vec<f64> = pairs.iter().map(|pair| weight(x, pair.0)).collect();
        let active = |key: usize| !self.lazy || p[key] > 0.0;
        let o: Vec<f64> = if self.lazy {
            let column = |c: usize, x: &mut Arithmetic<'_>| {
                let product = |(key, &p): (usize, &f64)| {
                    let p = x.stored_weight(p);
                    let product = x.product(p, self.row("v", key, width)[c]);
                    x.rounded(product, keys)
                };
                p.iter().enumerate().map(product).sum()
            };
            (0..width).map(|c| column(c, x)).collect()
        } else {
            o
        };
        let o: Vec<f64> = o.into_iter().map(|o| x.stored(o)).collect();
        let mut summed = |use_all: bool| {
            let all = pairs.iter().enumerate().filter(|(key, _)| use_all || active(*key));
            all.map(|(_, &(p, _, dp))| x.rounded(p * dp, keys)).sum::<f64>()
        };
        let mean = if self.lazy {
            summed(false)
        } else if self.choices.summed_delta {
            summed(true)
        } else {
            x.dot(dout, &o)
        };
        let delta = x.rounded(mean - dlse, 1);
        let raw: Vec<f64> = (0..keys)
            .map(|key| {
                let (p, _, dp) = pairs[key];
                let t = x.rounded(if active(key) { dp } else { 0.0 } - delta, 1);
                x.rounded(p * t, 1)
            })
            .collect();
        let ds: Vec<f64> = (0..keys).map(|key| x.stored_ds(pairs[key].1 * raw[key])).collect();
        let mut dq: Vec<f64> = (0..d)
            .map(|c| {
                let mut sum = 0.0;
                for (key, ds) in ds.iter().enumerate() {
                    let product = x.product(*ds, self.row("k", key, d)[c]);
                    sum += x.rounded(product, keys);
                }
                x.rounded(self.scores.scale() * sum, 2)
            })
            .collect();
        if self.choices.forward_gradient {
            let key = |key: usize, slope: f64| {
                self.row("k", key, d).iter().map(|k| slope * k).collect::<Vec<_>>()
            };
            let (g, _) = self.forward(x, (head, row), (keys, d), key);
            dq = g.into_iter().map(|g| x.rounded(self.scores.scale() * dlse * g, 2)).collect();
        }
        let of_head = if self.lazy {
            let all = (0..keys).filter(|&key| active(key));
            all.map(|key| x.rounded(pairs[key].2 / keys as f64, keys)).sum()
        } else if let Some(sink) = self.sink(x, head) {
            let stored = x.rounded(lse, 2);
            let pi = x.exp(sink - stored);
            -x.rounded(pi * delta, 1)
        } else {
            0.0
        };
        Pulled { o, lse, p, raw, ds, dq, head: of_head }
    }
}

struct Pulled {
    o: Vec<f64>,
    lse: f64,
    /// Weights that multiply dout.
    p: Vec<f64>,
    /// dS.
    raw: Vec<f64>,
    ds: Vec<f64>,
    dq: Vec<f64>,
    /// Of the sink, or of τ.
    head: f64,
}

/// Small problems, between them with every option.
fn problem(random: &mut Random) -> Problem {
    let heads = 1 + random.below(2);
    let (queries, keys) = (1 + random.below(2), 1 + random.below(5));
    let dim = 1 + random.below(3);
    let e = Extents { batch: 1, query_heads: heads, key_heads: 1, queries, keys, dim };
    match random.below(4) {
        0 => {
            let mut problem = AttentionLse::new(e).mask(Mask::causal());
            if random.below(2) == 0 {
                problem = problem.softcap(5.0);
            }
            if random.below(2) == 0 { problem.sinks() } else { problem }.into()
        }
        1 => LazyAttention::new(e).into(),
        _ => {
            let mut problem = Attention::new(e).value_dim(1 + random.below(2)).mask(Mask::causal());
            if random.below(3) == 0 {
                problem = problem.softcap(if random.below(2) == 0 { 2.0 } else { 30.0 });
            }
            if random.below(3) == 0 {
                problem = problem.sinks();
            }
            if random.below(3) == 0 { problem.bias(1, heads) } else { problem }.into()
        }
    }
}

/// Operands of which q is `peak` times normal, with now and then a massive channel, or one key that has
/// nearly all of the weight.
fn operands(problem: &Problem, storage: Dtype, random: &mut Random, peak: f64) -> Values {
    let mut values = inputs(problem, storage, 1.0, random.below(1 << 30) as u64);
    let dim = problem.scores().unwrap().extents.dim;
    let kind = random.below(4);
    values.get_mut("q").unwrap().mapv_inplace(|q| storage.round(peak * q));
    if kind == 0 {
        // The massive channel of real activations.
        let mut fill = |name: &str, x: f64| {
            let rows = values.get_mut(name).unwrap().as_slice_mut().unwrap().chunks_mut(dim);
            rows.for_each(|row| row[0] = storage.round(x + random.normal()));
        };
        fill("q", 448.0);
        fill("k", -547.0);
    } else if kind == 1 {
        let k = values.get_mut("k").unwrap().as_slice_mut().unwrap();
        let last = k.len() - dim;
        k[last..].iter_mut().for_each(|k| *k = storage.round(8.0 * *k));
    }
    if let Some(tau) = values.get_mut("tau") {
        tau.mapv_inplace(|_| f64::from((-random.uniform()) as f32));
    }
    values
}

/// Kernels as wrong as their profiles let them be never cross a bound.
#[test]
fn the_worst_attention_stays_within_its_bounds() {
    let cases = [
        ("f32-strict", Dtype::F32),
        ("f32-strict", Dtype::Bf16),
        ("f32-bf16x3", Dtype::F32),
        ("f32-tf32", Dtype::F32),
        ("f16-flash", Dtype::F16),
        ("bf16-split2", Dtype::Bf16),
        ("bf16-flash", Dtype::Bf16),
    ];
    let mut random = Random(41);
    for (name, storage) in cases {
        let profile = Profile::by_name(name).unwrap();
        let mut found = Found::default();
        for trial in 0..240 {
            let peak = [1.0, 16.0, 64.0][trial % 3];
            let problem = problem(&mut random);
            let values = operands(&problem, storage, &mut random, peak);
            let bounds = bounds_of(&problem, storage, name, &values);
            let choices = Choices {
                summed_delta: random.below(2) == 0,
                forward_gradient: random.below(2) == 0
                    && matches!(problem, Problem::AttentionLse(_)),
            };
            let kernel = Kernel::new(&problem, &values, choices);
            let granted = Granted { profile, storage };
            let what = (&problem, &values, choices, name);
            found.climb(&what, &bounds, &mut random, 300, |all| kernel.run(granted, all));
        }
        assert!(found.kernels >= 10_000, "{name}");
        // All that does not overflow is bounded, but where products that are off by 2⁻⁹ leave scores of 10⁵
        // open by hundreds: gradients of such rows.
        let open = if name == "f32-tf32" { found.elements / 10 } else { 0 };
        assert!(found.elements - found.bounded <= open, "{name}: {found:?}");
        // The climb comes near the edge: the storage, or what the scores err by.
        for output in ["o", "dq", "dk", "dv"] {
            assert!(found.margins[output] > 0.3, "{name} {output}: {:?}", found.margins);
        }
    }
}
