//! `etalon check`: exit status, errors, what is printed, and reports.

use super::{Bench, etalon, refusal};
use etalon_conformance::tensor::{Stored, Tensor, Tensors};
use etalon_conformance::vectors::{read_tensors, write_tensors};
use std::fs;
use std::process::Output;

/// A bench whose kernel has answered with the right results in f32, `lse` and `o`, or `dq`, `dk`, `dv`.
fn answered(pass: &str) -> Bench {
    let bench = Bench::new("causal", "attention");
    let outputs = bench.outputs(pass, &["--tier", "simd"]);
    write_tensors(&bench.path("got.safetensors"), &outputs).unwrap();
    bench
}

pub(super) fn change(bench: &Bench, change: impl FnOnce(&mut Tensors)) {
    let path = bench.path("got.safetensors");
    let mut tensors = read_tensors(&path, u64::MAX).unwrap();
    change(&mut tensors);
    write_tensors(&path, &tensors).unwrap();
}

fn scale(tensors: &mut Tensors, name: &str, factor: f64) {
    let tensor = tensors.get_mut(name).unwrap();
    let values = tensor.to_f64(name).unwrap() * factor;
    *tensor = Tensor::store(&values, tensor.stored().unwrap());
}

pub(super) fn check(bench: &Bench, pass: &str, more: &[&str]) -> Output {
    let paths = ["p.json", "in.safetensors", "got.safetensors"].map(|name| bench.path(name));
    let [problem, input, got] = paths.each_ref().map(|path| path.to_str().unwrap());
    let arguments =
        ["check", bench.algorithm, pass, "--problem", problem, "--in", input, "--got", got];
    etalon(&[&arguments[..], more].concat())
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Text on stdout, and the exit status. Lines fit the page, but for the command.
pub(super) fn said(output: &Output) -> (String, Option<i32>) {
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = text(output);
    let command = |line: &str| line.starts_with("  etalon check ");
    let wide = text.lines().find(|line| line.chars().count() > 100 && !command(line));
    assert_eq!(wide, None, "{text}");
    (text, output.status.code())
}

#[test]
fn right_results_pass_in_a_few_lines() {
    for pass in ["forward", "backward"] {
        let (text, status) = said(&check(&answered(pass), pass, &[]));
        assert_eq!(status, Some(0), "{text}");
        assert!(text.lines().count() <= 8, "{text}");
        let last = text.lines().last().unwrap();
        assert!(
            last.starts_with("PASSED: ") && last.ends_with("the bounds of f32-strict"),
            "{last}"
        );
    }
}

#[test]
fn a_wrong_result_is_told_with_its_place_and_reason() {
    let bench = answered("backward");
    change(&bench, |got| scale(got, "dk", 2.0));
    let (text, status) = said(&check(&bench, "backward", &[]));
    assert_eq!(status, Some(1), "{text}");
    assert!(text.contains("dk: worst at [") && text.contains("What explains it:"), "{text}");
    assert!(text.contains("dk: the results are the exact ones times"), "{text}");
    assert!(
        text.contains("To see it again:\n  etalon check attention backward --problem "),
        "{text}"
    );
    assert!(text.lines().last().unwrap().starts_with("FAILED: 1 of 3 outputs of "), "{text}");
    // The command does what it says.
    let command = text.lines().find(|line| line.starts_with("  etalon check ")).unwrap();
    let words: Vec<&str> = command.split_whitespace().skip(1).collect();
    assert_eq!(said(&etalon(&words)), (text, Some(1)));
}

#[test]
fn what_is_conspicuous_fails_where_inputs_are_random() {
    let bench = answered("backward");
    change(&bench, |got| scale(got, "dv", 1.005));
    // The bounds of bf16 are wider than half a percent.
    let wide = ["--profile", "bf16-flash"];
    let page = bench.path("r.html");
    let report = format!("html={}", page.display());
    let more = [&wide[..], &["--report", &report]].concat();
    let (text, status) = said(&check(&bench, "backward", &more));
    assert_eq!(status, Some(1), "{text}");
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("dv: error ÷ bound"), "pictures, though no element is off: {page}");
    assert!(text.contains("results are") && text.contains("The inputs are random"), "{text}");
    assert!(
        text.lines().last().unwrap().starts_with("FAILED: errors of attention backward"),
        "{text}"
    );
    // Taken for structured they leave it open, unless that is allowed.
    let (text, status) = said(&check(&bench, "backward", &[&wide[..], &["--structured"]].concat()));
    assert_eq!(status, Some(3), "{text}");
    assert!(text.lines().last().unwrap().starts_with("UNDECIDED: errors of attention"), "{text}");
    let allowed = [&wide[..], &["--structured", "--allow-undecided", "0.5"]].concat();
    let (text, status) = said(&check(&bench, "backward", &allowed));
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains("33.5 % undecided (50.0 % allowed)"), "{text}");
    // Undecided results have a command that shows them again, which says what was assumed.
    let (text, _) = said(&check(&bench, "backward", &[&wide[..], &["--structured"]].concat()));
    assert!(text.contains("--profile bf16-flash --structured"), "{text}");
}

