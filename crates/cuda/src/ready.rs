//! A pass of any algorithm that may be enqueued.

use crate::job::Job;
use crate::linear_attention;
use crate::linear_cross_entropy;
use crate::options::Options;
use crate::parts::{Holds, Parts};
use crate::queue::Queue;
use crate::softmax::{self, GivenArray};
use crate::workspace::Held;
use etalon_problem::{Dtype, Error, Pass, Problem, Table, Views};
use std::fmt::Debug;
use std::sync::Arc;

/// A pass of an algorithm whose memory is laid out and whose kernels are loaded.
pub(crate) trait Ready: Debug + Send + Sync {
    /// Its operands.
    fn parts(&self) -> &Parts;

    /// The bytes of its tables, which depend on the problem alone.
    fn table_bytes(&self) -> usize;

    /// The bytes that a call needs beside the tables and the operands.
    fn scratch_bytes(&self) -> usize;

    /// Copies the tables to memory that begins there.
    fn upload(&self, queue: &Queue<'_>, tables: u64) -> Result<(), Error>;

    /// Enqueues the kernels, between [`Job::gather`] and [`Job::scatter`].
    fn compute(&self, job: &Job<'_, Parts>) -> Result<(), Error>;

    /// The same without the problem that it was made from.
    fn into_owned(self: Box<Self>) -> Box<dyn Ready>;

    /// Enqueues the pass on operands at these addresses, one for each of its parts, and then for each given array.
    fn enqueue(
        &self,
        queue: Queue<'_>,
        addresses: &[u64],
        (tables, scratch): (u64, u64),
    ) -> Result<(), Error> {
        let job = Job { prepared: self.parts(), queue, addresses, tables, scratch };
        job.gather()?;
        self.compute(&job)?;
        job.scatter()
    }
}

/// Where the operands of a pass lie.
#[derive(Clone, Copy)]
pub(crate) enum Operands<'a, 'v> {
    /// In the memory of the host, as these inputs do.
    Host(&'a Views<'v>),
    /// On the device, with these arrays of the problem.
    Device(&'a [GivenArray]),
}

/// Prepares a pass that has passed [`Table::check_call`].
pub(crate) fn ready<'a>(
    held: &Arc<Held>,
    problem: &'a Problem,
    call: (Pass, Dtype),
    table: &Table,
    holds: Holds<'_>,
    operands: Operands<'_, '_>,
    options: &Options,
) -> Result<Box<dyn Ready + 'a>, Error> {
    options.blocking.map_or(Ok(()), |blocking| blocking.check())?;
    let held = held.clone();
    let (inputs, given) = match operands {
        Operands::Host(inputs) => (Some(inputs), &[][..]),
        Operands::Device(given) => (None, given),
    };
    Ok(match problem {
        Problem::LinearAttention(problem) => {
            linear_attention::prepare(held, problem, call, table, holds, options)?
        }
        Problem::LinearCrossEntropy(problem) => {
            linear_cross_entropy::prepare(held, problem, call, table, holds, inputs, options)?
        }
        Problem::LazyAttention(lazy) => {
            let problem = (problem, lazy.bias);
            softmax::prepare_lazy(held, problem, call, table, (holds, given), options)?
        }
        _ => softmax::prepare(held, problem, call, table, (holds, given), options)?,
    })
}
