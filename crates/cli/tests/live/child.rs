//! Programs that answer, each in a way of its own.

use crate::shared;
use etalon_conformance::live::{ERROR, Frame, HELLO, Most, OUTPUTS, UNSUPPORTED};
use etalon_conformance::tensor::{Data, Tensor, Tensors};
use etalon_conformance::tier::{Hints, Request, Tier};
use etalon_conformance::tiers::Reference;
use etalon_conformance::vectors::parse_problem;
use etalon_problem::{Problem, Role};
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::{Write, stderr, stdin, stdout};
use std::path::Path;
use std::process::{Command, exit, id};
use std::thread::sleep;
use std::time::Duration;

/// Their capabilities: few, so that a run is short.
pub const TAKES: &str = r#"{"kernels": [{
    "algorithm": "attention", "passes": ["forward", "backward"], "dtypes": ["f32"],
    "limits": {"dim": {"at_most": 8}, "value_dim": {"at_most": 8}, "queries": {"at_most": 24},
        "keys": {"at_most": 24}, "batch": {"one_of": [1]}, "key_heads": {"at_most": 2}},
    "masks": ["full", "causal"], "sequences": ["dense"], "options": {}}]}"#;

/// Memory of former requests.
#[derive(Default)]
pub struct Before {
    asked: usize,
    /// Results by a name for the request.
    pub results: HashMap<String, Tensors>,
}

/// Answers until stdin ends. `path` is a file: of its process, or of what it has done before.
pub fn run(mode: &str, path: Option<&str>) {
    let path = path.filter(|path| !path.is_empty());
    if let Some(path) = path.filter(|_| mode != "once" && !shared::is_meant(mode)) {
        fs::write(path, id().to_string()).expect("a file for its number");
    }
    let mut before = Before::default();
    while let Some(frame) = Frame::read(&mut stdin(), Most::ANY).expect("a frame") {
        match frame.kind {
            HELLO => hello(mode, frame.id),
            _ if shared::is_meant(mode) => shared::answer(mode, path, &frame, &mut before),
            _ => answer(mode, path, &frame, &mut before),
        }
    }
}

fn hello(mode: &str, id: u64) {
    let mut frame = Frame { kind: HELLO, id, text: b"child".to_vec(), ..Frame::default() };
    frame.json = TAKES.as_bytes().to_vec();
    match mode {
        "no-library" => {
            eprintln!("loading\nlibkernel.so: no such file\n");
            exit(3);
        }
        "mute" => sleep(Duration::from_secs(100)),
        "prints" => print!("Loading the kernel, please wait …"),
        "nameless" => frame.text.clear(),
        _ if shared::is_meant(mode) => frame.text = b"child\nshared".to_vec(),
        "not-hello" => frame.kind = OUTPUTS,
        "undeclared" => frame.json.clear(),
        "misdeclared" => {
            frame.json = br#"{"kernels": [{"algorithm": "attention", "mask": []}]}"#.to_vec()
        }
        "fickle" => frame.text = format!("child {}", std::process::id()).into_bytes(),
        _ => {}
    }
    send(&frame.to_bytes().expect("a hello"));
}

pub fn send(bytes: &[u8]) {
    // Stdin ends next if nobody reads.
    let _ = stdout().write_all(bytes).and_then(|()| stdout().flush());
}

