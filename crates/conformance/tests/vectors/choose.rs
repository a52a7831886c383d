//! The choice of vectors: those of the list stay, and others come in until every value of every axis, every probe and
//! every bug of the zoo that outputs alone can show has one, the smallest first.

use crate::common::{notices, size};
use etalon_conformance::bounds::bounds;
use etalon_conformance::cases::{Depth, Spec, specs};
use etalon_conformance::gates::{generic, informative};
use etalon_conformance::laws::{self, Kind};
use etalon_conformance::profile::Profile;
use etalon_conformance::vector_set::{Id, core, digest};
use etalon_conformance::zoo::mutants;
use etalon_problem::{Algorithm, Dtype, Operand, Pass, Role};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// The most bytes of a vector, but for the only one with a value.
const LARGEST: usize = 80_000;

/// The most bytes of all questions of a probe.
const LARGEST_PROBE: usize = 60_000;

/// The most bytes of the plain vectors of an algorithm.
const PLAIN: usize = 220_000;

/// As many vectors have the flag of a bug: those that notice the fewest others.
const FLAGGED: usize = 3;

/// The purpose of a vector: a value with a pass, or with any.
type Aim = (Algorithm, &'static str, String);

struct Candidate {
    id: Id,
    size: usize,
    aims: BTreeSet<Aim>,
}

/// An output of fewer numbers shows nothing of the values of a case but its shape.
const FEW: usize = 150;

/// The most bytes of the vectors of an algorithm that have pairs of a pass and a value.
const BUDGET: usize = 560_000;

fn candidate(spec: &Spec, pass: Pass) -> Option<Candidate> {
    let id = Id::new(spec, pass).ok()?;
    let question = id.question().ok()?;
    let operands = question.problem.operands(pass);
    let results = operands.iter().filter(|x| x.role == Role::Output).map(Operand::len);
    let shows = results.sum::<usize>() >= FEW;
    let algorithm = spec.algorithm;
    let values = spec.values().into_iter().filter(|x| shows || x.starts_with("shape="));
    let values: Vec<String> = values.chain([format!("type={}", spec.dtype)]).collect();
    let mut aims: BTreeSet<Aim> = values.iter().map(|x| (algorithm, "any", x.clone())).collect();
    aims.insert((algorithm, "any", pass.to_string()));
    aims.extend(values.into_iter().map(|x| (algorithm, pass.name(), x)));
    Some(Candidate { size: size(&question), id, aims })
}

fn candidates(algorithm: Algorithm) -> Vec<Candidate> {
    let specs: Vec<Spec> =
        specs(algorithm, Depth::Core, 0).filter(|spec| !spec.is_large()).collect();
    let passes = |spec: &Spec| -> Vec<Candidate> {
        algorithm.passes().iter().filter_map(|&pass| candidate(spec, pass)).collect()
    };
    specs.par_iter().flat_map_iter(passes).collect()
}

/// Vectors that simple kernels take, too: random elements and no options, of the shapes that show most.
fn plain(algorithm: Algorithm) -> Vec<Id> {
    let (options, shapes): (&[&str], &[&str]) = match algorithm {
        Algorithm::LinearAttention => (
            &["", ".decay=per_head", ".decay=per_token"],
            &[".shape=lattice", ".shape=tail_one", ".shape=groups"],
        ),
        Algorithm::LinearCrossEntropy => (
            &["", ".link=bias", ".link=softcap"],
            &[".shape=small", ".shape=ragged", ".shape=wide"],
        ),
        _ => (
            &["", ".mask=causal"],
            &[".shape=row", ".shape=square", ".shape=wide", ".shape=tail_one", ".shape=groups"],
        ),
    };
    let mut found = Vec::new();
    for shape in shapes {
        for option in options {
            // The axis of shapes stands behind that of masks and of decays, and before that of links.
            let values = match algorithm {
                Algorithm::LinearCrossEntropy => format!("{shape}{option}"),
                _ => format!("{option}{shape}"),
            };
            for kind in ["forward.f32", "backward.f32", "forward.bf16", "backward.bf16"] {
                found.push(format!("{algorithm}.{kind}{values}").parse().unwrap());
            }
        }
    }
    let mut left = PLAIN;
    let sizes = found.into_iter().map(|id: Id| (size(&id.question().unwrap()), id));
    let fits = sizes.filter(|(size, _)| {
        let fits = *size <= left.min(LARGEST / 2);
        left -= if fits { *size } else { 0 };
        fits
    });
    fits.map(|x| x.1).collect()
}

/// Tells whether bounds could notice anything, where inputs are generic.
fn is_useful(id: &Id) -> bool {
    let Ok(question) = id.question() else { return false };
    let (problem, pass, dtype) = (&question.problem, question.pass, question.dtype);
    let exact = bounds(problem, pass, dtype, &Profile::flash(dtype), &question.inputs);
    exact.is_ok_and(|exact| {
        generic(problem, pass, &question.inputs).is_err() || informative(&exact).is_ok()
    })
}

/// The ids of the set: those of the list, then those that are new.
fn ids() -> Vec<Id> {
    let mut chosen: Vec<Id> = core().unwrap().into_iter().map(|x| x.id).collect();
    let mut have: BTreeSet<Aim> = BTreeSet::new();
    for id in &chosen {
        have.extend(candidate(id.spec(), id.pass()).into_iter().flat_map(|x| x.aims));
    }
    let mut unflagged: BTreeSet<&str> = mutants().iter().map(|x| x.name).collect();
    for algorithm in Algorithm::ALL {
        let mut all = candidates(algorithm);
        all.retain(|x| !chosen.contains(&x.id));
        let own = chosen.iter().filter(|id| id.spec().algorithm == algorithm);
        let spent: usize = own.map(|id| 3000 + size(&id.question().unwrap())).sum();
        let mut left = BUDGET.saturating_sub(spent);
        // First every value once, then with every pass, as far as the budget goes.
        for pairs in [false, true] {
            loop {
                let counts = |aim: &&Aim| (pairs || aim.1 == "any") && !have.contains(*aim);
                let new = |x: &Candidate| x.aims.iter().filter(counts).count();
                // As much as possible for the bytes, of which each vector has some thousands besides.
                let worth = |x: &Candidate| new(x) as f64 / (3000 + x.size) as f64;
                let fits = |x: &Candidate| new(x) > 0 && (!pairs || x.size <= left.min(LARGEST));
                let best = all.iter().enumerate().filter(|(_, x)| fits(x));
                let best = best.max_by(|a, b| worth(a.1).total_cmp(&worth(b.1))).map(|x| x.0);
                let Some(best) = best else { break };
                let best = all.swap_remove(best);
                if is_useful(&best.id) {
                    left = left.saturating_sub(best.size + 3000);
                    have.extend(best.aims);
                    chosen.push(best.id);
                }
            }
        }
        let new = plain(algorithm).into_iter().filter(|id| !chosen.contains(id));
        chosen.extend(new.collect::<Vec<_>>());
        probes(algorithm, &mut chosen);
        bugs(algorithm, &mut chosen, &mut unflagged);
    }
    unflagged.iter().for_each(|name| println!("no vector notices {name}"));
    chosen
}

/// Adds the questions of every probe that the list lacks, on the case on which they take the fewest bytes.
fn probes(algorithm: Algorithm, chosen: &mut Vec<Id>) {
    let asked = laws::all().into_iter().filter(|law| law.kind == Kind::Probe);
    for law in asked.filter(|law| law.of.contains(&algorithm)) {
        for &pass in law.passes {
            let asks = |id: &Id| {
                let probe = id.probe().is_some_and(|(probe, _)| probe.law == law.name);
                probe && id.spec().algorithm == algorithm && id.pass() == pass
            };
            if law.name == "random_probe" || chosen.iter().any(asks) {
                continue;
            }
            let specs: Vec<Spec> =
                specs(algorithm, Depth::Core, 0).filter(|spec| !spec.is_large()).collect();
            let asked = specs.par_iter().filter_map(|spec| {
                let id = Id::new(&Spec { dtype: Dtype::F32, ..*spec }, pass).ok()?;
                let questions = id.asking(law.name, 1).probe()?.0.questions().ok()?;
                let size: usize = questions.iter().map(size).sum();
                (size <= LARGEST_PROBE).then_some((size, questions.len(), id))
            });
            // Cases of many rows show more than those of one.
            let asked: Vec<(usize, usize, Id)> = asked.collect();
            let rich = asked.iter().filter(|x| x.0 > 10_000).min_by_key(|x| x.0);
            if let Some((_, count, id)) = rich.or(asked.iter().max_by_key(|x| x.0)) {
                chosen.extend((1..=*count).map(|number| id.asking(law.name, number)));
            } else {
                println!("no case of {algorithm} {pass} is small enough for {}", law.name);
            }
        }
    }
}

/// Adds vectors for bugs that no chosen one notices.
fn bugs(algorithm: Algorithm, chosen: &mut Vec<Id>, unflagged: &mut BTreeSet<&str>) {
    let own = mutants().into_iter().filter(|x| x.of.contains(&algorithm));
    let own: Vec<_> = own.collect();
    let ours = || chosen.iter().filter(|id| id.spec().algorithm == algorithm);
    let mut noticed: BTreeSet<&str> = BTreeSet::new();
    let found: Vec<Vec<&'static str>> =
        ours().collect::<Vec<_>>().par_iter().map(|id| notices(id, &own)).collect();
    noticed.extend(found.into_iter().flatten());
    unflagged.retain(|name| !noticed.contains(name));
    let mut others = candidates(algorithm);
    others.retain(|x| x.size <= LARGEST && !chosen.contains(&x.id));
    others.sort_by_key(|x| x.size);
    for other in others {
        let left: Vec<_> = own.iter().copied().filter(|x| unflagged.contains(x.name)).collect();
        if left.is_empty() {
            break;
        }
        let found = notices(&other.id, &left);
        if !found.is_empty() && is_useful(&other.id) {
            unflagged.retain(|name| !found.contains(name));
            chosen.push(other.id);
        }
    }
}

/// The lines of the list.
pub fn lines() -> Vec<String> {
    let ids = ids();
    let bugs = mutants();
    let found: Vec<Vec<&'static str>> = ids.par_iter().map(|id| notices(id, &bugs)).collect();
    let mut flags: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
    for bug in &bugs {
        let mut own: Vec<usize> =
            (0..ids.len()).filter(|&at| found[at].contains(&bug.name)).collect();
        own.sort_by_key(|&at| found[at].len());
        own.truncate(FLAGGED);
        own.into_iter().for_each(|at| flags.entry(at).or_default().push(bug.name));
    }
    let line = |(at, id): (usize, &Id)| {
        let (id, question) = (id.to_string(), id.question().unwrap());
        let flags = flags.get(&at).map_or(String::new(), |x| format!(" {}", x.join(",")));
        format!("{id} {}{flags}", digest(&id, &question).unwrap())
    };
    ids.iter().enumerate().map(line).collect()
}
