//! Messages for users who come from another library, another editor or another format.

use super::{Bench, etalon, refusal};
use std::fs;
use std::process::{Command, Output};

#[test]
fn keys_of_other_libraries_are_answered_with_what_to_write() {
    for (key, write) in [
        (r#""is_causal": true"#, r#"write "mask": { "causal": { "align": "top_left" } }"#),
        (
            r#""window_size": [128, 0]"#,
            r#"write "mask": { "window": { "left": 128, "right": 0 } }"#,
        ),
        (r#""window_size": [127, -1]"#, r#"write "mask": { "window": { "left": 127 } }"#),
        (
            r#""sliding_window": 4096"#,
            r#"write "mask": { "window": { "left": 4095, "right": 0 } }"#,
        ),
        (r#""window": 8"#, r#"write "mask": { "window": { "left": 7, "right": 0 } }"#),
        (r#""layout": "bshd""#, "tensors are [batch, heads, rows, elements]"),
        (r#""dtype": "bf16""#, "tensors have the types of the file"),
        (r#""alibi_slopes": true"#, r#"write "bias": { "batch": 1, "heads": 8 }"#),
        (r#""cu_seqlens_q": [0, 19]"#, r#"write "sequences": { "packed": "#),
        (r#""sm_scale": 0.125"#, r#"write "softmax_scale": 0.125"#),
    ] {
        let bench = Bench::new("causal", "attention");
        bench.edit_problem("\"batch\"", &format!("{key}, \"batch\""));
        let line = bench.refused("forward", &[]);
        assert!(
            line.starts_with("p.json: not a valid problem file: line 3: unknown key `"),
            "{line}"
        );
        assert!(line.contains(write), "{line}");
    }
    let bench = Bench::new("options", "attention");
    bench.edit_problem("\"right\": 2", "\"right\": -1");
    let line = bench.refused("forward", &[]);
    let reason = "`mask.window.right` must be a whole number of at least 0, found `-1`";
    assert!(line.contains(reason) && line.contains("leave out an end that is open"), "{line}");
}

#[test]
fn the_mark_of_an_editor_is_no_mistake() {
    let bench = Bench::new("causal", "attention");
    let text = fs::read_to_string(bench.path("p.json")).unwrap();
    fs::write(bench.path("p.json"), format!("\u{feff}{text}")).unwrap();
    bench.outputs("forward", &[]);
    let wide: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
    fs::write(bench.path("p.json"), [&[0xff, 0xfe], &wide[..]].concat()).unwrap();
    let line = bench.refused("forward", &[]);
    assert_eq!(line, "p.json: no JSON text: it is UTF-16; save it as UTF-8");
}

#[test]
fn files_of_other_formats_are_answered_with_the_way_out() {
    for (start, way) in [
        (&b"PK\x03\x04\0\0\0\0\0\0archive/data.pkl"[..], "safetensors.torch.save_file"),
        (b"\x80\x02}q\0X\x04\0\0\0", "safetensors.torch.save_file"),
        (b"\x93NUMPY\x01\0v\0", "safetensors.numpy.save_file"),
    ] {
        let bench = Bench::new("causal", "attention");
        fs::write(bench.path("in.safetensors"), start).unwrap();
        let line = bench.refused("forward", &[]);
        assert!(line.starts_with("in.safetensors: no safetensors file: it is a"), "{line}");
        assert!(line.contains(way), "{line}");
    }
}

#[test]
fn a_missing_folder_is_named() {
    let bench = Bench::new("causal", "attention");
    let [problem, input] = ["p.json", "in.safetensors"].map(|name| bench.path(name));
    let out = bench.path("absent/out.safetensors");
    let [problem, input, out] = [&problem, &input, &out].map(|path| path.to_str().unwrap());
    let files = ["--problem", problem, "--in", input, "--out", out];
    for line in [
        refusal(&etalon(&[&["eval", "attention", "forward"][..], &files].concat())),
        refusal(&etalon(&["probe", "--problem", problem, "--out", out])),
    ] {
        assert!(
            line.contains("cannot be written: there is no folder ")
                && line.ends_with("/absent: make it first"),
            "{line}"
        );
    }
}

#[test]
fn a_file_that_is_not_there_is_told_from_its_folder() {
    let bench = Bench::new("causal", "attention");
    let reason = |input: &str| {
        let problem = bench.path("p.json");
        let files = ["--problem", problem.to_str().unwrap(), "--in", input, "--out", "never"];
        refusal(&etalon(&[&["eval", "attention", "forward"][..], &files].concat()))
    };
    let path = |name: &str| bench.path(name).to_str().unwrap().to_string();
    let line = reason(&path("none.safetensors"));
    assert!(line.ends_with("none.safetensors: cannot be read: there is no such file"), "{line}");
    let line = reason(&path("none/in.safetensors"));
    assert!(
        line.contains("cannot be read: there is no folder ") && line.ends_with("/none"),
        "{line}"
    );
    #[cfg(unix)]
    {
        fs::create_dir(bench.path("folder")).unwrap();
        let line = reason(&path("folder"));
        assert!(line.ends_with("it is a folder, and a file in it is wanted"), "{line}");
    }
}

#[test]
fn nothing_is_not_timed() {
    for option in ["--length", "--batch"] {
        let line = refusal(&etalon(&["bench", option, "0"]));
        assert!(line.contains("must be a whole number of at least 1, found 0"), "{line}");
    }
}

/// One line per reason: all levels of cuda where there is no driver.
#[test]
fn absent_levels_are_listed_together() {
    let output = etalon(&["list"]);
    let text = String::from_utf8(output.stdout).unwrap();
    let mut reasons: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("absent: "))
        .map(|line| line.split_once(": ").unwrap_or_else(|| panic!("{line}")).1)
        .collect();
    let lines = reasons.len();
    reasons.sort_unstable();
    reasons.dedup();
    assert_eq!(reasons.len(), lines, "{text}");
}

/// A verdict has a colour where somebody wants it, and never in a pipe.
#[test]
fn verdicts_have_a_colour_on_terminals() {
    let bench = Bench::new("causal", "attention");
    let outputs = bench.outputs("forward", &["--tier", "simd"]);
    etalon_conformance::vectors::write_tensors(&bench.path("got.safetensors"), &outputs).unwrap();
    let run = |variables: &[(&str, &str)]| -> String {
        let paths = ["p.json", "in.safetensors", "got.safetensors"].map(|name| bench.path(name));
        let [problem, input, got] = paths.each_ref().map(|path| path.to_str().unwrap());
        let mut command = Command::new(env!("CARGO_BIN_EXE_etalon"));
        for name in ["NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE"] {
            command.env_remove(name);
        }
        command.args(["check", "attention", "forward", "--problem", problem, "--in", input]);
        let Output { stdout, .. } =
            command.args(["--got", got]).envs(variables.iter().copied()).output().unwrap();
        String::from_utf8(stdout).unwrap()
    };
    let plain = run(&[]);
    assert!(plain.contains("\nPASSED: ") && !plain.contains('\u{1b}'), "{plain}");
    let coloured = run(&[("CLICOLOR_FORCE", "1")]);
    assert!(coloured.contains("\u{1b}[32mPASSED\u{1b}[0m: "), "{coloured:?}");
    assert_eq!(run(&[("NO_COLOR", "1")]), plain);
}
