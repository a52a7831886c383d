//! Memory of the machine, and its comparison with the needs of a command.
//!
//! An allocation that fails ends a program without a word, and one that the system cannot keep its
//! promise for ends it later. So whatever grows with an argument or a file is compared with what there
//! is before it is allocated.

use crate::outcome::Failure;
use crate::units::bytes;
use sysinfo::{MemoryRefreshKind, ProcessRefreshKind, ProcessesToUpdate, System, get_current_pid};

/// Bytes that may still be allocated: what the system, or the control group of this process, has
/// available, and what the limit of the address space (`ulimit -v`) leaves. Without an answer of the
/// system, everything.
pub fn available() -> u64 {
    let mut system = System::new();
    system.refresh_memory_specifics(MemoryRefreshKind::nothing().with_ram());
    let of_system = Some(system.available_memory()).filter(|&bytes| bytes > 0);
    let of_group = system.cgroup_limits().map(|group| group.free_memory);
    let most = of_system.into_iter().chain(of_group).chain(address_space());
    most.min().unwrap_or(u64::MAX)
}

/// Bytes of the address space that are left, where it is limited.
pub fn address_space() -> Option<u64> {
    let limit = limit()?;
    let process = get_current_pid().ok()?;
    let mut system = System::new();
    let memory = ProcessRefreshKind::nothing().with_memory();
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[process]), false, memory);
    Some(limit.saturating_sub(system.process(process)?.virtual_memory()))
}

#[cfg(unix)]
fn limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::As).current
}

#[cfg(not(unix))]
fn limit() -> Option<u64> {
    None
}

/// Fails if so many bytes are not there; `what` needs them.
pub fn afford(what: &str, needed: u128) -> Result<(), Failure> {
    within(what, needed, available())
}

/// Fails if so many bytes are more than there are.
pub fn within(what: &str, needed: u128, available: u64) -> Result<(), Failure> {
    if needed <= u128::from(available) {
        return Ok(());
    }
    let [needed, available] = [needed, available.into()]
        .map(|amount| bytes(usize::try_from(amount).unwrap_or(usize::MAX)));
    Err(Failure(format!("{what} needs about {needed} of memory, and {available} are available")))
}
