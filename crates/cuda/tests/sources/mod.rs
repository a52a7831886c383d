//! Sources of kernels for the compiler of the host, and that compiler.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// The texts of these files of a module's source, with the kernel arguments that are defined in them.
pub fn files(source: &str, names: &[&str]) -> String {
    let (mut kept, mut is_asked) = (String::new(), false);
    for line in source.lines() {
        // As in `#line 1 "tile/types.cuh"`; arguments lie within a file.
        match line.strip_prefix("#line ").and_then(|rest| rest.split('"').nth(1)) {
            Some("arguments") => {}
            Some(name) => is_asked = names.contains(&name),
            None if is_asked => kept += &format!("{line}\n"),
            None => {}
        }
    }
    kept
}

/// Writes texts into a folder and compiles `model.cpp`, one of them: the program, or `None` where there is no C++
/// compiler.
pub fn compile(folder: &Path, texts: &[(&str, &str)], options: &[&str]) -> Option<PathBuf> {
    texts.iter().for_each(|(name, text)| fs::write(folder.join(name), text).unwrap());
    let program = folder.join("model");
    let mut command = Command::new(env::var_os("CXX").unwrap_or_else(|| "c++".into()));
    command.args(["-std=c++17", "-w"]).args(options).arg("-o").arg(&program);
    let Ok(built) = command.arg(folder.join("model.cpp")).output() else {
        println!("skipped: no C++ compiler");
        return None;
    };
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    Some(program)
}
