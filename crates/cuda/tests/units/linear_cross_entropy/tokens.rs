//! Unit tests of `src/linear_cross_entropy/tokens.rs`.

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