/// Also of an output that has an element beyond its bound.
#[test]
fn what_is_conspicuous_stands_in_every_form() {
    let bench = answered("backward");
    change(&bench, |got| {
        scale(got, "dv", 1.005);
        let mut values = got["dv"].to_f64("dv").unwrap();
        values[[0, 0, 0, 0]] += 7.0;
        got.insert("dv".to_string(), Tensor::store(&values, got["dv"].stored().unwrap()));
    });
    let paths = ["json", "md", "html"].map(|kind| (kind, bench.path(&format!("r.{kind}"))));
    let reports = paths.each_ref().map(|(kind, path)| format!("{kind}={}", path.display()));
    let mut more = vec!["--profile", "bf16-flash"];
    reports.iter().for_each(|report| more.extend(["--report", report.as_str()]));
    let (text, status) = said(&check(&bench, "backward", &more));
    assert_eq!(status, Some(1), "{text}");
    let [json, md, html] = paths.each_ref().map(|(_, path)| fs::read_to_string(path).unwrap());
    let md = md.replace("\\[", "[");
    let report: serde_json::Value = serde_json::from_str(&json).unwrap();
    let outputs = report["outputs"].as_array().unwrap().iter();
    let sentences: Vec<&str> = outputs
        .flat_map(|output| output["conspicuous"].as_array().unwrap())
        .map(|sentence| sentence.as_str().unwrap())
        .collect();
    assert!(sentences.iter().any(|sentence| sentence.contains("dv, all elements")), "{json}");
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    for sentence in sentences {
        for form in [&text, &md, &html] {
            assert!(words(form).contains(&words(sentence)), "{sentence} in {form}");
        }
    }
}

