//! The sweeps of a pass, chosen within its budget.

use super::cut::{Cut, RANGE, SweepSpec, TILE};
use super::logits::SLICE;
use crate::tile::BAND;
use crate::{Level, Options};
use etalon_problem::LinearCrossEntropy;

/// The sweeps of a pass.
pub fn sweeps(
    problem: &LinearCrossEntropy,
    options: &Options,
    spec: SweepSpec,
) -> [Option<Cut>; 3] {
    let (threads, budget) = (rayon::current_num_threads(), options.memory_budget);
    match spec.gradients() {
        true => gradients(problem, options.level, spec, threads, budget),
        false => [Some(totals(problem, options.level, spec, threads, budget)), None, None],
    }
}

/// A sweep for the totals alone, within a budget of bytes.
pub fn totals(
    problem: &LinearCrossEntropy,
    level: Level,
    spec: SweepSpec,
    threads: usize,
    budget: usize,
) -> Cut {
    let spec = SweepSpec {
        filter: false,
        ..spec.only(SweepSpec { totals: true, ..SweepSpec::default() })
    };
    let cut = |chunk, threads| Cut::new(problem, level, spec, (chunk, usize::MAX), threads);
    affordable(problem.tokens, threads, budget, 1, cut).unwrap_or_else(|| cut(BAND, 1))
}

/// The sweeps of a backward pass: one, in which the totals come along, or else a sweep for the totals
/// and one or two for the gradients.
fn gradients(
    problem: &LinearCrossEntropy,
    level: Level,
    spec: SweepSpec,
    threads: usize,
    budget: usize,
) -> [Option<Cut>; 3] {
    let tokens = problem.tokens;
    let whole = |spec: SweepSpec| {
        let cut = move |chunk, threads| {
            Cut::new(
                problem,
                level,
                SweepSpec { totals: true, ..spec },
                (chunk, usize::MAX),
                threads,
            )
        };
        affordable(tokens, threads, budget, few(problem, threads), cut)
    };
    let totals = totals(problem, level, spec, threads, budget);
    let [first, second] = after_totals(problem, level, spec, threads, budget);
    let again = [Some(totals), first, second];
    match whole(spec).map(|cut| [Some(cut), None, None]) {
        Some(once) if time(&once) <= time(&again) => once,
        _ => again,
    }
}

/// Time of some sweeps, in the unit of [`time_of`].
fn time<'c>(sweeps: impl IntoIterator<Item = &'c Option<Cut>>) -> f64 {
    sweeps.into_iter().flatten().map(time_of).sum()
}

/// Time of a sweep, against that of a product of the first order on one thread: of products, and of copies of w.
fn time_of(cut: &Cut) -> f64 {
    let SweepSpec { dh, dw, second, bf16, .. } = cut.spec;
    // A copy takes as long as the product with so many tokens.
    let copy = if bf16 { 96.0 } else { 8.0 };
    let with_copy = |tokens: usize| 1.0 + copy / tokens as f64;
    let gradient = |wanted, time| if wanted { time } else { 0.0 };
    let gradients = gradient(dh, with_copy(cut.block)) + gradient(dw, 1.0);
    let logits = with_copy(cut.range);
    // Of three products for logits and their motions two have the same copy.
    let products = if second { 2.0 * logits + 1.0 + 2.0 * gradients } else { logits + gradients };
    let tasks = cut.span.saturating_mul(cut.chunk / BAND);
    products / cut.threads.min(tasks) as f64
}

/// The sweeps for the gradients where totals are known: one, or one each for dh and dw.
pub fn after_totals(
    problem: &LinearCrossEntropy,
    level: Level,
    spec: SweepSpec,
    threads: usize,
    budget: usize,
) -> [Option<Cut>; 2] {
    let together = [again(problem, level, spec, threads, budget), None];
    let dh = spec.only(SweepSpec { dh: true, ..SweepSpec::default() });
    let dw = SweepSpec { dh: false, ..spec };
    let least = |spec: SweepSpec| Cut {
        classes_outside: spec == dw && spec.dw_apart,
        ..Cut::new(problem, level, spec, (BAND, 1), 1)
    };
    let sweep = |part: SweepSpec| {
        again(problem, level, part, threads, budget).unwrap_or_else(|| least(part))
    };
    // A filter alone chooses in the sweep for dh, if there is one.
    let second = dw.dw || dw.dbias || !spec.dh;
    let apart = [spec.dh.then(|| sweep(dh)), second.then(|| sweep(dw))];
    match together[0].is_some() && time(&together) <= time(&apart) {
        true => together,
        false => apart,
    }
}

