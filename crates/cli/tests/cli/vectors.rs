//! `etalon export` and `etalon check DIR OUTPUTS`.

use super::{etalon, refusal};
use etalon_conformance::tensor::{Stored, Tensor, Tensors};
use etalon_conformance::tier::{Hints, Request, Tier};
use etalon_conformance::tiers::{Simd, ask};
use etalon_conformance::vector_set::{Entry, Loaded, Set, Validity};
use etalon_conformance::vectors::{read_tensors, write_tensors};
use etalon_problem::Dtype;
use std::fs;
use std::path::PathBuf;
use std::process::Output;
use std::sync::LazyLock;
use tempfile::{TempDir, tempdir};

/// The set, written once.
static SET: LazyLock<(TempDir, PathBuf)> = LazyLock::new(|| {
    let folder = tempdir().unwrap();
    let path = folder.path().join("vectors");
    let output = etalon(&["export", path.to_str().unwrap()]);
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains(" vectors, ") && said.contains("etalon check "), "{said}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
    (folder, path)
});

/// A folder of outputs of the simd tier, and the set that they answer.
struct Answers {
    folder: TempDir,
    set: Set,
}

impl Answers {
    /// The answers to vectors whose id begins so; invalid ones are refused.
    fn new(prefix: &str) -> Self {
        let (folder, set) = (tempdir().unwrap(), Set::read(&SET.1).unwrap());
        let tier = Simd::levels().0.pop().expect("a level");
        for entry in set.manifest.vectors.iter().filter(|x| x.id.starts_with(prefix)) {
            let path = |kind: &str| folder.path().join(format!("{}.{kind}", entry.id));
            if entry.result == Validity::Invalid {
                fs::write(path("refused"), "no meaning").unwrap();
                continue;
            }
            let Loaded { question, .. } = set.load(entry, u64::MAX).unwrap();
            let (problem, hints) = (&question.problem, Hints::default());
            let (pass, dtype, inputs) = (question.pass, question.dtype, &question.inputs);
            if tier.offers(problem.algorithm(), pass, dtype).is_ok() {
                let outputs = ask(&tier, &Request { problem, pass, dtype, inputs, hints }).unwrap();
                write_tensors(&path("safetensors"), &outputs).unwrap();
            }
        }
        Answers { folder, set }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn check(&self, more: &[&str]) -> Output {
        let [set, outputs] = [&*SET.1, self.folder.path()].map(|path| path.to_str().unwrap());
        etalon(&[&["check", set, outputs], more].concat())
    }

    /// Exit status, and what is printed.
    fn judged(&self, more: &[&str]) -> (Option<i32>, String) {
        let output = self.check(more);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(said, "");
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    }

    /// The one line of a refusal, with the folders left out.
    fn refused(&self) -> String {
        let line = refusal(&self.check(&["--allow-missing"]));
        [self.folder.path(), &*SET.1]
            .iter()
            .fold(line, |line, path| line.replace(&format!("{}/", path.display()), ""))
    }

    fn edit(&self, id: &str, change: impl FnOnce(&mut Tensors)) {
        let path = self.path(&format!("{id}.safetensors"));
        let mut tensors = read_tensors(&path, u64::MAX).unwrap();
        change(&mut tensors);
        write_tensors(&path, &tensors).unwrap();
    }

    /// An answered vector with this beginning, of random inputs and some hundred results.
    fn rich(&self, prefix: &str) -> String {
        let plain = |id: &str| !id.contains("family=") && !id.contains("_probe=");
        let many = |x: &Entry| {
            x.outputs.values().map(|x| x.shape.iter().product::<usize>()).sum::<usize>() > 300
        };
        let answered = |id: &str| self.path(&format!("{id}.safetensors")).exists();
        let fits =
            |x: &&Entry| x.id.starts_with(prefix) && plain(&x.id) && many(x) && answered(&x.id);
        self.set.manifest.vectors.iter().find(fits).expect(prefix).id.clone()
    }
}

#[test]
fn outputs_of_the_simd_tier_pass() {
    let answers = Answers::new("");
    let reports = tempdir().unwrap();
    let report = |kind: &str| format!("{kind}={}", reports.path().join(kind).display());
    let [junit, json, md] = ["junit", "json", "md"].map(report);
    let arguments = ["--allow-missing", "--report", &junit, "--report", &json, "--report", &md];
    let (status, said) = answers.judged(&arguments);
    assert_eq!(status, Some(0), "{said}");
    let last = said.lines().last().unwrap();
    let vectors = format!(
        " of {} vectors of etalon {}",
        answers.set.manifest.vectors.len(),
        env!("CARGO_PKG_VERSION")
    );
    assert!(last.starts_with("PASSED: ") && last.contains(&vectors), "{last}");
    assert!(last.contains(", 0 negative, 0 undecided"), "{last}");
    let read = |kind: &str| fs::read_to_string(reports.path().join(kind)).unwrap();
    let file: serde_json::Value = serde_json::from_str(&read("json")).unwrap();
    let records = file["records"].as_array().unwrap();
    assert_eq!((&file["passed"], &file["depth"]), (&true.into(), &"vectors".into()));
    let has = |check: &str| records.iter().any(|x| x["check"] == check && x["verdict"] == "pass");
    assert!(["bound", "refusal", "edge_probe", "count_probe", "dyadic_probe"].into_iter().all(has));
    assert!(read("junit").contains("<testcase name=\"backward bound\""));
    assert!(read("md").starts_with("# etalon check: PASSED: "));
}

#[test]
fn a_report_lies_in_no_folder_that_is_read() {
    let answers = Answers::new("attention.forward.f32");
    for (name, folder) in [("DIR", &*SET.1), ("OUTPUTS", answers.folder.path())] {
        let report = format!("json={}", folder.join("manifest.json").display());
        let line = refusal(&answers.check(&["--allow-missing", "--report", &report]));
        let part = format!("--report would lie in the folder of {name}, ");
        assert!(line.starts_with(&part), "{line}");
    }
}

#[test]
fn a_planted_error_fails_at_its_vector() {
    let answers = Answers::new("attention.");
    assert_eq!(answers.judged(&["--allow-missing"]).0, Some(0));
    let forward = answers.rich("attention.forward.f32");
    let generic = answers.rich("attention.backward.f32");
    type Change = fn(f64) -> f64;
    let changes: [(&str, &str, Change); 4] = [
        (&forward, "o", |x| x * 1.01),
        (&forward, "lse", |x| x * std::f64::consts::LOG2_E),
        (&forward, "o", |_| f64::NAN),
        (&generic, "dq", |x| -x),
    ];
    for (id, output, change) in changes {
        let path = answers.path(&format!("{id}.safetensors"));
        let own = fs::read(&path).unwrap();
        answers.edit(id, |x| {
            let tensor = x.get_mut(output).unwrap();
            let values = tensor.to_f64(output).unwrap().mapv(change);
            *tensor = Tensor::store(&values, tensor.stored().unwrap());
        });
        let (status, said) = answers.judged(&["--allow-missing"]);
        assert_eq!(status, Some(1), "{id} {output}: {said}");
        let failed: Vec<&str> =
            said.lines().filter(|line| line.starts_with("FAILED outputs")).collect();
        assert_eq!(failed.len(), 1, "{said}");
        assert!(failed[0].contains(&format!("bound {id}: {output}[")), "{said}");
        assert!(said.lines().last().unwrap().starts_with("FAILED: "), "{said}");
        fs::write(&path, own).unwrap();
    }
}

#[test]
fn what_is_missing_is_reported_and_what_must_be_refused_is_not_computed() {
    let answers = Answers::new("attention.forward.f32");
    let (status, said) = answers.judged(&[]);
    assert_eq!(status, Some(3), "{said}");
    assert!(said.contains(": OUTPUTS has no outputs of it"), "{said}");
    let (status, said) = answers.judged(&["--allow-missing"]);
    assert_eq!(status, Some(0), "{said}");
    assert!(said.lines().last().unwrap().contains(" not checked"), "{said}");
    let invalid = "attention.invalid.heads_in_no_groups";
    fs::write(answers.path(&format!("{invalid}.safetensors")), "").unwrap();
    let (status, said) = answers.judged(&["--allow-missing"]);
    assert_eq!(status, Some(1), "{said}");
    let line = format!(
        "refusal {invalid}: a problem that has no meaning was computed: line 1: `query_heads` must be"
    );
    assert!(said.contains(&line), "{said}");
    fs::remove_file(answers.path(&format!("{invalid}.safetensors"))).unwrap();
    let valid = answers.rich("attention.forward.f32");
    fs::rename(
        answers.path(&format!("{valid}.safetensors")),
        answers.path(&format!("{valid}.refused")),
    )
    .unwrap();
    let (status, said) = answers.judged(&["--allow-missing"]);
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains(&format!("bound {valid}: a valid problem was refused")), "{said}");
}

