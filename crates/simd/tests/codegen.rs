//! Kernels call no operation on registers.
//!
//! The kernels are fast only if every lane operation is inlined into the gate of its instruction
//! set. A forgotten `#[inline(always)]`, or a closure handed out of a gate, compiles to a call per
//! register, which no test of results would notice.
//!
//! This program is linked with every kernel and reads itself by `objdump` of binutils, which come with gcc: as
//! it was built, so with `cargo test --release` what a release has. Its symbols must name the types of generic
//! functions, which `.cargo/config.toml` asks for.

#![cfg(target_arch = "x86_64")]

use etalon_simd::linear_cross_entropy::{filter, shard};
use std::hint::black_box;
use std::process::Command;
use std::sync::LazyLock;

/// The instructions of this program, or `None` where flags of the caller replaced those that it needs.
fn assembly() -> Option<&'static str> {
    static ASSEMBLY: LazyLock<String> = LazyLock::new(disassemble);
    let named = ASSEMBLY.contains("<_RNv") && ASSEMBLY.contains("11etalon_simd5lanes");
    let replaced = ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS"].map(std::env::var_os);
    if !named && replaced.iter().any(Option::is_some) {
        println!("skipped: RUSTFLAGS replaces the flags of .cargo/config.toml");
        return None;
    }
    assert!(named, "built without -Csymbol-mangling-version=v0, which .cargo/config.toml asks for");
    Some(&ASSEMBLY)
}

/// Every kernel is reached from these: the linker leaves out what is not.
fn keep_kernels() {
    black_box(etalon_simd::run_in as *const ());
    black_box(shard::backward_shard_into::<f32, f32> as *const ());
    black_box(shard::forward_shard_into::<f32> as *const ());
    black_box(filter::backward_into::<f32, f32> as *const ());
}

fn disassemble() -> String {
    keep_kernels();
    let program = std::env::current_exe().expect("the path of this program");
    let read = Command::new("objdump")
        .args(["--disassemble", "--no-show-raw-insn"])
        .arg(&program)
        .output()
        .expect("objdump of binutils, which this test needs");
    String::from_utf8(read.stdout).expect("text")
}

/// True if a function is an operation on registers, or generic over them: all of these belong inside a gate.
/// Only the gates themselves are functions on purpose.
fn is_lane_operation(symbol: &str) -> bool {
    let name = format!("{:#}", rustc_demangle::demangle(symbol));
    // The CPU and the system are asked once, by functions of their own; and tests emulate instructions.
    let asked = ["::detect", "::sync::", "::enabled_state", "::request_tiles"];
    let mut others = ["::gate", "::lanes::emulation"].into_iter().chain(asked);
    let other = others.any(|other| name.contains(other));
    let ours = name.contains("etalon_simd::lanes::") && !other;
    // The CPU is asked for its features by a function of its own.
    let intrinsic = name.contains("core_arch") && !name.contains("xgetbv");
    ours || intrinsic || name.contains("wide::")
}

/// The functions of the program: what is inlined wherever it is used is none.
fn functions(assembly: &str) -> impl Iterator<Item = &str> {
    assembly.lines().filter_map(|line| line.split_once('<')?.1.strip_suffix(">:"))
}

#[test]
fn no_lane_operation_is_out_of_line() {
    let Some(assembly) = assembly() else { return };
    let all: Vec<&str> = functions(assembly).filter(|symbol| symbol.starts_with("_R")).collect();
    let gates = all.iter().filter(|symbol| symbol.contains("5enter4gate"));
    assert!(gates.count() > 50, "{} functions are read", all.len());
    let found: Vec<&str> = all.into_iter().filter(|symbol| is_lane_operation(symbol)).collect();
    let some: Vec<_> =
        found.iter().take(5).map(|symbol| rustc_demangle::demangle(symbol)).collect();
    assert!(found.is_empty(), "{} functions, such as {some:#?}", found.len());
}

#[test]
fn every_level_has_its_fused_loop() {
    let Some(assembly) = assembly() else { return };
    // A register block alone has 12 (AVX2) or 24 (AVX-512) of them, in each of three layouts; all kernels of tiles
    // call one function, of 8 rows of two registers.
    let levels = [
        ("avx2", "vfmadd", "%ymm", 36),
        ("avx512", "vfmadd", "%zmm", 36),
        ("avx512bf16", "vdpbf16ps", "%zmm", 16),
    ];
    for (level, instruction, register, least) in levels {
        let fused = assembly
            .lines()
            .filter(|line| line.contains(instruction) && line.contains(register))
            .count();
        assert!(fused >= least, "{level}: {fused} of {instruction}");
    }
    let tiles = assembly.lines().filter(|line| line.contains("tdpbf16ps")).count();
    // Four sums in the one function that all kernels call.
    assert!(tiles >= 4, "{tiles} of tdpbf16ps");
}
