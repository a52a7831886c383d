//! Facts of the machine of a run, for reports.

use chrono::{SecondsFormat, Utc};
use etalon_conformance::report::About;
pub use etalon_simd::probe::cpu_name as cpu;

/// The commit from which this binary was built, where the build knew it: `ETALON_COMMIT=$(git
/// rev-parse HEAD) cargo build --release`.
pub const COMMIT: Option<&str> = option_env!("ETALON_COMMIT");

/// Time and place of a run that begins now.
pub fn about() -> About {
    let date = Utc::now().to_rfc3339_opts(SecondsFormat::Secs, true);
    About { date: Some(date), cpu: cpu(), commit: COMMIT, ..About::default() }
}
