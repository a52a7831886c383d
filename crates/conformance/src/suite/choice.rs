//! The choice of which laws look at which cases, by the depth of a run.

use crate::cases::{Case, Depth};
use crate::laws::Law;
use etalon_problem::Pass;
use std::collections::BTreeMap;

/// At smoke depth every law looks at as many cases, where there are as many.
const CASES_AT_SMOKE: usize = 2;

/// The gate itself, which every case must pass.
const EVERY_CASE: &str = "bound";

/// Cost of a problem beyond which core depth leaves the second order to full depth: it takes several times what the
/// passes take that it differentiates.
const SECOND_ORDER: f64 = 8e6;

/// Cost of a problem that core depth has for the ways through a kernel: beyond it `bound` looks, and laws about a
/// choice of the caller, such as budgets and tile sizes.
const FOR_WAYS: f64 = 1.2e7;

/// True if core depth affords a law of a pass at a problem of this cost.
pub(super) fn is_affordable(law: &Law, pass: Pass, cost: f64) -> bool {
    let is_for_ways = law.name == EVERY_CASE || law.asks.is_some();
    (pass != Pass::DoubleBackward || cost <= SECOND_ORDER) && (is_for_ways || cost <= FOR_WAYS)
}

/// A law, by number, that applies to a pass of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Applies {
    pub pass: Pass,
    pub law: usize,
    /// True if the law favours the case.
    pub favoured: bool,
}

/// The passes of a case with the laws that apply to them.
pub(crate) fn applicable(laws: &[Law], case: &Case) -> Vec<Applies> {
    let pairs = Pass::ALL.into_iter().flat_map(|pass| (0..laws.len()).map(move |law| (pass, law)));
    let concerned = pairs.filter(|&(pass, law)| laws[law].concerns(case, pass));
    let applies = |(pass, law): (Pass, usize)| Applies {
        pass,
        law,
        favoured: (laws[law].favours)(case, pass),
    };
    concerned.map(applies).collect()
}

/// Of the laws that apply to each case, those that look at it at that depth.
pub(crate) fn choose(
    depth: Depth,
    laws: &[Law],
    applicable: Vec<Vec<Applies>>,
) -> Vec<Vec<(Pass, usize)>> {
    match depth {
        Depth::Smoke => few(laws, applicable),
        Depth::Core => share(laws, applicable),
        Depth::Full | Depth::Soak => {
            let limited = |of: &Applies| laws[of.law].looks.is_some();
            let of_some: Vec<Vec<Applies>> = applicable
                .iter()
                .map(|all| all.iter().copied().filter(limited).collect())
                .collect();
            let some = share(laws, of_some);
            let all = applicable.into_iter().zip(some).map(|(mut all, some)| {
                all.retain(|of| !limited(of));
                [pairs(all), some].concat()
            });
            all.collect()
        }
    }
}

pub(super) fn pairs(all: Vec<Applies>) -> Vec<(Pass, usize)> {
    all.iter().map(|of| (of.pass, of.law)).collect()
}

/// Of the laws that apply to each case, those that look at it: every law gets its quota of cases,
/// first of those that it favours, evenly spread.
fn share(laws: &[Law], applicable: Vec<Vec<Applies>>) -> Vec<Vec<(Pass, usize)>> {
    let mut totals: BTreeMap<Applies, usize> = BTreeMap::new();
    applicable.iter().flatten().for_each(|of| *totals.entry(*of).or_default() += 1);
    let total = |of: &Applies| totals.get(of).copied().unwrap_or(0);
    let mut seen: BTreeMap<Applies, usize> = BTreeMap::new();
    let mut chosen = |of: &Applies| {
        let place = seen.entry(*of).or_default();
        *place += 1;
        let most = laws[of.law].at_core;
        let favoured = total(&Applies { favoured: true, ..*of }).min(most);
        let quota = if of.favoured { favoured } else { most - favoured };
        laws[of.law].name == EVERY_CASE || spread(*place - 1, total(of), quota)
    };
    let of_case = |all: Vec<Applies>| {
        all.into_iter().filter(&mut chosen).map(|of| (of.pass, of.law)).collect()
    };
    applicable.into_iter().map(of_case).collect()
}

