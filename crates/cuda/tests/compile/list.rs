//! The list of what CI compiles, `list.txt` beside this file: a line for each module, by the name that the snapshot
//! has for it, with the kernels that are compiled of it. It must have every kernel for every architecture of CI that
//! it serves and with every value of each of its compile-time names; where it lacks one, a test says which lines give
//! it.

use crate::report::{Compilation, module};
use etalon_cuda::Target;
use etalon_cuda::kernels::{Family, Variant, every_variant};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// The architectures that kernels are compiled for.
pub const ARCHITECTURES: [&str; 7] = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"];

/// Architectures of CI: the oldest, those of Hopper, the newest. The others have the instructions of one of them; only
/// the whole matrix compiles for them.
const OF_CI: [&str; 4] = ["sm_80", "sm_90", "sm_90a", "sm_120"];

/// Some kernels of a compilation.
pub type Excerpt = (Compilation, Vec<&'static str>);

/// Every variant, for each architecture that it serves.
pub fn everything() -> Vec<Compilation> {
    let serves = |architecture: &str, variant: &Variant| {
        let device = Target::of(architecture).unwrap().capability;
        let own = variant.family.architecture_on(device);
        own.as_deref() == Some(architecture) && variant.fits(architecture)
    };
    let all = every_variant().into_iter().flat_map(|variant| {
        let own = ARCHITECTURES.into_iter().filter(|architecture| serves(architecture, &variant));
        own.map(|architecture| (architecture, variant.clone())).collect::<Vec<_>>()
    });
    all.collect()
}

/// The compilations for the architectures of CI.
fn of_ci() -> Vec<Compilation> {
    everything().into_iter().filter(|x| OF_CI.contains(&x.0)).collect()
}

/// A compilation with all of its kernels.
pub fn whole(compilation: &Compilation) -> Excerpt {
    (compilation.clone(), compilation.1.kernels())
}

/// The modules that CI compiles.
pub fn listed() -> Vec<Excerpt> {
    let lines = include_str!("list.txt").lines();
    read(lines, &everything()).unwrap_or_else(|fault| panic!("list.txt: {fault}"))
}

/// Reads lines; of the first that names no module, or a kernel that its module lacks, says so.
fn read<'a>(lines: impl Iterator<Item = &'a str>, all: &[Compilation]) -> Result<Vec<Excerpt>, String> {
    let modules: BTreeMap<String, &Compilation> = all.iter().map(|x| (module(x), x)).collect();
    let excerpt = |line: &str| {
        let (name, kernels) = line.split_once(": ").ok_or(format!("no kernels: {line}"))?;
        let &compilation = modules.get(name).ok_or(format!("there is no module {name}"))?;
        let own = compilation.1.kernels();
        let known = |kernel| {
            let found = own.iter().find(|own| **own == kernel);
            found.copied().ok_or(format!("{name} has no kernel {kernel}"))
        };
        let kernels = kernels.split(' ').map(known).collect::<Result<_, String>>()?;
        Ok((compilation.clone(), kernels))
    };
    lines.map(excerpt).collect()
}

fn line((compilation, kernels): &Excerpt) -> String {
    format!("{}: {}", module(compilation), kernels.join(" "))
}

/// A kernel of a family with an architecture, or with the value of a compile-time name.
type Need = (Family, &'static str, String);

fn needs((architecture, variant): &Compilation, kernel: &'static str) -> Vec<Need> {
    let values = variant.defines.iter().map(|(name, value)| format!("{name}={value}"));
    let settings = values.chain([architecture.to_string()]);
    settings.map(|setting| (variant.family, kernel, setting)).collect()
}

fn met(list: &[Excerpt]) -> BTreeSet<Need> {
    let of = |(compilation, kernels): &Excerpt| {
        kernels.iter().flat_map(|kernel| needs(compilation, kernel)).collect::<Vec<_>>()
    };
    list.iter().flat_map(of).collect()
}

/// The needs of these compilations that a list does not meet, and modules that meet them, few rather than quick ones:
/// a module that the list has comes with the kernels that it has there.
fn absent(list: &[Excerpt], all: &[Compilation]) -> (BTreeSet<Need>, Vec<Excerpt>) {
    let whole: Vec<Excerpt> = all.iter().map(whole).collect();
    let absent: BTreeSet<Need> = met(&whole).difference(&met(list)).cloned().collect();
    let listed: BTreeMap<&Compilation, &Vec<&str>> = list.iter().map(|(x, y)| (x, y)).collect();
    let (mut open, mut lines) = (absent.clone(), Vec::new());
    while !open.is_empty() {
        let gives = |x: &Compilation, kernel: &'static str| {
            needs(x, kernel).into_iter().filter(|need| open.contains(need)).count()
        };
        let worth = |x: &Compilation| -> usize { x.1.kernels().iter().map(|y| gives(x, y)).sum() };
        let best = all.iter().min_by_key(|&x| Reverse((worth(x), listed.contains_key(x)))).unwrap();
        let had = |kernel: &str| listed.get(best).is_some_and(|own| own.contains(&kernel));
        let kernels = best.1.kernels().into_iter().filter(|y| had(y) || gives(best, y) > 0);
        let excerpt = (best.clone(), kernels.collect());
        let given = met(std::slice::from_ref(&excerpt));
        open.retain(|need| !given.contains(need));
        lines.push(excerpt);
    }
    (absent, lines)
}