#[test]
fn the_strictest_profile_is_named() {
    let bench = answered("backward");
    let (text, status) = said(&check(&bench, "backward", &["--profile", "auto"]));
    assert_eq!(status, Some(0), "{text}");
    assert!(text.ends_with(
        "PASSED: f32-strict is the strictest profile that holds for attention backward in f32\n"
    ));
    change(&bench, |got| scale(got, "dk", 2.0));
    let (text, status) = said(&check(&bench, "backward", &["--profile", "auto"]));
    assert_eq!(status, Some(1), "{text}");
    assert!(text.contains("FAILED: no profile holds for attention backward in f32"), "{text}");
    let file = bench.path("mine.json");
    fs::write(&file, r#"{ "base": "bf16-flash" }"#).unwrap();
    let file = file.to_str().unwrap();
    let (text, status) = said(&check(&bench, "backward", &["--profile", file]));
    assert_eq!(status, Some(1), "{text}");
    assert!(text.contains(&format!("--profile {file}")), "{text}");
    let line = refusal(&check(&bench, "backward", &["--profile", "f8"]));
    assert!(line.contains("one of f64"), "{line}");
}

#[test]
fn what_is_no_output_of_the_pass_is_refused() {
    let refused = |edit: &dyn Fn(&mut Tensors), more: &[&str]| {
        let bench = answered("forward");
        change(&bench, |got| edit(got));
        let line = refusal(&check(&bench, "forward", more));
        line.replace(&format!("{}/", bench.folder.path().display()), "")
    };
    let line = refused(&|got| drop(got.remove("lse")), &[]);
    assert_eq!(line, "got.safetensors: `lse` is missing: attention forward returns it");
    let rename = |got: &mut Tensors| {
        let lse = got.remove("lse").unwrap();
        got.insert("ls".to_string(), lse);
    };
    let line = refused(&rename, &[]);
    let reason = "`ls` was given, but attention forward has no such output";
    assert_eq!(line, format!("got.safetensors: {reason}; did you mean \"lse\"?"));
    let transpose = |got: &mut Tensors| got.get_mut("o").unwrap().shape = vec![2, 19, 4, 16];
    let line = refused(&transpose, &[]);
    let reason = "`o` must have shape [2, 4, 19, 16], found [2, 19, 4, 16]";
    assert_eq!(line, format!("got.safetensors: {reason}, which looks like [B, N, Hq, E]"));
    let narrow = |got: &mut Tensors| {
        let o = got["o"].to_f64("o").unwrap();
        got.insert("o".to_string(), Tensor::store(&o, Stored::Integer));
    };
    let line = refused(&narrow, &[]);
    assert_eq!(line, "got.safetensors: `o` must hold f64, f32, bf16 or f16, found integers");
    let line = refused(&|_| {}, &["--only", "dq"]);
    let reason = "attention forward has no such output; backward returns it";
    assert_eq!(line, format!("--only: `dq` was given, but {reason}"));
    let line = refused(&|_| {}, &["--only", "ls"]);
    assert!(line.ends_with("has no such output; did you mean \"lse\"?"), "{line}");
    let line = refused(&|_| {}, &["--report", "pdf=x"]);
    assert!(
        line.contains("html=PATH, md=PATH, junit=PATH, json=PATH, annotations=PATH or badge=PATH"),
        "{line}"
    );
}

#[test]
fn an_output_is_judged_alone() {
    let bench = answered("forward");
    change(&bench, |got| drop(got.remove("lse")));
    let (text, status) = said(&check(&bench, "forward", &["--only", "o"]));
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains("PASSED: 1 output of attention forward"), "{text}");
}

#[test]
fn reports_hold_what_is_printed() {
    let bench = answered("forward");
    change(&bench, |got| scale(got, "lse", std::f64::consts::LOG2_E));
    let [json, md, html] = ["r.json", "r.md", "r.html"].map(|name| bench.path(name));
    let reports = [("json", &json), ("md", &md), ("html", &html)]
        .map(|(kind, path)| format!("{kind}={}", path.display()));
    let mut more = Vec::new();
    reports.iter().for_each(|report| more.extend(["--report", report.as_str()]));
    let (text, status) = said(&check(&bench, "forward", &more));
    assert_eq!(status, Some(1), "{text}");
    let report: serde_json::Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    assert_eq!((&report["schema"], &report["passed"]), (&1.into(), &false.into()));
    assert_eq!((&report["algorithm"], &report["pass"]), (&"attention".into(), &"forward".into()));
    let lse = &report["outputs"].as_array().unwrap().iter().find(|x| x["name"] == "lse").unwrap();
    assert_eq!((&lse["off"], &lse["elements"]), (&(2 * 4 * 19).into(), &(2 * 4 * 19).into()));
    assert!(lse["worst"]["got"].is_number() && lse["worst"]["index"].is_array(), "{report}");
    let ids: Vec<&str> = report["explanations"]
        .as_array()
        .unwrap()
        .iter()
        .map(|explanation| explanation["id"].as_str().unwrap())
        .collect();
    for id in ["factor", "lse-base-2", "lse-in-base-2"] {
        assert!(ids.contains(&id), "{ids:?}");
    }
    assert!(report["command"].as_str().unwrap().starts_with("etalon check attention forward"));
    let (md, html) = (fs::read_to_string(md).unwrap(), fs::read_to_string(html).unwrap());
    for word in ["lse-in-base-2", "worst margin", "FAILED: 1 of 2 outputs"] {
        assert!(md.contains(word) && html.contains(word) && text.contains(word), "{word}");
    }
    assert!(md.starts_with("# etalon check: FAILED") && html.starts_with("<!DOCTYPE html>"));
}
