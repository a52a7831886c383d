//! Status of a check, and the elements that its bounds do not judge.

use super::{Check, Output, statistics, types};
use crate::bounds::{Bounds, bounds};
use crate::gates::{Status, Uninformative, Verdict, g1, uninformative};
use crate::profile::Profile;
use crate::stochastic;
use crate::tensor::Tensors;
use crate::tier::Request;
use crate::tiers::check_results;
use etalon_problem::{Dtype, Error, Operand};
use serde::Serializer;
use std::sync::Arc;

impl Check {
    /// The same where the inputs count as generic, or do not, whatever they look like.
    pub fn on_inputs(mut self, generic: bool) -> Self {
        let off = self.outputs.iter().any(|output| output.off > 0);
        let doubtful = self.conspicuous || self.outputs.iter().any(|output| output.undecided > 0);
        self.generic = generic;
        self.status = match (off, doubtful) {
            (true, _) => Status::Failed,
            (false, true) if generic => Status::Failed,
            (false, true) => Status::Undecided,
            (false, false) => Status::Passed,
        };
        self.passed = self.status == Status::Passed;
        self
    }

    /// The same where nobody claims the profile: it is the strictest that holds only where its bounds judge every
    /// output by themselves. Where simulated kernels alone judge most of one it is undecided.
    pub fn as_strictest(mut self) -> Self {
        self.too_wide = self.outputs.iter().any(Output::is_mostly_uninformative);
        if self.status == Status::Passed && self.too_wide {
            (self.status, self.passed) = (Status::Undecided, false);
        }
        self
    }

    /// The share of the elements that are undecided. Of an output whose errors are conspicuous that is all.
    pub fn undecided(&self) -> f64 {
        let undecided = |output: &Output| match output.conspicuous.is_empty() {
            true if self.too_wide && output.is_mostly_uninformative() => output.uninformative,
            true => output.undecided,
            false => output.elements,
        };
        let elements: usize = self.outputs.iter().map(|output| output.elements).sum();
        let undecided: usize = self.outputs.iter().map(undecided).sum();
        undecided as f64 / elements.max(1) as f64
    }
}

/// Of fewer elements, such as a loss that is nearly 0, nothing is said by how many are uninformative.
const FEWEST: usize = 64;

impl Output {
    /// True if bounds judge less than half of its elements without simulated kernels.
    pub fn is_mostly_uninformative(&self) -> bool {
        mostly_uninformative(self.uninformative, self.elements)
    }
}

fn mostly_uninformative(uninformative: usize, elements: usize) -> bool {
    elements >= FEWEST && 2 * uninformative > elements
}

/// As JSON writes it.
pub(super) fn name<S: Serializer>(status: &Status, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(status.name())
}

/// The strictest profile that holds: within whose bounds the outputs lie, and which judges them. Where there is
/// none, the strictest of those that leave them undecided. Of results that are stored in less than f64 no
/// profile of sums in f64 is tried: storing them hides what would tell.
pub fn strictest(
    request: &Request<'_>,
    outputs: &Tensors,
    only: &[String],
) -> Result<Option<Profile>, Error> {
    let &Request { problem, pass, dtype, inputs, .. } = request;
    check_results(problem, pass, outputs, only)?;
    let types = types(request, outputs);
    let tells = |profile: &Profile| profile.accumulator != Dtype::F64 || dtype == Dtype::F64;
    let (operands, mut undecided) = (problem.operands(pass), None);
    for profile in Profile::ALL.into_iter().filter(tells) {
        let mut exact = match bounds(problem, pass, &types, &profile, inputs) {
            Err(Error::Unsupported { .. }) => continue,
            exact => exact?,
        };
        exact.outputs.retain(|name, _| only.is_empty() || only.contains(name));
        if g1(&exact, outputs).verdict != Verdict::Pass {
            continue;
        }
        let statistics = statistics(request, &profile, &operands, &exact, outputs)?;
        let doubts = doubts(request, &profile, &operands, &exact, outputs)?;
        let conspicuous = statistics.iter().any(|statistic| statistic.margin() > 1.0);
        let judged =
            |x: &Uninformative| x.undecided == 0 && !mostly_uninformative(x.elements, x.of);
        if !conspicuous && doubts.iter().all(judged) {
            return Ok(Some(profile));
        }
        undecided = undecided.or(Some(profile));
    }
    Ok(undecided)
}

/// Of outputs with uninformative elements, whether these err as correct kernels do.
pub(super) fn doubts(
    request: &Request<'_>,
    profile: &Profile,
    operands: &[Operand],
    exact: &Bounds,
    outputs: &Tensors,
) -> Result<Vec<Uninformative>, Error> {
    let &Request { problem, pass, inputs, .. } = request;
    let types = types(request, outputs);
    uninformative(operands, profile, exact, outputs, |kernel| {
        stochastic::errors(problem, pass, &types, profile, inputs, exact, kernel).map(Arc::new)
    })
}
