//! attention and attention_lse: which kernels compute a pass.

use crate::gpu::Device;
use crate::job::Job;
use crate::lane::Layout;
use crate::options::{Level, Options, Precision};
use crate::second::{self, Between};
use crate::workspace::Held;
use crate::{hopper, portable};
use etalon_problem::{Dtype, Error, Pass, Problem, Scores, Table, Views, ViewsMut};

/// Computes a pass. The call has passed [`Table::check_call`].
pub(crate) fn run(
    held: &Held,
    problem: &Problem,
    (pass, storage): (Pass, Dtype),
    table: &Table,
    inputs: &Views<'_>,
    outputs: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    let (device, parts) = (&held.device, parts(problem)?);
    let (scores, value_dim) = parts;
    let mut layout = Layout::default();
    let mut plan = choose(device, parts, (pass, storage), options)?;
    if let Some(plan) = &mut plan {
        plan.reserve(scores, value_dim.is_some(), &mut layout)?;
    }
    let between = match pass {
        Pass::DoubleBackward | Pass::Jvp => Some(Between::new(scores, value_dim, &mut layout)?),
        _ => None,
    };
    let lane = held.lane()?;
    let call = (pass, storage);
    let mut job = Job::new(device, parts, call, table, inputs, outputs, lane, layout)?;
    job.fill(inputs)?;
    if let Some(plan) = &plan {
        plan.upload(scores, &mut job.lane, device)?;
    }
    if pass == Pass::Forward || !job.is_given("lse") || !job.is_given("o") {
        match &plan {
            Some(plan) => hopper::forward(&job, plan)?,
            None => portable::forward(&job)?,
        }
    }
    match (pass, &plan, &between) {
        (Pass::Forward, ..) if job.address("gradient") != 0 => portable::gradient_of_lse(&job)?,
        (Pass::Backward, Some(plan), _) => hopper::backward(&job, plan)?,
        (Pass::Backward, None, _) => portable::backward(&job)?,
        (_, _, Some(between)) => second::run(&job, between, pass)?,
        _ => {}
    }
    job.lane.finish(device)?;
    job.results(outputs)?;
    held.give_back(job.lane);
    Ok(())
}

/// The scores of a problem, and E of attention.
fn parts(problem: &Problem) -> Result<(&Scores, Option<usize>), Error> {
    match problem {
        Problem::Attention(problem) => Ok((&problem.scores, Some(problem.value_dim))),
        Problem::AttentionLse(problem) => Ok((&problem.scores, None)),
        other => Err(Error::value("algorithm", "attention", other.algorithm())),
    }
}

/// The plan of the tensor cores; `None`: the portable kernels. Fails where the level that is asked for
/// cannot compute the pass.
fn choose(
    device: &Device,
    (scores, value_dim): (&Scores, Option<usize>),
    (pass, storage): (Pass, Dtype),
    options: &Options,
) -> Result<Option<hopper::Plan>, Error> {
    let plan = || match options.precision {
        Precision::Flash => hopper::Plan::new(device, scores, value_dim, pass, storage),
        Precision::Strict => Err(
            "tensor cores take P and dS in the storage type, which the precision `flash` permits",
        ),
    };
    match options.level {
        Level::Portable => Ok(None),
        Level::Auto => Ok(plan().ok()),
        Level::Sm90a => plan().map(Some).map_err(|reason| Error::Unsupported {
            what: format!("level {}", Level::Sm90a),
            reason: reason.to_string(),
        }),
    }
}
