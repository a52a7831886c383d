//! Damaged and hostile input: one line and exit status 2, or the result; never an abort, a panic, a run
//! without end, or a file that is left behind.

use super::{Bench, etalon, refusal};
use etalon_conformance::tensor::{Data, Tensor, Tensors};
use etalon_conformance::vectors::{read_tensors, write_tensors};
use std::fs;
use std::process::{Command, Output, Stdio};
use std::time::Duration;
use tempfile::tempdir;

/// A folder with this problem and tensors of f32 that are zero.
fn bench(algorithm: &'static str, problem: &str, tensors: &[(&str, &[usize])]) -> Bench {
    let bench = Bench { folder: tempdir().unwrap(), algorithm };
    fs::write(bench.path("p.json"), problem).unwrap();
    let zeros = |shape: &[usize]| Tensor {
        shape: shape.to_vec(),
        data: Data::F32(vec![0.0; shape.iter().product()]),
    };
    let tensors: Tensors =
        tensors.iter().map(|(name, shape)| (name.to_string(), zeros(shape))).collect();
    write_tensors(&bench.path("in.safetensors"), &tensors).unwrap();
    bench
}

const EXTENTS: [&str; 6] = ["batch", "query_heads", "key_heads", "queries", "keys", "dim"];

/// The text of a problem of these extents, with more keys behind them.
fn problem(algorithm: &str, extents: [usize; 6], more: &str) -> String {
    let extents = EXTENTS.iter().zip(extents).map(|(key, extent)| format!("\"{key}\": {extent}, "));
    let extents: String = extents.collect();
    format!("{{ {extents}{more} \"algorithm\": \"{algorithm}\" }}")
}

/// A file with a problem, to be explained.
fn explain(problem: &str, more: &[&str]) -> Output {
    let folder = tempdir().unwrap();
    let path = folder.path().join("p.json");
    fs::write(&path, problem).unwrap();
    etalon(
        &[&["explain", "--threads", "1", "--problem", path.to_str().unwrap()][..], more].concat(),
    )
}

#[test]
fn heads_that_no_tensor_vouches_for_cost_nothing() {
    let heads = 1 << 31;
    let text = problem("attention", [1, heads, heads, 0, 0, 1], "");
    let rows: [usize; 4] = [1, heads, 0, 1];
    let tensors: Vec<(&str, &[usize])> =
        ["q", "k", "v", "dout"].into_iter().map(|name| (name, &rows[..])).collect();
    let bench = bench("attention", &text, &tensors);
    for pass in ["forward", "backward"] {
        let outputs = bench.outputs(pass, &["--profile", "f32-strict"]);
        assert!(outputs.values().all(Tensor::is_empty), "{pass}");
    }
}

#[test]
fn batch_elements_without_rows_end_soon() {
    let text = problem("attention_lse", [16_384, 64, 64, 0, 3, 1], "");
    let (q, k, lse) = ([16_384, 64, 0, 1], [16_384, 64, 3, 1], [16_384, 64, 0]);
    let tensors: [(&str, &[usize]); 3] = [("q", &q), ("k", &k), ("dlse", &lse)];
    let bench = bench("attention_lse", &text, &tensors);
    for tier in ["reference", "simd"] {
        let outputs = bench.outputs("backward", &["--tier", tier]);
        assert_eq!(outputs["dk"].shape, k);
        assert!(outputs["dk"].to_f64("dk").unwrap().iter().all(|&x| x == 0.0));
    }
    let more = ["--profile", "f32-strict"];
    assert_eq!(bench.outputs("backward", &more)["dk.bound"].shape, k);

    // Heads times elements of values, without a row.
    let (million, heads) = (1 << 20, 1 << 20);
    let text = problem("attention", [2, heads, heads, 0, 0, 1], "\"value_dim\": 1048576,");
    let (q, v) = ([2, heads, 0, 1], [2, heads, 0, million]);
    let tensors: [(&str, &[usize]); 4] = [("q", &q), ("k", &q), ("v", &v), ("dout", &v)];
    let bench = self::bench("attention", &text, &tensors);
    assert_eq!(bench.outputs("double_backward", &["--tier", "simd"])["gv"].shape, v);
}

