//! Kernels in f64 that round where a profile stores, and nowhere else.

use etalon_oracle::profile::Profile;
use etalon_oracle::tensor::Values;
use etalon_problem::{Attention, Axis as Extent, Dtype, LinearCrossEntropy, Pass, Sequence};
use ndarray::{Array1, Array2, Array3, Array4, ArrayD, ArrayView4, Ix2, Ix4};

/// A number as a type has it; as it is where that is the accumulator's.
fn kept(x: f64, dtype: Dtype) -> f64 {
    if dtype == Dtype::F32 { x } else { dtype.round(x) }
}

fn four<'a>(x: &'a Values, name: &str) -> ArrayView4<'a, f64> {
    x[name].view().into_dimensionality::<Ix4>().unwrap()
}

/// Scores and normalised weights of a head of dense attention, each with what a backward pass needs of it.
struct Weights {
    /// `[N, M]`; 0 where a pair is masked.
    p: Array2<f64>,
    /// τ of the softcap.
    tau: Array2<f64>,
    /// Of the sink.
    pi: Array1<f64>,
    lse: Array1<f64>,
}

fn weights(problem: &Attention, stores: &Profile, x: &Values, b: usize, h: usize) -> Weights {
    let (scores, e) = (&problem.scores, &problem.scores.extents);
    let (q, k) = (four(x, "q"), four(x, "k"));
    let stored = |x: f64| kept(x, stores.score_store);
    let sequence =
        Sequence { batch: b, query_start: 0, queries: e.queries, key_start: 0, keys: e.keys };
    let sink = x.get("sinks").map(|sinks| stored(sinks[[h]]));
    let mut found = Weights {
        p: Array2::zeros([e.queries, e.keys]),
        tau: Array2::zeros([e.queries, e.keys]),
        pi: Array1::zeros(e.queries),
        lse: Array1::zeros(e.queries),
    };
    for i in 0..e.queries {
        let mut row = vec![f64::NEG_INFINITY; e.keys];
        for j in (0..e.keys).filter(|&j| scores.mask.allows(&sequence, h, i, j)) {
            let dot: f64 =
                (0..e.dim).map(|c| q[[b, h, i, c]] * k[[b, h / scores.group(), j, c]]).sum();
            let mut s = stored(scores.scale() * stored(dot));
            if let Some(cap) = scores.softcap {
                found.tau[[i, j]] = stored(stored(s / cap).tanh());
                s = stored(cap * found.tau[[i, j]]);
            }
            if scores.bias.is_some() {
                s = stored(s + four(x, "bias")[[0, 0, i, j]]);
            }
            row[j] = s;
        }
        let m = row.iter().copied().fold(sink.unwrap_or(f64::NEG_INFINITY), f64::max);
        let l =
            row.iter().map(|s| (s - m).exp()).sum::<f64>() + sink.map_or(0.0, |s| (s - m).exp());
        found.lse[i] = m + l.ln();
        let weight = |s: f64| kept((s - m).exp() / l, stores.weight_store);
        (0..e.keys).for_each(|j| found.p[[i, j]] = weight(row[j]));
        found.pi[i] = sink.map_or(0.0, weight);
    }
    found
}

/// `softmax(q kᵀ σ) v` with tensors in between, and what autograd makes of it.
pub fn attention(problem: &Attention, pass: Pass, stores: &Profile, x: &Values) -> Values {
    let (scores, e, width) = (&problem.scores, &problem.scores.extents, problem.value_dim);
    let v = four(x, "v");
    let shape = [e.batch, e.query_heads, e.queries, width];
    let (mut o, mut lse) =
        (Array4::zeros(shape), Array3::zeros([e.batch, e.query_heads, e.queries]));
    let mut grads = Gradients::new(problem);
    for b in 0..e.batch {
        for h in 0..e.query_heads {
            let found = weights(problem, stores, x, b, h);
            let shared = h / scores.group();
            for i in 0..e.queries {
                lse[[b, h, i]] = found.lse[i];
                for c in 0..width {
                    let terms = (0..e.keys).map(|j| found.p[[i, j]] * v[[b, shared, j, c]]);
                    o[[b, h, i, c]] = terms.sum();
                }
            }
            if pass != Pass::Forward {
                grads.add(problem, stores, x, (b, h), &found);
            }
        }
    }
    match pass {
        Pass::Forward => {
            Values::from([("o".to_string(), o.into_dyn()), ("lse".to_string(), lse.into_dyn())])
        }
        _ => grads.into_values(),
    }
}

