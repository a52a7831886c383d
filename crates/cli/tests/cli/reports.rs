//! The forms of a report, of every command that writes one.

use super::check::{change, check};
#[cfg(target_os = "linux")]
use super::hostile::limited;
use super::{Bench, etalon, refusal};
use etalon_conformance::tensor::Tensor;
use etalon_conformance::vectors::write_tensors;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::tempdir;

const FORMS: [&str; 6] = ["html", "md", "junit", "json", "annotations", "badge"];

/// Arguments that ask for every form.
fn all(folder: &Path) -> Vec<String> {
    let file = |form: &str| format!("--report={form}={}", folder.join(form).display());
    FORMS.iter().map(|form| file(form)).collect()
}

fn read(folder: &Path, form: &str) -> String {
    fs::read_to_string(folder.join(form)).unwrap()
}

/// The commands that a page says to run, as a shell takes them.
fn commands(page: &str) -> Vec<String> {
    let lines = page.split("<pre>").skip(1).filter_map(|x| Some(x.split_once("</pre>")?.0));
    let lines = lines.flat_map(str::lines).filter(|line| line.starts_with("etalon "));
    let text = |line: &str| {
        line.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&amp;", "&")
    };
    lines.map(text).collect()
}

fn shell(line: &str) -> Output {
    let own = line.replacen("etalon", concat!("'", env!("CARGO_BIN_EXE_etalon"), "'"), 1);
    Command::new("sh").arg("-c").arg(own).output().expect("a shell")
}

/// A form without its date.
fn without_time(page: &str) -> String {
    let times = |line: &&str| !line.contains(">date<") && !line.starts_with("| date |");
    page.lines().filter(times).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_failing_check_has_pictures_a_replay_and_a_test_for_each_output() {
    let bench = Bench::new("causal", "attention");
    let outputs = bench.outputs("backward", &["--tier", "simd"]);
    write_tensors(&bench.path("got.safetensors"), &outputs).unwrap();
    change(&bench, |got| {
        let (mut values, stored) = (got["dk"].to_f64("dk").unwrap(), got["dk"].stored().unwrap());
        let [rows, width] = [2, 3].map(|axis| values.shape()[axis]);
        // The second half of the keys, of which the first column holds no numbers.
        for (at, x) in
            values.iter_mut().enumerate().filter(|(at, _)| 2 * (at / width % rows) >= rows)
        {
            *x = if at % width == 0 { f64::NAN } else { 0.0 };
        }
        got.insert("dk".to_string(), Tensor::store(&values, stored));
    });
    let (first, second) = (tempdir().unwrap(), tempdir().unwrap());
    for folder in [&first, &second] {
        let reports = all(folder.path());
        let reports: Vec<&str> = reports.iter().map(String::as_str).collect();
        assert_eq!(check(&bench, "backward", &reports).status.code(), Some(1));
    }
    let page = read(first.path(), "html");
    for part in
        ["<svg", "dk: error ÷ bound, M from top to bottom", "NaN</li>", "FAILED: 1 of 3 outputs"]
    {
        assert!(page.contains(part), "{part}");
    }
    for form in ["html", "md", "annotations"] {
        let [one, two] = [&first, &second].map(|x| without_time(&read(x.path(), form)));
        assert_eq!(one, two, "{form}: equal checks give equal bytes");
    }
    let xml = read(first.path(), "junit");
    assert!(xml.contains("tests=\"3\" skipped=\"0\" failures=\"1\" errors=\"0\""), "{xml}");
    assert!(
        xml.contains("<testcase name=\"backward dk\" classname=\"outputs attention\""),
        "{xml}"
    );
    let line = read(first.path(), "annotations");
    assert!(
        line.starts_with("::error title=etalon check%3A attention backward%2C dk%3A "),
        "{line}"
    );
    assert_eq!(line.lines().count(), 1);
    assert!(read(first.path(), "md").contains("·") && read(first.path(), "md").contains("N"));
    let commands = commands(&page);
    assert_eq!(commands.len(), 2, "{commands:?}");
    assert!(commands.iter().all(|line| shell(line).status.code() == Some(1)));
}

#[test]
fn an_evaluation_is_judged_by_its_profile() {
    let bench = Bench::new("causal", "attention");
    let folder = tempdir().unwrap();
    let reports = all(folder.path());
    let reports: Vec<&str> = reports.iter().map(String::as_str).collect();
    let line = bench.refused("forward", &reports);
    assert_eq!(line, "--report judges by bounds: say --profile, too");
    let output = bench.eval("forward", &[&reports[..], &["--profile", "--tier", "simd"]].concat());
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.starts_with("PASSED: 2 outputs of attention forward"), "{said}");
    let page = read(folder.path(), "html");
    assert!(page.contains("<p>etalon eval</p>") && page.contains("<svg"), "{page}");
    assert!(page.contains("<td class=\"passed\">✓ "), "{page}");
    assert!(read(folder.path(), "annotations").starts_with("::notice title=etalon eval::PASSED"));
}

