//! The tokens that count, and what they weigh:
//!
//! ```text
//! (C10) Z   = Σ_i κ_i cw_{y_i},  Z_z = n or Z      with `Mean`; the given number with `By`; else 1
//! ```

use bytemuck::{Pod, Zeroable};
use etalon_problem::{Error, LinearCrossEntropy, NothingLeft, Reduction, View, Views};
use ndarray::ArrayViewD;

/// A token that counts: `Token` of `cross_entropy.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct Token {
    /// Where it lies in the arrays.
    index: i32,
    /// y_i
    target: i32,
    /// κ_i
    weight: f32,
    /// cw_{y_i}
    class_weight: f32,
}

/// The tokens that count, in their order, and by what their losses are divided.
#[derive(Debug)]
pub(crate) struct Tokens {
    pub counted: Vec<Token>,
    /// Z of (C10).
    pub z: f64,
    /// Z_z of (C10).
    pub z_lse: f64,
    /// Σ_v cw_v
    pub class_weights: f64,
    /// What a mean of nothing is: 0: there is something; 1: 0; 2: NaN.
    pub nothing_left: i32,
}

impl Tokens {
    /// From inputs of the problem's shapes. Fails at a target that is no class, and where nothing is left to
    /// average if the problem wants that.
    pub fn new(problem: &LinearCrossEntropy, inputs: &Views<'_>) -> Result<Tokens, Error> {
        let Some(View::I64(targets)) = inputs.get("targets") else {
            return Err(Error::missing("targets", None));
        };
        let weights = numbers(inputs, "token_weights");
        let class_weights = numbers(inputs, "class_weights");
        let what = || "the tokens that count".to_string();
        let mut counted = Vec::new();
        let room = counted.try_reserve_exact(problem.tokens);
        room.map_err(|_| Error::Memory { what: what(), bytes: 16 * problem.tokens })?;
        for (index, &target) in targets.iter().enumerate() {
            if target == problem.ignore_index {
                continue;
            }
            let class = problem.class_of(index, target)?;
            counted.push(Token {
                index: index as i32,
                target: class as i32,
                weight: weights.map_or(1.0, |all| all[[index]]),
                class_weight: class_weights.map_or(1.0, |all| all[[class]]),
            });
        }
        let each = |token: &Token| f64::from(token.weight) * f64::from(token.class_weight);
        let (z, z_lse) = problem.normalisers(counted.len(), counted.iter().map(each))?;
        let all = |weights: &ArrayViewD<'_, f32>| weights.iter().map(|&x| f64::from(x)).sum();
        let nothing = problem.reduction == Reduction::Mean && z == 0.0;
        let nothing_left = match problem.nothing_left {
            _ if !nothing => 0,
            NothingLeft::Zero => 1,
            NothingLeft::Nan | NothingLeft::Error => 2,
        };
        let class_weights = class_weights.map_or(problem.vocab as f64, all);
        Ok(Tokens { counted, z, z_lse, class_weights, nothing_left })
    }
}

fn numbers<'v>(inputs: &'v Views<'_>, name: &str) -> Option<&'v ArrayViewD<'v, f32>> {
    match inputs.get(name) {
        Some(View::F32(numbers)) => Some(numbers),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array1, array};

    fn tokens(problem: &LinearCrossEntropy, targets: &Array1<i64>) -> Result<Tokens, Error> {
        let (weights, classes) = (array![2f32, 4.0, 8.0], array![0.5f32, 0.25]);
        let inputs = Views::new()
            .with("targets", targets)
            .with("token_weights", &weights)
            .with("class_weights", &classes);
        Tokens::new(problem, &inputs)
    }

    #[test]
    fn ignored_tokens_are_left_out_and_the_others_keep_their_places() {
        let problem = LinearCrossEntropy::new(3, 1, 2);
        let all = tokens(&problem, &array![1, -100, 0]).unwrap();
        let places: Vec<_> = all.counted.iter().map(|token| (token.index, token.target)).collect();
        assert_eq!(places, [(0, 1), (2, 0)]);
        assert_eq!((all.z, all.z_lse, all.class_weights), (2.0 * 0.25 + 8.0 * 0.5, 2.0, 0.75));
    }

    #[test]
    fn a_target_that_is_no_class_is_named() {
        let problem = LinearCrossEntropy::new(3, 1, 2);
        let error = tokens(&problem, &array![0, 1, 2]).unwrap_err().to_string();
        assert!(error.contains("targets[2]"), "{error}");
        assert!(tokens(&problem, &array![0, -1, 1]).is_err());
    }

    #[test]
    fn a_mean_of_nothing_is_what_the_problem_wants() {
        let none = array![-100, -100, -100];
        let of = |result| tokens(&LinearCrossEntropy::new(3, 1, 2).nothing_left(result), &none);
        assert_eq!(of(NothingLeft::Zero).unwrap().nothing_left, 1);
        assert_eq!(of(NothingLeft::Nan).unwrap().nothing_left, 2);
        assert!(of(NothingLeft::Error).is_err());
    }
}