struct Gradients {
    dq: Array4<f64>,
    dk: Array4<f64>,
    dv: Array4<f64>,
    dbias: Array4<f64>,
    dsinks: Array1<f64>,
}

impl Gradients {
    fn new(problem: &Attention) -> Self {
        let e = &problem.scores.extents;
        let keys = |width| Array4::zeros([e.batch, e.key_heads, e.keys, width]);
        Gradients {
            dq: Array4::zeros([e.batch, e.query_heads, e.queries, e.dim]),
            dk: keys(e.dim),
            dv: keys(problem.value_dim),
            dbias: Array4::zeros([1, 1, e.queries, e.keys]),
            dsinks: Array1::zeros(e.query_heads),
        }
    }

    /// Adds those of a head.
    fn add(
        &mut self,
        problem: &Attention,
        stores: &Profile,
        x: &Values,
        (b, h): (usize, usize),
        found: &Weights,
    ) {
        let (scores, e, width) = (&problem.scores, &problem.scores.extents, problem.value_dim);
        let shared = h / scores.group();
        let (q, k, v, dout) = (four(x, "q"), four(x, "k"), four(x, "v"), four(x, "dout"));
        let back = |x: f64| kept(x, stores.ds_store);
        let mut own = [Array2::zeros([e.keys, e.dim]), Array2::zeros([e.keys, width])];
        for i in 0..e.queries {
            let dp: Vec<f64> = (0..e.keys)
                .map(|j| {
                    let dp: f64 =
                        (0..width).map(|c| dout[[b, h, i, c]] * v[[b, shared, j, c]]).sum();
                    kept(dp, stores.dp_store)
                })
                .collect();
            let dlse = x.get("dlse").map_or(0.0, |dlse| dlse[[b, h, i]]);
            let delta = (0..e.keys).map(|j| found.p[[i, j]] * dp[j]).sum::<f64>() - dlse;
            self.dsinks[h] += back(-found.pi[i] * delta);
            for j in 0..e.keys {
                let p = found.p[[i, j]];
                let mut ds = back(p * (dp[j] - delta));
                self.dbias[[0, 0, i, j]] += ds;
                if stores.score_store != Dtype::F32 {
                    if let Some(cap) = scores.softcap {
                        ds = back(ds * cap);
                        ds = back(ds * (1.0 - found.tau[[i, j]].powi(2)));
                        ds = back(ds / cap);
                    }
                    ds = back(ds * scores.scale());
                } else {
                    let tau = found.tau[[i, j]];
                    ds *= scores.scale() * (1.0 - tau * tau);
                }
                for c in 0..e.dim {
                    self.dq[[b, h, i, c]] += ds * k[[b, shared, j, c]];
                    own[0][[j, c]] += ds * q[[b, h, i, c]];
                }
                for c in 0..width {
                    own[1][[j, c]] += p * dout[[b, h, i, c]];
                }
            }
        }
        let group = if scores.group() > 1 { stores.group_store } else { Dtype::F32 };
        for (all, own) in [&mut self.dk, &mut self.dv].into_iter().zip(own) {
            own.indexed_iter().for_each(|((j, c), x)| all[[b, shared, j, c]] += kept(*x, group));
        }
    }

    fn into_values(self) -> Values {
        let Gradients { dq, dk, dv, dbias, dsinks } = self;
        let all = [("dq", dq), ("dk", dk), ("dv", dv), ("dbias", dbias)];
        let all = all.map(|(name, x)| (name.to_string(), x.into_dyn()));
        let sinks = ("dsinks".to_string(), dsinks.into_dyn());
        all.into_iter().chain([sinks]).collect()
    }
}

/// The gradients of attention from an lse that was stored in some type.
pub fn from_stored_lse(problem: &Attention, lse: Dtype, x: &Values) -> Values {
    let (e, strict) = (&problem.scores.extents, Profile::by_name("f32-strict").unwrap());
    let mut grads = Gradients::new(problem);
    let o = attention(problem, Pass::Forward, &strict, x).remove("o").unwrap();
    let mut x = x.clone();
    for b in 0..e.batch {
        for h in 0..e.query_heads {
            let mut found = weights(problem, &strict, &x, b, h);
            // δ is that of o: what the weights of a row miss of 1 is no part of it.
            for i in 0..e.queries {
                let factor = (found.lse[i] - lse.round(found.lse[i])).exp();
                let exact: f64 = (0..problem.value_dim)
                    .map(|c| Dtype::Bf16.round(o[[b, h, i, c]]) * x["dout"][[b, h, i, c]])
                    .sum();
                let v = four(&x, "v");
                let own: f64 = (0..e.keys)
                    .map(|j| {
                        let dp: f64 = (0..problem.value_dim)
                            .map(|c| {
                                x["dout"][[b, h, i, c]] * v[[b, h / problem.scores.group(), j, c]]
                            })
                            .sum();
                        factor * found.p[[i, j]] * dp
                    })
                    .sum();
                found.p.row_mut(i).mapv_inplace(|p| p * factor);
                if let Some(dlse) = x.get_mut("dlse") {
                    dlse[[b, h, i]] += own - exact;
                }
            }
            grads.add(problem, &strict, &x, (b, h), &found);
        }
    }
    let mut all = grads.into_values();
    all.retain(|name, _| matches!(name.as_str(), "dq" | "dk" | "dv"));
    all
}

