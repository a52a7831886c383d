//! No two files of a crate import each other in a circle. A module and the modules within it count as
//! one here: a parent hands on what its children have, and they share what is private to it.

use crate::files::{below, root};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// A module: the names on the way to it from the root of its crate, which itself has none.
type Module = Vec<String>;

/// The files of a crate by module, each with what it imports by name.
struct Crate {
    imports: BTreeMap<Module, Vec<Import>>,
}

/// A name in a module, and the path that it stands for; `*` is every name of a module.
#[derive(Debug, Clone, PartialEq)]
struct Import {
    name: String,
    path: Vec<String>,
}

impl Crate {
    fn read(sources: &Path) -> Self {
        let files = below(sources).into_iter();
        let files = files.filter(|path| path.extension().is_some_and(|kind| kind == "rs"));
        let of = |path: PathBuf| {
            let module = module(path.strip_prefix(sources).unwrap());
            let imports = list(&module, &fs::read_to_string(path).unwrap());
            (module, imports)
        };
        let imports = files.map(of).collect();
        Crate { imports }
    }

    /// The file in which what a path names is written, if it is one of the crate.
    fn file(&self, path: &[String]) -> Option<Module> {
        let mut path = path.to_vec();
        // Every round follows one import: no name is handed on so often.
        for _ in 0..8 {
            let depth = (0..=path.len()).rev().find(|&n| self.imports.contains_key(&path[..n]))?;
            let (module, rest) = path.split_at(depth);
            let handed_on = rest.split_first().and_then(|(name, rest)| {
                let import = self.imports[module].iter().find(|import| import.name == *name)?;
                Some(import.path.iter().chain(rest).cloned().collect::<Vec<_>>())
            });
            match handed_on.filter(|other| *other != path) {
                Some(other) => path = other,
                None => return Some(module.to_vec()),
            }
        }
        None
    }

    /// The files that each file imports, save those around it and within it.
    fn arrows(&self) -> BTreeMap<Module, BTreeSet<Module>> {
        let of = |(module, imports): (&Module, &Vec<Import>)| {
            let files = imports.iter().filter_map(|import| self.file(&import.path));
            let apart = |file: &Module| !file.starts_with(module) && !module.starts_with(file);
            (module.clone(), files.filter(apart).collect())
        };
        self.imports.iter().map(of).collect()
    }
}

/// The module of a file: `a/b.rs` and `a/b/mod.rs` are `a::b`.
fn module(file: &Path) -> Module {
    let names = file.with_extension("");
    let mut names: Module = names.iter().map(|name| name.to_str().unwrap().to_string()).collect();
    if names.last().is_some_and(|last| ["mod", "lib", "main"].contains(&last.as_str())) {
        names.pop();
    }
    names
}

