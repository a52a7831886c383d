//! Instructions of a kernel, by nvdisasm: those of its main loop, and arrivals that split a warp.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The disassembler among the packages of a folder, if it is there: that of the wheel `nvidia-cuda-nvdisasm`.
pub fn disassembler(folder: &Path) -> Option<PathBuf> {
    let path = folder.join("nvidia/cu13/bin/nvdisasm");
    path.is_file().then_some(path)
}

/// Facts of the machine code of a kernel.
#[derive(Debug, Default)]
pub struct Code {
    /// The main loop in words; empty if it has none.
    pub main_loop: String,
    /// Arrivals at a barrier behind which the lanes of a warp need not meet again.
    pub splits: usize,
}

/// An instruction: whether it has a predicate, its opcode and its operands.
type Instruction<'a> = (bool, &'a str, &'a str);

/// The code of the kernels of each of these images, by the kernel's name. All are of one architecture: what the
/// disassembler does before the first instruction takes as long as some thousand of them.
pub fn codes(
    disassembler: &Path,
    architecture: &str,
    images: &[Vec<u8>],
) -> Result<Vec<BTreeMap<String, Code>>, String> {
    let kernels: Option<Vec<_>> = images.iter().map(|image| kernels(image)).collect();
    let kernels = kernels.ok_or("an image is no ELF file")?;
    let all: Vec<u8> = kernels.iter().flatten().flat_map(|(_, code)| *code).copied().collect();
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let path = folder.path().join("kernels");
    std::fs::write(&path, all).map_err(|error| error.to_string())?;
    let name = architecture.replace("sm_", "SM");
    let output = Command::new(disassembler).args(["--binary", &name]).arg(&path).output();
    let output = output.map_err(|error| format!("{}: {error}", disassembler.display()))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    let text = String::from_utf8(output.stdout).map_err(|error| error.to_string())?;
    let code: Vec<_> = text.lines().filter_map(instruction).collect();
    let expected = kernels.iter().flatten().map(|(_, code)| code.len() / BYTES).sum::<usize>();
    if code.len() != expected {
        return Err(format!("nvdisasm wrote {} of {expected} instructions", code.len()));
    }
    let mut first = 0;
    let mut codes = |(name, bytes): (String, &[u8])| {
        let own = first..first + bytes.len() / BYTES;
        first = own.end;
        let main_loop = main_loop(&code[own.clone()], own.start).unwrap_or_default();
        (name, Code { main_loop, splits: splits(&code[own]) })
    };
    Ok(kernels.into_iter().map(|own| own.into_iter().map(&mut codes).collect()).collect())
}

/// The kernels of an image with their machine code: its sections `.text.NAME`.
fn kernels(image: &[u8]) -> Option<Vec<(String, &[u8])>> {
    let number = |at: usize, bytes: usize| {
        let own = image.get(at..at + bytes)?;
        Some(own.iter().rev().fold(0, |number, &byte| number << 8 | usize::from(byte)))
    };
    // A 64-bit ELF file: where the headers of sections begin, their size, their number, and which has the names.
    let (headers, size) = (number(0x28, 8)?, number(0x3a, 2)?);
    let (sections, names) = (number(0x3c, 2)?, number(0x3e, 2)?);
    let body = |section: usize| {
        let header = headers + section * size;
        let (start, bytes) = (number(header + 0x18, 8)?, number(header + 0x20, 8)?);
        Some((start, number(header, 4)?, bytes))
    };
    let (names, ..) = body(names)?;
    let mut kernels = Vec::new();
    for section in 0..sections {
        let (start, name, bytes) = body(section)?;
        let name = image.get(names + name..)?.split(|&byte| byte == 0).next()?;
        if let Some(name) = std::str::from_utf8(name).ok()?.strip_prefix(".text.") {
            kernels.push((name.to_string(), image.get(start..start + bytes)?));
        }
    }
    Some(kernels)
}

/// The instruction of a line, if it is one: behind its place, `/*0a80*/`, and its predicate.
fn instruction(line: &str) -> Option<Instruction<'_>> {
    let (_, rest) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    let rest = rest.trim_end_matches(';').trim();
    let is_conditional = rest.starts_with('@');
    let rest = if is_conditional { rest.split_once(' ')?.1.trim_start() } else { rest };
    let (opcode, operands) = rest.split_once(' ').unwrap_or((rest, ""));
    Some((is_conditional, opcode, operands))
}

