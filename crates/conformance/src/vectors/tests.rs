use super::*;
use std::collections::BTreeMap;
use std::fs;
use tempfile::tempdir;

fn tensors() -> Tensors {
    let nan = f64::NAN.to_bits();
    let list = [
        ("a", vec![2, 1], Data::F64(vec![f64::MIN_POSITIVE, -0.0])),
        ("b", vec![2], Data::F32(vec![f32::INFINITY, 1.5])),
        ("c", vec![1, 1, 2], Data::Bf16(vec![bf16::MAX, bf16::NEG_INFINITY])),
        ("d", vec![2], Data::F16(vec![f16::MIN_POSITIVE_SUBNORMAL, f16::ONE])),
        ("e", vec![2], Data::I64(vec![i64::MIN, -1])),
        ("f", vec![2], Data::Bool(vec![true, false])),
        ("g", vec![0, 3], Data::F32(vec![])),
        ("h", vec![], Data::F64(vec![f64::from_bits(nan)])),
    ];
    list.into_iter().map(|(name, shape, data)| (name.to_string(), Tensor { shape, data })).collect()
}

fn entries(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    names.map(|name| name.into_string().unwrap()).collect()
}

#[test]
fn every_type_survives_its_file() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let written = tensors();
    write_tensors(&path, &written).unwrap();
    assert_eq!(entries(folder.path()), ["x.safetensors"]);
    let read = read_tensors(&path, u64::MAX).unwrap();
    assert_eq!(read.keys().collect::<Vec<_>>(), written.keys().collect::<Vec<_>>());
    for (name, tensor) in &written {
        assert_eq!(read[name].shape, tensor.shape, "{name}");
        // Bits, since NaN differs from itself.
        assert_eq!(InFile(&read[name]).data(), InFile(tensor).data(), "{name}");
    }
}

#[test]
fn small_integers_widen_and_bytes_are_flags() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let write = |dtype, bytes: &[u8], n| {
        let view = TensorView::new(dtype, vec![n], bytes).unwrap();
        fs::write(&path, safetensors::serialize([("x", view)], None).unwrap()).unwrap();
        read_tensors(&path, u64::MAX).map(|tensors| tensors["x"].data.clone())
    };
    let bytes = [255, 255, 255, 255, 7, 0, 0, 0];
    assert_eq!(write(Stored::I32, &bytes, 2).unwrap(), Data::I64(vec![-1, 7]));
    assert_eq!(write(Stored::U8, &[1, 0], 2).unwrap(), Data::Bool(vec![true, false]));
    for (dtype, bytes) in [(Stored::U8, [2]), (Stored::BOOL, [2]), (Stored::I8, [0])] {
        let error = write(dtype, &bytes, 1).unwrap_err().to_string();
        assert!(error.contains("x.safetensors: `x` must hold F64, F32"), "{error}");
        assert!(error.ends_with(&format!("found {dtype:?}")), "{error}");
    }
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let whole = to_bytes(&path, &tensors()).unwrap();
    for length in 0..whole.len() {
        fs::write(&path, &whole[..length]).unwrap();
        let error =
            read_tensors(&path, u64::MAX).expect_err("a part of a file is not a file").to_string();
        assert!(error.contains("x.safetensors: no valid safetensors file"), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }
}

#[test]
fn a_draft_that_is_dropped_leaves_what_was_there() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("x");
    fs::write(&path, "before").unwrap();
    drop(Draft::new(&path).unwrap());
    assert_eq!(fs::read_to_string(&path).unwrap(), "before");
    assert_eq!(entries(folder.path()), ["x"]);
    Draft::new(&path).unwrap().finish(b"after").unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "after");
    assert_eq!(entries(folder.path()), ["x"]);
}

#[test]
fn places_that_cannot_be_written_are_told_at_once() {
    let folder = tempdir().unwrap();
    let folder = folder.path();
    let absent = format!("there is no folder {}: make it first", folder.join("absent").display());
    for (path, reason) in [
        (folder.join("absent/x"), absent.as_str()),
        (folder.to_path_buf(), "it is not a regular file"),
        (PathBuf::from("/dev/null"), "it is not a regular file"),
        (PathBuf::from(""), "it is not the name of a file"),
    ] {
        let error = Draft::new(&path).expect_err(&format!("{path:?}")).to_string();
        assert_eq!(error, format!("{}: cannot be written: {reason}", path.display()));
    }
    assert!(entries(folder).is_empty());
}

#[cfg(unix)]
#[test]
fn a_link_is_followed() {
    let folder = tempdir().unwrap();
    let (file, link) = (folder.path().join("file"), folder.path().join("link"));
    fs::write(&file, "before").unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    Draft::new(&link).unwrap().finish(b"after").unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), "after");
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
}