/// Of the laws that apply to each case, those that still lack cases, in the order of the cases: the
/// first cases serve most laws, others only what they alone show. The gate judges each of them.
fn few(laws: &[Law], applicable: Vec<Vec<Applies>>) -> Vec<Vec<(Pass, usize)>> {
    let mut seen: BTreeMap<(Pass, usize), usize> = BTreeMap::new();
    let mut lacks = |of: &(Pass, usize)| {
        let cases = seen.entry(*of).or_default();
        *cases += 1;
        *cases <= CASES_AT_SMOKE
    };
    let of_case = |all: Vec<Applies>| {
        let all = all.into_iter().map(|of| (of.pass, of.law));
        let (gate, others): (Vec<_>, Vec<_>) = all.partition(|of| laws[of.1].name == EVERY_CASE);
        let others: Vec<_> = others.into_iter().filter(&mut lacks).collect();
        if others.is_empty() { others } else { [gate, others].concat() }
    };
    applicable.into_iter().map(of_case).collect()
}

/// True if the case at `place` of `total` is one of `quota`, evenly spread.
fn spread(place: usize, total: usize, quota: usize) -> bool {
    let quota = quota.min(total);
    place * quota / total != (place + 1) * quota / total
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::laws::law::{DEAREST, laws};
    use crate::laws::{Judgement, Trial};

    fn holds(_: &Trial<'_>) -> Judgement {
        Ok(None)
    }

    laws! {
        EVERY;
        /// The gate.
        Gate bound = holds on Any;
        /// A law of few looks.
        Probe probe = holds on Any, looks 8;
        /// A law that asks a tier several times.
        Meaning dear = holds on Any, core DEAREST;
        /// A law about a choice of the caller.
        Contract ways = holds on Any asks Partials;
    }

    #[test]
    fn a_law_of_few_looks_has_them_at_every_depth_and_a_dear_one_at_core_depth() {
        let applies = |law| Applies { pass: Pass::Forward, law, favoured: false };
        for (depth, of_dear) in [(Depth::Core, DEAREST), (Depth::Full, 50)] {
            let chosen = choose(depth, LAWS, vec![[0, 1, 2].map(applies).to_vec(); 50]);
            let looks = |law| chosen.iter().flatten().filter(|(_, of)| *of == law).count();
            assert_eq!([0, 1, 2].map(looks), [50, 8, of_dear], "{depth}");
        }
    }

    #[test]
    fn a_dear_problem_is_for_the_ways_through_a_kernel() {
        let affordable = |cost| {
            let laws = ["bound", "ways", "dear"].map(|name| LAWS.iter().find(|x| x.name == name));
            Pass::ALL.map(|pass| laws.map(|law| law.is_some_and(|x| is_affordable(x, pass, cost))))
        };
        assert_eq!(affordable(SECOND_ORDER).as_flattened(), [true; 3 * Pass::ALL.len()]);
        let second = Pass::ALL.iter().position(|&pass| pass == Pass::DoubleBackward).unwrap();
        for (cost, formula) in [(FOR_WAYS, true), (2.0 * FOR_WAYS, false)] {
            let mut expected = [[true, true, formula]; Pass::ALL.len()];
            expected[second] = [false; 3];
            assert_eq!(affordable(cost), expected, "{cost}");
        }
    }

    #[test]
    fn a_spread_has_its_size() {
        for total in [1, 5, 40, 100, 157] {
            for quota in [0, 3, 40] {
                let chosen = (0..total).filter(|&place| spread(place, total, quota)).count();
                assert_eq!(chosen, quota.min(total), "of {total}");
            }
        }
    }
}
