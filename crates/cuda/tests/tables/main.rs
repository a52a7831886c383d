//! The tables that the device makes of lengths, offsets and masks that lie there: the kernels of `tables.cu`, compiled for
//! the host, beside a model of what they must make, on random problems.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

use std::fs;
use std::process::Command;

const TEXTS: [(&str, &str); 6] = [
    ("tile.cuh", include_str!("../../src/kernels/tile.cuh")),
    ("tables.cu", include_str!("../../src/kernels/tables.cu")),
    ("host.h", include_str!("../host.h")),
    ("cuda.h", include_str!("cuda.h")),
    ("memory.h", include_str!("memory.h")),
    ("model.cpp", include_str!("model.cpp")),
];

#[test]
fn tables_made_on_the_device_are_those_of_the_host() {
    let folder = tempfile::tempdir().unwrap();
    TEXTS.iter().for_each(|(name, text)| fs::write(folder.path().join(name), text).unwrap());
    let program = folder.path().join("model");
    let mut command = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()));
    command.args(["-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE"]).arg("-o").arg(&program);
    let Ok(built) = command.arg(folder.path().join("model.cpp")).output() else {
        return println!("skipped: no C++ compiler");
    };
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let done = Command::new(program).output().unwrap();
    assert!(done.status.success(), "{}\n{}", done.status, String::from_utf8_lossy(&done.stdout));
}
