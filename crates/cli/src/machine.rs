//! Where a run was made, for reports.

/// The commit from which this binary was built, where the build knew it: `ETALON_COMMIT=$(git
/// rev-parse HEAD) cargo build --release`.
pub const COMMIT: Option<&str> = option_env!("ETALON_COMMIT");

/// The CPU's own name, where it has one.
#[cfg(target_arch = "x86_64")]
pub fn cpu() -> Option<String> {
    let name = raw_cpuid::CpuId::new().get_processor_brand_string()?;
    Some(name.as_str().trim().to_string())
}

/// The CPU's own name, where it has one.
#[cfg(not(target_arch = "x86_64"))]
pub fn cpu() -> Option<String> {
    None
}
