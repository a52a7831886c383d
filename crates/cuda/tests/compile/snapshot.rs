//! Recorded resources of kernels for a version of the compiler: `nvrtc-VERSION.txt` beside this file, a line for each
//! kernel of each module.

use crate::list::Excerpt;
use crate::report::{Kernel, LOOP, module};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

/// Lines by the module and the kernel that they are about.
pub struct Snapshot {
    path: PathBuf,
    lines: BTreeMap<String, String>,
}

impl Snapshot {
    fn path(version: &str) -> PathBuf {
        // The variable as cargo sets it, or whoever runs the program on a machine without cargo.
        let crate_folder = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
        let crate_folder = crate_folder.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        crate_folder.join("tests/compile").join(format!("nvrtc-{version}.txt"))
    }

    /// The snapshot of a version of the compiler, if one was recorded.
    pub fn read(version: &str) -> Option<Snapshot> {
        let path = Snapshot::path(version);
        let text = fs::read_to_string(&path).ok()?;
        let of = |line: &str| {
            let (key, rest) = line.split_once(": ").expect("a kernel, and what it takes");
            (key.to_string(), rest.to_string())
        };
        Some(Snapshot { lines: text.lines().map(of).collect(), path })
    }

    /// The same without what nvdisasm counts.
    pub fn without_instructions(mut self) -> Snapshot {
        for rest in self.lines.values_mut() {
            *rest = rest.split(LOOP).next().unwrap_or_default().to_string();
        }
        self
    }

    /// All that were recorded.
    pub fn all() -> Vec<Snapshot> {
        let folder = Snapshot::path("").parent().unwrap().to_path_buf();
        let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
        let versions = names.filter_map(|name| {
            let name = name.into_string().ok()?;
            Some(name.strip_prefix("nvrtc-")?.strip_suffix(".txt")?.to_string())
        });
        versions.filter_map(|version| Snapshot::read(&version)).collect()
    }

    /// The snapshot of a compilation.
    pub fn new(version: &str, modules: &BTreeMap<String, Vec<Kernel>>) -> Snapshot {
        let lines = modules.iter().flat_map(|(module, kernels)| {
            kernels.iter().map(move |kernel| {
                let line = format!("{module} {kernel}");
                let (key, rest) = line.split_once(": ").unwrap();
                (key.to_string(), rest.to_string())
            })
        });
        Snapshot { lines: lines.collect(), path: Snapshot::path(version) }
    }

    /// Lines of this list, with those of another in place of its own.
    pub fn updated(mut self, other: Snapshot, list: &[Excerpt]) -> Snapshot {
        let kernels = kernels(list);
        self.lines.retain(|key, _| kernels.contains(key));
        self.lines.extend(other.lines);
        self
    }

    /// True if it has each of these kernels of a module.
    pub fn has(&self, excerpt: &Excerpt) -> bool {
        kernels(std::slice::from_ref(excerpt)).iter().all(|key| self.lines.contains_key(key))
    }

    pub fn write(&self) {
        let lines = self.lines.iter().map(|(key, rest)| format!("{key}: {rest}\n"));
        fs::write(&self.path, lines.collect::<String>()).unwrap();
    }

    /// Fails unless every kernel that was compiled takes what was recorded.
    pub fn check(&self, compiled: &Snapshot) {
        let (differences, path) = (self.differences(compiled), self.path.display());
        assert!(differences.is_empty(), "not as in {path} (ETALON_RENEW):\n{}", differences.join("\n"));
    }

    fn differences(&self, compiled: &Snapshot) -> Vec<String> {
        let differs = |(key, rest): &(&String, &String)| self.lines.get(*key) != Some(*rest);
        let difference = |(key, rest): (&String, &String)| {
            let recorded = self.lines.get(key).map_or("nothing", String::as_str);
            format!("{key}\n  recorded {recorded}\n  compiled {rest}")
        };
        compiled.lines.iter().filter(differs).map(difference).collect()
    }

    /// Fails unless it is about the kernels of this list and no others.
    pub fn check_list(&self, list: &[Excerpt]) {
        let (kernels, own): (_, BTreeSet<String>) = (kernels(list), self.lines.keys().cloned().collect());
        let path = self.path.display();
        assert_eq!(kernels.difference(&own).collect::<Vec<_>>(), [""; 0], "absent from {path} (ETALON_RENEW=absent)");
        assert_eq!(own.difference(&kernels).collect::<Vec<_>>(), [""; 0], "in {path} alone");
    }

    /// The bytes of shared memory of each kernel's block, and its architecture.
    pub fn shared(&self) -> impl Iterator<Item = (&str, &str, u32)> {
        self.lines.iter().map(|(key, rest)| {
            let part = rest.split([',', ';']).find_map(|part| part.trim().strip_suffix(" bytes shared"));
            let bytes = part.expect("shared memory").split(" + ").map(|x| x.parse::<u32>().unwrap());
            (key.split(' ').next().unwrap(), key.as_str(), bytes.sum())
        })
    }
}

/// The kernels of a list, as lines name them.
fn kernels(list: &[Excerpt]) -> BTreeSet<String> {
    let of = |(compilation, kernels): &Excerpt| {
        let name = |kernel: &&str| format!("{} {kernel}", module(compilation));
        kernels.iter().map(name).collect::<Vec<_>>()
    };
    list.iter().flat_map(of).collect()
}

#[test]
fn a_kernel_that_takes_more_is_told_and_so_is_one_that_was_not_recorded() {
    let path = Snapshot::path("0.0");
    let snapshot = |lines: &[(&str, &str)]| {
        let own = |(key, rest): &(&str, &str)| (key.to_string(), rest.to_string());
        Snapshot { path: path.clone(), lines: lines.iter().map(own).collect() }
    };
    let recorded = snapshot(&[("sm_80 A=1 x", "1 registers"), ("sm_80 A=1 y", "2 registers")]);
    assert!(recorded.differences(&snapshot(&[("sm_80 A=1 y", "2 registers")])).is_empty());
    let more = [("sm_80 A=1 x", "9 registers"), ("sm_80 A=1 z", "2 registers")];
    let differences = recorded.differences(&snapshot(&more)).join("\n");
    for part in ["A=1 x", "recorded 1", "compiled 9", "A=1 z", "recorded nothing"] {
        assert!(differences.contains(part), "{part}: {differences}");
    }
    assert!(!differences.contains("A=1 y"));
}
