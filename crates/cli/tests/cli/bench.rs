//! `etalon bench`: its figures, as a file and as a table.

use super::{etalon, refusal};
use std::fs;
use tempfile::tempdir;

#[test]
fn a_bench_leaves_its_figures() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("bench.json");
    let json = path.to_str().unwrap();
    let size = ["--length", "32", "--dim", "16", "--heads", "2", "--seconds", "0"];
    let output = etalon(&[&["bench", "--threads", "1", "--json", json][..], &size].concat());
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let file: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let figures = file["figures"].as_array().unwrap();
    // Four passes of two algorithms and three of lazy attention, with two masks; four of linear attention
    // and of linear cross-entropy.
    assert_eq!(figures.len(), 30);
    let linear: Vec<_> =
        figures.iter().filter(|figure| figure["algorithm"] == "linear_attention").collect();
    // 2 heads of 32 tokens, of which a chunk has all.
    assert_eq!(linear[0]["flops"], 2 * 32 * (4 * 16 * 16 + 32 * (16 + 16)));
    assert_eq!(linear[2]["pass"], "double_backward");
    assert_eq!(linear[2]["flops"], 2 * 32 * (36 * 16 * 16 + 32 * (8 * 16 + 7 * 16)));
    assert!(linear.iter().any(|figure| figure["gigabytes"]["memory"].as_f64() > Some(0.0)));
    assert!(file["peak_gflops"].as_f64().unwrap() > 0.0);
    // Keys of the file that the comparison with PyTorch reads.
    let script = include_str!("../../../../benches/peers/compare.py");
    for (object, of) in [(&file, "made[\""), (&figures[0], "figure[\"")] {
        let keys: Vec<_> = script.split(of).skip(1).filter_map(|x| x.split_once('"')).collect();
        assert!(keys.len() > 1, "compare.py reads {of}");
        assert!(keys.iter().all(|(key, _)| !object[key].is_null()), "{keys:?} of {object}");
    }
    let full = &figures[0];
    assert_eq!((&full["algorithm"], &full["mask"]), (&"attention".into(), &"full".into()));
    assert_eq!(full["flops"], 2 * 2 * 2 * 32 * 32 * 16); // 2 heads, q·k and p·v
    let quartiles = ["min_ns", "lower_quartile_ns", "median_ns", "upper_quartile_ns", "max_ns"];
    let times = quartiles.map(|key| full[key].as_u64().unwrap());
    assert!(times[0] > 0 && times.is_sorted() && full["runs"].as_u64() >= Some(3), "{full}");
    assert!(
        figures.iter().all(|figure| figure["first_ns"].as_u64() > Some(0)),
        "first calls: {file}"
    );
    let chosen = ["--pass", "jvp", "--mask", "window=8", "--blocking", "16x16"];
    let output = etalon(&[&["bench", "--threads", "1"][..], &size, &chosen].concat());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let rows: Vec<&str> = text.lines().filter(|line| line.contains("window=8")).collect();
    assert!(rows.len() == 2 && rows.iter().all(|row| row.contains("jvp")), "{text}");
    assert!(rows.iter().all(|row| row.matches(" %").count() == 2), "spread and share: {text}");
    let table = text.lines().skip(1).take_while(|line| !line.contains(" batch element"));
    assert!(table.into_iter().all(|line| line.chars().count() <= 100), "{text}");
    let modes = ["--pass", "backward", "--mode", "separate,fused,gradient", "--mask", "full"];
    let options = ["--softcap", "5", "--bias", "--tune"];
    let output = etalon(&[&["bench", "--threads", "1"][..], &size, &modes, &options].concat());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let tuned = text.lines().filter(|line| line.contains("Options"));
    let modes =
        "two modes of attention, three of attention_lse and of lazy_attention, linear_attention";
    assert_eq!(tuned.count(), 9, "{modes}: {text}");
    let line = refusal(&etalon(&["bench", "--dtype", "f64"]));
    assert!(line.starts_with("invalid value 'f64' for '--dtype <DTYPE>'"), "{line}");
    let line = refusal(&etalon(&["bench", "--json", folder.path().to_str().unwrap()]));
    assert!(line.ends_with("cannot be written: it is not a regular file"), "{line}");
    let line = refusal(&etalon(&["bench", "--level", "avx9"]));
    assert!(line.starts_with("`level` must be one of portable"), "{line}");
}

/// With a device the times are its own; without one the error says what is missing.
#[test]
fn a_bench_of_a_device() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("bench.json");
    let json = path.to_str().unwrap();
    let cuda = ["bench", "--tier", "cuda", "--json", json, "--level", "portable"];
    let size = ["--length", "32", "--dim", "16", "--heads", "2", "--seconds", "0"];
    let some = ["--algorithm", "attention", "--mask", "causal"];
    let output = etalon(&[&cuda[..], &size, &some].concat());
    if etalon_cuda::probe().is_err() {
        assert!(refusal(&output).starts_with("the tier cuda is not supported"), "{output:?}");
        assert!(!path.exists());
    } else {
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let file: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let figures = file["figures"].as_array().unwrap();
        assert_eq!(figures.len(), 4, "the passes of attention");
        assert!(figures.iter().all(|figure| figure["median_ns"].as_u64() > Some(0)));
        for time in ["enqueue_ns", "recorded_ns"] {
            assert!(figures.iter().all(|figure| figure[time].as_u64() > Some(0)), "{time}");
        }
        assert!(figures.iter().all(|figure| figure["launches"].as_u64() > Some(0)));
        assert_eq!(file["unit"], "fused multiply-adds");
    }
    let line = refusal(&etalon(&["bench", "--tier", "cuda", "--level", "avx2"]));
    assert!(line.starts_with("`level` must be one of auto, portable"), "{line}");
}
