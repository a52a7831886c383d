//! The tables that the device makes of lengths, offsets and masks that lie there: the kernels of `pairs/tables.cu`,
//! compiled for the host, beside a model of what they must make, on random problems.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

#[path = "../sources/mod.rs"]
mod sources;

use etalon_cuda::kernels::Variant;
use std::process::Command;

/// The files of the module, and those of the model.
const KERNELS: [&str; 3] = ["tile/types.cuh", "pairs/tiles.cuh", "pairs/tables.cu"];
const TEXTS: [(&str, &str); 4] = [
    ("host.h", include_str!("../host.h")),
    ("cuda.h", include_str!("cuda.h")),
    ("memory.h", include_str!("memory.h")),
    ("model.cpp", include_str!("model.cpp")),
];

#[test]
fn tables_made_on_the_device_are_those_of_the_host() {
    let folder = tempfile::tempdir().unwrap();
    let kernels = sources::files(&Variant::tables().source(&Variant::tables().kernels()), &KERNELS);
    let texts = [&TEXTS[..], &[("kernels.inc", &kernels)]].concat();
    let options = ["-O1", "-U_FORTIFY_SOURCE"];
    let Some(program) = sources::compile(folder.path(), &texts, &options) else { return };
    let done = Command::new(program).output().unwrap();
    assert!(done.status.success(), "{}\n{}", done.status, String::from_utf8_lossy(&done.stdout));
}
