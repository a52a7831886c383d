//! Checks that a device cannot make: targets that are no classes, in the memory of the host.

use etalon_problem::{Error, LinearCrossEntropy, View, Views};
use ndarray::ArrayViewD;

/// Bytes of `Token` and of `Common` of `linear_cross_entropy/problem.cuh`.
pub(crate) const TOKEN: usize = 16;
pub(crate) const COMMON: usize = 40;

/// The number of tokens that count. Fails at a target that is no class, and where nothing is left to average if the
/// problem wants that.
pub(crate) fn counted(problem: &LinearCrossEntropy, inputs: &Views<'_>) -> Result<usize, Error> {
    let Some(View::I64(targets)) = inputs.get("targets") else {
        return Err(Error::missing("targets", None));
    };
    let weights = numbers(inputs, "token_weights");
    let class_weights = numbers(inputs, "class_weights");
    let weight = |all: Option<&ArrayViewD<'_, f32>>, at: usize| all.map_or(1.0, |all| f64::from(all[[at]]));
    let (mut counted, mut sum) = (0, 0.0);
    for (index, &target) in targets.iter().enumerate() {
        if target != problem.ignore_index {
            let class = problem.class_of(index, target)?;
            counted += 1;
            sum += weight(weights, index) * weight(class_weights, class);
        }
    }
    problem.normalisers(counted, std::iter::once(sum))?;
    Ok(counted)
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
    use etalon_problem::NothingLeft;
    use ndarray::{Array1, array};

    fn of(problem: &LinearCrossEntropy, targets: &Array1<i64>) -> Result<usize, Error> {
        let weights = array![2f32, 4.0, 8.0];
        let inputs = Views::new().with("targets", targets).with("token_weights", &weights);
        counted(problem, &inputs)
    }

    #[test]
    fn ignored_tokens_do_not_count() {
        assert_eq!(of(&LinearCrossEntropy::new(3, 1, 2), &array![1, -100, 0]), Ok(2));
    }

    #[test]
    fn a_target_that_is_no_class_is_named() {
        let problem = LinearCrossEntropy::new(3, 1, 2);
        let error = of(&problem, &array![0, 1, 2]).unwrap_err().to_string();
        assert!(error.contains("targets[2]"), "{error}");
        assert!(of(&problem, &array![0, -1, 1]).is_err());
    }

    #[test]
    fn a_mean_of_nothing_is_an_error_where_the_problem_wants_that() {
        let none = array![-100, -100, -100];
        let of = |result| of(&LinearCrossEntropy::new(3, 1, 2).nothing_left(result), &none);
        assert_eq!((of(NothingLeft::Zero), of(NothingLeft::Nan)), (Ok(0), Ok(0)));
        assert!(of(NothingLeft::Error).is_err());
    }
}
