//! A problem that somebody brings, and what is known of the kernel that is asked about it.

use crate::capabilities::Capabilities;
use crate::cases::Case;
use etalon_problem::{Dtype, Error, Pass, Problem};

/// The most pairs of a query and a key, seen or not, over all batch elements and heads, of a problem that probes are
/// made for: they list all of them.
pub const MOST_PAIRS: u128 = 1 << 26;

/// A problem that somebody brings.
#[derive(Debug, Clone, PartialEq)]
pub struct Given {
    /// Its name in lists of probes.
    pub name: String,
    /// The problem.
    pub problem: Problem,
    /// The storage type.
    pub dtype: Dtype,
    /// The seed of the elements.
    pub seed: u64,
    /// The optional cotangents that the kernel reads, beside those that its capabilities name.
    pub cotangents: Vec<String>,
}

impl Given {
    /// Fails unless the problem is one that probes can be made for.
    pub fn check(&self) -> Result<(), Error> {
        self.problem.check()?;
        let Some(scores) = self.problem.scores() else { return Ok(()) };
        let pairs = scores.pair_shape().iter().fold(1u128, |n, &x| n.saturating_mul(x as u128));
        if pairs <= MOST_PAIRS {
            return Ok(());
        }
        let what = "batch · query_heads · queries · keys";
        let expected = format!(
            "at most {MOST_PAIRS} (mask, heads and dim matter to a probe: fewer rows will do)"
        );
        Err(Error::value(what, expected, pairs))
    }

    /// The case of a pass, as capabilities have the tensors of that.
    pub(super) fn case(
        &self,
        pass: Pass,
        capabilities: Option<&Capabilities>,
    ) -> Result<Case, Error> {
        self.check()?;
        let mut cotangents = self.cotangents.clone();
        let kernel = capabilities.and_then(|x| x.kernel(&self.problem, pass, self.dtype).ok());
        cotangents.extend(kernel.into_iter().flat_map(|kernel| kernel.cotangents.clone()));
        Case::given(&self.name, self.problem.clone(), self.dtype, self.seed, &cotangents)
    }
}