fn answer(mode: &str, path: Option<&str>, frame: &Frame, before: &mut Before) {
    before.asked += 1;
    let (problem, outputs) = computed(frame);
    let mut out = Frame { kind: OUTPUTS, id: frame.id, tensors: outputs, ..Frame::default() };
    let long = problem.scores().is_some_and(|scores| scores.extents.queries > 16);
    match mode {
        "hangs" => sleep(Duration::from_secs(100)),
        "hangs-when-long" if long => sleep(Duration::from_secs(100)),
        "aborts" => std::process::abort(),
        "aborts-when-long" if long => std::process::abort(),
        "exits" => exit(0),
        "once" => {
            let path = path.expect("a file");
            if !Path::new(path).exists() {
                fs::write(path, "been here").expect("a file");
                std::process::abort();
            }
        }
        "orphan" => {
            // It holds the streams that it inherits, and is in the group of this process.
            Command::new("sleep").arg("100").spawn().expect("sleep");
            exit(0);
        }
        "number" => out.id += 1,
        "kind" => out.kind = 9,
        "wants" => out.wanted = frame.wanted.clone(),
        "error" | "fickle" => {
            out = Frame {
                kind: ERROR,
                id: frame.id,
                text: b"no\nmemory\x1b".to_vec(),
                ..Frame::default()
            };
            if mode == "fickle" {
                exit(1);
            }
        }
        "refuses" => out = refusal(frame.id),
        "refuses-when-long" if long => out = refusal(frame.id),
        "floods" => {
            let _ = stderr().write_all("too many words\n".repeat(1 << 15).as_bytes());
        }
        _ => changed(mode, frame, before, &mut out.tensors),
    }
    let mut bytes = out.to_bytes().expect("an answer");
    match mode {
        "half" | "half-and-hangs" => bytes.truncate(bytes.len() / 2),
        "version" => bytes[8] = 2,
        "huge" => bytes[48..56].copy_from_slice(&(1_u64 << 40).to_le_bytes()),
        "many" => bytes[24..32].copy_from_slice(&u64::MAX.to_le_bytes()),
        "garbage" => bytes.fill(0xa5),
        "wordy" => bytes.splice(0..0, *b"step 1 of 3\n").for_each(drop),
        _ => {}
    }
    send(&bytes);
    match mode {
        "half" => exit(0),
        "half-and-hangs" => sleep(Duration::from_secs(100)),
        _ => {}
    }
}

fn refusal(id: u64) -> Frame {
    Frame { kind: UNSUPPORTED, id, text: b"not today".to_vec(), ..Frame::default() }
}

/// Exact results, rounded, of a request.
pub fn computed(frame: &Frame) -> (Problem, Tensors) {
    let said: Value = serde_json::from_slice(&frame.json).expect("JSON");
    let (path, text) = (Path::new("request"), said["problem"].to_string());
    let problem = parse_problem(path, &text, path, &frame.tensors).expect("a problem");
    let word = |key: &str| said[key].as_str().expect("a word").to_string();
    let (pass, dtype) =
        (word("pass").parse().expect("a pass"), word("dtype").parse().expect("a type"));
    let read = |name: &str| {
        let operands = problem.operands(pass);
        operands.iter().any(|x| x.name == name && x.role.is_given() && x.role != Role::Saved)
    };
    let mut inputs = frame.tensors.clone();
    inputs.retain(|name, _| read(name));
    let (inputs, hints) = (&inputs, Hints::default());
    let request = Request { problem: &problem, pass, dtype, inputs, hints };
    let outputs = Reference.run(&request).expect("results");
    (problem, outputs)
}

/// Changes results.
fn changed(mode: &str, frame: &Frame, before: &mut Before, outputs: &mut Tensors) {
    match mode {
        "scaled" => each(outputs, |x| *x *= 1.01),
        "jitters" => {
            let odd = before.asked as u32 & 1;
            let moved = |x: f32| f32::from_bits(x.to_bits() ^ odd);
            each(outputs, |x| *x = if x.abs() > 0.01 { moved(*x) } else { *x });
        }
        "shape" => outputs.values_mut().for_each(|x| x.shape.reverse()),
        "missing" => drop(outputs.pop_first()),
        "extra" => {
            let tensor = Tensor { shape: vec![1], data: Data::F32(vec![1.0]) };
            outputs.insert("max".to_string(), tensor);
        }
        "type" => {
            for x in outputs.values_mut() {
                let Data::F32(own) = &x.data else { continue };
                x.data = Data::F64(own.iter().map(|&x| f64::from(x)).collect());
            }
        }
        _ => cheated(mode, frame, before, outputs),
    }
}