/// Imports of a file, by `use` or by a path in place. Paths begin with the root of the crate; those of
/// other crates, with the file itself, which has no such name.
fn list(module: &Module, text: &str) -> Vec<Import> {
    let code: Vec<&str> = text.lines().map(|line| line.split("//").next().unwrap()).collect();
    let code = code.join("\n");
    let mut imports = Vec::new();
    for item in code.split(';') {
        let Some(at) = item.rfind("use ") else { continue };
        let before = item[..at].trim_end();
        // `use` begins an item, behind another one or what makes it public.
        if before.is_empty() || before.ends_with(['}', '{', ']', ')']) || before.ends_with("pub") {
            let tree = item[at + 4..].replace(" as ", "=");
            let tree: String = tree.chars().filter(|c| !c.is_whitespace()).collect();
            expand(module, &tree, &mut imports);
        }
    }
    // Paths that stand where they are used, as `crate::module::name`.
    for root in ["crate::", "super::"] {
        for (at, _) in code.match_indices(root) {
            let end = code[at..].find(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
            let path = code[at..end.map_or(code.len(), |end| at + end)].trim_end_matches(':');
            expand(module, path, &mut imports);
        }
    }
    imports
}

/// Adds the paths of a tree of imports that stands behind `before`.
fn expand(before: &[String], tree: &str, imports: &mut Vec<Import>) {
    let (mut path, mut rest) = (before.to_vec(), tree);
    while let Some((name, inner)) =
        rest.split_once("::").filter(|(name, _)| !name.contains(['{', ',']))
    {
        match name {
            "crate" => path.clear(),
            "self" => {}
            "super" => drop(path.pop()),
            name => path.push(name.to_string()),
        }
        rest = inner;
    }
    match rest.strip_prefix('{').and_then(|inner| inner.strip_suffix('}')) {
        Some(inner) => branches(inner).iter().for_each(|inner| expand(&path, inner, imports)),
        None if !rest.is_empty() => {
            let (own, renamed) = rest.split_once('=').map_or((rest, None), |(a, b)| (a, Some(b)));
            if own != "self" {
                path.push(own.to_string());
            }
            let name = renamed.map(str::to_string).or(path.last().cloned()).unwrap_or_default();
            imports.push(Import { name, path });
        }
        None => {}
    }
}

/// The branches of a tree of imports: what stands between commas that are in no inner braces.
fn branches(tree: &str) -> Vec<String> {
    let (mut depth, mut list) = (0, vec![String::new()]);
    for c in tree.chars() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        match (c, list.last_mut()) {
            (',', _) if depth == 0 => list.push(String::new()),
            (c, Some(last)) => last.push(c),
            _ => {}
        }
    }
    list
}

/// Circles of arrows: every file from which one comes back to it, with the files on the way.
fn circles(arrows: &BTreeMap<Module, BTreeSet<Module>>) -> Vec<BTreeSet<Module>> {
    let reach = |from: &Module| {
        let (mut found, mut open) = (BTreeSet::new(), vec![from]);
        while let Some(file) = open.pop() {
            let further = arrows.get(file).into_iter().flatten();
            open.extend(further.filter(|file| found.insert((*file).clone())));
        }
        found
    };
    let reached: BTreeMap<&Module, BTreeSet<Module>> =
        arrows.keys().map(|file| (file, reach(file))).collect();
    let circle = |file: &Module| {
        let back = |other: &&Module| reached.get(*other).is_some_and(|files| files.contains(file));
        reached[file].iter().filter(back).cloned().collect::<BTreeSet<_>>()
    };
    let found: BTreeSet<_> =
        arrows.keys().map(circle).filter(|circle| !circle.is_empty()).collect();
    found.into_iter().collect()
}

/// The folders of the tests and examples of a crate that have several files.
fn programs(folder: &Path) -> Vec<PathBuf> {
    let inside = |kind: &str| fs::read_dir(folder.join(kind)).into_iter().flatten();
    let entries = inside("tests").chain(inside("examples"));
    let folders = entries.map(|entry| entry.unwrap().path());
    folders.filter(|path| path.join("main.rs").exists()).collect()
}

#[test]
fn no_two_files_import_each_other_in_a_circle() {
    let mut files = 0;
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let folder = entry.unwrap().path();
        for sources in [vec![folder.join("src")], programs(&folder)].concat() {
            let own = Crate::read(&sources);
            files += own.imports.len();
            let found = circles(&own.arrows());
            assert!(found.is_empty(), "{}: {found:?}", sources.display());
        }
    }
    assert!(files > 200, "only {files} files were read");
}

#[test]
fn a_circle_is_found_also_through_a_file_that_hands_names_on() {
    let file = |module: &[&str], text: &str| {
        let module: Module = module.iter().map(|name| name.to_string()).collect();
        (module.clone(), list(&module, text))
    };
    let imports = [
        file(&[], "pub mod a;\npub mod b;\npub use b::{self, inner::Third as C};"),
        file(&["a"], "use crate::{C, b};\nuse std::fmt;"),
        file(&["b"], "mod inner;"),
        file(&["b", "inner"], "use super::super::a;"),
    ];
    let found = circles(&Crate { imports: imports.into() }.arrows());
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].len(), 2, "{found:?}");
}
