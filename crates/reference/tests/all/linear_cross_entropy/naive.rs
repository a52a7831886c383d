//! A second formulation: full matrices of logits, every equation as it stands in
//! `docs/linear_cross_entropy.md`, and the closed form of the second order in place of dual
//! numbers.

use super::cases::cases;
use super::tensors::{Operands, PASSES, Tensors, assert_near, operands, run};
use etalon_problem::{LinearCrossEntropy, LseSquareWeight, Pass, Reduction};
use ndarray::{Array1, Array2, ArrayD, Axis, arr0};

/// The two round differently; weights of either sign make some sums cancel by a digit or two.
const TOLERANCE: f64 = 1e-12;

struct Naive<'a> {
    problem: &'a LinearCrossEntropy,
    x: &'a Operands<f64>,
    h: Array2<f64>,
    w: Array2<f64>,
    class_weights: Array1<f64>,
    /// z, r and dr/da
    z: Array2<f64>,
    r: Array2<f64>,
    r_slope: Array2<f64>,
    p: Array2<f64>,
    lse: Array1<f64>,
    entropy: Array1<f64>,
    n: f64,
    z_loss: f64,
    z_lse: f64,
}

/// 0 · −∞ is no entropy, and no loss of a class without weight.
fn weighted(p: f64, x: f64) -> f64 {
    if p == 0.0 { 0.0 } else { p * x }
}

fn p_ln_p(p: f64) -> f64 {
    weighted(p, p.ln())
}

impl<'a> Naive<'a> {
    fn new(problem: &'a LinearCrossEntropy, x: &'a Operands<f64>) -> Self {
        let two = |name: &str| x.floats[name].clone().into_dimensionality().expect(name);
        let one = |name: &str, length: usize| {
            let tensor = x.floats.get(name).cloned();
            tensor.map_or(Array1::ones(length), |x| x.into_dimensionality().expect(name))
        };
        let (h, w): (Array2<f64>, Array2<f64>) = (two("h"), two("w"));
        let mut a = h.dot(&w.t());
        if problem.bias {
            a += &one("bias", problem.vocab); // (C1)
        }
        let sigma = problem.logit_scale;
        let (theta, cap) = (problem.temperature, problem.softcap);
        let t = |a: f64| cap.map_or(0.0, |c| (sigma * a / c).tanh());
        let z = a.mapv(|a| cap.map_or(sigma * a, |c| c * t(a)) / theta); // (C2)
        let r = a.mapv(|a| sigma / theta * (1.0 - t(a) * t(a))); // (C11)
        let r_slope = a.mapv(|a| {
            cap.map_or(0.0, |c| -2.0 * sigma / c * t(a) * sigma / theta * (1.0 - t(a).powi(2)))
        }); // (C25)
        let lse = z.map_axis(Axis(1), |z| z.iter().map(|z| z.exp()).sum::<f64>().ln()); // (C3)
        let p = (&z - &lse.view().insert_axis(Axis(1))).mapv(f64::exp); // (C4)
        let entropy = p.map_axis(Axis(1), |p| -p.iter().copied().map(p_ln_p).sum::<f64>()); // (C6)
        let mut naive = Naive {
            problem,
            x,
            h,
            w,
            class_weights: one("class_weights", problem.vocab),
            z,
            r,
            r_slope,
            p,
            lse,
            entropy,
            n: 0.0,
            z_loss: 1.0,
            z_lse: 1.0,
        };
        naive.n = naive.counted().count() as f64;
        (naive.z_loss, naive.z_lse) = match problem.reduction {
            Reduction::None | Reduction::Sum => (1.0, 1.0),
            Reduction::By { normaliser } => (normaliser, normaliser),
            Reduction::Mean => {
                let z = naive.counted().map(|(i, y)| naive.kappa(i) * naive.class_weights[y]).sum();
                (
                    z,
                    if problem.lse_square_weight == LseSquareWeight::Unweighted {
                        naive.n
                    } else {
                        z
                    },
                )
            }
        };
        naive
    }

