//! Damaged sets: each is refused with the name of the file.

use crate::written;
use etalon_conformance::vector_set::{Entry, INDEX, Set, Validity, sha256};
use std::fs;
use std::path::Path;

/// The error of reading all of a set, with the folder left out.
fn said(folder: &Path) -> Result<(), String> {
    let read = || {
        let set = Set::read(folder)?;
        for entry in &set.manifest.vectors {
            match entry.result {
                Validity::Valid => drop(set.load(entry, u64::MAX)?),
                Validity::Invalid => drop(set.problem(entry, u64::MAX)?),
            }
        }
        Ok(())
    };
    let said = read().map_err(|error: etalon_conformance::vectors::Error| error.to_string());
    said.map_err(|text| text.replace(&format!("{}/", folder.display()), ""))
}

/// The error of reading one vector; empty where there is none.
fn said_of(set: &Set, entry: &Entry, folder: &Path) -> String {
    let text = set.load(entry, u64::MAX).map_or_else(|error| error.to_string(), |_| String::new());
    text.replace(&format!("{}/", folder.display()), "")
}

#[test]
fn a_changed_byte_is_refused_wherever_it_is() {
    let folder = written();
    let folder = folder.path();
    assert_eq!(said(folder), Ok(()));
    let set = Set::read(folder).unwrap();
    let valid = set.manifest.vectors.iter().filter(|x| x.result == Validity::Valid);
    let entry = valid.min_by_key(|x| x.tensors.as_ref().map(|x| x.bytes)).unwrap();
    let names = [entry.problem.file.clone(), entry.tensors.as_ref().unwrap().file.clone()];
    for name in names {
        let path = folder.join(&name);
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1 << (at % 8);
            fs::write(&path, changed).unwrap();
            let text = said_of(&set, entry, folder);
            assert!(text.starts_with(&format!("{name}: its SHA-256 must be ")), "{at}: {text}");
        }
        for length in [0, 1, 7, 8, whole.len() / 2, whole.len() - 1] {
            fs::write(&path, &whole[..length]).unwrap();
            let text = said_of(&set, entry, folder);
            let expected = format!("{name}: must have {} bytes, found {length}", whole.len());
            assert_eq!(text, expected);
        }
        fs::write(&path, [&whole[..], b" "].concat()).unwrap();
        assert!(said_of(&set, entry, folder).contains("must have"));
        fs::write(&path, whole).unwrap();
    }
    let path = folder.join(INDEX);
    let whole = fs::read(&path).unwrap();
    // Every kind of place: keys, values, marks and spaces lie within any hundred bytes.
    for at in (0..whole.len()).step_by(whole.len() / 400).chain(0..100) {
        let mut changed = whole.clone();
        changed[at] ^= 1 << (at % 7);
        fs::write(&path, changed).unwrap();
        let text = Set::read(folder).map(drop).expect_err("a changed manifest").to_string();
        assert!(text.contains(&format!("{INDEX}: ")), "{at}: {text}");
    }
    for length in [0, 1, 100, whole.len() / 2, whole.len() - 2] {
        fs::write(&path, &whole[..length]).unwrap();
        let text = Set::read(folder).map(drop).expect_err("a part of a manifest").to_string();
        assert!(text.contains(&format!("{INDEX}: not a valid manifest: ")), "{length}: {text}");
    }
}

/// The set with another text of the manifest, sealed again: what it says.
fn with_manifest(folder: &Path, edit: impl FnOnce(String) -> String) -> String {
    let path = folder.join(INDEX);
    let own = fs::read_to_string(&path).unwrap();
    let (_, rest) = own.split_once("\"seal\": \"").unwrap();
    let seal = &rest[..64];
    let text = edit(own.replacen(seal, &"0".repeat(64), 1));
    let text = text.replacen(&"0".repeat(64), &sha256(text.as_bytes()), 1);
    fs::write(&path, text).unwrap();
    let said = said(folder).expect_err("a changed manifest");
    fs::write(&path, own).unwrap();
    said
}