#[test]
fn explaining_ends() {
    // A mask that is no interval, of a million rows and keys; a row of keys is summed, no tile.
    let mask = r#""mask": { "or": [{ "causal": {} }, { "window": { "left": 5 } }] },"#;
    let million = 1 << 20;
    let output = explain(&problem("attention", [1, 32, 32, million, million, 128], mask), &[]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let rows = 1 << 40;
    let output = explain(&problem("attention", [1, 1, 1, rows, 1, 1], ""), &[]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("the pairs are not counted: "), "{text}");
    // Slices of very many columns of a state, and a span of very many chunks.
    let long = 1usize << 40;
    let linear = format!(
        r#"{{ "algorithm": "linear_attention", "batch": 1, "query_heads": 1, "key_heads": 1,
            "tokens": {}, "dim": 1000000, "value_dim": {long} }}"#,
        1 << 10
    );
    let output = explain(&linear, &[]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    // An extent that no list of sequences can have.
    let line = refusal(&explain(&problem("attention", [long, 1, 1, 1, 1, 1], ""), &[]));
    assert!(line.starts_with("the list of sequences needs about "), "{line}");
}

#[test]
fn bench_asks_for_memory_before_it_takes_any() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("bench.json");
    let json = path.to_str().unwrap();
    for arguments in [
        ["--dim", "1000000000"],
        ["--length", "4294967296"],
        ["--heads", "1000000000000"],
        ["--batch", "18446744073709551615"],
        ["--mask", "array=18446744073709551615"],
    ] {
        let long = ["--length", "1000000000", "--heads", "1", "--dim", "1", "--algorithm"];
        let long = [&long[..], &["attention"]].concat();
        let more: &[&str] = if arguments[0] == "--mask" { &long } else { &[] };
        let command = [&["bench", "--threads", "1", "--json", json][..], &arguments, more].concat();
        let line = refusal(&etalon(&command));
        let short = line.contains(" needs about ") && line.contains(" are available");
        assert!(short || line.contains("must be addressable"), "{arguments:?}: {line}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "{arguments:?}");
    }
}

#[test]
fn seconds_are_a_number_that_ends() {
    for seconds in ["NaN", "inf", "-1", "1e300", "soon"] {
        let line = refusal(&etalon(&["bench", &format!("--seconds={seconds}")]));
        let expected = format!("`seconds` must be a number from 0 to 86400, found {seconds}");
        assert!(line.ends_with(&expected), "{line}");
    }
}

/// Runs the command in a shell that has set a limit.
#[cfg(target_os = "linux")]
pub fn limited(limit: &str, arguments: &[&str]) -> Output {
    let script = format!("ulimit {limit}; exec \"$0\" \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_etalon")]).args(arguments);
    command.output().expect("a shell")
}

