//! Programs that read and write tensors in files that they share with etalon, and what is wrong of some of them.

use crate::Test;
use crate::child::{Before, computed, send};
use crate::protocol::{ask, fault, new, started};
use etalon_conformance::live::{File, Frame, OUTPUTS, Placed};
use etalon_conformance::tensor::{Data, Tensor, Tensors};
use serde_json::Value;
use std::fs::{self, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use tempfile::tempdir;

pub const TESTS: &[Test] = &[
    ("shared_files_hold_the_same_tensors", shared_files_hold_the_same_tensors),
    ("what_is_wrong_of_shared_files_is_named", what_is_wrong_of_shared_files_is_named),
    ("shared_files_go_with_the_process", shared_files_go_with_the_process),
    ("nothing_is_shared_that_is_not_offered", nothing_is_shared_that_is_not_offered),
];

/// True of programs that take shared files.
pub fn is_meant(mode: &str) -> bool {
    mode.starts_with("shared")
}

/// Answers a request whose tensors lie in files; `path` is a file for their folder.
pub fn answer(mode: &str, path: Option<&str>, frame: &Frame, before: &mut Before) {
    let said: Value = serde_json::from_slice(&frame.json).expect("JSON");
    let file = |name: &str| said["shared"][name].as_str().map(str::to_string);
    let Some((inputs, outputs)) = file("inputs").zip(file("outputs")) else {
        // They were not offered.
        let tensors = computed(frame).1;
        let frame = Frame { kind: OUTPUTS, id: frame.id, tensors, ..Frame::default() };
        return send(&frame.to_bytes().expect("an answer"));
    };
    if let Some(path) = path {
        fs::write(path, &inputs).expect("a file for the name of a file");
    }
    let elements = fs::read(&inputs).expect("the shared inputs");
    let (given, mut places): (Vec<Placed>, _) =
        frame.placed.iter().cloned().partition(|placed| placed.file == File::Inputs);
    let read = |Placed { tensor, at, .. }: Placed| {
        let bytes = elements[at..at + tensor.bytes()].chunks_exact(4);
        let data = bytes.map(|x| f32::from_le_bytes(x.try_into().expect("four bytes"))).collect();
        (tensor.name, Tensor { shape: tensor.shape, data: Data::F32(data) })
    };
    let tensors: Tensors = given.into_iter().map(read).collect();
    let local = Frame { tensors, ..frame.clone() };
    match mode {
        "shared-aborts" => std::process::abort(),
        "shared-damages" => damage(Path::new(&inputs)),
        _ => {}
    }
    let mut own = computed(&local).1;
    if mode == "shared-late" {
        // Results that are ready when the next request comes.
        own = before.results.insert(String::new(), own).unwrap_or_default();
    }
    let mut to = OpenOptions::new().write(true).open(&outputs).expect("the shared outputs");
    for Placed { tensor, at, .. } in &places {
        let Some(Tensor { data: Data::F32(data), .. }) = own.get(&tensor.name) else { continue };
        let bytes: Vec<u8> = data.iter().flat_map(|x| x.to_le_bytes()).collect();
        to.seek(SeekFrom::Start(*at as u64)).expect("a place");
        if mode != "shared-writes-nothing" {
            to.write_all(&bytes).expect("a place");
        }
    }
    let mut tensors = Tensors::new();
    match mode {
        "shared-elsewhere" => places[0].at += 64,
        "shared-inputs" => places[0].file = File::Inputs,
        "shared-twice" => places.push(places[0].clone()),
        "shared-both" => tensors = own,
        "shared-cut" => to.set_len(3).expect("a shorter file"),
        _ => {}
    }
    let frame = Frame { kind: OUTPUTS, id: frame.id, placed: places, tensors, ..Frame::default() };
    send(&frame.to_bytes().expect("an answer"));
}

/// Sets the first byte of a file that is meant to be read.
fn damage(path: &Path) {
    let mut permissions = fs::metadata(path).expect("a file").permissions();
    #[cfg(unix)]
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o600);
    fs::set_permissions(path, permissions).expect("its owner may");
    let mut file = OpenOptions::new().write(true).open(path).expect("a file");
    let first = fs::read(path).expect("a file")[0];
    file.write_all(&[!first]).expect("a byte");
}

fn shared_files_hold_the_same_tensors() {
    let shared = started("shared", "");
    assert!(shared.shares());
    let frames = started("right", "");
    assert!(!frames.shares());
    assert_eq!(ask(&shared), ask(&frames));
    // Files are used again.
    assert_eq!(ask(&shared), ask(&frames));
    assert_eq!(shared.ends(), 0);
}

fn what_is_wrong_of_shared_files_is_named() {
    for (mode, part) in [
        ("shared-damages", "changed the shared elements of `k`, which it may only read"),
        ("shared-elsewhere", "at byte 64 of the shared results: no place that it was given"),
        ("shared-inputs", "at byte 0 of the shared inputs: no place that it was given"),
        ("shared-twice", "returned `o` twice"),
        ("shared-both", "returned `o` twice"),
        ("shared-cut", "left a file of results that ends: "),
    ] {
        let program = started(mode, "");
        let said = fault(&program);
        assert!(said.contains(part), "{mode}: {said}");
        assert_eq!(program.ends(), 1, "{mode}");
    }
    // Nobody has written a result: each element is NaN.
    for mode in ["shared-writes-nothing", "shared-late"] {
        let outputs = ask(&started(mode, "")).expect("results");
        let is_nan = |x: &Tensor| x.to_f64("").expect("numbers").iter().all(|x| x.is_nan());
        assert!(outputs.len() == 2 && outputs.values().all(is_nan), "{mode}: {outputs:?}");
    }
}

fn shared_files_go_with_the_process() {
    let folder = tempdir().expect("a folder");
    for mode in ["shared", "shared-aborts", "shared-damages"] {
        let named = folder.path().join(mode);
        let program = started(mode, named.to_str().expect("a name"));
        let _ = ask(&program);
        let inputs = fs::read_to_string(&named).expect("the name of a file");
        let own = Path::new(&inputs).parent().expect("a folder");
        assert_eq!(own.exists(), mode == "shared", "{mode}: {inputs}");
        drop(program);
        assert!(!own.exists(), "{mode}: {inputs}");
    }
}

fn nothing_is_shared_that_is_not_offered() {
    let program = new("shared", "").offered(false);
    assert!(program.start().expect("a hello").shared && !program.shares());
    assert_eq!(ask(&program), ask(&started("right", "")));
}