/// Two reports in one file would leave one of them.
#[test]
fn each_report_has_a_file_of_its_own() {
    let bench = Bench::new("causal", "attention");
    let outputs = bench.outputs("forward", &["--tier", "simd"]);
    write_tensors(&bench.path("got.safetensors"), &outputs).unwrap();
    let own = bench.path("report");
    let far = bench.path("far");
    fs::create_dir(&far).unwrap();
    let other = far.join("../report");
    for path in [&own, &other] {
        let two =
            [format!("--report=html={}", own.display()), format!("--report=md={}", path.display())];
        let line = refusal(&check(&bench, "forward", &[&two[0], &two[1]]));
        assert_eq!(line, format!("--report: {} would be written twice", path.display()));
        assert!(!own.exists());
    }
    let report = format!("--report=json={}", bench.path("out.safetensors").display());
    let line = bench.refused("forward", &["--profile", &report]);
    assert!(line.ends_with("out.safetensors would be written twice"), "{line}");
}

/// A disk that is full takes the report, not the verdict.
#[cfg(target_os = "linux")]
#[test]
fn a_report_that_cannot_be_written_leaves_the_verdict() {
    let folder = tempdir().unwrap();
    let page = folder.path().join("page");
    let report = format!("html={}", page.display());
    let probe =
        ["zoo", "class-tail-dropped", "--algorithm", "linear_cross_entropy", "--report", &report];
    let output = limited("-f 1", &probe);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let (said, error) = (String::from_utf8(output.stdout).unwrap(), output.stderr);
    assert!(said.lines().last().unwrap().starts_with("PASSED: 1 of 1 mutants"), "{said}");
    assert!(String::from_utf8(error).unwrap().contains("page: cannot be written: "));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing half-written");
}

#[test]
fn the_suite_reports_in_every_form() {
    let folder = tempdir().unwrap();
    let reports = all(folder.path());
    let mut line = vec!["verify", "--tier", "simd/portable", "--depth", "smoke", "--progress", "0"];
    line.extend(["--algorithm", "attention_lse", "--part", "1/4"]);
    line.extend(reports.iter().map(String::as_str));
    let output = etalon(&line);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let page = read(folder.path(), "html");
    assert!(page.contains("<h2>Matrix</h2>") && !page.contains("<h2>Failures"), "{page}");
    assert!(page.contains("The worst element of each check") && page.len() < 100_000, "{page}");
    assert!(read(folder.path(), "annotations").starts_with("::notice title=etalon verify::PASSED"));
}

#[test]
fn the_zoo_has_a_page() {
    let folder = tempdir().unwrap();
    let reports = all(folder.path());
    let zoo = |forms: &[&str]| {
        let mut line = vec!["zoo", "class-tail-dropped", "--algorithm", "linear_cross_entropy"];
        let wanted =
            |x: &&String| forms.iter().any(|form| x.starts_with(&format!("--report={form}=")));
        line.extend(reports.iter().filter(wanted).map(String::as_str));
        etalon(&line)
    };
    let line = refusal(&zoo(&["junit"]));
    assert_eq!(
        line,
        "--report junit: there is none of this command: a mutant is no check of a case"
    );
    assert_eq!(zoo(&["html", "json"]).status.code(), Some(0));
    let page = read(folder.path(), "html");
    assert!(page.contains("<h3>Kill matrix</h3>") && page.contains("class-tail-dropped"), "{page}");
    let file: serde_json::Value = serde_json::from_str(&read(folder.path(), "json")).unwrap();
    assert_eq!((&file["status"], &file["rows"][0]["sound"]), (&"passed".into(), &true.into()));
    assert!(file["rows"][0]["kills"].as_array().is_some_and(|kills| !kills.is_empty()), "{file}");
}
