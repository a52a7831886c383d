//! The release assembly holds no out-of-line operation on registers.
//!
//! The kernels are fast only if every lane operation is inlined into the gate of its instruction
//! set. A forgotten `#[inline(always)]`, or a closure handed out of a gate, compiles to a call per
//! register, which no test of results would notice.

#![cfg(target_arch = "x86_64")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// The assembly of the crate, in which every kernel is compiled.
fn assembly() -> &'static str {
    static ASSEMBLY: LazyLock<String> = LazyLock::new(build);
    &ASSEMBLY
}

fn build() -> String {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("..");
    let status = Command::new(env!("CARGO"))
        .args(["rustc", "--profile", "assembly", "--package", "etalon-simd", "--lib"])
        .arg("--target-dir")
        .arg(&target)
        .args(["--", "--emit=asm", "-Ccodegen-units=1", "-Csymbol-mangling-version=v0"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env_remove("RUSTFLAGS")
        .status()
        .expect("cargo runs");
    assert!(status.success(), "the crate must build");
    let newest = |folder: PathBuf| -> Option<PathBuf> {
        let files = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
        files
            .filter(|path| path.extension().is_some_and(|extension| extension == "s"))
            .filter(|path| path.to_string_lossy().contains("etalon_simd"))
            .max_by_key(|path| path.metadata().and_then(|data| data.modified()).ok())
    };
    let path = newest(target.join("assembly/deps")).expect("an assembly file");
    std::fs::read_to_string(path).expect("a readable assembly file")
}

/// Whether a function is an operation on registers, or generic over them: all of those belong
/// inside a gate. Only the gates themselves are functions on purpose.
fn is_lane_operation(symbol: &str) -> bool {
    let name = format!("{:#}", rustc_demangle::demangle(symbol));
    let ours = name.contains("etalon_simd::lanes::") && !name.contains("::gate::<");
    ours || name.contains("core_arch") || name.contains("wide::")
}

#[test]
fn no_lane_operation_is_out_of_line() {
    let assembly = assembly();
    let calls: Vec<&str> = assembly
        .lines()
        .map(str::trim)
        .filter(|line| line.starts_with("call") || line.starts_with("jmp"))
        .filter_map(|line| line.split_whitespace().nth(1))
        .filter(|symbol| is_lane_operation(symbol) && !symbol.starts_with(".L"))
        .collect();
    let some: Vec<_> =
        calls.iter().take(5).map(|symbol| rustc_demangle::demangle(symbol)).collect();
    assert!(calls.is_empty(), "{} calls, such as {some:#?}", calls.len());
}

#[test]
fn every_level_has_its_fused_loop() {
    let assembly = assembly();
    for (level, register) in [("avx2", "%ymm"), ("avx512", "%zmm")] {
        let fused = assembly
            .lines()
            .filter(|line| line.contains("vfmadd") && line.contains(register))
            .count();
        // A register block alone has 12 (AVX2) or 24 (AVX-512) of them, in each of three layouts.
        assert!(fused >= 36, "{level}: {fused} fused multiply-adds");
    }
}