/// A sweep that computes the logits again, of the tokens and threads that fit the fastest, and of those as many
/// classes at a time as fit.
fn again(
    problem: &LinearCrossEntropy,
    level: Level,
    spec: SweepSpec,
    threads: usize,
    budget: usize,
) -> Option<Cut> {
    let tiles = problem.vocab.div_ceil(TILE);
    let apart = spec.dw && spec.dw_apart;
    let threads = [threads, threads.div_ceil(2), threads.div_ceil(4), 1];
    let tokens = [RANGE, 8 * BAND, 6 * BAND, 4 * BAND, 3 * BAND, 2 * BAND, BAND];
    let tokens = tokens.into_iter().filter(|&chunk| chunk < problem.tokens + BAND);
    let cuts = tokens.flat_map(|chunk| threads.map(|threads| (chunk, threads)));
    let cuts = cuts.filter_map(|(chunk, threads)| {
        let spans = (0..=tiles.ilog2()).rev().map(|k| 1 << k);
        let mut spans = spans.filter(|&span| span >= LEAST.min(tiles)).map(|span| {
            let cut = Cut::new(problem, level, spec, (chunk, span), threads);
            Cut { classes_outside: apart, ..cut }
        });
        spans.find(|cut| cut.bytes() <= budget)
    });
    // Of equals the first, of the most tokens.
    cuts.min_by(|x, y| time_of(x).total_cmp(&time_of(y)))
}

/// Fewer tokens than these are not worth keeping all of their logits: half of the threads have no part of dh.
fn few(problem: &LinearCrossEntropy, threads: usize) -> usize {
    let slices = problem.dim.div_ceil(SLICE).max(1);
    threads.div_ceil(2 * slices).saturating_mul(BAND)
}

/// Tiles that a sweep takes at a time, at least, if it can.
const LEAST: usize = 2;

/// The most tokens at a time, at least `few` or all, and then the most threads, that a budget affords.
fn affordable(
    tokens: usize,
    threads: usize,
    budget: usize,
    few: usize,
    cut: impl Fn(usize, usize) -> Cut,
) -> Option<Cut> {
    let few = few.min(tokens).max(1);
    [threads, threads.div_ceil(2), threads.div_ceil(4), 1].into_iter().find_map(|threads| {
        let mut chunk = tokens.next_multiple_of(BAND).max(BAND);
        loop {
            let cut = cut(chunk, threads);
            let bytes = cut.bytes();
            if bytes <= budget {
                return Some(cut);
            }
            // In proportion, a little less, and always less.
            let less = (chunk as f64 * budget as f64 / bytes as f64) as usize;
            let less = less.max(chunk / 2).min(chunk - 1) / BAND * BAND;
            if less < few.next_multiple_of(BAND) {
                return None;
            }
            chunk = less;
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With 16 MiB, the logits of 96 tokens are kept where they leave room for every thread. On eight threads two
    /// of them may find room: more products on more of them take less time.
    #[test]
    fn logits_are_kept_where_enough_threads_fit() {
        let problem = LinearCrossEntropy::new(1024, 1024, 32_000);
        let spec = SweepSpec { dh: true, dw: true, ..SweepSpec::default() };
        for &level in Level::available() {
            let of = |threads| gradients(&problem, level, spec, threads, 16 << 20);
            for threads in [1, 2] {
                let [Some(cut), None, None] = of(threads) else { panic!("{level}: logits twice") };
                assert_eq!((cut.chunk, cut.threads), (BAND, threads), "{level}");
            }
            let [first, second] = after_totals(&problem, level, spec, 8, 16 << 20);
            let again = [Some(totals(&problem, level, spec, 8, 16 << 20)), first, second];
            assert!(time(&of(8)) <= time(&again), "{level}: the logits again take less");
        }
    }
}