/// A loss with its logits and their gradients in tensors, and dw summed over chunks of tokens.
pub fn cross_entropy(
    problem: &LinearCrossEntropy,
    pass: Pass,
    stores: &Profile,
    x: &Values,
) -> Values {
    let two = |name: &str| x[name].view().into_dimensionality::<Ix2>().unwrap();
    let (h, w) = (two("h"), two("w"));
    let [tokens, dim, vocab] = [Extent::Targets, Extent::Dim, Extent::Classes]
        .map(|axis| etalon_problem::Problem::from(problem.clone()).extent(axis));
    let stored = |x: f64| kept(x, stores.score_store);
    let (n, alpha, zeta) = (tokens as f64, problem.label_smoothing, problem.lse_square_scale);
    let dloss = x.get("dloss").map_or(0.0, |dloss| dloss.iter().next().copied().unwrap_or(0.0));
    let mut loss = 0.0;
    let mut da = Array2::zeros([tokens, vocab]);
    for i in 0..tokens {
        let y = x["targets"][[i]] as usize;
        let mut bent = vec![1.0; vocab];
        let z: Vec<f64> = (0..vocab)
            .map(|v| {
                let mut a = stored(h.row(i).dot(&w.row(v)));
                if problem.bias {
                    a = stored(a + x["bias"][[v]]);
                }
                if problem.logit_scale != 1.0 {
                    a = stored(a * problem.logit_scale);
                }
                if let Some(cap) = problem.softcap {
                    let tau = stored(stored(a / cap).tanh());
                    bent[v] = 1.0 - tau * tau;
                    a = stored(cap * tau);
                }
                if problem.temperature != 1.0 { stored(a / problem.temperature) } else { a }
            })
            .collect();
        let m = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = m + z.iter().map(|z| (z - m).exp()).sum::<f64>().ln();
        let mean = z.iter().sum::<f64>() / vocab as f64;
        loss += ((1.0 - alpha) * (lse - z[y]) + alpha * (lse - mean) + zeta * lse * lse) / n;
        for v in 0..vocab {
            let p = kept((z[v] - lse).exp(), stores.weight_store);
            let own = if v == y { 1.0 } else { 0.0 };
            let residual = kept(p - own, stores.residual_store);
            let smoothing = alpha * (p - 1.0 / vocab as f64) + 2.0 * zeta * lse * p;
            let slope = problem.logit_scale / problem.temperature * bent[v];
            // As Liger does, in one step from there on.
            da[[i, v]] =
                kept(slope * (dloss / n) * ((1.0 - alpha) * residual + smoothing), stores.ds_store);
        }
    }
    if pass == Pass::Forward {
        let loss = ("loss".to_string(), ArrayD::from_elem(vec![], loss));
        return Values::from([loss]);
    }
    let mut dw = Array2::zeros([vocab, dim + 1]);
    let chunk = match stores.chunk_tokens {
        0 => tokens.div_ceil(vocab.div_ceil(dim)).next_power_of_two(),
        tokens => tokens,
    };
    for start in (0..tokens).step_by(chunk) {
        for v in 0..vocab {
            for c in 0..=dim {
                let h = |i: usize| if c < dim { h[[i, c]] } else { 1.0 };
                let sum: f64 =
                    (start..(start + chunk).min(tokens)).map(|i| da[[i, v]] * h(i)).sum();
                let sum = kept(sum, stores.chunk_store);
                dw[[v, c]] = kept(dw[[v, c]] + sum, stores.chunk_store);
            }
        }
    }
    let dbias = dw.column(dim).to_owned();
    let dw = dw.slice_move(ndarray::s![.., ..dim]);
    let all = [("dh", da.dot(&w).into_dyn()), ("dw", dw.into_dyn()), ("dbias", dbias.into_dyn())];
    all.into_iter().map(|(name, x)| (name.to_string(), x)).collect()
}