    fn counted(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let targets = self.x.targets.iter().enumerate();
        let counted = targets.filter(|(_, y)| **y != self.problem.ignore_index);
        counted.map(|(i, &y)| (i, y as usize))
    }

    fn kappa(&self, i: usize) -> f64 {
        self.x.floats.get("token_weights").map_or(1.0, |x| x[[i]])
    }

    /// ω of (C8).
    fn omega(&self, y: usize) -> f64 {
        match self.problem.lse_square_weight {
            LseSquareWeight::Unweighted => 1.0,
            LseSquareWeight::ClassWeight => self.class_weights[y],
        }
    }

    /// Element `i` of a tensor with one number per token; of dloss, the only one.
    fn at(&self, name: &str, i: usize) -> f64 {
        let tensor = self.x.floats.get(name);
        tensor.map_or(0.0, |x| if x.ndim() == 0 { x[[]] } else { x[[i]] })
    }

    /// (1 − α) cw_y (d − x_y) + (α/V) Σ cw_v (d − x_v): (C7) with lse and z, (C31) with theirs.
    fn cross_entropy(&self, y: usize, d: f64, x: ndarray::ArrayView1<'_, f64>) -> f64 {
        let alpha = self.problem.label_smoothing;
        let spread: f64 =
            self.class_weights.iter().zip(x).map(|(&cw, x)| weighted(cw, d - x)).sum();
        weighted((1.0 - alpha) * self.class_weights[y], d - x[y])
            + weighted(alpha / x.len() as f64, spread)
    }

    /// Σ_i or not, of κ_i (ce_i/Z + ζ ω_i square_i/Z_z): (C9).
    fn reduce(&self, terms: impl Fn(usize, usize) -> (f64, f64)) -> ArrayD<f64> {
        let term = |(i, y)| {
            let (cross_entropy, square) = terms(i, y);
            let zeta = self.problem.lse_square_scale * self.omega(y);
            (i, weighted(self.kappa(i), cross_entropy / self.z_loss + zeta * square / self.z_lse))
        };
        let terms = self.counted().map(term);
        if self.problem.reduction == Reduction::None {
            return self.per_token(terms);
        }
        arr0(if self.n == 0.0 { self.nothing() } else { terms.map(|(_, x)| x).sum() }).into_dyn()
    }

    fn nothing(&self) -> f64 {
        match self.problem.nothing_left {
            etalon_problem::NothingLeft::Zero => 0.0,
            _ if self.problem.reduction != Reduction::Mean => 0.0,
            _ => f64::NAN,
        }
    }

    fn per_token(&self, values: impl Iterator<Item = (usize, f64)>) -> ArrayD<f64> {
        let mut all = Array1::zeros(self.problem.tokens);
        values.for_each(|(i, x)| all[i] = x);
        all.into_dyn()
    }

    fn forward(&self) -> Tensors<f64> {
        let loss = self.reduce(|i, y| {
            (self.cross_entropy(y, self.lse[i], self.z.row(i)), self.lse[i].powi(2))
        });
        let mut argmax = Array1::from_elem(self.problem.tokens, -1.0);
        for (i, _) in self.counted() {
            let row = self.z.row(i);
            argmax[i] =
                (0..row.len()).rev().max_by(|&v, &w| row[v].total_cmp(&row[w])).expect("a class")
                    as f64;
        }
        let rows = |value: &dyn Fn(usize, usize) -> f64| {
            self.per_token(self.counted().map(|(i, y)| (i, value(i, y))))
        };
        let wanted = self.problem.outputs;
        let all = [
            ("loss", true, loss),
            ("lse", wanted.lse, rows(&|i, _| self.lse[i])),
            ("logprob", wanted.logprob, rows(&|i, y| self.z[[i, y]] - self.lse[i])),
            ("entropy", wanted.entropy, rows(&|i, _| self.entropy[i])),
            ("argmax", wanted.argmax, argmax.into_dyn()),
            ("n_valid", true, arr0(self.n).into_dyn()),
            ("normaliser", true, arr0(self.z_loss).into_dyn()),
        ];
        let wanted = all.into_iter().filter(|(_, wanted, _)| *wanted);
        wanted.map(|(name, _, x)| (name.to_string(), x)).collect()
    }