/// Arrivals that some lanes jump over and that end in a jump to the same place: ptxas makes them of an arrival with a
/// predicate before a jump, and lets no lane wait at that place. Instructions on uniform registers there run twice.
fn splits(code: &[Instruction<'_>]) -> usize {
    let is_split = |code: &&[Instruction<'_>]| {
        let [(true, "BRA", over), (false, arrival, _), (false, "BRA", to)] = code else { return false };
        arrival.starts_with("SYNCS.ARRIVE") && over == to
    };
    code.windows(3).filter(is_split).count()
}

#[test]
fn an_arrival_that_some_lanes_jump_over_splits_a_warp() {
    let of = |lines: &[&'static str]| splits(&lines.iter().filter_map(|x| instruction(x)).collect::<Vec<_>>());
    let arrival = "/*0020*/ SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R2+URZ+0x1e918], RZ ;";
    let jump = "/*0030*/ BRA 0x90 ;";
    assert_eq!(of(&["/*0010*/ @P0 BRA 0x90 ;", arrival, jump]), 1);
    assert_eq!(of(&["/*0010*/ BRA 0x90 ;", arrival, jump]), 0, "another path");
    assert_eq!(of(&["/*0010*/ @P0 BRA 0xa0 ;", arrival, jump]), 0);
    assert_eq!(of(&["/*0010*/ @!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R2], RZ ;", "/*0020*/ NOP ;", jump]), 0);
}

/// Bytes of an instruction.
const BYTES: usize = 16;

/// Opcodes that multiply.
const PRODUCTS: [&str; 3] = ["HGMMA", "HMMA", "FFMA"];

/// Kinds of instructions: opcodes up to their first point. Copies of the copy engine begin with UTMA, and products in
/// two rows of f32 at once are FFMA2.
const KINDS: [&str; 14] =
    ["HGMMA", "HMMA", "FFMA2", "FFMA", "MUFU", "LDSM", "LDS", "STS", "LDGSTS", "UTMALDG", "LDG", "LDL", "STL", "BAR"];

fn kind(opcode: &str) -> &str {
    opcode.split('.').next().unwrap_or_default()
}

/// Of the innermost loops the one with the most products: its instructions by kind. Branches name the number of an
/// instruction in the file, in which this code begins at `first`.
fn main_loop(code: &[Instruction<'_>], first: usize) -> Option<String> {
    let target = |operands: &str| {
        let last = operands.split(',').next_back()?.trim();
        Some(usize::from_str_radix(last.strip_prefix("0x")?, 16).ok()? / BYTES)
    };
    let backward = |(at, &(_, opcode, operands)): (usize, &Instruction<'_>)| {
        let target = (kind(opcode) == "BRA").then(|| target(operands)).flatten()?;
        let begin = target.checked_sub(first)?;
        (begin < at).then_some(begin..at + 1)
    };
    let loops: Vec<_> = code.iter().enumerate().filter_map(backward).collect();
    let products = |range: &std::ops::Range<usize>| {
        let own = &code[range.clone()];
        own.iter().filter(|(_, opcode, _)| PRODUCTS.contains(&kind(opcode))).count()
    };
    let within = |inner: &std::ops::Range<usize>, outer: &std::ops::Range<usize>| {
        inner != outer && inner.start >= outer.start && inner.end <= outer.end
    };
    // A loop around another that multiplies is not the innermost.
    let innermost = |outer: &&_| !loops.iter().any(|inner| within(inner, outer) && products(inner) > 0);
    let main = loops.iter().filter(innermost).max_by_key(|x| (products(x), x.start))?;
    if products(main) == 0 {
        return None;
    }
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    code[main.clone()].iter().for_each(|(_, opcode, _)| *counts.entry(kind(opcode)).or_default() += 1);
    let mut text = format!("loop of {}", main.len());
    for kind in KINDS {
        if let Some(count) = counts.get(kind) {
            let _ = write!(text, " {kind} {count}");
        }
    }
    Some(text)
}

#[test]
fn the_innermost_loop_with_the_most_products_is_the_main_one() {
    let code = [
        ("LDC", "R1,c[0x0][0x28]"),        // 0x00
        ("FFMA.FTZ", "R0,R1,R2,R3"),       // 0x10: a loop of one product
        ("BRA", "0x10"),                   // 0x20
        ("LDG.E", "R0,desc[UR10][R2.64]"), // 0x30: around the next
        ("LDS.128", "R0,[R1]"),            // 0x40: two products
        ("FFMA", "R0,R1,R2,R3"),           // 0x50
        ("FFMA", "R0,R1,R2,R3"),           // 0x60
        ("BRA", "P1,0x40"),                // 0x70
        ("BRA.U", "UP0,0x30"),             // 0x80
        ("BRA", "0xa0"),                   // 0x90: forward
        ("EXIT", ""),                      // 0xa0
    ];
    let code = code.map(|(opcode, operands)| (false, opcode, operands));
    assert_eq!(main_loop(&code, 0).unwrap(), "loop of 4 FFMA 2 LDS 1");
    // Behind the code of another kernel.
    assert_eq!(main_loop(&code[4..], 4).unwrap(), "loop of 4 FFMA 2 LDS 1");
    assert_eq!(main_loop(&code[9..], 9), None);
    let lines = [
        "	.headerflags	@\"EF_CUDA_SM90\"",
        "        /*0010*/              @!P0 BRA 0x18f0 ;",
        "        /*0020*/                   LDC R1, c[0x0][0x28] ;",
        "        /*0030*/               @P1 EXIT ;",
    ];
    let found: Vec<_> = lines.into_iter().filter_map(instruction).collect();
    assert_eq!(found, [(true, "BRA", "0x18f0"), (false, "LDC", "R1, c[0x0][0x28]"), (true, "EXIT", "")]);
    assert!(kernels(b"\x7fELF").is_none());
}