/// Replaces results by something that takes no work.
fn cheated(mode: &str, frame: &Frame, before: &mut Before, outputs: &mut Tensors) {
    match mode {
        "by-shape" => remembered(before, format!("{}{:?}", pass(frame), shapes(frame)), outputs),
        "remembers" => {
            // Tensors have no names for NaN that are equal, but bytes have.
            let own = Frame { id: 0, ..frame.clone() };
            remembered(before, format!("{:?}", own.to_bytes()), outputs);
        }
        "former" => {
            let own = outputs.clone();
            let shapes = |x: &Tensors| x.values().map(|x| x.shape.clone()).collect::<Vec<_>>();
            if let Some(last) = before.results.insert(String::new(), own)
                && last.keys().eq(outputs.keys())
                && shapes(&last) == shapes(outputs)
            {
                *outputs = last;
            }
        }
        "zeros" => each(outputs, |x| *x = 0.0),
        "nan" => each(outputs, |x| *x = f32::NAN),
        "mean" => mean(frame, outputs),
        "inputs" => {
            let mut k = frame.tensors["k"].clone();
            each_of(&mut k, |x| *x = 0.0);
            outputs.insert("k".to_string(), k);
        }
        "twice" => {
            let (tensors, id) = (outputs.clone(), frame.id);
            let first = Frame { kind: OUTPUTS, id, tensors, ..Frame::default() };
            send(&first.to_bytes().expect("an answer"));
        }
        #[cfg(unix)]
        "spies" => {
            let parent = std::os::unix::process::parent_id();
            let line = fs::read(format!("/proc/{parent}/cmdline")).unwrap_or_default();
            if !String::from_utf8_lossy(&line).contains("--seed") {
                each(outputs, |x| *x = 0.0);
            }
        }
        "bf16" => each(outputs, |x| *x = half::bf16::from_f32(*x).to_f32()),
        "short" => {
            let mut short = frame.clone();
            for name in ["k", "v"] {
                let x = short.tensors.get_mut(name).expect("keys and values");
                let (keys, width) = (x.shape[2], x.shape[3]);
                let rows = |at: usize| (at / width) % keys.max(1);
                let Data::F32(data) = &mut x.data else { continue };
                data.iter_mut()
                    .enumerate()
                    .filter(|(at, _)| rows(*at) >= 16)
                    .for_each(|x| *x.1 = 0.0);
            }
            *outputs = computed(&short).1;
        }
        "one-head" => {
            for x in outputs.values_mut() {
                let head: usize = x.shape.iter().skip(2).product();
                let Data::F32(data) = &mut x.data else { continue };
                data.iter_mut().skip(head).for_each(|x| *x = 0.0);
            }
        }
        "generic" if !looks_random(frame) => mean(frame, outputs),
        "probes" if looks_random(frame) => mean(frame, outputs),
        "drifts" if before.asked > 100 => each(outputs, |x| *x *= 1.01),
        _ => {}
    }
}

/// Returns what was returned under this name, or else keeps what is returned.
fn remembered(before: &mut Before, name: String, outputs: &mut Tensors) {
    let kept = before.results.entry(name).or_insert_with(|| outputs.clone());
    outputs.clone_from(kept);
}

fn pass(frame: &Frame) -> String {
    let text = String::from_utf8_lossy(&frame.text);
    text.lines().filter(|line| line.starts_with("pass ")).collect()
}

fn shapes(frame: &Frame) -> Vec<Vec<usize>> {
    frame.tensors.values().map(|x| x.shape.clone()).collect()
}

/// The mean of the values in every row of o.
fn mean(frame: &Frame, outputs: &mut Tensors) {
    let Data::F32(v) = &frame.tensors["v"].data else { return };
    let mean = v.iter().sum::<f32>() / v.len().max(1) as f32;
    each(outputs, |x| *x = mean);
}

/// True if few numbers of q are equal.
fn looks_random(frame: &Frame) -> bool {
    let Data::F32(q) = &frame.tensors["q"].data else { return false };
    let numbers: HashSet<u32> = q.iter().map(|x| x.to_bits()).collect();
    numbers.len() * 10 > q.len() * 9 && q.iter().all(|x| x.is_finite())
}

fn each(outputs: &mut Tensors, change: impl Fn(&mut f32)) {
    outputs.values_mut().for_each(|x| each_of(x, &change));
}

fn each_of(x: &mut Tensor, change: impl Fn(&mut f32)) {
    if let Data::F32(x) = &mut x.data {
        x.iter_mut().for_each(change);
    }
}