#[cfg(target_os = "linux")]
#[test]
fn threads_that_cannot_be_had_are_an_error() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("p.json");
    fs::write(&path, problem("attention", [1, 1, 1, 9, 9, 4], "")).unwrap();
    let explain = ["explain", "--problem", path.to_str().unwrap(), "--threads"];
    for (limit, threads) in [("-v 4194304", "4000"), ("-v 1048576", "400"), ("-v 4194304", "65535")]
    {
        let line = refusal(&limited(limit, &[&explain[..], &[threads]].concat()));
        assert!(line.starts_with(&format!("starting {threads} threads needs about ")), "{line}");
    }
    // Either there are as many, or there is one line.
    for limit in ["-v 4194304", "-v 3145728", "-v 2621440", "-v 2097152"] {
        let output = limited(limit, &[&explain[..], &["1000"]].concat());
        assert!(matches!(output.status.code(), Some(0 | 2)), "{limit}: {output:?}");
        assert!(!String::from_utf8_lossy(&output.stderr).contains("panicked"), "{limit}");
    }
    let line = refusal(&etalon(&[&explain[..], &["18446744073709551615"]].concat()));
    assert!(line.starts_with("`threads` must be at most "), "{line}");
    let output = limited("-v 4194304", &[&explain[..], &["2"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

#[cfg(target_os = "linux")]
#[test]
fn what_does_not_fit_into_memory_is_refused() {
    // q, k and v of 64 MiB each, in an address space of 512 MiB: they can be read, but no f64 beside.
    let (n, dim) = (1 << 18, 64);
    let text = problem(
        "attention",
        [1, 1, 1, n, n, dim],
        r#""mask": { "window": { "left": 0, "right": 0 } },"#,
    );
    let shape: [usize; 4] = [1, 1, n, dim];
    let tensors: [(&str, &[usize]); 3] = [("q", &shape), ("k", &shape), ("v", &shape)];
    let bench = bench("attention", &text, &tensors);
    let paths = ["p.json", "in.safetensors", "out.safetensors"].map(|name| bench.path(name));
    let [problem, input, out] = paths.each_ref().map(|path| path.to_str().unwrap());
    let eval = ["eval", "attention", "forward", "--problem", problem, "--in", input, "--out", out];
    let threads = ["--threads", "1"];
    let before = bench.files();
    let line = refusal(&limited("-v 786432", &[&eval[..], &threads].concat()));
    assert!(line.contains("needs about ") && line.contains(" are available"), "{line}");
    let line = refusal(&limited("-v 262144", &[&eval[..], &threads].concat()));
    assert!(line.contains("bytes of memory to read, and "), "{line}");
    // A file that may not be longer than a block is not written at all.
    let line = refusal(&limited("-f 1", &[&eval[..], &["--tier", "simd"]].concat()));
    assert!(line.contains("out.safetensors: cannot be written: "), "{line}");
    assert_eq!(bench.files(), before);
}

#[cfg(unix)]
#[test]
fn a_signal_leaves_no_temporary_file() {
    let bench = Bench::new("causal", "attention");
    let report = format!("json={}", bench.path("report.json").display());
    let verify = ["verify", "--algorithm", "attention", "--progress", "0", "--report", &report];
    let mut command = Command::new(env!("CARGO_BIN_EXE_etalon"));
    command.args(verify).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // The first line of progress: by then the place of the report has been tried.
    let mut first = [0];
    std::io::Read::read_exact(child.stderr.as_mut().unwrap(), &mut first).unwrap();
    let before = ["in.safetensors", "p.json"];
    assert_eq!(bench.files(), before, "nothing stands there during the run");
    let id = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(id, rustix::process::Signal::TERM).unwrap();
    assert!(!child.wait().unwrap().success());
    assert_eq!(bench.files(), before);
}

/// While a large file is written, a signal comes at one moment or another.
#[cfg(unix)]
#[test]
fn a_signal_during_writing_leaves_no_temporary_file() {
    let (n, dim) = (1 << 17, 64);
    let text = problem("attention", [1, 1, 1, n, 0, dim], "");
    let (q, k): ([usize; 4], [usize; 4]) = ([1, 1, n, dim], [1, 1, 0, dim]);
    let tensors: [(&str, &[usize]); 3] = [("q", &q), ("k", &k), ("v", &k)];
    let bench = bench("attention", &text, &tensors);
    let paths = ["p.json", "in.safetensors", "out.safetensors"].map(|name| bench.path(name));
    let [problem, input, out] = paths.each_ref().map(|path| path.to_str().unwrap());
    let eval = ["eval", "attention", "forward", "--problem", problem, "--in", input, "--out", out];
    for _ in 0..4 {
        let mut child = Command::new(env!("CARGO_BIN_EXE_etalon")).args(eval).spawn().unwrap();
        let is_temporary = |name: &String| name.starts_with(".etalon-");
        let writes = |bench: &Bench| bench.files().iter().any(is_temporary);
        while child.try_wait().unwrap().is_none() {
            if writes(&bench) {
                let id = rustix::process::Pid::from_child(&child);
                // It may have ended by now.
                let _ = rustix::process::kill_process(id, rustix::process::Signal::TERM);
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        child.wait().unwrap();
        assert!(!writes(&bench), "{:?}", bench.files());
    }
}

#[cfg(unix)]
#[test]
fn an_output_behind_a_link_is_written_where_the_link_leads() {
    let bench = Bench::new("causal", "attention");
    let (folder, link) = (bench.path("to"), bench.path("out.safetensors"));
    fs::create_dir(&folder).unwrap();
    std::os::unix::fs::symlink("to/come.safetensors", &link).unwrap();
    assert_eq!(bench.outputs("forward", &[]).len(), 2);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(read_tensors(&folder.join("come.safetensors"), u64::MAX).is_ok());
    // In a circle, and where no folder is.
    for (to, reason) in [
        ("out.safetensors", "too many links"),
        ("absent/x", "there is no folder absent: make it first"),
    ] {
        fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink(to, &link).unwrap();
        let line = bench.refused("forward", &[]);
        assert!(
            line.starts_with(&format!("out.safetensors: cannot be written: {reason}")),
            "{line}"
        );
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }
}

/// Whatever leads from one path to the other, and whatever the command reads there.
#[test]
fn no_file_that_is_read_is_overwritten() {
    let bench = Bench::new("causal", "attention");
    let [problem, input, got, profile] =
        ["p.json", "in.safetensors", "got.safetensors", "own.json"]
            .map(|name| bench.path(name).to_str().expect("a name").to_string());
    bench.outputs("forward", &[]);
    fs::copy(bench.path("out.safetensors"), &got).unwrap();
    let folder = bench.path("x");
    fs::create_dir(&folder).unwrap();
    let around = folder.join("../p.json").to_str().expect("a name").to_string();
    let of = ["attention", "forward", "--problem", &problem, "--in", &input, "--threads", "1"];
    let json = |path: &str| format!("json={path}");
    let (onto_problem, onto_got, onto_profile) = (json(&around), json(&got), json(&profile));
    let mut refused = vec![
        (["eval", "--out", &input].to_vec(), "--out would overwrite the file of --in, "),
        (["eval", "--out", &around].to_vec(), "--out would overwrite the file of --problem, "),
        (
            ["trace", "--tile", "16x16", "--out", &input].to_vec(),
            "--out would overwrite the file of --in, ",
        ),
        (
            ["check", "--got", &got, "--report", &onto_problem].to_vec(),
            "--report would overwrite the file of --problem, ",
        ),
        (
            ["check", "--got", &got, "--report", &onto_got].to_vec(),
            "--report would overwrite the file of --got, ",
        ),
        (
            ["check", "--got", &got, "--profile", &profile, "--report", &onto_profile].to_vec(),
            "--report would overwrite the file of --profile, ",
        ),
    ];
    let link = bench.path("link").to_str().expect("a name").to_string();
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("in.safetensors", &link).unwrap();
        refused.push((vec!["eval", "--out", &link], "--out would overwrite the file of --in, "));
    }
    let before = [&problem, &input, &got].map(|path| fs::read(path).unwrap());
    for (more, part) in refused {
        let line = refusal(&etalon(&[&more[..1], &of, &more[1..]].concat()));
        assert!(line.starts_with(part), "{more:?}: {line}");
        assert_eq!([&problem, &input, &got].map(|path| fs::read(path).unwrap()), before);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn devices_without_end_are_refused() {
    let bench = Bench::new("causal", "attention");
    let input = bench.path("in.safetensors");
    let input = input.to_str().unwrap();
    for device in ["/dev/zero", "/dev/urandom", "/dev/null"] {
        let line = refusal(&etalon(&["explain", "--problem", device]));
        assert!(line.starts_with(&format!("{device}: ")), "{line}");
        let problem = bench.path("p.json");
        let problem = problem.to_str().unwrap();
        let line = refusal(&etalon(&["explain", "--problem", problem, "--in", device]));
        // Random bytes may begin as files of another kind do: one time in 256 with a brace, as JSON.
        let other = format!("{device}: no safetensors file: it is ");
        let is_other = device == "/dev/urandom" && line.starts_with(&other);
        let expected = format!("{device}: no valid safetensors file");
        assert!(is_other || line.starts_with(&expected), "{line}");
        let line = refusal(&etalon(&["explain", "--problem", device, "--in", input]));
        assert!(line.starts_with(&format!("{device}: ")), "{line}");
    }
    // A header that announces more than there is, or than fits anywhere.
    let header = br#"{"q":{"dtype":"F32","shape":[4294967296],"data_offsets":[0,17179869184]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    fs::write(bench.path("in.safetensors"), file).unwrap();
    let line = bench.refused("forward", &[]);
    let announced = 8 + header.len() as u64 + (1 << 34);
    let found = 8 + header.len();
    assert!(line.contains(&format!("announces {announced} bytes, found {found}")), "{line}");
}

#[test]
fn arrays_are_no_objects() {
    let text = |more: &str| problem("attention", [1, 2, 1, 3, 3, 4], more);
    for (more, key) in [
        (r#""bias": [1, 1],"#, "bias"),
        (r#""mask": { "causal": [] },"#, "causal"),
        (r#""mask": { "causal": ["top_left"] },"#, "causal"),
        (r#""mask": { "and": ["full", { "window": [1, 2, "top_left"] }] },"#, "window"),
        (r#""sequences": { "lengths": [[3], [3]] },"#, "lengths"),
    ] {
        let line = refusal(&explain(&text(more), &[]));
        let reason = format!("`{key}` must be an object with keys, found an array");
        assert!(line.contains("p.json: not a valid problem file: line "), "{line}");
        assert!(line.ends_with(&reason), "{line}");
    }
    let line = refusal(&explain(r#"["attention", 1, 2, 1, 3, 3, 4]"#, &[]));
    assert!(line.contains("p.json: not a valid problem file: "), "{line}");
    let lengths = r#""sequences": { "lengths": { "query": [3], "key": [2] } },"#;
    assert_eq!(explain(&text(lengths), &[]).status.code(), Some(0), "lists are arrays");
}

#[test]
fn foreign_text_is_shown_printable_and_short() {
    let strange = "\u{1b}[31mq\u{202e}\n";
    let very_long = "k".repeat(1 << 20);
    for name in [strange, &very_long] {
        let bench = Bench::new("causal", "attention");
        bench.edit(|tensors| {
            let q = tensors["q"].clone();
            tensors.insert(name.to_string(), q);
        });
        let text = fs::read_to_string(bench.path("p.json")).unwrap();
        let mut problem: serde_json::Value = serde_json::from_str(&text).unwrap();
        let of_tensor = bench.refused("forward", &[]);
        problem["mask"] = serde_json::json!({ "array": name });
        fs::write(bench.path("p.json"), problem.to_string()).unwrap();
        let of_array = bench.refused("forward", &[]);
        problem[name] = 1.into();
        fs::write(bench.path("p.json"), problem.to_string()).unwrap();
        let of_key = bench.refused("forward", &[]);
        let of_argument = refusal(&etalon(&["explain", &name[..name.len().min(100_000)]]));
        for line in [of_tensor, of_array, of_key, of_argument] {
            assert!(line.chars().count() < 2100, "{} characters", line.chars().count());
            assert!(!line.contains(|c: char| c.is_control() || c == '\u{202e}'), "{line:?}");
        }
    }
}
