//! What the main loop of a kernel executes, by nvdisasm.

use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The disassembler among the packages of a folder, if it is there: that of the wheel `nvidia-cuda-nvdisasm`.
pub fn disassembler(folder: &Path) -> Option<PathBuf> {
    let path = folder.join("nvidia/cu13/bin/nvdisasm");
    path.is_file().then_some(path)
}

/// The main loop of each kernel of an image that has one, in words.
pub fn main_loops(disassembler: &Path, image: &[u8]) -> Result<BTreeMap<String, String>, String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let path = folder.path().join("kernels.cubin");
    std::fs::write(&path, image).map_err(|error| error.to_string())?;
    let output = Command::new(disassembler).args(["-c", "-json"]).arg(&path).output();
    let output = output.map_err(|error| format!("{}: {error}", disassembler.display()))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    read(&output.stdout).map_err(|what| format!("nvdisasm wrote no {what}"))
}

fn read(json: &[u8]) -> Result<BTreeMap<String, String>, &'static str> {
    let json: Value = serde_json::from_slice(json).map_err(|_| "JSON")?;
    let functions = json.get(1).and_then(Value::as_array).ok_or("list of functions")?;
    let mut loops = BTreeMap::new();
    for function in functions {
        let name = function["function-name"].as_str().ok_or("name of a function")?;
        let code = function["sass-instructions"].as_array().ok_or("instructions")?;
        let code: Vec<(&str, &str)> = code
            .iter()
            .map(|x| Some((x["opcode"].as_str()?, x["operands"].as_str().unwrap_or_default())))
            .collect::<Option<_>>()
            .ok_or("opcode")?;
        if let Some(main) = main_loop(&code) {
            loops.insert(name.to_string(), main);
        }
    }
    Ok(loops)
}

/// Bytes of an instruction.
const BYTES: usize = 16;

/// What multiplies.
const PRODUCTS: [&str; 3] = ["HGMMA", "HMMA", "FFMA"];

/// What is told apart: opcodes up to their first point. Copies of the copy engine begin with UTMA, and products in
/// two rows of f32 at once are FFMA2.
const KINDS: [&str; 14] = [
    "HGMMA", "HMMA", "FFMA2", "FFMA", "MUFU", "LDSM", "LDS", "STS", "LDGSTS", "UTMALDG", "LDG",
    "LDL", "STL", "BAR",
];

fn kind(opcode: &str) -> &str {
    opcode.split('.').next().unwrap_or_default()
}

/// Of the innermost loops the one with the most products: its instructions by kind.
fn main_loop(code: &[(&str, &str)]) -> Option<String> {
    let target = |operands: &str| {
        let last = operands.split(',').next_back()?.trim();
        Some(usize::from_str_radix(last.strip_prefix("0x")?, 16).ok()? / BYTES)
    };
    let backward = |(at, &(opcode, operands)): (usize, &(&str, &str))| {
        let first = (kind(opcode) == "BRA").then(|| target(operands)).flatten()?;
        (first < at).then_some(first..at + 1)
    };
    let loops: Vec<_> = code.iter().enumerate().filter_map(backward).collect();
    let products = |range: &std::ops::Range<usize>| {
        let own = &code[range.clone()];
        own.iter().filter(|(opcode, _)| PRODUCTS.contains(&kind(opcode))).count()
    };
    let within = |inner: &std::ops::Range<usize>, outer: &std::ops::Range<usize>| {
        inner != outer && inner.start >= outer.start && inner.end <= outer.end
    };
    // A loop around another that multiplies is not the innermost.
    let innermost =
        |outer: &&_| !loops.iter().any(|inner| within(inner, outer) && products(inner) > 0);
    let main = loops.iter().filter(innermost).max_by_key(|x| (products(x), x.start))?;
    if products(main) == 0 {
        return None;
    }
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    code[main.clone()].iter().for_each(|(opcode, _)| *counts.entry(kind(opcode)).or_default() += 1);
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
    assert_eq!(main_loop(&code).unwrap(), "loop of 4 FFMA 2 LDS 1");
    assert_eq!(main_loop(&code[9..]), None);
    assert!(read(b"[]").is_err());
}
