//! Every kernel with every option compiles for every architecture that it serves, without a GPU: the
//! listed variants cover every pair of choices. Needs NVRTC, which `ETALON_NVRTC` may name by its folder;
//! without it the test says that it was skipped, and fails if `ETALON_NVRTC` is set.

use etalon_cuda::{Compiler, Family, Variant, shared_bytes};
use etalon_problem::Dtype::{self, Bf16, F16, F32};
use std::path::PathBuf;
use std::sync::Mutex;
use std::thread;

/// A variant of the portable kernels: architecture, storage, D, E, options.
type Portable = (&'static str, Dtype, usize, Option<usize>, bool);

const PORTABLE: [Portable; 12] = [
    ("sm_80", F32, 64, Some(64), true),
    ("sm_80", Bf16, 128, None, false),
    ("sm_86", Bf16, 128, Some(64), false),
    ("sm_86", F16, 256, Some(256), true),
    ("sm_89", F16, 64, None, true),
    ("sm_89", F32, 128, Some(128), false),
    ("sm_90", Bf16, 64, Some(64), true),
    ("sm_90", F32, 256, None, false),
    ("sm_90", F16, 128, Some(128), false),
    ("sm_100", F16, 64, Some(128), false),
    ("sm_120", Bf16, 256, Some(64), true),
    ("sm_120", F32, 64, Some(256), false),
];

/// Of the second order.
const SECOND: [Portable; 6] = [
    ("sm_80", Bf16, 64, Some(64), true),
    ("sm_86", F32, 128, None, false),
    ("sm_89", F16, 64, Some(128), false),
    ("sm_90", F32, 64, None, true),
    ("sm_100", Bf16, 128, Some(64), false),
    ("sm_120", F16, 128, Some(128), true),
];

/// On the tensor cores of any device, with rows of whole pieces or not.
const TENSOR: [(Portable, bool); 8] = [
    (("sm_80", Bf16, 128, Some(128), false), true),
    (("sm_86", F16, 128, Some(128), true), true),
    (("sm_89", Bf16, 64, Some(64), true), false),
    (("sm_90", Bf16, 256, Some(256), true), true),
    (("sm_90", F16, 64, Some(64), false), true),
    (("sm_90", Bf16, 128, None, true), false),
    (("sm_100", Bf16, 64, Some(128), false), false),
    (("sm_120", F16, 128, None, false), true),
];

/// Of the forward pass on tensor cores: storage, columns, whether the mask is a window and batch elements
/// have lengths, values.
const FORWARD: [(Dtype, usize, [bool; 2], bool); 5] = [
    (Bf16, 128, [true, false], true),
    (F16, 128, [false, true], true),
    (F16, 64, [true, true], true),
    (Bf16, 64, [false, false], false),
    (F16, 64, [true, false], true),
];

/// Of the backward pass: storage, columns, whether the mask is a window and batch elements have lengths.
const BACKWARD: [(Dtype, usize, [bool; 2]); 4] = [
    (Bf16, 128, [true, true]),
    (F16, 128, [false, false]),
    (F16, 64, [true, false]),
    (Bf16, 64, [false, true]),
];

/// The variant of the tensor cores that may spill: three warpgroups have 160 registers a thread.
fn may_spill(variant: &Variant) -> bool {
    *variant == Variant::hopper_forward(F16, 64, [true, true], true)
}

fn matrix() -> Vec<(&'static str, Variant)> {
    let portable = PORTABLE.iter().map(|&(architecture, storage, dim, value_dim, options)| {
        (architecture, Variant::portable(storage, dim, value_dim, options))
    });
    let second = SECOND.iter().map(|&(architecture, storage, dim, value_dim, options)| {
        (architecture, Variant::second(storage, dim, value_dim, options))
    });
    let tensor = TENSOR.iter().map(|&((architecture, storage, dim, value_dim, options), whole)| {
        (architecture, Variant::tensor(storage, dim, value_dim, options, whole))
    });
    let forward = FORWARD.iter().map(|&(storage, width, flags, values)| {
        ("sm_90a", Variant::hopper_forward(storage, width, flags, values))
    });
    let backward = BACKWARD.iter().map(|&(storage, width, flags)| {
        ("sm_90a", Variant::hopper_backward(storage, width, flags))
    });
    let architectures = Family::Moves.architectures().iter().zip([2, 4].into_iter().cycle());
    let moves = architectures.map(|(&architecture, bytes)| (architecture, Variant::moves(bytes)));
    portable.chain(second).chain(tensor).chain(forward).chain(backward).chain(moves).collect()
}

/// The shared memory that a block of compute capability 9.0 may have, in bytes.
const MOST_SHARED: u32 = 232_448;

#[test]
fn shared_memory_is_within_the_limit() {
    for (_, variant) in matrix() {
        for kernel in variant.kernels() {
            let bytes = shared_bytes(&variant, kernel);
            assert!(bytes <= MOST_SHARED, "{kernel} of {}: {bytes}", variant.describe());
        }
    }
}

#[test]
fn every_architecture_of_a_family_is_in_the_matrix() {
    for (_, variant) in matrix() {
        for architecture in variant.family.architectures() {
            let found = matrix()
                .iter()
                .any(|(of, other)| of == architecture && other.family == variant.family);
            assert!(found, "no variant of {:?} for {architecture}", variant.family);
        }
    }
}

#[test]
fn the_matrix_compiles() {
    let folder = std::env::var_os("ETALON_NVRTC").map(PathBuf::from);
    let compiler = match Compiler::find(folder.as_deref()) {
        Ok(compiler) => compiler,
        Err(absent) => {
            assert!(folder.is_none(), "ETALON_NVRTC is set, but: {absent}");
            println!("skipped: {absent}");
            return;
        }
    };
    println!("NVRTC {}", compiler.version());
    let (work, faults) = (Mutex::new(matrix()), Mutex::new(Vec::new()));
    let next = || work.lock().unwrap().pop();
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((architecture, variant)) = next() {
                    let what = format!("{} for {architecture}", variant.describe());
                    match check(compiler, &variant, architecture) {
                        Ok(report) => println!("{what}\n{report}"),
                        Err(fault) => faults.lock().unwrap().push(format!("{what}: {fault}")),
                    }
                }
            });
        }
    });
    let faults = faults.into_inner().unwrap();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Registers and spills of each kernel, or what is wrong.
