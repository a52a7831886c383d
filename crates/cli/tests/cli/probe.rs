//! `etalon probe`: questions as files, and the answers of a right kernel and of wrong ones.

use super::{etalon, refusal};
use etalon_conformance::tensor::{Tensor, Tensors};
use etalon_conformance::vectors::{read_tensors, write_tensors};
use etalon_problem::Dtype;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::{TempDir, tempdir};

/// The questions of attention_lse, whose probes are the cheapest.
fn questions() -> (TempDir, PathBuf) {
    let folder = tempdir().unwrap();
    let probes = folder.path().join("probes");
    let output =
        etalon(&["probe", "--out", probes.to_str().unwrap(), "--algorithm", "attention_lse"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), said.as_str()), (Some(0), ""));
    (folder, probes)
}

fn folders(probes: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(probes).unwrap().map(|entry| entry.unwrap().path());
    let mut folders: Vec<PathBuf> = entries.filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}

/// A kernel that computes what `question.json` asks, by files alone.
fn answer(folder: &Path) -> Tensors {
    let text = fs::read_to_string(folder.join("question.json")).unwrap();
    let asked: serde_json::Value = serde_json::from_str(&text).unwrap();
    let [problem, input, out] =
        ["problem.json", "inputs.safetensors", "outputs.safetensors"].map(|x| folder.join(x));
    let mut line =
        vec!["eval", asked["algorithm"].as_str().unwrap(), asked["pass"].as_str().unwrap()];
    let paths = [&problem, &input, &out].map(|path| path.to_str().unwrap());
    line.extend(["--problem", paths[0], "--in", paths[1], "--out", paths[2], "--tier", "simd"]);
    let output = etalon(&line);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    read_tensors(&out, u64::MAX).unwrap()
}

fn judged(probes: &Path) -> (String, Option<i32>) {
    let output = etalon(&["probe", "--check", probes.to_str().unwrap()]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    (text, output.status.code())
}

#[test]
fn a_right_kernel_passes_and_a_wrong_one_does_not() {
    let (_folder, probes) = questions();
    let line = refusal(&etalon(&["probe", "--check", probes.to_str().unwrap()]));
    assert!(
        line.ends_with("no folder holds outputs.safetensors: run your kernel on each first"),
        "{line}"
    );
    let folders = folders(&probes);
    assert!(folders.len() > 10, "{}", folders.len());
    folders.iter().for_each(|folder| drop(answer(folder)));
    let (text, status) = judged(&probes);
    assert_eq!(status, Some(0), "{text}");
    assert!(
        text.lines().last().unwrap().ends_with(" probes hold, 0 do not, 0 are not answered"),
        "{text}"
    );

    // A kernel whose lse is one key too much in one row.
    let counts = |folder: &&PathBuf| folder.to_str().unwrap().contains("count_probe");
    let answers = folders.iter().filter(counts).map(|x| x.join("outputs.safetensors"));
    let mut finite = answers.filter_map(|path| {
        let outputs = read_tensors(&path, u64::MAX).unwrap();
        let lse = outputs["lse"].to_f64("lse").unwrap();
        lse.iter().any(|x| x.is_finite()).then_some((path, outputs, lse))
    });
    let (path, mut outputs, mut lse) = finite.next().unwrap();
    let row = lse.iter_mut().find(|x| x.is_finite()).unwrap();
    *row = (row.exp() + 1.0).ln();
    outputs.insert("lse".to_string(), Tensor::round(&lse, Dtype::F32));
    write_tensors(&path, &outputs).unwrap();
    // And one that has not answered everything.
    fs::remove_file(folders.last().unwrap().join("outputs.safetensors")).unwrap();
    let (text, status) = judged(&probes);
    assert_eq!(status, Some(1), "{text}");
    assert!(text.contains("count_probe in ") && text.contains("keys, not"), "{text}");
    assert!(text.lines().last().unwrap().ends_with(" 1 do not, 1 are not answered"), "{text}");

    // A question that was changed is no question of this version.
    let input = folders[0].join("inputs.safetensors");
    let mut tensors = read_tensors(&input, u64::MAX).unwrap();
    let k = tensors["k"].to_f64("k").unwrap() + 1.0;
    tensors.insert("k".to_string(), Tensor::round(&k, Dtype::F32));
    write_tensors(&input, &tensors).unwrap();
    let line = refusal(&etalon(&["probe", "--check", probes.to_str().unwrap()]));
    assert!(
        line.contains("the question is not the one that this version of etalon asks"),
        "{line}"
    );
}

#[test]
fn folders_and_lists_that_cannot_be_used_are_refused() {
    let folder = tempdir().unwrap();
    fs::write(folder.path().join("file"), "").unwrap();
    let out = folder.path().to_str().unwrap();
    let line = refusal(&etalon(&["probe", "--out", out]));
    assert!(line.ends_with("cannot be written: it is a folder that is not empty"), "{line}");
    let line = refusal(&etalon(&["probe", "--check", out]));
    assert!(line.contains("probes.json: cannot be read"), "{line}");
    let list = folder.path().join("probes.json");
    for (text, why) in [
        ("a poem", "not a valid list of probes"),
        (r#"{"schema": 7, "etalon": "0", "probes": []}"#, "`schema` must be 1, found 7"),
        (r#"{"schema": 1, "etalon": "0", "probes": []}"#, "no folder holds"),
        (
            r#"{"schema": 1, "etalon": "0", "probes": [{"law": "bound", "case": "x", "pass": "forward", "folders": ["../x"]}]}"#,
            "`folders` must be names of folders",
        ),
        (
            r#"{"schema": 1, "etalon": "0", "probes": [{"law": "bound", "case": "x", "pass": "forward", "folders": ["x"]}]}"#,
            "`case` must be",
        ),
    ] {
        fs::write(&list, text).unwrap();
        let line = refusal(&etalon(&["probe", "--check", out]));
        assert!(line.contains(why), "{line}");
    }
    refusal(&etalon(&["probe"]));
    refusal(&etalon(&["probe", "--out", "x", "--check", "y"]));
}