#[test]
fn a_set_that_does_not_hold_together_is_refused() {
    let folder = written();
    let folder = folder.path();
    let replaced = |from: &'static str, to: &'static str| {
        move |text: String| {
            assert!(text.contains(from), "{from}");
            text.replacen(from, to, 1)
        }
    };
    let says = |from, to, words: &str| {
        let text = with_manifest(folder, replaced(from, to));
        assert!(text.contains(words), "{from} → {to}: {text}");
    };
    says("\"schema\": 1", "\"schema\": 2", "manifest.json: `schema` must be 1, found 2");
    says("\"schema\": 1", "\"schema\": \"x\"", "`schema` must be 1, found \"x\"");
    says("\"set\": \"core\"", "\"set\": \"heart\"", "`set` must be core, found heart");
    says("\"digest\": \"", "\"digest\": \"f", "manifest.json: the digest of etalon ");
    says("\"vectors\": [", "\"colour\": 1, \"vectors\": [", "unknown key `colour`");
    says("\"result\": \"valid\"", "\"result\": \"acceptable\"", "acceptable");
    says("\"result\": \"valid\"", "\"result\": \"invalid\"", "must have an error, and no pass");
    says("\"id\": \"attention", "\"id\": \"../attention", "an id must be letters, digits and");
    says("\"file\": \"attention", "\"file\": \"../attention", "a file of attention");
    says("\"bytes\": ", "\"bytes\": 99999999999", ".json: must have 99999999999");
    says("\"dtype\": \"f32\"", "\"dtype\": \"f64\"", "f64");
    let name = Set::read(folder).unwrap().manifest.vectors[0].problem.file.clone();
    let moved = folder.join("moved");
    fs::rename(folder.join(&name), &moved).unwrap();
    assert_eq!(
        said(folder).unwrap_err(),
        "moved: no file of the set: manifest.json does not name it"
    );
    let beside = tempfile::tempdir().unwrap();
    fs::rename(&moved, beside.path().join("moved"))
        .unwrap_or_else(|_| fs::remove_file(&moved).unwrap());
    assert_eq!(said(folder).unwrap_err(), format!("{name}: is missing: manifest.json names it"));
    assert!(said(&folder.join("absent")).unwrap_err().contains("there is no folder"));
}

/// Tensors that are others than the problem has, in a file whose hash is right.
#[test]
fn tensors_that_do_not_fit_are_refused() {
    use etalon_conformance::tensor::{Data, Tensor};
    use etalon_conformance::vectors::{read_tensors, write_tensors};
    let folder = written();
    let folder = folder.path();
    let set = Set::read(folder).unwrap();
    let is_forward = |x: &&Entry| {
        x.id.starts_with("attention.forward.f32")
            && x.outputs["o"].shape.iter().product::<usize>() > 1
    };
    let mut entry = set.manifest.vectors.iter().find(is_forward).unwrap().clone();
    let name = entry.tensors.as_ref().unwrap().file.clone();
    let path = folder.join(&name);
    let own = read_tensors(&path, u64::MAX).unwrap();
    let mut says = |change: &dyn Fn(&mut etalon_conformance::tensor::Tensors), words: &str| {
        let mut tensors = own.clone();
        change(&mut tensors);
        write_tensors(&path, &tensors).unwrap();
        let bytes = fs::read(&path).unwrap();
        let file = entry.tensors.as_mut().unwrap();
        (file.bytes, file.sha256) = (bytes.len() as u64, sha256(&bytes));
        let text = said_of(&set, &entry, folder);
        assert!(text.contains(words) && text.starts_with(&name), "{words}: {text}");
    };
    let flat = |x: &mut Tensor| x.shape = vec![x.len()];
    says(&|x| drop(x.remove("q")), "`q` is missing");
    says(&|x| drop(x.remove("o.exact")), "`o.exact` is missing");
    says(&|x| drop(x.remove("o.bound")), "`o.bound` is missing");
    says(&|x| flat(x.get_mut("q").unwrap()), "`q` must have shape");
    says(&|x| flat(x.get_mut("o.exact").unwrap()), "`o.exact` must have shape");
    says(&|x| flat(x.get_mut("o.bound").unwrap()), "`o.bound` must have shape");
    says(&|x| drop(x.insert("w".into(), own["q"].clone())), "`w` was given");
    says(&|x| drop(x.insert("p.exact".into(), own["q"].clone())), "`p.exact` was given");
    says(&|x| drop(x.insert("o.exact".into(), own["o.bound"].clone())), "`o.exact` must hold f64");
    says(&|x| drop(x.insert("o.bound".into(), own["o.exact"].clone())), "`o.bound` must hold f32");
    let negative =
        Tensor { data: Data::F32(vec![-1.0; own["o.bound"].len()]), ..own["o.bound"].clone() };
    says(&|x| drop(x.insert("o.bound".into(), negative.clone())), "`o.bound` must be 0 or more");
}
