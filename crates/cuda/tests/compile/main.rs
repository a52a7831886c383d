//! Kernels compile for the architectures that they serve, without a GPU, and take the registers, the shared
//! memory and in their main loops the instructions that the snapshot beside this file says.
//!
//! Needs NVRTC, which `ETALON_NVRTC` may name by its folder; without it the tests that compile say that they
//! were skipped, and fail if `ETALON_NVRTC` is set. Where nvdisasm lies in the same folder (the wheel
//! `nvidia-cuda-nvdisasm`), the instructions of main loops are compared, too. The first of these lines compiles every choice for every
//! architecture, the second every pair of choices, the third every variant there is. The last writes the
//! snapshot of this version of NVRTC.
//!
//! ```sh
//! ETALON_NVRTC=DIR cargo test -p etalon-cuda --test compile
//! ETALON_NVRTC=DIR cargo test -p etalon-cuda --test compile -- --ignored pair
//! ETALON_NVRTC=DIR cargo test -p etalon-cuda --test compile -- --ignored every_variant
//! ETALON_RENEW=1 ETALON_NVRTC=DIR cargo test -p etalon-cuda --test compile -- --ignored pair
//! ```
//!
//! `ETALON_RENEW=Linear,HopperLinear` compiles and writes the rows of these families alone.

mod instructions;
mod report;
mod snapshot;

use etalon_cuda::{
    Compilation, Compiler, Family, choicewise_variants, every_variant, most_shared,
    pairwise_variants, shared_bytes,
};
use instructions::disassembler;
use report::{Kernel, Tools, compile, module};
use snapshot::Snapshot;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Mutex;
use std::thread;

/// The compiler with the disassembler, if that lies in the same folder, or `None` where there is no compiler and none
/// was promised.
fn tools() -> Option<Tools> {
    let folder = std::env::var_os("ETALON_NVRTC").map(PathBuf::from);
    match Compiler::find(folder.as_deref()) {
        Ok(compiler) => {
            Some(Tools { compiler, disassembler: folder.and_then(|folder| disassembler(&folder)) })
        }
        Err(absent) => {
            assert!(folder.is_none(), "ETALON_NVRTC is set, but: {absent}");
            println!("skipped: {absent}");
            None
        }
    }
}

/// What the kernels of these modules take, by module. Fails where one does not compile, waits for its own
/// products, or spills without being listed.
fn compile_all(tools: &Tools, work: Vec<Compilation>) -> BTreeMap<String, Vec<Kernel>> {
    println!("{} modules by NVRTC {}", work.len(), tools.compiler.version());
    let (work, done) = (Mutex::new(work), Mutex::new(Vec::new()));
    let next = || work.lock().unwrap().pop();
    let some = || {
        while let Some(compilation) = next() {
            let kernels = compile(tools, &compilation);
            let result = kernels.and_then(|kernels| check_spills(&compilation, kernels));
            done.lock().unwrap().push((module(&compilation), result));
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(some);
        }
    });
    let (mut modules, mut faults) = (BTreeMap::new(), Vec::new());
    for (module, result) in done.into_inner().unwrap() {
        match result {
            Ok(kernels) => _ = modules.insert(module, kernels),
            Err(fault) => faults.push(format!("{module}: {fault}")),
        }
    }
    faults.sort();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    modules
}

fn check_spills(of: &Compilation, kernels: Vec<Kernel>) -> Result<Vec<Kernel>, String> {
    let spilt = kernels.iter().filter(|kernel| kernel.spills() && !may_spill(of));
    let spilt: Vec<String> = spilt.map(Kernel::to_string).collect();
    if spilt.is_empty() { Ok(kernels) } else { Err(spilt.join("; ")) }
}

/// The variants of which kernels may spill: those of the fallback, and those of the tensor cores in which
/// accumulators leave no register free.
fn may_spill((architecture, variant): &Compilation) -> bool {
    let is =
        |name: &str, value: &str| variant.defines.iter().any(|(n, v)| *n == name && v == value);
    match variant.family {
        Family::Portable
        | Family::Second
        | Family::Lazy
        | Family::Linear
        | Family::LinearSecond
        | Family::CrossEntropy => true,
        // Accumulators of 128 columns; `means`, of which three blocks share a multiprocessor.
        Family::LazyTensor | Family::LinearTensor => true,
        Family::Tensor if is("VALUES", "0") || is("CD", "256") => false,
        Family::Tensor if is("CE", "128") => true,
        Family::Tensor => match *architecture {
            "sm_100" => is("CD", "128") || is("OPTIONS", "1") && is("WHOLE", "0"),
            "sm_80" => is("CD", "128") && is("OPTIONS", "1") && is("WHOLE", "0"),
            _ => false,
        },
        // Three warpgroups.
        Family::HopperForward => is("D", "64") && is("LENGTHS", "1") && is("VALUES", "1"),
        Family::HopperLazyForward => is("D", "64"),
        // A few numbers that are wanted behind the loop; of the thread that loads, which has 24 registers.
        Family::HopperLinear | Family::HopperBackward | Family::HopperLazyBackward => true,
        // Accumulators of 256 columns, and of two gradients beside four products.
        Family::TensorWide | Family::TensorSecond => true,
        Family::TensorF32 => is("CE", "128"),
        Family::HopperCrossEntropy
        | Family::Moves
        | Family::Peak
        | Family::TensorPeak
        | Family::HopperPeak => false,
    }
}

