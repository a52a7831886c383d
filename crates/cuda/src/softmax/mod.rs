//! attention and attention_lse.

mod hopper;
mod portable;
mod prepared;
mod ready;
mod rows;
mod second;
mod tables;
mod window;

pub(crate) use ready::Ready;

/// A call of a prepared pass.
type Job<'a> = crate::job::Job<'a, prepared::Prepared<'a>>;

impl Job<'_> {
    fn scores(&self) -> &etalon_problem::Scores {
        &self.prepared.scores
    }
}
