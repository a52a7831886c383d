//! Linear_attention: its cases, and its host: chunks of tokens, and a state between them.

mod backward;
mod bugs;
mod cases;
mod forward;
mod head;

pub(crate) use bugs::MUTANTS;
pub use cases::{Family, GateKind, Point};

use crate::zoo::job::Job;
use crate::zoo::rows::Results;
use etalon_problem::{Error, LinearAttention, Pass, TokenSequences};
use head::Head;

/// The results of a pass; an error for a state that would grow.
pub(super) fn results(job: &Job, problem: &LinearAttention) -> Result<Results, Error> {
    if job.pass == Pass::Step {
        return step(job.clone(), problem.clone());
    }
    for sequence in problem.list_sequences() {
        for h in 0..problem.extents.key_heads {
            let head = Head::new(job, problem, sequence, h);
            if let Some(g) = head.g.iter().find(|g| g.is_nan() || **g > 0.0) {
                return Err(Error::value("g", "at most 0", g));
            }
        }
    }
    Ok(match job.pass {
        Pass::Backward => backward::backward(job, problem),
        _ => forward::forward(job, problem),
    })
}

/// A step is a forward pass of one token.
fn step(mut job: Job, mut problem: LinearAttention) -> Result<Results, Error> {
    job.pass = Pass::Forward;
    problem.extents.tokens = 1;
    problem.sequences = TokenSequences::Dense;
    (problem.initial_state, problem.final_state) = (true, true);
    for name in ["q", "k", "v"] {
        job.inputs.get_mut(name).into_iter().for_each(|x| x.shape.swap(2, 3));
    }
    results(&job, &problem)
}
