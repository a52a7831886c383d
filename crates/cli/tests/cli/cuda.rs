//! `etalon cuda`: what it refuses on any machine. What it writes is tested in `crates/cuda`.

use super::{etalon, refusal};
use std::fs;
use tempfile::tempdir;

#[test]
fn an_archive_needs_architectures_and_a_compiler() {
    let folder = tempdir().unwrap();
    let out = folder.path().join("archive");
    let archive = |arguments: &[&str]| {
        let own = ["cuda", "archive", "--out", out.to_str().unwrap()];
        refusal(&etalon(&[&own[..], arguments].concat()))
    };
    assert!(archive(&[]).contains("--arch"));
    for arch in ["sm_75", "sm_", "90", "sm_90x", "sm_80,sm_-1", "sm_99999999"] {
        let line = archive(&["--arch", arch]);
        assert!(line.contains("from sm_80 on") && line.contains("found "), "{line}");
    }
    let nowhere = folder.path().join("nowhere");
    let line = archive(&["--arch", "sm_80,sm_90a", "--nvrtc", nowhere.to_str().unwrap()]);
    assert!(line.contains("nvidia-cuda-nvrtc") && line.contains("nowhere/lib64"), "{line}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
}
