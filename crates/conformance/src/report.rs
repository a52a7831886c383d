//! What a run leaves behind: its records, their summary, and JSON for programs.

mod json;
mod record;
mod summary;

pub use json::json;
pub use record::{About, Absent, Record, Report, Verdict};
pub use summary::{Counts, Group, Key};

#[cfg(test)]
mod tests;