#[test]
fn a_claim_of_ones_own_has_bounds_of_its_own() {
    let answers = Answers::new("attention.forward.f32");
    let (status, said) = answers.judged(&["--allow-missing", "--profile", "f32-tf32"]);
    assert_eq!(status, Some(0), "{said}");
    let (status, said) = answers.judged(&["--allow-missing", "--profile", "f64"]);
    assert_eq!(status, Some(1), "sums in f32 are none in f64: {said}");
    for (profile, words) in
        [("auto", "--profile auto: each vector"), ("f8", "`profile` must be one of")]
    {
        let line = refusal(&answers.check(&["--profile", profile]));
        assert!(line.contains(words), "{line}");
    }
}

#[test]
fn outputs_that_are_none_are_refused() {
    let answers = Answers::new("attention.forward.bf16");
    let id = answers.rich("attention.forward.bf16");
    let file = format!("{id}.safetensors");
    let own = fs::read(answers.path(&file)).unwrap();
    let says = |words: &str| {
        let line = answers.refused();
        assert!(line.contains(words), "{words}: {line}");
        fs::write(answers.path(&file), &own).unwrap();
    };
    fs::write(answers.path(&file), &own[..own.len() - 1]).unwrap();
    says(&format!("{file}: no valid safetensors file, or cut short: its header announces"));
    fs::write(answers.path(&file), b"").unwrap();
    says(&format!("{file}: no valid safetensors file"));
    answers.edit(&id, |x| x.get_mut("o").unwrap().shape.push(1));
    says(&format!("{file}: `o` must have shape"));
    answers.edit(&id, |x| drop(x.insert("p".to_string(), x["o"].clone())));
    says(&format!("{file}: `p` was given"));
    answers.edit(&id, |x| {
        let lse = x.get_mut("lse").unwrap();
        *lse = Tensor::store(&lse.to_f64("lse").unwrap(), Stored::Float(Dtype::Bf16));
    });
    says(&format!("{file}: `lse` must hold f32, or a wider type, found bf16"));
    // A type that is wider is rounded first.
    answers.edit(&id, |x| {
        let o = x.get_mut("o").unwrap();
        *o = Tensor::store(&o.to_f64("o").unwrap(), Stored::Float(Dtype::F64));
    });
    assert_eq!(answers.judged(&["--allow-missing"]).0, Some(0));
    fs::write(answers.path("notes.txt"), "").unwrap();
    says("notes.txt: must be ID.safetensors or ID.refused of a vector of the set");
    fs::remove_file(answers.path("notes.txt")).unwrap();
    fs::write(answers.path("attention.forward.f32.mask=diagonal.safetensors"), "").unwrap();
    says("must be ID.safetensors or ID.refused");
}

