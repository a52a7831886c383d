//! attention and attention_lse; and lazy_attention, which has their scores.

mod asked;
mod blocks;
mod counts;
mod given;
mod hopper;
mod hopper_backward;
mod hopper_call;
mod hopper_lazy;
mod lazy;
mod lazy_ready;
mod mend;
mod plan;
mod portable;
mod prepared;
mod ready;
mod rows;
mod second;
mod slots;
mod tables;
mod variants;
mod way;
mod window;

pub(crate) use given::{Array, GivenArray, arrays};
pub(crate) use lazy_ready::{LazyReady, LazyStats};
pub(crate) use plan::plan;
pub(crate) use ready::Ready;
#[cfg(test)]
pub(crate) use variants::most_shared;
pub(crate) use variants::{CONSUMER, Hopper, Lengths, Results};

use etalon_problem::Error;

/// A call of a prepared pass.
type Job<'a> = crate::job::Job<'a, prepared::Prepared<'a>>;

impl Job<'_> {
    fn scores(&self) -> &etalon_problem::Scores {
        &self.prepared.scores
    }

    /// Writes 0 to all that is computed, and −∞ to lse: what rows keep that no kernel writes.
    fn fill_results(&self) -> Result<(), Error> {
        for part in self.prepared.list.iter().filter(|part| !part.given) {
            let nothing = if part.operand.name == "lse" { f32::NEG_INFINITY } else { 0.0 };
            let place = self.place(part.operand.name);
            self.prepared.moves()?.fill(&self.queue, part.bytes, place, nothing.to_bits())?;
        }
        Ok(())
    }
}