    /// β, λ, g α/V of (C12)–(C14), with any cotangents in place of dloss and so on, and any
    /// number in place of lse.
    fn pull(&self, names: [&str; 3], i: usize, y: usize, lse: f64) -> (f64, f64, f64) {
        let [loss, of_lse, logprob] = names.map(|name| self.at(name, i));
        let alpha = self.problem.label_smoothing;
        let g = loss * self.kappa(i) / self.z_loss;
        let eta = g * alpha / self.problem.vocab as f64;
        let beta = g * (1.0 - alpha) * self.class_weights[y] - logprob;
        let gamma =
            loss * self.problem.lse_square_scale * self.kappa(i) * self.omega(y) / self.z_lse;
        (beta, eta * self.class_weights.sum() + 2.0 * gamma * lse + of_lse, eta)
    }

    /// (C15)
    fn dz(&self, i: usize, y: usize) -> Array1<f64> {
        let (beta, lambda, eta) = self.pull(["dloss", "dlse", "dlogprob"], i, y, self.lse[i]);
        let (p, entropy) = (self.p.row(i), self.entropy[i]);
        Array1::from_shape_fn(p.len(), |v| {
            let own = if v == y { beta } else { 0.0 };
            let surprise = p_ln_p(p[v]) + p[v] * entropy;
            (beta + lambda) * p[v]
                - self.at("dentropy", i) * surprise
                - eta * self.class_weights[v]
                - own
        })
    }

    /// (C16), with rows of 0 at ignored tokens.
    fn da(&self) -> Array2<f64> {
        let mut da = Array2::zeros(self.z.dim());
        self.counted().for_each(|(i, y)| da.row_mut(i).assign(&(self.dz(i, y) * self.r.row(i))));
        da
    }

    fn backward(&self) -> Tensors<f64> {
        let da = self.da();
        let all = [
            ("dh", da.dot(&self.w)),     // (C17)
            ("dw", da.t().dot(&self.h)), // (C18)
        ];
        let mut all: Tensors<f64> =
            all.into_iter().map(|(name, x)| (name.to_string(), x.into_dyn())).collect();
        if self.problem.bias {
            all.insert("dbias".to_string(), da.sum_axis(Axis(0)).into_dyn()); // (C19)
        }
        all
    }