#[test]
fn folders_that_are_none_are_refused() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("full");
    fs::create_dir(&path).unwrap();
    fs::write(path.join("mine"), "precious").unwrap();
    let line = refusal(&etalon(&["export", path.to_str().unwrap()]));
    assert!(line.ends_with("full: cannot be written: it is a folder that is not empty"), "{line}");
    assert_eq!(fs::read_to_string(path.join("mine")).unwrap(), "precious");
    let absent = folder.path().join("absent");
    let line = refusal(&etalon(&["export", absent.join("x").to_str().unwrap()]));
    assert!(line.contains("there is no folder"), "{line}");
    for profile in ["auto", "f8"] {
        refusal(&etalon(&["export", absent.to_str().unwrap(), "--profile", profile]));
    }
    assert!(!absent.exists());
    let [dir, outputs] = [absent.to_str().unwrap(), path.to_str().unwrap()];
    let line = refusal(&etalon(&["check", dir, outputs]));
    assert!(line.contains("manifest.json: cannot be read: there is no folder"), "{line}");
    let line = refusal(&etalon(&["check", outputs, outputs]));
    assert!(line.ends_with("full/manifest.json: cannot be read: there is no such file"), "{line}");
    let help = etalon(&["check", outputs, dir, "--help"]).stdout;
    assert!(String::from_utf8(help).unwrap().contains("etalon check [OPTIONS] DIR OUTPUTS"));
    let help = etalon(&["check", "--help"]).stdout;
    assert!(
        String::from_utf8(help).unwrap().contains("`etalon check DIR OUTPUTS` judges a folder")
    );
    // An algorithm stays one, and a misspelt one is told its names.
    let line = refusal(&etalon(&["check", "attentoin", "forward"]));
    assert!(line.contains("[possible values: attention"), "{line}");
}
