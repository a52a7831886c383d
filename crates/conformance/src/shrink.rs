//! The simplest case that shows a failure.
//!
//! proptest shrinks a point of the grid: one axis after the other, those of the structure before that
//! of the elements, the shape by cost. What it finds is a case with a name, as every other.

use crate::cases::{SHAPE, Spec, cost};
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

/// As many cases are tried at most: no algorithm's axes have as many values.
const TRIES: u32 = 200;

/// The axes of what the elements are like.
const OF_ELEMENTS: [&str; 2] = ["family", "elements"];

/// The simplest case that `fails`, and how, if it does so for one that is simpler than `spec`.
pub(crate) fn simplest(
    spec: Spec,
    fails: impl Fn(&Spec) -> Option<String>,
) -> Option<(Spec, String)> {
    let mut axes: Vec<Axis> =
        spec.choices().into_iter().map(|names| Axis::new(&spec, names)).collect();
    axes.sort_by_key(|axis| OF_ELEMENTS.contains(&axis.name));
    let config = Config { failure_persistence: None, max_shrink_iters: TRIES, ..Config::default() };
    // Nothing is drawn.
    let random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let test = |names: Vec<(&str, &str)>| match spec.with(&names).and_then(|spec| fails(&spec)) {
        Some(text) => Err(TestCaseError::fail(text)),
        None => Ok(()),
    };
    match TestRunner::new_with_rng(config, random).run_one(Axes { axes, at: 0 }, test) {
        Err(TestError::Fail(reason, names)) => {
            let found = spec.with(&names).filter(|found| *found != spec)?;
            Some((found, reason.message().to_string()))
        }
        _ => None,
    }
}

/// The values of an axis, simplest first, up to the one that fails.
#[derive(Debug)]
struct Axis {
    name: &'static str,
    values: Vec<&'static str>,
    /// The simplest of which it is known that the case fails, and what is being tried.
    known: usize,
    tried: usize,
    /// The next to be tried.
    next: usize,
}

impl Axis {
    fn new(spec: &Spec, (name, mut values): (&'static str, Vec<&'static str>)) -> Self {
        if name == SHAPE {
            let of = |value| spec.with(&[(name, value)]).map_or(f64::MAX, |x| cost(&x.problem()));
            values.sort_by(|x, y| of(x).total_cmp(&of(y)));
        }
        let own = spec.values();
        let known = values.iter().position(|value| own.contains(&format!("{name}={value}")));
        let known = known.unwrap_or(0);
        Axis { name, values, known, tried: known, next: 0 }
    }

    /// Tries the next value that is simpler than what is known to fail.
    fn try_next(&mut self) -> bool {
        let left = self.next < self.known;
        if left {
            (self.tried, self.next) = (self.next, self.next + 1);
        }
        left
    }
}

/// proptest calls `simplify` after a value that fails, and `complicate` after one that does not.
#[derive(Debug)]
struct Axes {
    axes: Vec<Axis>,
    at: usize,
}

impl ValueTree for Axes {
    type Value = Vec<(&'static str, &'static str)>;

    fn current(&self) -> Self::Value {
        self.axes.iter().map(|axis| (axis.name, axis.values[axis.tried])).collect()
    }

    fn simplify(&mut self) -> bool {
        while let Some(axis) = self.axes.get_mut(self.at) {
            axis.known = axis.tried;
            if axis.try_next() {
                return true;
            }
            self.at += 1;
        }
        false
    }

    fn complicate(&mut self) -> bool {
        let Some(axis) = self.axes.get_mut(self.at) else { return false };
        // With nothing left to be tried on this axis, back to what fails, and on with the next.
        axis.try_next() || std::mem::replace(&mut axis.tried, axis.known) != axis.known
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::{Depth, specs};
    use etalon_problem::Algorithm;

    /// A failure that needs two values of two axes, whatever the others are.
    #[test]
    fn what_does_not_matter_goes() {
        let needs = ["sequences=packed", "mask=causal"];
        let has = |spec: &Spec| needs.iter().all(|x| spec.values().contains(&x.to_string()));
        let all = || specs(Algorithm::Attention, Depth::Full, 0);
        let spec = all().find(|spec| has(spec) && spec.is_large()).expect("such a case");
        let fails = |spec: &Spec| has(spec).then(|| "so".to_string());
        let (found, text) = simplest(spec, fails).expect("a simpler one");
        assert!(has(&found) && !found.is_large() && text == "so", "{found}");
        for (name, values) in found.choices() {
            let plainest = values.iter().any(|value| needs.contains(&&*format!("{name}={value}")));
            let first = format!("{name}={}", values[0]);
            assert!(
                plainest || name == SHAPE || found.values().contains(&first),
                "{found}: {name}"
            );
        }
        assert_eq!(simplest(found, fails), None, "it is the simplest");
    }
}
