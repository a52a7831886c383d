//! The run that compiles every variant: in parts, on several machines or one after another. It takes the
//! least effort, by which all that is learnt is that they compile, or the full one, by which no kernel spills that may
//! not.
//!
//! | variable | |
//! |---|---|
//! | `ETALON_PART=3/8` | the third of eight parts alone |
//! | `ETALON_ONLY=linear_attention/sm80,sm_90a` | these families and architectures alone |
//! | `ETALON_DONE=FILE` | modules that the file names are not compiled again, and those that compile are added |
//! | `ETALON_SECONDS=500` | no module is begun later than that |
//! | `ETALON_EFFORT=full` | modules are compiled as for a device, which takes four times as long |

use crate::list::everything;
use crate::report::{Compilation, Effort, module};
use etalon_cuda::Cache;
use etalon_cuda::kernels::Family;
use std::collections::BTreeSet;
use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A run: its modules, its time limit, and the modules that it has compiled.
pub struct Run {
    /// Its number, from 1, of so many.
    pub part: (usize, usize),
    pub effort: Effort,
    only: Vec<String>,
    end: Option<Instant>,
    done: BTreeSet<String>,
    journal: Option<Mutex<File>>,
}

impl Run {
    /// The run that the variables ask for.
    pub fn new() -> Run {
        let part = env::var("ETALON_PART").ok().map(|text| {
            let part = parse_part(&text);
            part.unwrap_or_else(|| panic!("ETALON_PART={text}: K/N was expected, as in 3/8"))
        });
        let only = env::var("ETALON_ONLY").unwrap_or_default();
        let only = only.split(',').filter(|name| !name.is_empty()).map(str::to_string).collect();
        let seconds = env::var("ETALON_SECONDS").ok();
        let seconds = seconds.map(|text| text.parse().expect("ETALON_SECONDS: a number"));
        let is_full = env::var("ETALON_EFFORT").is_ok_and(|effort| effort == "full");
        let journal = env::var_os("ETALON_DONE");
        let done = journal.as_ref().and_then(|path| fs::read_to_string(path).ok());
        let open = |path| OpenOptions::new().create(true).append(true).open(path).unwrap();
        Run {
            part: part.unwrap_or((1, 1)),
            effort: if is_full { Effort::Full } else { Effort::Least },
            only,
            end: seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds)),
            done: done.unwrap_or_default().lines().map(str::to_string).collect(),
            journal: journal.map(open).map(Mutex::new),
        }
    }

    /// Of these the modules of its part.
    pub fn part(&self, all: Vec<Compilation>) -> Vec<Compilation> {
        let is = |(architecture, variant): &Compilation, name: &String| {
            name == architecture || *name == variant.family.to_string()
        };
        let asked = |x: &Compilation| self.only.is_empty() || self.only.iter().any(|name| is(x, name));
        // Neighbours are alike: each part gets some of every kind.
        let own = all.into_iter().filter(asked).enumerate();
        let own = own.filter(|(at, _)| at % self.part.1 + 1 == self.part.0);
        own.map(|(_, compilation)| compilation).collect()
    }

    /// True if a module of this version of the compiler was compiled before.
    pub fn is_done(&self, compilation: &Compilation, nvrtc: &str) -> bool {
        self.done.contains(&self.line(compilation, nvrtc))
    }

    /// Notes that it compiles.
    pub fn note(&self, compilation: &Compilation, nvrtc: &str) {
        if let Some(journal) = &self.journal {
            // A whole line at once: a run that is stopped leaves no half of one.
            let line = format!("{}\n", self.line(compilation, nvrtc));
            journal.lock().unwrap().write_all(line.as_bytes()).unwrap();
        }
    }

    /// True if its time is over.
    pub fn is_over(&self) -> bool {
        self.end.is_some_and(|end| Instant::now() >= end)
    }

    /// A module, with a hash of all that it is compiled from.
    fn line(&self, compilation: &Compilation, nvrtc: &str) -> String {
        let (architecture, variant) = compilation;
        let effort = if self.effort == Effort::Full { "full" } else { "least" };
        let (source, options) = (variant.source(&variant.kernels()), variant.options(architecture).join("\n"));
        format!("{} {}", &Cache::key(&[&source, &options, nvrtc, effort])[..16], module(compilation))
    }
}

fn parse_part(text: &str) -> Option<(usize, usize)> {
    let (part, parts) = text.split_once('/')?;
    let (part, parts) = (part.parse().ok()?, parts.parse().ok()?);
    (1..=parts).contains(&part).then_some((part, parts))
}

#[test]
fn parts_have_every_module_once() {
    assert_eq!(parse_part("3/8"), Some((3, 8)));
    assert!(["", "3", "0/8", "9/8", "x/8"].iter().all(|text| parse_part(text).is_none()));
    let all = everything();
    let only = vec!["linear_attention/portable".to_string(), "sm_90a".to_string()];
    let of = |part, only: &[String]| {
        let (only, done) = (only.to_vec(), BTreeSet::new());
        let run = Run { part: (part, 3), effort: Effort::Least, only, end: None, done, journal: None };
        run.part(all.clone())
    };
    let mut parts: Vec<Compilation> = (1..=3).flat_map(|part| of(part, &[])).collect();
    let mut expected = all.clone();
    parts.sort();
    expected.sort();
    assert_eq!(parts, expected);
    let some = (1..=3).flat_map(|part| of(part, &only)).collect::<Vec<_>>();
    let is = |x: &&Compilation| x.0 == "sm_90a" || x.1.family == Family::LinearPortable;
    assert_eq!(some.len(), all.iter().filter(is).count());
}

#[test]
fn what_was_compiled_is_not_compiled_again_unless_its_source_or_the_compiler_is_another() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("done");
    let journal = || OpenOptions::new().create(true).append(true).open(&path).unwrap();
    let run = || Run {
        part: (1, 1),
        effort: Effort::Least,
        only: Vec::new(),
        end: None,
        done: fs::read_to_string(&path).unwrap_or_default().lines().map(str::to_string).collect(),
        journal: Some(Mutex::new(journal())),
    };
    let all = everything();
    run().note(&all[0], "13.0");
    run().note(&all[1], "13.0");
    assert!(run().is_done(&all[0], "13.0") && run().is_done(&all[1], "13.0"));
    assert!(!run().is_done(&all[2], "13.0") && !run().is_done(&all[0], "13.1"));
}
