//! Values of which the points of a run are made: all of a grid, or those within declared capabilities.

use super::axes::Names;
use super::{Point, Spec};
use crate::capabilities::{Capabilities, Kernel};
use etalon_problem::{Algorithm, Dtype, Problem};

/// Storage types and values of axes that the points of a run have.
pub(crate) struct Choices<'a> {
    pub algorithm: Algorithm,
    pub storage: Vec<Dtype>,
    pub axes: Vec<Names>,
    /// Declared capabilities, if any.
    capabilities: Option<&'a Capabilities>,
}

impl<'a> Choices<'a> {
    /// Choices of the whole grid.
    pub fn all(algorithm: Algorithm) -> Self {
        let (storage, axes) = (Point::storage(algorithm).to_vec(), Point::axes(algorithm));
        Choices { algorithm, storage, axes, capabilities: None }
    }

    /// Choices that kernels take: of each axis the values that least stands against, beside values of the other axes
    /// that were found so. Kernels of one algorithm that take different things may share a value that only one takes.
    pub fn within(algorithm: Algorithm, capabilities: &'a Capabilities) -> Self {
        let mut choices = Choices { capabilities: Some(capabilities), ..Choices::all(algorithm) };
        let kernels = capabilities.kernels.iter().filter(|kernel| kernel.algorithm == algorithm);
        let kernels: Vec<&Kernel> = kernels.collect();
        let has = |dtype: &Dtype| kernels.iter().any(|kernel| kernel.stores(*dtype));
        choices.storage.retain(has);
        let Some(&dtype) = choices.storage.first() else { return choices };
        let all = choices.axes.clone();
        for axis in &mut choices.axes {
            axis.1.clear();
        }
        for kernel in kernels {
            let taken = taken(algorithm, dtype, &all, kernel);
            for ((_, own), (_, names)) in choices.axes.iter_mut().zip(taken) {
                own.extend(
                    names.into_iter().filter(|name| !own.contains(name)).collect::<Vec<_>>(),
                );
            }
        }
        choices
    }

    /// The values of an axis.
    pub fn values(&self, axis: &str) -> &[&'static str] {
        let own = self.axes.iter().find(|(name, _)| *name == axis);
        own.map_or(&[], |(_, names)| names)
    }

    /// The problem of a point, as the run has it.
    pub fn problem(&self, spec: &Spec) -> Problem {
        self.capabilities.map_or_else(|| spec.problem(), |declared| spec.problem_for(declared))
    }
}

/// Of each axis the values that least of a kernel stands against.
fn taken(algorithm: Algorithm, dtype: Dtype, axes: &[Names], kernel: &Kernel) -> Vec<Names> {
    let plainest: Vec<&str> = axes.iter().map(|(_, names)| names[0]).collect();
    let Ok(point) = Point::parse(algorithm, &plainest) else { return Vec::new() };
    let mut base = Spec { algorithm, dtype, point, seed: 0 };
    let mut taken = axes.to_vec();
    for (axis, names) in &mut taken {
        let against = |name: &&'static str| {
            let spec = base.with(&[(*axis, *name)]);
            spec.map_or(usize::MAX, |spec| against(&spec, kernel))
        };
        let counts: Vec<usize> = names.iter().map(against).collect();
        let least = counts.iter().copied().min().unwrap_or(0);
        let mut counts = counts.into_iter();
        names.retain(|_| counts.next() == Some(least));
        base = names.first().and_then(|name| base.with(&[(*axis, *name)])).unwrap_or(base);
    }
    taken
}

/// Number of reasons for which a kernel does not take a point, over its passes.
fn against(spec: &Spec, kernel: &Kernel) -> usize {
    let problem = spec.problem_to_fit(kernel);
    let passes = spec.algorithm.passes().iter().filter(|pass| kernel.has_pass(**pass));
    let reasons = passes.map(|&pass| {
        let given = |name: &str| {
            let operands = problem.operands(pass);
            operands.iter().any(|operand| operand.name == name && spec.given(operand, pass))
        };
        let unread = kernel.reads(&problem, pass, &given, &[]).is_err();
        kernel.reasons(&problem, pass, spec.dtype).len() + usize::from(unread)
    });
    reasons.sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capabilities::tensors_of;
    use crate::cases::{Depth, specs_for};
    use etalon_problem::{Pass, Role};

    fn capabilities(text: &str) -> Capabilities {
        serde_json::from_str(&format!(r#"{{"kernels": [{text}]}}"#)).expect(text)
    }

    /// A kernel as they are: a few head dimensions, causal, no options.
    const NARROW: &str = r#"{"algorithm": "attention", "passes": ["forward", "backward"], "dtypes": ["bf16"],
        "limits": {"dim": {"one_of": [64, 128]}, "queries": {"multiple_of": 64, "at_least": 64}},
        "equal": [["queries", "keys"], ["dim", "value_dim"]],
        "masks": ["causal"], "sequences": ["dense"], "options": {}, "omits": ["lse"]}"#;

    #[test]
    fn a_narrow_kernel_has_cases_enough() {
        let declared = capabilities(NARROW);
        let specs: Vec<Spec> =
            specs_for(Algorithm::Attention, Depth::Core, 0, Some(&declared)).collect();
        let taken = |spec: &&Spec| {
            let problem = spec.problem_for(&declared);
            declared.takes(&problem, Pass::Forward, spec.dtype).is_ok()
        };
        let taken: Vec<&Spec> = specs.iter().filter(taken).collect();
        assert!(taken.len() >= 60, "{} of {}", taken.len(), specs.len());
        assert!(2 * taken.len() > specs.len(), "{} of {}", taken.len(), specs.len());
        let dims: std::collections::BTreeSet<usize> = taken
            .iter()
            .filter_map(|spec| Some(spec.problem_for(&declared).scores()?.extents.dim))
            .collect();
        assert_eq!(dims.into_iter().collect::<Vec<_>>(), [64, 128]);
    }

    #[test]
    fn a_kernel_that_takes_all_has_the_whole_grid() {
        for algorithm in Algorithm::ALL {
            let mut kernel = Kernel::of(algorithm);
            let cotangents = tensors_of(algorithm, Role::OptionalCotangent);
            kernel.cotangents = cotangents.into_iter().map(str::to_string).collect();
            let declared = Capabilities { kernels: vec![kernel] };
            let (own, all) = (Choices::within(algorithm, &declared), Choices::all(algorithm));
            assert_eq!(own.axes, all.axes, "{algorithm}");
            assert_eq!(own.storage, all.storage, "{algorithm}");
        }
    }
}
