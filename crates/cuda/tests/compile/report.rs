//! The report of the assembler on each kernel of a module.

use etalon_cuda::kernels::{Compiler, Variant, shared_bytes};
use std::collections::BTreeMap;
use std::fmt;

/// A variant for an architecture.
pub type Compilation = (&'static str, Variant);

/// Resources of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    pub name: String,
    /// Of a thread.
    pub registers: u32,
    /// The memory of a thread for what does not fit its registers, or is indexed, in bytes.
    pub stack: u32,
    /// Stores and loads of registers that were spilt, in bytes.
    pub spills: [u32; 2],
    /// Shared memory of a block: what the source declares, and what a launch adds, in bytes.
    pub shared: [u32; 2],
    /// The instructions of its main loop by kind; empty if it has none, or nobody counted.
    pub main_loop: String,
}

/// Separator before the main loop's part of a line.
pub const LOOP: &str = "; ";

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Kernel { name, registers, stack, spills, shared, main_loop } = self;
        write!(f, "{name}: {registers} registers, {} + {} bytes shared", shared[0], shared[1])?;
        if *stack > 0 {
            write!(f, ", {stack} bytes of stack")?;
        }
        if *spills != [0, 0] {
            write!(f, ", {} + {} bytes spilt", spills[0], spills[1])?;
        }
        if !main_loop.is_empty() {
            write!(f, "{LOOP}{main_loop}")?;
        }
        Ok(())
    }
}

impl Kernel {
    pub fn spills(&self) -> bool {
        self.spills != [0, 0]
    }
}

/// Pains that the compiler takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effort {
    /// The least: all that is learnt is that kernels compile.
    Least,
    /// As much as for a device.
    Full,
}

/// The module of a compilation as the snapshot names it.
pub fn module((architecture, variant): &Compilation) -> String {
    format!("{architecture} {}", variant.describe())
}

/// Compiles these kernels of a module and reads what they take, in the order of their names, with their machine code;
/// or what is wrong.
pub fn compile(
    compiler: &Compiler,
    (architecture, variant): &Compilation,
    wanted: &[&str],
    effort: Effort,
) -> Result<(Vec<Kernel>, Vec<u8>), String> {
    let mut options = variant.options(architecture);
    if compiler.version().as_str() >= "13" {
        // NVRTC reports nothing on modules of its cache, which it keeps where there is a driver.
        options.push("--no-cache".to_string());
        options.extend((effort == Effort::Least).then(|| "--Ofast-compile=max".to_string()));
    }
    let compiled = compiler.compile(&variant.source(wanted), &options)?;
    // C75xx: products of the tensor cores that the assembler made wait for each other.
    if let Some(line) = compiled.log.lines().find(|line| effort == Effort::Full && line.contains("(C75")) {
        return Err(line.to_string());
    }
    let kernels = kernels(&compiled.log, variant)?;
    let (mut found, mut expected): (Vec<&str>, Vec<&str>) =
        (kernels.iter().map(|x| x.name.as_str()).collect(), wanted.to_vec());
    found.sort();
    expected.sort();
    if found != expected {
        return Err(format!("kernels {expected:?} were expected, and {found:?} compiled"));
    }
    Ok((kernels, compiled.image))
}

/// Reads the lines of `--ptxas-options=-v`.
fn kernels(log: &str, variant: &Variant) -> Result<Vec<Kernel>, String> {
    let mut kernels: Vec<Kernel> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or_default().to_string();
            let shared = [0, shared_bytes(variant, &name)];
            let main_loop = String::new();
            kernels.push(Kernel { name, registers: 0, stack: 0, spills: [0, 0], shared, main_loop });
            continue;
        }
        let Some(kernel) = kernels.last_mut() else { continue };
        let number = |unit: &str| before(line, unit);
        if line.contains("bytes stack frame") {
            let own = [" bytes stack frame", " bytes spill stores", " bytes spill loads"].map(number);
            let [Some(stack), Some(stores), Some(loads)] = own else {
                return Err(format!("an unknown line: {line}"));
            };
            (kernel.stack, kernel.spills) = (stack, [stores, loads]);
        } else if line.contains("Used ") {
            kernel.registers = number(" registers").ok_or_else(|| format!("an unknown line: {line}"))?;
            kernel.shared[0] = number(" bytes smem").unwrap_or(0);
        }
    }
    if let Some(kernel) = kernels.iter().find(|kernel| kernel.registers == 0) {
        return Err(format!("nothing is said of the registers of {}", kernel.name));
    }
    kernels.sort_by(|x, y| x.name.cmp(&y.name));
    Ok(kernels)
}

/// The number before a unit.
fn before(line: &str, unit: &str) -> Option<u32> {
    let head = &line[..line.find(unit)?];
    let digits = head.rfind(|c: char| !c.is_ascii_digit()).map_or(0, |at| at + 1);
    head[digits..].parse().ok()
}

/// Prints the seconds that each module took, the most first, and those of each architecture.
pub fn print_costs(mut costs: Vec<(f64, String)>) {
    costs.sort_by(|x, y| y.0.total_cmp(&x.0));
    let mut architectures = BTreeMap::<&str, f64>::new();
    for (seconds, module) in &costs {
        println!("{seconds:7.2} s  {module}");
        *architectures.entry(module.split(' ').next().unwrap_or_default()).or_default() += seconds;
    }
    println!("seconds by architecture: {architectures:.0?}");
}

#[test]
fn a_log_is_read() {
    let log = "ptxas info    : 78 bytes gmem\n\
        ptxas info    : Compiling entry function 'move' for 'sm_80'\n\
        ptxas info    : Function properties for move\n\
        ptxas         .     24 bytes stack frame, 20 bytes spill stores, 56 bytes spill loads\n\
        ptxas info    : Used 128 registers, used 1 barriers, 34816 bytes smem, 832 bytes cmem[0]\n";
    let found = kernels(log, &Variant::moves(2)).unwrap();
    let expected = "move: 128 registers, 34816 + 0 bytes shared, 24 bytes of stack, 20 + 56 bytes spilt";
    assert_eq!(found.iter().map(Kernel::to_string).collect::<Vec<_>>(), [expected]);
    let less: String = log.lines().take(4).map(|line| format!("{line}\n")).collect();
    assert!(kernels(&less, &Variant::moves(2)).is_err());
}