/// Compares with the snapshot of this version of the compiler, or says that there is none.
fn compare(tools: &Tools, compiled: &Snapshot) {
    match Snapshot::read(&tools.compiler.version()) {
        Some(recorded) if tools.disassembler.is_some() => recorded.check(compiled),
        Some(recorded) => {
            println!("instructions are not compared: there is no nvdisasm");
            recorded.without_instructions().check(compiled);
        }
        None => println!("there is no snapshot of NVRTC {}", tools.compiler.version()),
    }
}

#[test]
fn every_choice_compiles_as_recorded() {
    let Some(tools) = tools() else { return };
    let compiled = compile_all(&tools, choicewise_variants());
    compare(&tools, &Snapshot::new(&tools.compiler.version(), &compiled));
}

#[test]
#[ignore = "compiles for minutes"]
fn every_pair_of_choices_compiles_as_recorded() {
    let Some(tools) = tools() else { return };
    let (version, renew) = (tools.compiler.version(), std::env::var("ETALON_RENEW").ok());
    let some = renew.as_deref().filter(|families| *families != "1");
    let some: Option<Vec<&str>> = some.map(|families| families.split(',').collect());
    let asked = |compilation: &Compilation| {
        let family = format!("{:?}", compilation.1.family);
        some.as_ref().is_none_or(|some| some.contains(&family.as_str()))
    };
    let work = pairwise_variants().into_iter().filter(asked).collect();
    let compiled = Snapshot::new(&version, &compile_all(&tools, work));
    if renew.is_none() {
        return compare(&tools, &compiled);
    }
    assert!(tools.disassembler.is_some(), "a snapshot has the counts of nvdisasm");
    match (Snapshot::read(&version), some) {
        (Some(recorded), Some(some)) => recorded.renewed(compiled, &some).write(),
        _ => compiled.write(),
    }
}

/// Every variant of some families, for each of their architectures.
fn everything(families: &[Family]) -> Vec<Compilation> {
    let own = every_variant().into_iter().filter(|variant| families.contains(&variant.family));
    let all = own.flat_map(|variant| {
        let architectures = variant.family.architectures().iter();
        architectures.map(move |&architecture| (architecture, variant.clone()))
    });
    all.filter(|(architecture, variant)| variant.fits(architecture)).collect()
}

fn compile_families(families: &[Family]) {
    let Some(tools) = tools() else { return };
    compile_all(&tools, everything(families));
}

#[test]
#[ignore = "compiles for ten minutes"]
fn every_variant_of_the_portable_kernels() {
    compile_families(&[Family::Portable, Family::Lazy, Family::Moves]);
}

#[test]
#[ignore = "compiles for ten minutes"]
fn every_variant_of_the_second_order() {
    compile_families(&[Family::Second, Family::TensorSecond]);
}

#[test]
#[ignore = "compiles for minutes"]
fn every_variant_of_linear_attention() {
    compile_families(&[Family::Linear, Family::LinearSecond, Family::LinearTensor]);
}

#[test]
#[ignore = "compiles for minutes"]
fn every_variant_of_linear_cross_entropy() {
    compile_families(&[Family::CrossEntropy]);
}

#[test]
#[ignore = "compiles for ten minutes"]
fn every_variant_of_sm80() {
    compile_families(&[Family::Tensor, Family::TensorWide, Family::TensorF32, Family::LazyTensor]);
}

#[test]
#[ignore = "compiles for minutes"]
fn every_variant_of_sm90a() {
    compile_families(&[
        Family::HopperForward,
        Family::HopperBackward,
        Family::HopperLazyForward,
        Family::HopperLazyBackward,
        Family::HopperCrossEntropy,
        Family::HopperLinear,
    ]);
}

#[test]
fn snapshots_are_of_the_matrix() {
    let snapshots = Snapshot::all();
    assert!(!snapshots.is_empty());
    snapshots.iter().for_each(|snapshot| snapshot.check_matrix(&pairwise_variants()));
}

#[test]
fn shared_memory_is_within_the_limit() {
    for compilation in everything(&Family::ALL) {
        let (architecture, variant) = &compilation;
        for kernel in variant.kernels() {
            let bytes = shared_bytes(variant, kernel);
            assert!(
                bytes <= most_shared(architecture),
                "{} {kernel}: {bytes}",
                module(&compilation)
            );
        }
    }
    // With what the sources declare.
    for snapshot in Snapshot::all() {
        for (architecture, kernel, bytes) in snapshot.shared() {
            assert!(bytes <= most_shared(architecture), "{kernel}: {bytes}");
        }
    }
}
