//! Nonfinite fallback of the backward pass of attention on sm_90a: the kernels `cleanse` and `merge`, compiled for the
//! host, beside a model of what they must do with each key head of each sequence.
#![cfg(target_os = "linux")]

#[path = "../sources/mod.rs"]
mod sources;

use etalon_cuda::kernels::{Family, Variant, every_variant};
use std::fs;
use std::path::Path;
use std::process::Command;

/// The files of the module in which the two kernels are, without those of products and copies.
const FILES: [&str; 5] = [
    "tile/types.cuh",
    "pairs/sm90a.cuh",
    "pairs/spans.cuh",
    "attention/sm90a_backward.cuh",
    "attention/sm90a_backward.cu",
];

/// A text without the statements in the device's own instructions: the two kernels have none.
fn without_assembler(text: &str) -> String {
    let mut rest = text;
    let mut kept = String::new();
    while let Some((before, after)) = rest.split_once("asm") {
        let statement = after.starts_with('(') || after.starts_with(" volatile(");
        let end = after.find(");").filter(|_| statement);
        kept += before;
        kept += if statement { "" } else { "asm" };
        rest = end.map_or(after, |end| &after[end + 1..]);
    }
    kept + rest
}

/// Builds and runs the model for a kind of sequences: of the arrays' lengths (0), of their own (1), listed (2).
fn run(folder: &Path, lengths: usize) {
    let program = folder.join(format!("model-{lengths}"));
    let mut command = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()));
    command.args(["-std=c++17", "-O1", "-w"]).arg(format!("-DLENGTHS={lengths}"));
    let built = command.arg("-o").arg(&program).arg(folder.join("model.cpp")).output();
    let Ok(built) = built else { return println!("skipped: no C++ compiler") };
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let done = Command::new(program).output().unwrap();
    assert!(done.status.success(), "LENGTHS {lengths}:\n{}", String::from_utf8_lossy(&done.stdout));
}

#[test]
fn each_key_head_of_each_sequence_is_mended_for_itself() {
    let folder = tempfile::tempdir().unwrap();
    let is_backward = |x: &Variant| x.family == Family::AttentionSm90aBackward;
    let variant = every_variant().into_iter().find(is_backward).unwrap();
    let kernels = sources::files(&variant, &FILES);
    fs::write(folder.path().join("kernels.inc"), without_assembler(&kernels)).unwrap();
    fs::write(folder.path().join("host.h"), include_str!("../host.h")).unwrap();
    fs::write(folder.path().join("cuda.h"), include_str!("cuda.h")).unwrap();
    fs::write(folder.path().join("model.cpp"), include_str!("model.cpp")).unwrap();
    (0..3).for_each(|lengths| run(folder.path(), lengths));
}
