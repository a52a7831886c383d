//! A pass of linear_cross_entropy that may be enqueued.

use crate::cross_entropy::prepared::Prepared;
use crate::cross_entropy::run::run;
use crate::job::Job;
use crate::options::Options;
use crate::parts::{Holds, Parts};
use crate::queue::Queue;
use crate::ready;
use crate::room::Room;
use crate::workspace::Held;
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Dtype, Error, LinearCrossEntropy, Pass, Table, Views};
use std::borrow::Cow;
use std::sync::Arc;

/// A pass that may be enqueued.
#[derive(Debug)]
pub(crate) struct Ready<'a>(Prepared<'a>);

impl<'a> Ready<'a> {
    /// As [`Prepared::new`].
    pub fn new(
        held: Arc<Held>,
        problem: &'a LinearCrossEntropy,
        call: (Pass, Dtype),
        table: &Table,
        holds: Holds<'_>,
        inputs: Option<&Views<'_>>,
        options: &Options,
    ) -> Result<Ready<'a>, Error> {
        let problem = (problem, None);
        Prepared::new(held, problem, call, table, holds, inputs, options).map(Ready)
    }

    /// The same with a filter; where it leaves what it found – the tiles that are left out, B and C – in scratch
    /// memory.
    pub fn filtered(self, filter: Filter) -> Result<(Ready<'a>, [Room; 3]), Error> {
        let prepared = self.0.filtered(filter)?;
        let rooms = prepared.filter.map(|x| [x.left_out, x.dh, x.dw]).unwrap_or_default();
        Ok((Ready(prepared), rooms))
    }
}

impl ready::Ready for Ready<'_> {
    fn parts(&self) -> &Parts {
        &self.0.parts
    }

    fn table_bytes(&self) -> usize {
        0
    }

    fn scratch_bytes(&self) -> usize {
        self.0.scratch_bytes
    }

    fn upload(&self, _: &Queue<'_>, _: u64) -> Result<(), Error> {
        Ok(())
    }

    fn compute(&self, job: &Job<'_, Parts>) -> Result<(), Error> {
        run(&job.of(&self.0))
    }

    fn into_owned(self: Box<Self>) -> Box<dyn ready::Ready> {
        let problem = Cow::Owned(self.0.problem.into_owned());
        Box::new(Ready(Prepared { problem, ..self.0 }))
    }
}