#[test]
fn problems_are_read_with_their_arrays() {
    let folder = tempdir().unwrap();
    let (json, file) = (folder.path().join("p.json"), folder.path().join("t.safetensors"));
    let extents = r#""batch":1,"query_heads":1,"key_heads":1,"queries":2,"keys":2,"dim":4"#;
    let read = |problem: &str, tensors: &Tensors| {
        fs::write(&json, problem).unwrap();
        read_problem(&json, &file, tensors)
            .map_err(|error| error.to_string().replace(&folder.path().display().to_string(), ""))
    };
    let mask = r#""mask":{"array":"m"}"#;
    let problem = format!(r#"{{"algorithm":"attention_lse",{extents},{mask}}}"#);
    let with = |shape: &[usize], data| {
        BTreeMap::from([("m".to_string(), Tensor { shape: shape.to_vec(), data })])
    };
    let flags = Data::Bool(vec![true, false, true, true]);
    let found = read(&problem, &with(&[1, 1, 2, 2], flags.clone())).unwrap();
    assert_eq!(found.arrays(), [("m".to_string(), vec![1, 1, 2, 2])]);

    let wrong = read(&problem, &with(&[1, 1, 1, 4], flags)).unwrap_err();
    assert_eq!(wrong, "/t.safetensors: `m` must have shape [1, 1, 2, 2], found [1, 1, 1, 4]");
    let wrong = read(&problem, &with(&[1, 1, 2, 2], Data::F32(vec![0.0; 4]))).unwrap_err();
    assert_eq!(wrong, "/t.safetensors: `m` must hold bool, found f32");
    let wrong = read(&problem, &BTreeMap::new()).unwrap_err();
    assert_eq!(wrong, "/t.safetensors: `m` is missing: the mask names it");

    let wrong =
        read(&format!(r#"{{"algorithm":"attention",{extents},"colour":1}}"#), &BTreeMap::new());
    assert!(
        wrong.unwrap_err().starts_with(
            "/p.json: not a valid problem file: line 1: unknown key `colour`, expected"
        )
    );
    let wrong = read("{\n\"algorithm\": }", &BTreeMap::new()).unwrap_err();
    assert_eq!(
        wrong,
        "/p.json: not a valid problem file: line 2, column 14: no JSON value: it has numbers, true, false, null \
        and strings in double quotes, and no comments"
    );
}

/// A value that JSON and its type take, and no problem: its key and its line are named, of nested keys their own.
#[test]
fn errors_of_meaning_name_key_and_line() {
    let folder = tempdir().unwrap();
    let (json, file) = (folder.path().join("p.json"), folder.path().join("t.safetensors"));
    let scores = [
        (r#""batch": 2"#, r#""batch": 2"#, ""),
        (r#""dim": 8"#, r#""dim": 0"#, "line 4: `dim` must be at least 1, found 0"),
        (
            r#""key_heads": 2"#,
            r#""key_heads": 0"#,
            "line 3: `key_heads` must be at least 1, found 0",
        ),
        (
            r#""query_heads": 4"#,
            r#""query_heads": 3"#,
            "line 3: `query_heads` must be a multiple of key_heads (2), found 3",
        ),
        (
            r#""softcap": 1"#,
            r#""softcap": -1"#,
            "line 5: `softcap` must be finite and above 0, found -1",
        ),
        (r#""heads": 4"#, r#""heads": 3"#, "line 6: `bias.heads` must be 1 or 4, found 3"),
        (r#""chunk": 4"#, r#""chunk": 0"#, "line 8: `mask.chunk` must be at least 1, found 0"),
        (
            r#""key": [3, 9]"#,
            r#""key": [3]"#,
            "line 10: `sequences.key` must be 2 lengths, one per batch element, found 1",
        ),
        (
            r#""query": [9, 9]"#,
            r#""query": [9, 10]"#,
            "line 9: `sequences.query` must be lengths of at most 9, found 10",
        ),
    ];
    let right = "{ \"algorithm\": \"attention\",\n\"batch\": 2,\n\"query_heads\": 4, \"key_heads\": 2,\n\
        \"queries\": 9, \"keys\": 9, \"dim\": 8,\n\"softcap\": 1,\n\"bias\": { \"batch\": 1, \"heads\": 4 },\n\
        \"mask\": { \"and\": [{ \"chunked_causal\": { \"chunk\": 3 } },\n{ \"chunked_causal\": { \"chunk\": 4 } }] },\n\
        \"sequences\": { \"lengths\": { \"query\": [9, 9],\n\"key\": [3, 9] } } }";
    for (part, changed, words) in scores {
        assert!(right.contains(part), "{part}");
        fs::write(&json, right.replace(part, changed)).unwrap();
        let said = read_problem(&json, &file, &BTreeMap::new()).err();
        let said = said.map_or(String::new(), |error| error.to_string());
        let said = said.strip_prefix(&format!("{}: ", json.display())).unwrap_or(&said);
        assert_eq!(said, words, "{changed}");
    }
    for (text, words) in [
        (
            "{ \"algorithm\": \"linear_attention\", \"batch\": 1, \"query_heads\": 2,\n\"key_heads\": 2, \"tokens\": 4, \
            \"dim\": 4,\n\"sequences\": { \"lengths\": {\n\"tokens\": [1, 4] } } }",
            "line 4: `sequences.tokens` must be 1 length, one per batch element, found 2",
        ),
        (
            "[1]",
            "not a valid problem file: line 1: the file must be an object with keys, found an array",
        ),
        (
            "{ \"algorithm\": \"linear_attention\", \"batch\": 1, \"query_heads\": 2,\n\"key_heads\": 2, \"tokens\": 4, \
            \"dim\": 4,\n\"sequences\": { \"packed\": { \"cu_tokens\":\n[1, 4] } } }",
            "line 4: `sequences.cu_tokens` must be offsets that begin with 0, found 1",
        ),
        (
            "{ \"algorithm\": \"linear_cross_entropy\", \"tokens\": 4, \"dim\": 4,\n\"vocab\": 9,\n\
            \"label_smoothing\": 1.5 }",
            "line 3: `label_smoothing` must be in [0, 1], found 1.5",
        ),
        (
            "{ \"algorithm\": \"linear_cross_entropy\", \"tokens\": 4, \"dim\": 4, \"vocab\": 9,\n\
            \"reduction\": { \"by\":\n{ \"normaliser\": 0 } } }",
            "line 3: `reduction.by.normaliser` must be finite, not 0, found 0",
        ),
    ] {
        fs::write(&json, text).unwrap();
        let said = read_problem(&json, &file, &BTreeMap::new()).unwrap_err().to_string();
        assert_eq!(said, format!("{}: {words}", json.display()));
    }
}
