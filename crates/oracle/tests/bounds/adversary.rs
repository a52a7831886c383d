//! Correct kernels at their worst: every operation is off by all that the profile grants, in a direction
//! that a search chooses. What follows holds for every direction, so a climb towards the edge of the
//! bound must never cross it.

use crate::Random;
use etalon_oracle::bounds::{Bound, Bounds, NoBound, Values};
use etalon_oracle::profile::Profile;
use etalon_problem::Dtype;
use std::collections::BTreeMap;

/// The largest errors of operations, those of a profile and a storage type.
#[derive(Debug, Clone, Copy)]
pub struct Granted {
    pub profile: Profile,
    pub storage: Dtype,
}

/// Directions, one for each operation in the order in which a kernel does them: +1 or −1.
#[derive(Debug, Clone)]
pub struct Arithmetic<'a> {
    granted: Granted,
    directions: &'a [f64],
    next: usize,
}

impl<'a> Arithmetic<'a> {
    pub fn new(granted: Granted, directions: &'a [f64]) -> Self {
        Arithmetic { granted, directions, next: 0 }
    }

    /// Number of directions that were read.
    pub fn operations(&self) -> usize {
        self.next
    }

    fn direction(&mut self) -> f64 {
        self.next += 1;
        self.directions.get(self.next - 1).copied().unwrap_or(1.0)
    }

    pub fn u(&self) -> f64 {
        self.granted.profile.accumulator.unit_roundoff()
    }

    /// x after n roundings to the accumulator.
    pub fn rounded(&mut self, x: f64, n: usize) -> f64 {
        x * (1.0 + self.direction() * self.u()).powi(n as i32)
    }

    fn stored_in(&mut self, x: f64, dtype: Dtype, roundoff: f64) -> f64 {
        let kept = dtype == self.granted.profile.accumulator;
        let u = if kept { 0.0 } else { roundoff };
        x * (1.0 + self.direction() * u)
    }

    /// P before it multiplies v, dS before it multiplies q and k, the gradients of one head of several.
    pub fn stored_weight(&mut self, p: f64) -> f64 {
        let Profile { p_store, .. } = self.granted.profile;
        self.stored_in(p, p_store, self.granted.profile.p_roundoff())
    }

    pub fn stored_ds(&mut self, ds: f64) -> f64 {
        let Profile { ds_store, .. } = self.granted.profile;
        self.stored_in(ds, ds_store, self.granted.profile.ds_roundoff())
    }

    pub fn stored_head(&mut self, x: f64) -> f64 {
        let Profile { group_store, .. } = self.granted.profile;
        self.stored_in(x, group_store, group_store.unit_roundoff())
    }

    /// A result in the storage type.
    pub fn stored(&mut self, x: f64) -> f64 {
        x * (1.0 + self.direction() * self.granted.storage.unit_roundoff())
    }

    /// A wide result.
    pub fn wide(&mut self, x: f64) -> f64 {
        let f64_alone = self.granted.storage == Dtype::F64;
        let wide = if f64_alone { Dtype::F64 } else { Dtype::F32 };
        x * (1.0 + self.direction() * wide.unit_roundoff())
    }

    /// x·y of a matrix product, whose factors may be narrowed.
    pub fn product(&mut self, x: f64, y: f64) -> f64 {
        let off = 1.0 + self.direction() * self.granted.profile.factor;
        x * off * y * off
    }

    /// Σ x y, in any order.
    pub fn dot(&mut self, x: &[f64], y: &[f64]) -> f64 {
        let n = x.len();
        let products = x.iter().zip(y).map(|(&x, &y)| {
            let product = self.product(x, y);
            self.rounded(product, n)
        });
        products.sum()
    }

    pub fn exp(&mut self, x: f64) -> f64 {
        let Profile { exp_constant: a, exp_slope: b, .. } = self.granted.profile;
        // The rounded argument is most of it.
        (x + self.direction() * (a + b * x.abs()) * self.u()).exp()
    }

    pub fn tanh(&mut self, x: f64) -> f64 {
        x.tanh() + self.direction() * self.granted.profile.tanh * self.u()
    }

