//! Kernels compile for the architectures that they serve, without a GPU, and take the registers, the shared
//! memory and in their main loops the instructions that the snapshot beside this file says.
//!
//! Needs NVRTC, which `ETALON_NVRTC` may name by its folder; without it the tests that compile say that they
//! were skipped, and fail if `ETALON_NVRTC` is set. Where nvdisasm lies in the same folder (the wheel
//! `nvidia-cuda-nvdisasm`), the instructions of main loops are compared, too. The first of these lines compiles the
//! modules of `list.txt`: every kernel for each architecture that it serves and with each value of each of its
//! options; those that multiply on tensor cores, of sm_80 and sm_90a, as for a device, to compare them with the
//! snapshot, unless it was recorded of the same source; and the others with the least effort. It prints the seconds of
//! each module (`-- --nocapture`). The second compares all of them. The third writes the snapshot of this version of
//! NVRTC. The last compiles every variant there is: see `every.rs`.
//!
//! ```sh
//! ETALON_NVRTC=DIR cargo test -p etalon-cuda --test compile
//! ETALON_NVRTC=DIR cargo test -p etalon-cuda --test compile -- --ignored main_loop
//! ETALON_RENEW=1 ETALON_NVRTC=DIR cargo test -p etalon-cuda --test compile -- --ignored main_loop
//! ETALON_NVRTC=DIR cargo test -p etalon-cuda --test compile -- --ignored every_variant
//! ```
//!
//! `ETALON_RENEW=move,pairs/tables` compiles and writes the rows of these families alone, `ETALON_RENEW=changed` those
//! that the snapshot lacks, or has of another source.

mod every;
mod instructions;
mod list;
mod report;
mod snapshot;

use etalon_cuda::Target;
use etalon_cuda::kernels::{Compiler, Family, Unit, Variant, declared_bytes, shared_bytes};
use etalon_problem::Dtype;
use every::Run;
use instructions::{codes, disassembler};
use list::{Excerpt, everything, listed, whole};
use report::{Compilation, Effort, Kernel, compile, module, print_costs};
use snapshot::Snapshot;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

/// The compiler of kernels, and the reader of their instructions, if it is there.
struct Tools {
    compiler: Compiler,
    disassembler: Option<PathBuf>,
    /// The snapshot of this version.
    recorded: Option<Snapshot>,
    /// The effort for all modules; `None`: that of CI for each.
    effort: Option<Effort>,
}

/// True of modules whose machine code CI compares with the snapshot: of kernels on tensor cores, those of the level
/// sm80 on the oldest architecture. Sources of the others are the same on each, and those of f16 are those of bf16.
fn is_compared((architecture, variant): &Compilation) -> bool {
    let is_compared = match variant.family.unit() {
        Unit::Ffma => false,
        Unit::Mma => *architecture == "sm_80",
        Unit::Wgmma => true,
    };
    is_compared && variant.storage() != Some(Dtype::F16)
}

impl Tools {
    /// The effort for a module: in CI the least, in a sixth of the time, where nothing is compared, or where the
    /// snapshot was recorded of the same source, whose machine code is the same.
    fn effort(&self, excerpt: &Excerpt) -> Effort {
        let in_ci = || if is_compared(&excerpt.0) && !self.has(excerpt) { Effort::Full } else { Effort::Least };
        self.effort.unwrap_or_else(in_ci)
    }

    /// True if the snapshot was recorded of this source.
    fn has(&self, excerpt: &Excerpt) -> bool {
        self.recorded.as_ref().is_some_and(|recorded| recorded.is_of(excerpt))
    }
}

/// The compiler with the disassembler, if that lies in the same folder, or `None` where there is no compiler and none
/// was promised.
fn tools() -> Option<Tools> {
    let folder = std::env::var_os("ETALON_NVRTC").map(PathBuf::from);
    match Compiler::find(folder.as_deref()) {
        Ok(compiler) => {
            let disassembler = folder.and_then(|folder| disassembler(&folder));
            let recorded = Snapshot::read(&compiler.version());
            Some(Tools { compiler, disassembler, recorded, effort: None })
        }
        Err(absent) => {
            assert!(folder.is_none(), "ETALON_NVRTC is set, but: {absent}");
            println!("skipped: {absent}");
            None
        }
    }
}

