//! Plants the bugs of `crates/simd/tests/planted/bugs.txt` in a copy of the workspace, behind a switch,
//! and prints by which law each is noticed, at which depth. Arguments are names of bugs: those alone.
//!
//! ```sh
//! cargo run -p etalon-conformance --example planted
//! ```

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};

#[path = "../../simd/tests/planted/bugs.rs"]
mod bugs;

fn main() -> Result<(), Box<dyn Error>> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize()?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let copy = target.unwrap_or_else(|| workspace.join("target")).join("planted");
    for file in ["Cargo.toml", "Cargo.lock", "README.md", "rust-toolchain.toml"] {
        copy_changed(&workspace.join(file), &copy.join(file))?;
    }
    for folder in ["crates", "benches", "docs"] {
        copy_folder(&workspace.join(folder), &copy.join(folder))?;
    }
    let simd = copy.join("crates/simd");
    plant(&simd)?;
    let examples = copy.join("crates/conformance/examples");
    for file in ["hunt.rs", "bugs.rs", "bugs.txt"] {
        copy_changed(&simd.join("tests/planted").join(file), &examples.join(file))?;
    }
    let status = Command::new("cargo")
        .args(["run", "--release", "-p", "etalon-conformance", "--example", "hunt", "--"])
        .args(std::env::args().skip(1))
        .env("CARGO_TARGET_DIR", copy.join("target"))
        .current_dir(&copy)
        .status()?;
    exit(status.code().unwrap_or(1));
}

/// Plants every bug, and the switch.
fn plant(simd: &Path) -> Result<(), Box<dyn Error>> {
    let source = simd.join("src");
    let mut planted: Vec<(PathBuf, String)> = Vec::new();
    for (at, bug) in bugs::all().iter().enumerate() {
        let path = source.join(&bug.file);
        let known = planted.iter().position(|(other, _)| *other == path);
        let known = match known {
            Some(known) => known,
            None => {
                planted.push((path.clone(), fs::read_to_string(&path)?));
                planted.len() - 1
            }
        };
        let text = &mut planted[known].1;
        if std::env::args().any(|name| name == bug.name) {
            eprintln!("{} ({}): {}", bug.name, bug.kind, bug.story);
        }
        let condition = format!("crate::planted::is({})", at + 1);
        *text = bug
            .plant(text, &condition)
            .ok_or_else(|| format!("{}: its text is not once in {}", bug.name, bug.file))?;
    }
    let lib = source.join("lib.rs");
    let text = fs::read_to_string(&lib)?;
    planted.push((lib, text.replace("mod aligned;", "pub mod planted;\nmod aligned;")));
    let switch = fs::read_to_string(simd.join("tests/planted/switch.rs"))?;
    planted.push((source.join("planted.rs"), switch));
    for (path, text) in planted {
        write_changed(&path, &text)?;
    }
    Ok(())
}

/// Copies the files of a folder that are not as they were; the planted ones are written again.
fn copy_folder(from: &Path, to: &Path) -> Result<(), Box<dyn Error>> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &to)?;
        } else {
            copy_changed(&entry.path(), &to)?;
        }
    }
    Ok(())
}

fn copy_changed(from: &Path, to: &Path) -> Result<(), Box<dyn Error>> {
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)?;
    }
    let new = fs::read(from)?;
    if fs::read(to).ok().as_deref() != Some(&new[..]) {
        fs::write(to, new)?;
    }
    Ok(())
}

/// Writes a file unless it is so already: what has not changed is not built again.
fn write_changed(path: &Path, text: &str) -> Result<(), Box<dyn Error>> {
    if fs::read_to_string(path).ok().as_deref() != Some(text) {
        fs::write(path, text)?;
    }
    Ok(())
}
