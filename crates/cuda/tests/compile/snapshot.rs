//! Recorded resources of kernels for a version of the compiler: `nvrtc-VERSION.txt` beside this file, a line for each
//! kernel of each module. A line of a module that CI compares has a hash of the source with its kernels' lines: while
//! neither changes, machine code is what was recorded.

use crate::is_compared;
use crate::list::{Excerpt, listed};
use crate::report::{Kernel, LOOP, module};
use etalon_cuda::Cache;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

/// Lines by the module and the kernel that they are about.
#[derive(Clone)]
pub struct Snapshot {
    path: PathBuf,
    lines: BTreeMap<String, String>,
    /// The hashes of sources, by module.
    sources: BTreeMap<String, String>,
}

/// Separator of a module and the hash of its source.
const SOURCE: &str = ": source ";

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
        let parts = |line: &str, separator| {
            let (key, rest) = line.split_once(separator).expect("a kernel, and what it takes");
            (key.to_string(), rest.to_string())
        };
        let (sources, lines): (Vec<_>, Vec<_>) = text.lines().partition(|line| line.contains(SOURCE));
        let sources = sources.into_iter().map(|line| parts(line, SOURCE)).collect();
        Some(Snapshot { lines: lines.into_iter().map(|line| parts(line, ": ")).collect(), sources, path })
    }

    /// The same without what nvdisasm counts.
    pub fn without_instructions(&self) -> Snapshot {
        let mut all = self.clone();
        for rest in all.lines.values_mut() {
            *rest = rest.split(LOOP).next().unwrap_or_default().to_string();
        }
        all
    }

    /// The hash of the source of these kernels, the options of the compiler and the kernels' lines; `None` if it lacks
    /// one.
    fn hash(&self, (compilation, kernels): &Excerpt) -> Option<String> {
        let (architecture, variant) = compilation;
        let mut parts = vec![variant.source(kernels), variant.options(architecture).join("\n")];
        for kernel in kernels {
            parts.push(self.lines.get(&format!("{} {kernel}", module(compilation)))?.clone());
        }
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        Some(Cache::key(&parts)[..16].to_string())
    }

    /// True if it was recorded of this source.
    pub fn is_of(&self, excerpt: &Excerpt) -> bool {
        let recorded = self.sources.get(&module(&excerpt.0));
        recorded.is_some() && recorded == self.hash(excerpt).as_ref()
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
        Snapshot { lines: lines.collect(), path: Snapshot::path(version), sources: BTreeMap::new() }
    }

    /// Lines of this list, with those of another, which was compiled of these, in place of its own.
    pub fn updated(mut self, other: Snapshot, list: &[Excerpt], compiled: &[Excerpt]) -> Snapshot {
        let (kernels, modules) = (kernels(list), modules(list));
        self.lines.retain(|key, _| kernels.contains(key));
        self.lines.extend(other.lines);
        self.sources.retain(|module, _| modules.contains(module));
        for excerpt in compiled.iter().filter(|x| is_compared(&x.0)) {
            let hash = self.hash(excerpt).expect("the lines of what was compiled");
            self.sources.insert(module(&excerpt.0), hash);
        }
        self
    }

    /// True if it has each of these kernels of a module.
    pub fn has(&self, excerpt: &Excerpt) -> bool {
        kernels(std::slice::from_ref(excerpt)).iter().all(|key| self.lines.contains_key(key))
    }

    pub fn write(&self) {
        let lines = self.lines.iter().map(|(key, rest)| format!("{key}: {rest}\n"));
        let sources = self.sources.iter().map(|(module, hash)| format!("{module}{SOURCE}{hash}\n"));
        let mut all: Vec<String> = lines.chain(sources).collect();
        all.sort();
        fs::write(&self.path, all.concat()).unwrap();
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
        assert_eq!(kernels.difference(&own).collect::<Vec<_>>(), [""; 0], "absent from {path} (ETALON_RENEW=changed)");
        assert_eq!(own.difference(&kernels).collect::<Vec<_>>(), [""; 0], "in {path} alone");
        let compared: BTreeSet<String> = modules(list);
        let own: BTreeSet<String> = self.sources.keys().cloned().collect();
        assert_eq!(own.difference(&compared).collect::<Vec<_>>(), [""; 0], "sources in {path} alone");
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

/// The modules of a list that CI compares.
fn modules(list: &[Excerpt]) -> BTreeSet<String> {
    list.iter().filter(|x| is_compared(&x.0)).map(|x| module(&x.0)).collect()
}

#[test]
fn a_kernel_that_takes_more_is_told_and_so_is_one_that_was_not_recorded() {
    let path = Snapshot::path("0.0");
    let snapshot = |lines: &[(&str, &str)]| {
        let own = |(key, rest): &(&str, &str)| (key.to_string(), rest.to_string());
        Snapshot { path: path.clone(), lines: lines.iter().map(own).collect(), sources: BTreeMap::new() }
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

/// A module is compiled as for a device again where its source differs from that of the record, or its lines.
#[test]
fn a_record_is_of_one_source_and_of_its_own_lines() {
    let list = listed();
    let excerpt = list.iter().find(|x| is_compared(&x.0) && x.1.len() > 1).expect("a module on tensor cores");
    let lines = kernels(std::slice::from_ref(excerpt)).into_iter().map(|key| (key, "1 registers".to_string()));
    let compiled = Snapshot { path: PathBuf::new(), lines: lines.collect(), sources: BTreeMap::new() };
    assert!(!compiled.is_of(excerpt));
    let recorded = compiled.clone().updated(compiled, &list, std::slice::from_ref(excerpt));
    assert!(recorded.is_of(excerpt));
    // Fewer kernels are another source.
    assert!(!recorded.is_of(&(excerpt.0.clone(), excerpt.1[1..].to_vec())));
    let mut edited = recorded;
    edited.lines.values_mut().for_each(|line| line.push('0'));
    assert!(!edited.is_of(excerpt));
}