/// Does each piece of work, on all cores, the last first.
fn in_parallel<T: Send, R: Send>(work: Vec<T>, each: impl Fn(T) -> R + Sync) -> Vec<R> {
    let (work, done) = (Mutex::new(work), Mutex::new(Vec::new()));
    let next = || work.lock().unwrap().pop();
    let some = || {
        while let Some(one) = next() {
            let result = each(one);
            done.lock().unwrap().push(result);
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(some);
        }
    });
    done.into_inner().unwrap()
}

/// A module with what these of its kernels take and with their machine code. Fails where one does not compile; with
/// the full effort also where one waits for its own products, or spills without being listed.
fn compile_one(tools: &Tools, excerpt: &Excerpt) -> Result<(String, Vec<Kernel>, Vec<u8>), String> {
    let ((of, kernels), effort) = (excerpt, tools.effort(excerpt));
    let named = |fault| format!("{}: {fault}", module(of));
    let (kernels, image) = compile(&tools.compiler, of, kernels, effort).map_err(named)?;
    let kernels = match effort {
        Effort::Full => check_spills(of, kernels).and_then(|kernels| check_declared(&of.1, kernels)),
        Effort::Least => Ok(kernels),
    };
    Ok((module(of), kernels.map_err(named)?, image))
}

/// Fails if there are faults, with all of them.
fn check_faults(mut faults: Vec<String>) {
    faults.sort();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Resources of the kernels of these modules, by module, of those that were compiled as for a device.
fn compile_all(tools: &Tools, mut work: Vec<Excerpt>) -> BTreeMap<String, Vec<Kernel>> {
    println!("{} modules by NVRTC {}", work.len(), tools.compiler.version());
    // The longest does not begin when all else is done.
    work.sort_by_cached_key(|one| (tools.effort(one), one.1.len()));
    let compiled = in_parallel(work, |one| {
        let (start, result) = (Instant::now(), compile_one(tools, &one));
        (one, result, start.elapsed().as_secs_f64())
    });
    let (mut modules, mut faults, mut costs) = (BTreeMap::<_, Vec<_>>::new(), Vec::new(), Vec::new());
    for (one, result, seconds) in compiled {
        costs.push((seconds, module(&one.0)));
        match result {
            Ok(module) if tools.effort(&one) == Effort::Full => modules.entry(one.0.0).or_default().push(module),
            Ok(_) => {}
            Err(fault) => faults.push(fault),
        }
    }
    print_costs(costs);
    check_faults(faults);
    let mut kernels = BTreeMap::new();
    let mut parts = Vec::new();
    for (architecture, mut modules) in modules {
        while !modules.is_empty() {
            parts.push((architecture, modules.split_off(modules.len().saturating_sub(TOGETHER))));
        }
    }
    let code = |part: &[(String, Vec<Kernel>, Vec<u8>)]| part.iter().map(|x| x.2.len()).sum::<usize>();
    parts.sort_by_key(|(_, part)| code(part));
    for part in in_parallel(parts, |(architecture, part)| count(tools, architecture, part)) {
        kernels.extend(part.unwrap());
    }
    kernels
}

/// Modules that are disassembled at once: more take more memory and save less time each.
const TOGETHER: usize = 32;

/// Counts the instructions of main loops, if there is a disassembler. Fails where an arrival splits a warp.
fn count(
    tools: &Tools,
    architecture: &str,
    modules: Vec<(String, Vec<Kernel>, Vec<u8>)>,
) -> Result<Vec<(String, Vec<Kernel>)>, String> {
    let (mut modules, images): (Vec<_>, Vec<_>) =
        modules.into_iter().map(|(module, kernels, image)| ((module, kernels), image)).unzip();
    if let Some(disassembler) = &tools.disassembler {
        let codes = codes(disassembler, architecture, &images)?;
        for ((module, kernels), mut codes) in modules.iter_mut().zip(codes) {
            for kernel in kernels {
                let code = codes.remove(&kernel.name).unwrap_or_default();
                if code.splits > 0 {
                    return Err(format!("{module} {}: {} arrivals split a warp", kernel.name, code.splits));
                }
                kernel.main_loop = code.main_loop;
            }
        }
    }
    Ok(modules)
}

fn check_spills(of: &Compilation, kernels: Vec<Kernel>) -> Result<Vec<Kernel>, String> {
    let spilt = kernels.iter().filter(|kernel| kernel.spills() && !may_spill(of));
    let spilt: Vec<String> = spilt.map(Kernel::to_string).collect();
    if spilt.is_empty() { Ok(kernels) } else { Err(spilt.join("; ")) }
}

/// Fails where a source declares other shared memory than plans state.
fn check_declared(variant: &Variant, kernels: Vec<Kernel>) -> Result<Vec<Kernel>, String> {
    for kernel in &kernels {
        let planned = declared_bytes(variant, &kernel.name).unwrap_or(kernel.shared[0]);
        if planned != kernel.shared[0] {
            return Err(format!("{}: {} bytes are declared, {planned} planned", kernel.name, kernel.shared[0]));
        }
    }
    Ok(kernels)
}

/// The variants of which kernels may spill: those of the fallback, and those of the tensor cores in which
/// accumulators leave no register free.
fn may_spill((architecture, variant): &Compilation) -> bool {
    let is = |name: &str, value: &str| variant.defines.iter().any(|(n, v)| *n == name && v.to_string() == value);
    match variant.family {
        Family::AttentionPortable
        | Family::AttentionFallback
        | Family::AttentionPortableSecondOrder
        | Family::LazyPortable
        | Family::LinearPortable
        | Family::LinearPortableSecondOrder
        | Family::CrossEntropyPortable => true,
        // Accumulators of 128 columns; `means`, of which three blocks share a multiprocessor.
        Family::LazySm80 | Family::LinearSm80 => true,
        Family::AttentionSm80 if is("VALUES", "0") || is("CD", "256") => false,
        Family::AttentionSm80 if is("CE", "128") => true,
        Family::AttentionSm80 => match *architecture {
            "sm_100" => is("CD", "128") || is("OPTIONS", "1"),
            "sm_80" => is("CD", "128") && is("OPTIONS", "1") && is("WHOLE", "0"),
            _ => false,
        },
        // Three warpgroups; accumulators of 256 columns, beside which numbers of a tile are kept in memory.
        Family::AttentionSm90aForward => is("VALUES", "1") && (is("D", "256") || (is("D", "64") && is("LENGTHS", "1"))),
        Family::LazySm90aForward => is("D", "64"),
        // A few numbers that are wanted behind the loop; of the thread that loads, which has 24 registers.
        Family::LinearSm90a | Family::LazySm90aBackward => true,
        Family::AttentionSm90aBackward | Family::AttentionSm90aWide => true,
        // Accumulators of 256 columns, and of two gradients beside four products.
        Family::AttentionSm80Wide | Family::AttentionSm80SecondOrder | Family::AttentionSm90aSecondOrder => true,
        Family::AttentionSm80F32 => is("CE", "128"),
        Family::AttentionSm80Fused => is("CD", "128") || is("CE", "128"),
        Family::CrossEntropyShards
        | Family::CrossEntropySm90a
        | Family::Move
        | Family::Tables
        | Family::PeakFfma
        | Family::PeakMma
        | Family::PeakWgmma => false,
    }
}

/// Compares with the snapshot of this version of the compiler, or says that there is none, or of what it does not
/// compare.
fn compare(tools: &Tools, compiled: &Snapshot) {
    match &tools.recorded {
        Some(recorded) if tools.disassembler.is_some() => recorded.check(compiled),
        Some(recorded) => {
            println!("main loops are not compared: there is no nvdisasm");
            recorded.without_instructions().check(compiled);
        }
        None => println!("there is no snapshot of NVRTC {}", tools.compiler.version()),
    }
}

#[test]
fn every_kernel_compiles_as_recorded() {
    let Some(tools) = tools() else { return };
    let compiled = compile_all(&tools, listed());
    compare(&tools, &Snapshot::new(&tools.compiler.version(), &compiled));
}

#[test]
#[ignore = "compiles for minutes"]
fn every_main_loop_is_as_recorded() {
    let Some(tools) = tools() else { return };
    let tools = Tools { effort: Some(Effort::Full), ..tools };
    match std::env::var("ETALON_RENEW") {
        Ok(which) => update(&tools, &which),
        Err(_) => {
            let compiled = compile_all(&tools, listed());
            compare(&tools, &Snapshot::new(&tools.compiler.version(), &compiled));
        }
    }
}

/// Writes the snapshot with these rows anew.
fn update(tools: &Tools, which: &str) {
    assert!(tools.disassembler.is_some(), "a snapshot has the counts of nvdisasm");
    let (list, version) = (listed(), tools.compiler.version());
    let recorded = tools.recorded.clone().unwrap_or_else(|| Snapshot::new(&version, &BTreeMap::new()));
    let is_asked = |excerpt: &Excerpt| match which {
        "1" => true,
        "changed" if is_compared(&excerpt.0) => !tools.has(excerpt),
        "changed" => !recorded.has(excerpt),
        families => families.split(',').any(|name| name == excerpt.0.1.family.to_string()),
    };
    let work: Vec<Excerpt> = list.iter().filter(|x| is_asked(x)).cloned().collect();
    let compiled = Snapshot::new(&version, &compile_all(tools, work.clone()));
    recorded.updated(compiled, &list, &work).write();
}

#[test]
#[ignore = "compiles for hours"]
fn every_variant_compiles() {
    let (Some(tools), run) = (tools(), Run::new()) else { return };
    let tools = Tools { effort: Some(run.effort), ..tools };
    let (start, version) = (Instant::now(), tools.compiler.version());
    let all = run.part(everything());
    let (there, work): (Vec<_>, Vec<_>) = all.into_iter().partition(|x| run.is_done(x, &version));
    let ((part, parts), modules) = (run.part, work.len());
    let compiled = in_parallel(work, |one| {
        let result = (!run.is_over()).then(|| compile_one(&tools, &whole(&one)))?;
        Some(result.map(|(_, kernels, _)| {
            run.note(&one, &version);
            let is_full = run.effort == Effort::Full;
            [kernels.len(), kernels.iter().filter(|kernel| is_full && kernel.spills()).count()]
        }))
    });
    let ([mut kernels, mut spilling], mut left, mut faults) = ([0; 2], modules, Vec::new());
    for result in compiled.into_iter().flatten() {
        left -= 1;
        match result {
            Ok([own, spilt]) => (kernels, spilling) = (kernels + own, spilling + spilt),
            Err(fault) => faults.push(fault),
        }
    }
    println!(
        "part {part} of {parts}: NVRTC {version} compiled {} modules in {:.0} s, {} before, {left} are left; {} are wrong; \
         of {kernels} kernels {spilling} spill, as listed",
        modules - left,
        start.elapsed().as_secs_f64(),
        there.len(),
        faults.len(),
    );
    check_faults(faults);
    assert!(left == 0, "the time was over: run it again with the same ETALON_DONE");
}

#[test]
fn every_kernel_on_tensor_cores_is_compared_in_ci() {
    let list = listed();
    let kernels = |is: fn(&Compilation) -> bool| {
        let own = list.iter().filter(|x| x.0.1.family.unit() != Unit::Ffma && is(&x.0));
        own.flat_map(|x| x.1.iter().map(|kernel| (x.0.1.family, *kernel))).collect::<BTreeSet<_>>()
    };
    assert_eq!(kernels(is_compared), kernels(|_| true));
}

#[test]
fn snapshots_are_of_the_list() {
    let snapshots = Snapshot::all();
    assert!(!snapshots.is_empty());
    snapshots.iter().for_each(|snapshot| snapshot.check_list(&listed()));
}

#[test]
fn shared_memory_is_within_the_limit() {
    let most = |architecture: &str| Target::of(architecture).unwrap().shared_memory;
    for compilation in everything() {
        let (architecture, variant) = &compilation;
        for kernel in variant.kernels() {
            let bytes = shared_bytes(variant, kernel);
            assert!(bytes <= most(architecture), "{} {kernel}: {bytes}", module(&compilation));
        }
    }
    // With what the sources declare.
    for snapshot in Snapshot::all() {
        for (architecture, kernel, bytes) in snapshot.shared() {
            assert!(bytes <= most(architecture), "{kernel}: {bytes}");
        }
    }
}
