//! Passes of linear cross-entropy with its classes in shards, one for each rank.

use crate::engine::Engine;
use crate::error::exception;
use crate::problem::{Problem, borrowed, check_memory, places, views};
use crate::tensor::Borrowed;
use etalon_problem::linear_cross_entropy::shard::Shard;
use etalon_problem::{Error, LinearCrossEntropy, Views, ViewsMut};
use etalon_simd::Options;
use etalon_simd::linear_cross_entropy::shard::by_name;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ops::Range;

/// A step of a pass over shards.
#[derive(Clone, Copy)]
pub enum Step {
    Forward,
    Combine,
    Output,
    Backward,
    CombineDh,
}

impl Step {
    pub fn of(name: &str) -> Result<Self, Error> {
        Ok(match name {
            "forward" => Step::Forward,
            "combine" => Step::Combine,
            "output" => Step::Output,
            "backward" => Step::Backward,
            "combine_dh" => Step::CombineDh,
            _ => {
                let names = "one of forward, combine, output, backward, combine_dh";
                return Err(Error::value("step", names, name));
            }
        })
    }

    /// True if it is about the classes of one shard, and not about those of all.
    fn is_of_one(self) -> bool {
        matches!(self, Step::Forward | Step::Output | Step::Backward)
    }
}

/// Runs a step of a pass over shards: reads `inputs` and writes `outputs`, both by name. `classes` has the first class
/// of a shard and the one behind its last: those of the own shard, or of all shards in their order for "combine" and
/// "combine_dh". Results without a place are not computed.
#[pyfunction]
#[pyo3(signature = (problem, step, classes, inputs, outputs, *, memory_budget = None))]
#[allow(clippy::too_many_arguments, reason = "keywords in Python")]
pub fn run_shard(
    py: Python<'_>,
    problem: &Problem,
    step: &str,
    classes: Vec<(usize, usize)>,
    inputs: &Bound<'_, PyDict>,
    outputs: &Bound<'_, PyDict>,
    memory_budget: Option<usize>,
) -> PyResult<()> {
    let of: &LinearCrossEntropy = (&problem.inner).try_into().map_err(exception)?;
    let step = Step::of(step).map_err(exception)?;
    let shards: Vec<Range<usize>> = classes.into_iter().map(|(start, end)| start..end).collect();
    let inputs = borrowed(inputs, Borrowed::input)?;
    let mut outputs = borrowed(outputs, Borrowed::output)?;
    check_memory(&inputs, &outputs)?;
    let (views, mut places) = (views(&inputs)?, places(&mut outputs)?);
    let mut options = Options::default();
    options.memory_budget = memory_budget.unwrap_or(options.memory_budget);
    let engine = Engine::get()?;
    let ran = engine.run(py, multiplications(of, step, &shards), || {
        run(&engine, (of, step, &shards), &views, &mut places, &options)
    });
    ran.map_err(exception)
}

/// The number of partials that a shard has of each token: one for each of its nodes.
#[pyfunction]
pub fn count_nodes(problem: &Problem, start: usize, end: usize) -> PyResult<usize> {
    let of: &LinearCrossEntropy = (&problem.inner).try_into().map_err(exception)?;
    Ok(Shard::new(of, start..end).map_err(exception)?.nodes().count())
}

fn run(
    engine: &Engine,
    (problem, step, shards): (&LinearCrossEntropy, Step, &[Range<usize>]),
    inputs: &Views<'_>,
    outputs: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    let workspace = &engine.workspace;
    let own = || match shards {
        [classes] => Shard::new(problem, classes.clone()),
        _ => Err(Error::value("classes", "one range, that of the own shard", shards.len())),
    };
    match step {
        Step::Forward => by_name::forward(workspace, &own()?, inputs, outputs, options),
        Step::Combine => by_name::combine(problem, shards, inputs, outputs),
        Step::Output => by_name::output(workspace, &own()?, inputs, outputs),
        Step::Backward => by_name::backward(workspace, &own()?, inputs, outputs, options),
        Step::CombineDh => by_name::combine_dh(problem, shards, inputs, outputs),
    }
}

/// Multiplications of a step, about.
fn multiplications(problem: &LinearCrossEntropy, step: Step, shards: &[Range<usize>]) -> f64 {
    let rows = (problem.tokens as f64) * (problem.dim as f64);
    let classes: usize = shards.iter().map(|x| x.end.saturating_sub(x.start)).sum();
    if step.is_of_one() { rows * classes as f64 } else { rows * shards.len() as f64 }
}