    pub fn ln(&mut self, x: f64) -> f64 {
        let ln = x.ln();
        ln + self.direction() * self.granted.profile.log * self.u() * ln.abs().max(1.0)
    }
}

/// Results of a kernel by name, in row-major order.
pub type Results = BTreeMap<&'static str, Vec<f64>>;

/// Findings of a climb.
#[derive(Debug, Default)]
pub struct Found {
    /// Number of kernels that were tried.
    pub kernels: usize,
    /// The largest margin by output.
    pub margins: BTreeMap<String, f64>,
    /// Elements with a bound, and all of them.
    pub bounded: usize,
    pub elements: usize,
}

/// |got − value| / bound of one element; ∞ and a value without distance require nothing here.
fn margin(bound: &Bound, at: usize, got: f64) -> f64 {
    let (value, b) = (bound.value.as_slice().unwrap()[at], bound.bound.as_slice().unwrap()[at]);
    let right = bound.as_right.get(&at).is_some_and(|all| all.iter().any(|&x| x as f64 == got));
    if right || !value.is_finite() || b == f64::INFINITY || got == value {
        return 0.0;
    }
    (got - value).abs() / b
}

impl Found {
    /// Climbs from random directions towards the edge of the bound of one element after the other, for
    /// some `kernels` in all. Panics where a kernel crosses any bound.
    pub fn climb(
        &mut self,
        what: &dyn std::fmt::Debug,
        bounds: &[Bounds; 2],
        random: &mut Random,
        kernels: usize,
        kernel: impl Fn(&[f64]) -> (Results, usize),
    ) {
        let outputs: BTreeMap<&String, &Bound> = bounds.iter().flat_map(|x| &x.outputs).collect();
        for (name, bound) in &outputs {
            let reasons: Vec<NoBound> = bound.no_bound.keys().copied().collect();
            assert!(reasons.iter().all(|x| *x == NoBound::Exponential), "{name}: {reasons:?}");
            // Only what weights multiply that are made again; lazy attention has them in its forward pass.
            let again = name.starts_with('d') || outputs.contains_key(&"dtau".to_string());
            assert!(reasons.is_empty() || again, "{name}: {reasons:?}");
            self.elements += bound.bound.len();
            self.bounded += bound.bound.iter().filter(|b| **b < f64::INFINITY).count();
            self.bounded += bound.as_right.len(); // judged as one of a set
        }
        let mut tried = |directions: &[f64], target: (&str, usize)| {
            let (results, _) = kernel(directions);
            for (name, list) in &results {
                let bound = outputs[&name.to_string()];
                assert_eq!(bound.value.len(), list.len(), "{name}");
                for (at, &got) in list.iter().enumerate() {
                    let margin = margin(bound, at, got);
                    let value = bound.value.as_slice().unwrap()[at];
                    let b = bound.bound.as_slice().unwrap()[at];
                    assert!(
                        margin <= 1.0,
                        "{name}[{at}] is {got:e}, exact is {value:e} ± {b:e}: margin {margin} of {what:#?}"
                    );
                    let most = self.margins.entry((*name).to_string()).or_default();
                    *most = most.max(margin);
                }
            }
            self.kernels += 1;
            margin(outputs[&target.0.to_string()], target.1, results[target.0][target.1])
        };
        let (results, operations) = kernel(&[]);
        let mut names: Vec<&str> = results.keys().copied().collect();
        names.retain(|name| !results[name].is_empty());
        let mut left = kernels;
        while left > 0 {
            let name = names[random.below(names.len())];
            let target = (name, random.below(results[name].len()));
            let mut directions: Vec<f64> = (0..operations).map(|_| random.sign()).collect();
            let mut best = tried(&directions, target);
            left -= 1;
            // One pass over all operations finds the worst of a sum whose terms do not interact.
            for at in 0..operations {
                if left == 0 {
                    break;
                }
                directions[at] = -directions[at];
                let reached = tried(&directions, target);
                left -= 1;
                if reached > best {
                    best = reached;
                } else {
                    directions[at] = -directions[at];
                }
            }
        }
    }
}

/// The elements of an operand, none of one that is absent.
pub fn operand(values: &Values, name: &str) -> Vec<f64> {
    values.get(name).map_or(Vec::new(), |x| x.iter().copied().collect())
}
