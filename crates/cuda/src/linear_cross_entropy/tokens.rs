//! Checks that a device cannot make: targets that are no classes, in the memory of the host.

use etalon_problem::{Error, LinearCrossEntropy, Result, View, Views};
use ndarray::ArrayViewD;

/// The number of tokens that count. Fails at a target that is no class, and where nothing is left to average if the
/// problem wants that.
pub(crate) fn counted(problem: &LinearCrossEntropy, inputs: &Views<'_>) -> Result<usize> {
    let Some(View::I64(targets)) = inputs.get("targets") else {
        return Err(Error::missing("targets", None));
    };
    let numbers = |name| if let Some(View::F32(numbers)) = inputs.get(name) { Some(numbers) } else { None };
    let (weights, class_weights) = (numbers("token_weights"), numbers("class_weights"));
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

#[cfg(test)]
#[path = "../../tests/units/linear_cross_entropy/tokens.rs"]
mod tests;