fn check(compiler: Compiler, variant: &Variant, architecture: &str) -> Result<String, String> {
    let compiled = compiler.compile(&variant.source(), &variant.options(architecture))?;
    if !compiled.image.starts_with(b"\x7fELF") {
        return Err("the compiler returned no machine code".to_string());
    }
    // C75xx: products of the tensor cores that the assembler made wait for each other.
    if let Some(line) = compiled.log.lines().find(|line| line.contains("(C75")) {
        return Err(line.to_string());
    }
    // The portable kernels may spill where accumulators are wide; those of the tensor cores never.
    let spills = |line: &&str| line.contains("spill") && !line.contains("0 bytes spill stores, 0");
    if matches!(variant.family, Family::HopperForward | Family::HopperBackward)
        && !may_spill(variant)
        && let Some(line) = compiled.log.lines().find(spills)
    {
        return Err(line.to_string());
    }
    let kernels = variant.kernels();
    let found = kernels.iter().filter(|name| compiled.log.contains(&format!("'{name}'"))).count();
    if found != kernels.len() {
        return Err(format!("{found} of the kernels {kernels:?} were compiled"));
    }
    let told = |line: &&str| line.contains("registers") || line.contains("spill");
    Ok(compiled.log.lines().filter(told).map(str::trim).collect::<Vec<_>>().join("\n"))
}
