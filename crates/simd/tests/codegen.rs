//! The release build calls no operation on registers.
//!
//! The kernels are fast only if every lane operation is inlined into the gate of its instruction
//! set. A forgotten `#[inline(always)]`, or a closure handed out of a gate, compiles to a call per
//! register, which no test of results would notice.
//!
//! The crate is built as in a release, and read by `objdump` of binutils, which come with gcc.

#![cfg(target_arch = "x86_64")]

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

/// The instructions of the crate, in which every kernel is compiled, each relocation on a line after
/// its instruction.
fn assembly() -> &'static str {
    static ASSEMBLY: LazyLock<String> = LazyLock::new(|| disassemble(&build()));
    &ASSEMBLY
}

/// The library's archive, as cargo names it.
fn build() -> String {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("..");
    let built = Command::new(env!("CARGO"))
        .args(["rustc", "--profile", "assembly", "--package", "etalon-simd", "--lib"])
        .args(["--message-format", "json", "--target-dir"])
        .arg(&target)
        .args(["--", "-Csymbol-mangling-version=v0"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env_remove("RUSTFLAGS")
        .stderr(Stdio::inherit())
        .output()
        .expect("cargo runs");
    assert!(built.status.success(), "the crate must build");
    let messages = String::from_utf8(built.stdout).expect("text");
    let of_crate = messages.lines().filter(|line| line.contains("\"name\":\"etalon_simd\""));
    let archive = of_crate.flat_map(|line| line.split('"')).find(|word| word.ends_with(".rlib"));
    archive.expect("an archive among the files that cargo names").to_string()
}

fn disassemble(archive: &str) -> String {
    let read = Command::new("objdump")
        .args(["--disassemble", "--reloc", "--no-show-raw-insn", archive])
        .output()
        .expect("objdump of binutils, which this test needs");
    let text = String::from_utf8(read.stdout).expect("text");
    assert!(text.contains("<_R"), "{archive} holds functions of Rust");
    text
}

/// Whether a function is an operation on registers, or generic over them: all of those belong
/// inside a gate. Only the gates themselves are functions on purpose.
fn is_lane_operation(symbol: &str) -> bool {
    let name = format!("{:#}", rustc_demangle::demangle(symbol));
    let ours = name.contains("etalon_simd::lanes::") && !name.contains("::gate::<");
    ours || name.contains("core_arch") || name.contains("wide::")
}

/// The functions that are called: what the relocation after a call or a jump names. Every function
/// has a section of its own, so that none is called without one.
fn called(assembly: &str) -> impl Iterator<Item = &str> {
    assembly.lines().zip(assembly.lines().skip(1)).filter_map(|(instruction, relocation)| {
        let mut words = instruction.split_whitespace().skip(1);
        let operation = words.next()?;
        let (_, target) = relocation.split_once("R_X86_64_")?;
        let calls = operation.starts_with("call") || operation.starts_with("jmp");
        let symbol = target.split_whitespace().nth(1)?.split(['+', '-']).next()?;
        (calls && symbol.starts_with('_')).then_some(symbol)
    })
}

#[test]
fn no_lane_operation_is_out_of_line() {
    let all: Vec<&str> = called(assembly()).collect();
    assert!(all.len() > 1000, "{} calls are read", all.len());
    let calls: Vec<&str> = all.into_iter().filter(|symbol| is_lane_operation(symbol)).collect();
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
