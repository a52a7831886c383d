//! Unit tests of `src/archive.rs`.

use super::*;

#[test]
fn code_runs_on_later_devices_of_its_major_version() {
    assert_eq!(compatible("sm_89"), (80..=89).rev().map(|n| format!("sm_{n}")).collect::<Vec<_>>());
    assert_eq!(compatible("sm_90"), ["sm_90"]);
    assert_eq!(compatible("sm_121"), ["sm_121", "sm_120"]);
    assert_eq!(compatible("sm_90a"), ["sm_90a"]);
}

#[test]
fn an_index_is_read_back_and_a_damaged_line_is_named() {
    let index =
        Index { nvrtc: (13, 0), entries: BTreeMap::from([("0f".repeat(32), "sm_80 Moves WORD=2".to_string())]) };
    let lines = index.lines();
    assert_eq!(Index::parse(&lines), Ok(index));
    for (found, line) in [
        ("", 1),
        ("etalon archive 1\nnvrtc 13.0\n", 1),
        ("etalon archive 2\n", 2),
        ("etalon archive 2\nnvrtc 13\n", 2),
        ("etalon archive 2\nnvrtc 13.0\n../../etc/passwd sm_80\n", 3),
        (&lines.replace("0f0f", "0f"), 3),
    ] {
        assert_eq!(Index::parse(found), Err(line), "{found}");
    }
}

#[test]
fn a_folder_without_an_index_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = Archive::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains(&folder.path().display().to_string()), "{error}");
    fs::write(folder.path().join(INDEX), "something else").unwrap();
    let error = Archive::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("line 1"), "{error}");
}
