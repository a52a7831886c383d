//! What a run leaves behind: its records, and JSON for programs.

mod json;
mod record;

pub use json::json;
pub use record::{About, Absent, Record, Report, Verdict};
