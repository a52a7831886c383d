//! `etalon explain`: cases, memory, chunks and sparsity in words.

use super::{etalon, refusal};
use etalon_conformance::cases::{Depth, Spec, specs};
use etalon_conformance::vectors::write_tensors;
use etalon_problem::{Algorithm, Dtype};
use etalon_simd::Options;
use std::fs;
use tempfile::tempdir;

#[test]
fn a_case_is_explained_in_words() {
    let mut specs = specs(Algorithm::Attention, Depth::Core, 0);
    let name = specs.next().unwrap().to_string();
    let output = etalon(&["explain", &name]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0));
    for part in
        [name.as_str(), "a query sees ", "\"algorithm\": \"attention\"", "Laws of forward: "]
    {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    for part in ["The simd tier, simd/", "backward", "fused", "chosen", "sums of dq: "] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let line = refusal(&etalon(&["explain", "attention/f32/diagonal"]));
    assert!(line.contains("`case` must be algorithm/dtype/mask/"), "{line}");
}

#[test]
fn the_memory_of_a_problem_is_explained() {
    // Plan of the seed of the project for its partials of dq: 128 MiB and 8 GiB. The sums of one head are 8 B·Hq times
    // smaller, and one thread works on one head at a time.
    for (length, partials, sums) in [(2048, "128 MiB", "1.03 MiB"), (8192, "8.00 GiB", "4.03 MiB")]
    {
        let path =
            format!("{}/../../docs/examples/attention-{length}.json", env!("CARGO_MANIFEST_DIR"));
        let output = etalon(&["explain", "--problem", &path, "--threads", "1"]);
        let text = String::from_utf8(output.stdout).unwrap();
        let end = format!("every 128 keys would hold {partials}; this one keeps {sums} in sums");
        assert!(text.contains(&end), "{text}");
        let poor = ["explain", "--problem", &path, "--threads", "1", "--budget", "1000000"];
        let text = String::from_utf8(etalon(&poor).stdout).unwrap();
        let chosen = text.lines().find(|line| line.contains("chosen")).unwrap();
        assert!(chosen.contains("separate"), "{text}");
    }
    let line = refusal(&etalon(&["explain"]));
    assert!(line.contains("--problem"), "{line}");
}

/// In bf16 levels of pairs have plans of their own.
#[test]
fn every_level_and_precision_has_plans() {
    let linear = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/examples/linear-4096.json");
    let attention = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/examples/attention-2048.json");
    for level in Options::of_levels() {
        for problem in [linear, attention] {
            let name = level.name();
            let output =
                etalon(&["explain", "--problem", problem, "--dtype", "bf16", "--level", &name]);
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(text.contains(&format!("The simd tier, simd/{name}, ")), "{text}");
        }
    }
    let line = refusal(&etalon(&["explain", "--problem", attention, "--level", "avx9"]));
    assert!(line.contains("avx9"), "{line}");
}

/// Without a device.
#[test]
fn a_pass_of_a_device_is_explained() {
    let path = format!("{}/../../docs/examples/attention-8192.json", env!("CARGO_MANIFEST_DIR"));
    let explain = |more: &[&str]| {
        let own = ["explain", "--problem", &path, "--threads", "1"];
        String::from_utf8(etalon(&[&own[..], more].concat()).stdout).unwrap()
    };
    let text = explain(&["--dtype", "bf16"]);
    for part in [
        "The cuda tier on compute capability 9.0 (132 multiprocessors, 227 KiB for a block)",
        "Tiles of forward sm90a: 128x128",
        "  not sm80: the second order is computed by the level portable",
        "  sums of dq: 128 MiB",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let row = |text: &str, words: &[&str]| {
        let found = text.lines().find(|line| words.iter().all(|word| line.contains(word)));
        found.unwrap_or_else(|| panic!("{words:?} are not in\n{text}")).to_string()
    };
    assert!(row(&text, &["backward", "fused", "sm90a"]).contains("chosen"), "{text}");
    assert!(!text.contains(" NaN "), "{text}");
    // Slots for all 128 tiles of 64 keys fit: 32 heads · 8192 queries · 128 columns · 4 bytes each.
    let text = explain(&["--arch", "sm_86", "--budget", "18000000000"]);
    // But operands are wider than those for which auto fuses.
    assert!(row(&text, &["backward", "separate", "portable"]).contains("chosen"), "{text}");
    assert!(row(&text, &["backward", "fused", "portable"]).contains("16.0 GiB"), "{text}");
    assert!(text.contains("  partial sums of dq: 16.0 GiB"), "{text}");
    assert!(text.contains("nothing was measured on such a device"), "{text}");
    let text = explain(&["--dtype", "bf16", "--cuda-level", "sm90a"]);
    assert!(row(&text, &["backward", "fused", "sm90a"]).contains("chosen"), "{text}");
    assert!(text.contains("  sums of dq: 128 MiB"), "{text}");
    let line = refusal(&etalon(&["explain", "--problem", &path, "--arch", "sm_75"]));
    assert!(line.contains("sm_90"), "{line}");
}

#[test]
fn the_chunks_of_a_problem_are_explained() {
    let path = format!("{}/../../docs/examples/linear-4096.json", env!("CARGO_MANIFEST_DIR"));
    let chunks = ["explain", "--problem", &path, "--threads", "1", "--blocking", "80x24"];
    let text = String::from_utf8(etalon(&chunks).stdout).unwrap();
    assert!(text.contains("backward: chunks of 80 tokens, micro-chunks of 24"), "{text}");
    // 52 chunks, with states of 16 KiB: 53 of them are less than a megabyte.
    assert!(text.contains("a state kept every chunk; "), "{text}");
    assert!(text.contains("  step: workspace "), "{text}");
    // Figure that the seed of the project printed as 76 KB: with micro-chunks of 32, 96 KiB at D = E = 64.
    let row = text.lines().find(|line| line.trim_start().starts_with("99 KiB")).unwrap();
    assert!(row.contains("96.0 KiB"), "{text}");
    // Of the kernels for devices beside it: docs/linear_attention.md.
    let device = ["--dtype", "bf16", "--cuda-level", "sm80"];
    let text = String::from_utf8(etalon(&[&chunks[..], &device].concat()).stdout).unwrap();
    let row = text.lines().find(|line| line.contains("flow ") && line.contains("sm80")).unwrap();
    assert!(row.contains("50.9 KiB"), "{text}");
}

#[test]
fn the_sparsity_of_tensors_is_explained() {
    let mut specs = specs(Algorithm::LazyAttention, Depth::Core, 0);
    let plain = |spec: &Spec| spec.dtype == Dtype::Bf16 && spec.problem().arrays().is_empty();
    let case = specs.find(plain).unwrap().build();
    let folder = tempdir().unwrap();
    let [problem, input] = ["p.json", "in.safetensors"].map(|name| folder.path().join(name));
    fs::write(&problem, serde_json::to_string(&case.problem).unwrap()).unwrap();
    write_tensors(&input, &case.inputs).unwrap();
    let [problem, input] = [&problem, &input].map(|path| path.to_str().unwrap());
    let explain = ["explain", "--problem", problem, "--threads", "1"];
    let with = etalon(&[&explain[..], &["--in", input]].concat());
    let text = String::from_utf8(with.stdout).unwrap();
    for part in ["active pairs, of the visible ones", "(E46)", "measured", "at tau = 0"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let without = String::from_utf8(etalon(&explain).stdout).unwrap();
    assert!(without.contains("backward") && !without.contains("active pairs"), "{without}");
}