    fn double_backward(&self) -> Tensors<f64> {
        let two = |name: &str| -> Array2<f64> {
            self.x.floats[name].clone().into_dimensionality().expect(name)
        };
        let (ddh, ddw) = (two("ddh"), two("ddw"));
        let mut a_dot = ddh.dot(&self.w.t()) + self.h.dot(&ddw.t());
        if let Some(ddbias) = self.x.floats.get("ddbias") {
            a_dot += ddbias;
        }
        let z_dot = &self.r * &a_dot; // (C21)
        let (da, mut x) = (self.da(), Array2::zeros(self.z.dim()));
        let mut mu = Array1::zeros(self.problem.tokens);
        let mut entropy_dot = Array1::zeros(self.problem.tokens);
        for (i, y) in self.counted() {
            let (p, z_dot, dz) = (self.p.row(i), z_dot.row(i), self.dz(i, y));
            let q = p.mapv(f64::ln) + self.entropy[i];
            mu[i] = p.dot(&z_dot); // (C22)
            let p_dot = &p * &(&z_dot - mu[i]); // (C23)
            let pq = ndarray::Zip::from(&p).and(&q).map_collect(|&p, &q| weighted(p, q));
            entropy_dot[i] = -(&pq * &z_dot).sum(); // (C24)
            let (beta, lambda, _) = self.pull(["dloss", "dlse", "dlogprob"], i, y, self.lse[i]);
            let names = ["cot_loss", "cot_lse", "cot_logprob"];
            let (beta_dot, mut lambda_dot, eta_dot) = self.pull(names, i, y, self.lse[i]);
            let still = self.pull(["dloss", "", ""], i, y, 0.0).1;
            lambda_dot += self.pull(["dloss", "", ""], i, y, mu[i]).1 - still; // 2 γ μ
            for v in 0..p.len() {
                let own = if v == y { beta_dot } else { 0.0 };
                let q_dot = z_dot[v] - mu[i] + entropy_dot[i];
                let moved = (beta_dot + lambda_dot) * p[v] + (beta + lambda) * p_dot[v]
                    - self.at("cot_entropy", i) * pq[v]
                    - self.at("dentropy", i) * (pq[v] * (z_dot[v] - mu[i]) + p[v] * q_dot)
                    - eta_dot * self.class_weights[v]
                    - own; // (C26)
                x[[i, v]] = self.r[[i, v]] * moved + self.r_slope[[i, v]] * a_dot[[i, v]] * dz[v]; // (C27)
            }
        }
        let loss = self.reduce(|i, y| {
            (self.cross_entropy(y, mu[i], z_dot.row(i)), 2.0 * self.lse[i] * mu[i]) // (C31)
        });
        let wanted = self.problem.outputs;
        let logprob = self.per_token(self.counted().map(|(i, y)| (i, z_dot[[i, y]] - mu[i])));
        let all = [
            ("gh", true, (x.dot(&self.w) + da.dot(&ddw)).into_dyn()), // (C28)
            ("gw", true, (x.t().dot(&self.h) + da.t().dot(&ddh)).into_dyn()), // (C29)
            ("gbias", self.problem.bias, x.sum_axis(Axis(0)).into_dyn()), // (C30)
            ("gdloss", true, loss),
            ("gdlse", wanted.lse, mu.into_dyn()),
            ("gdlogprob", wanted.logprob, logprob), // (C32)
            ("gdentropy", wanted.entropy, entropy_dot.into_dyn()),
        ];
        let wanted = all.into_iter().filter(|(_, wanted, _)| *wanted);
        wanted.map(|(name, _, x)| (name.to_string(), x)).collect()
    }
}

fn assert_agrees(name: &str, problem: &LinearCrossEntropy, pass: Pass, x: &Operands<f64>) {
    let naive = Naive::new(problem, x);
    let expected = match pass {
        Pass::Forward => naive.forward(),
        Pass::Backward => naive.backward(),
        _ => naive.double_backward(),
    };
    let found = run(problem, pass, x).expect(name);
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (result, found) in found {
        // Of numbers near 0, as V = 1 gives, the rounding of the terms remains.
        let what = format!("{name}: {pass} {result}");
        assert_near(&found, &expected[&result], TOLERANCE, 1.0, &what);
    }
}

#[test]
fn every_pass_agrees_with_full_matrices() {
    for (name, problem) in cases() {
        for pass in PASSES {
            assert_agrees(name, &problem, pass, &operands(&problem, pass, 11));
        }
    }
}

/// Classes whose bias makes their logits −∞, targets among them: with a cap they stand at its end,
/// without one they have no probability, and move all the same.
#[test]
fn impossible_classes_agree_with_full_matrices() {
    let mut of_targets = 0;
    for (name, problem) in cases().into_iter().filter(|(_, problem)| problem.vocab > 2) {
        let problem = LinearCrossEntropy { bias: true, ..problem };
        for pass in PASSES {
            let mut x = operands(&problem, pass, 12);
            let bias = x.floats.get_mut("bias").expect(name);
            for v in [1, problem.vocab - 1] {
                // A cap has an end on either side.
                let end = if v > 1 && problem.softcap.is_some() { 1.0 } else { -1.0 };
                bias[[v]] = end * f64::INFINITY * problem.logit_scale.signum();
                of_targets += x.targets.iter().filter(|&&y| y == v as i64).count();
            }
            assert_agrees(name, &problem, pass, &x);
        }
    }
    assert!(of_targets > 100, "only {of_targets} targets were impossible");
}
