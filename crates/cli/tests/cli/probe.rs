//! `etalon probe`: questions as files, and the answers of a right kernel and of wrong ones.

use super::{etalon, refusal};
use etalon_conformance::tensor::{Tensor, Tensors};
use etalon_conformance::vectors::{read_tensors, write_tensors};
use etalon_problem::Dtype;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;
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
    let page = probes.parent().unwrap().join("report.html");
    let report = format!("html={}", page.display());
    let output = etalon(&["probe", "--check", probes.to_str().unwrap(), "--report", &report]);
    let page = fs::read_to_string(page).unwrap();
    let failed = output.status.code() == Some(1);
    assert_eq!(page.contains("<h2>Failures in detail</h2>") && page.contains("<svg"), failed);
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
    let report = format!("json={}", folders[0].join("question.json").display());
    let onto = ["probe", "--check", probes.to_str().unwrap(), "--report", &report];
    let line = refusal(&etalon(&onto));
    assert!(line.starts_with("--report would lie in the folder of --check, "), "{line}");
    folders.iter().for_each(|folder| drop(answer(folder)));
    let (text, status) = judged(&probes);
    assert_eq!(status, Some(0), "{text}");
    assert!(
        text.lines().last().unwrap().starts_with("PASSED: ")
            && text.lines().last().unwrap().ends_with(" probes hold, 0 fail"),
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
    let last = text.lines().last().unwrap();
    assert!(last.starts_with("FAILED: ") && last.ends_with(", 1 fails, 1 undecided"), "{text}");

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
        (r#"{"schema": 7, "etalon": "0", "probes": []}"#, "`schema` must be 2, found 7"),
        (r#"{"schema": 2, "etalon": "0", "probes": []}"#, "no folder holds"),
        ("{\"schema\": 2,\n\"colour\": 1}", "line 2: unknown key `colour`"),
        (
            r#"{"schema": 2, "etalon": "0", "probes": [{"law": "bound", "case": "x", "pass": "forward", "folders": ["../x"]}]}"#,
            "`folders` must be names of folders",
        ),
        (
            r#"{"schema": 2, "etalon": "0", "probes": [{"law": "bound", "case": "x", "pass": "forward", "folders": ["x"]}]}"#,
            "`law` must be the name of a probe",
        ),
        (
            r#"{"schema": 2, "etalon": "0", "probes": [{"law": "edge_probe", "case": "x", "pass": "forward", "folders": ["x"]}]}"#,
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

/// A folder with a problem of somebody, bf16 with grouped heads, and what the kernel takes.
fn brought(problem: &str, capabilities: &str) -> TempDir {
    let folder = tempdir().unwrap();
    for (name, text) in [("mine.json", problem), ("takes.json", capabilities)] {
        fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

const WINDOW: &str = r#"{ "algorithm": "attention", "batch": 1, "query_heads": 4, "key_heads": 2, "queries": 48,
    "keys": 48, "dim": 128, "mask": { "window": { "left": 15, "right": 0 } } }"#;

const TAKES: &str = r#"{ "kernels": [{ "algorithm": "attention", "dtypes": ["bf16"], "masks": ["window"],
    "limits": { "dim": { "one_of": [64, 128] } }, "options": {} }] }"#;

fn ask(folder: &TempDir, more: &[&str]) -> Output {
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let (problem, out) = (path("mine.json"), path("probes"));
    let mut line = vec!["probe", "--out", &out, "--problem", &problem, "--dtype", "bf16"];
    line.extend(more);
    etalon(&line)
}

/// Notices a run that passes on one answer of many, and questions that have another D than the problem's.
#[test]
fn a_problem_of_ones_own_is_asked_about_and_silence_is_undecided() {
    let folder = brought(WINDOW, TAKES);
    let takes = folder.path().join("takes.json");
    let output = ask(&folder, &["--capabilities", takes.to_str().unwrap()]);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.starts_with("7 probes, 12 questions. Answer each"), "{said}");
    let without_cap = "tanh_of_rows forward: the problem has no softcap";
    assert!(said.contains("Not asked:") && said.contains(without_cap), "{said}");
    let probes = folder.path().join("probes");
    let folders = folders(&probes);
    for folder in &folders {
        let problem = fs::read_to_string(folder.join("problem.json")).unwrap();
        let [asked, own]: [serde_json::Value; 2] =
            [problem.as_str(), WINDOW].map(|text| serde_json::from_str(text).unwrap());
        assert_eq!((&asked["dim"], &asked["key_heads"]), (&own["dim"], &own["key_heads"]));
    }
    answer(&folders[0]);
    let (text, status) = judged(&probes);
    assert_eq!(status, Some(3), "{text}");
    let last = text.lines().last().unwrap();
    assert_eq!(last, "UNDECIDED: 0 probes hold, 0 fail, 7 undecided, 2 not asked", "{text}");
    folders.iter().for_each(|folder| drop(answer(folder)));
    let (text, status) = judged(&probes);
    assert_eq!(status, Some(0), "{text}");
    let last = text.lines().last().unwrap();
    assert_eq!(last, "PASSED: 7 probes hold, 0 fail, 2 not asked", "{text}");
}

#[test]
fn questions_about_a_problem_are_refused_where_they_make_no_sense() {
    let folder =
        brought(WINDOW, r#"{ "kernels": [{ "algorithm": "attention", "masks": ["causal"] }] }"#);
    let takes = folder.path().join("takes.json");
    let line = refusal(&ask(&folder, &["--capabilities", takes.to_str().unwrap()]));
    assert!(
        line.starts_with("no probe is left of this problem in bf16 (edge_probe: mask window"),
        "{line}"
    );
    let line = refusal(&ask(&folder, &["--with", "dlsee"]));
    assert!(line.ends_with("`with` must be of dlse, found dlsee"), "{line}");
    let text = WINDOW.replace(r#""window""#, r#""array": "m", "window""#);
    fs::write(folder.path().join("mine.json"), text).unwrap();
    assert!(refusal(&ask(&folder, &[])).contains("mine.json: "));
    fs::write(folder.path().join("mine.json"), WINDOW.replace("48", "9999")).unwrap();
    assert!(refusal(&ask(&folder, &[])).ends_with("fewer rows will do), found 399920004"));
    assert!(!folder.path().join("probes").exists());
}