#[test]
fn every_kernel_is_listed_for_the_architectures_of_ci_and_with_every_value() {
    let (absent, lines) = absent(&listed(), &of_ci());
    let absent: Vec<String> =
        absent.iter().map(|(family, kernel, with)| format!("{family} {kernel}: {with}")).collect();
    let lines: Vec<String> = lines.iter().map(line).collect();
    assert!(
        absent.is_empty(),
        "list.txt lacks\n{}\nLines that give it, in place of those of the same modules:\n{}",
        absent.join("\n"),
        lines.join("\n")
    );
}

#[test]
fn modules_are_listed_once_in_order_and_are_few() {
    let modules: Vec<String> = listed().iter().map(|x| module(&x.0)).collect();
    for pair in modules.windows(2) {
        assert!(pair[0] < pair[1], "{} must come before {}", pair[1], pair[0]);
    }
    // Two cores take a minute for as many.
    assert!(modules.len() <= 141, "{}", modules.len());
}

/// The compilations of a family in CI.
fn of(family: Family) -> Vec<Compilation> {
    of_ci().into_iter().filter(|x| x.1.family == family).collect()
}

#[test]
fn absent_kernels_are_reported_with_the_lines_to_add() {
    let all = of(Family::Tables);
    let list: Vec<Excerpt> = listed().into_iter().filter(|x| all.contains(&x.0)).collect();
    let report = |list: &[Excerpt]| {
        let (absent, lines) = absent(list, &all);
        let needs = absent.iter().map(|need| format!("{} {}", need.1, need.2));
        (needs.collect::<Vec<_>>(), lines.iter().map(line).collect::<Vec<_>>())
    };
    assert_eq!(report(&list), (vec![], vec![]));
    let rest: Vec<Excerpt> = list.iter().filter(|x| x.0.0 != "sm_120").cloned().collect();
    let lines = vec!["sm_120 pairs/tables: sequences rows intervals".to_string()];
    let needs = ["intervals sm_120", "rows sm_120", "sequences sm_120"].map(str::to_string);
    assert_eq!(report(&rest), (needs.to_vec(), lines.clone()));
    // With what its line has.
    let mut rest = list.clone();
    rest.iter_mut().filter(|x| x.0.0 == "sm_120").for_each(|x| x.1 = vec!["sequences"]);
    assert_eq!(report(&rest), (needs[..2].to_vec(), lines));
}

#[test]
fn lines_to_add_give_a_family_all_that_it_needs() {
    // Options, widths and architectures.
    let all = of(Family::AttentionSm80Fused);
    let (needed, lines) = absent(&[], &all);
    for need in [("fused", "sm_120"), ("collect", "CE=128"), ("fused", "STORAGE=2")] {
        assert!(needed.contains(&(Family::AttentionSm80Fused, need.0, need.1.to_string())));
    }
    let lines: Vec<String> = lines.iter().map(line).collect();
    let read = read(lines.iter().map(String::as_str), &all).unwrap();
    assert!(read.len() <= 6, "three architectures, and at most three values of two names: {lines:?}");
    assert_eq!(absent(&read, &all), (BTreeSet::new(), vec![]));
}

#[test]
fn lines_of_what_there_is_not_are_refused() {
    let all = of(Family::Tables);
    for (line, part) in [
        ("sm_80 pairs/tables", "no kernels: sm_80 pairs/tables"),
        ("sm_90a pairs/tables: rows", "no module sm_90a pairs/tables"),
        ("sm_80 pairs/tables: rows columns", "no kernel columns"),
    ] {
        let fault = read([line].into_iter(), &all).unwrap_err();
        assert!(fault.contains(part), "{fault}");
    }
}
