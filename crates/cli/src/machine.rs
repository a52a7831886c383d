//! Facts of the machine of a run, for reports.

/// The commit from which this binary was built, where the build knew it: `ETALON_COMMIT=$(git
/// rev-parse HEAD) cargo build --release`.
pub const COMMIT: Option<&str> = option_env!("ETALON_COMMIT");

pub use etalon_simd::probe::cpu_name as cpu;
