//! Several ways to one number: parts of a problem, each computed by itself, give what the whole gives.
//!
//! Allowances follow from the bounds of the whole and of the parts, (N112) and (N113).

use super::compare::{Strict, allowance, close};
use super::determinism::{same_alone, same_as};
use super::flaw::{Flaw, Judgement, worst};
use super::forms::small;
use super::law::{DEAR, DEAREST, laws, many_ways, scores_are};
use super::part::Part;
use super::tensors::{change_each, result, returned};
use super::trial::Trial;
use super::visible::Visible;
use crate::bounds::Bounds;
use crate::cases::Case;
use crate::generate::Stream;
use crate::tensor::Tensors;
use etalon_problem::{
    Align, Axis, Error, LinearCrossEntropy, Mask, NamedArray, Pass, Problem, Reduction, Sequences,
};
use ndarray::{ArrayD, s};
use std::collections::BTreeMap;
use std::ops::Range;

laws! {
    SCORES;
    /// A sequence of a batch, packed or padded or neither, gives alone what it gives there.
    Meaning sequences_alone of SEQUENCES if |case, _| sequences(&case.problem).len() > 1,
        favour many_ways, core DEAR;
    /// Queries in chunks, each with the keys up to its end, and the last query alone, give the rows of the whole, and
    /// gradients that add up to those of the whole.
    Meaning chunks_of_queries if |case, _| {
        scores_are(case, |s| s.sequences == Sequences::Dense && s.extents.queries > 1)
            && small(case)
            && ends_with_its_keys(case)
    }, favour continues, core DEAR;
    /// Keys in two chunks, put together by their lse, give the rows of the whole.
    Meaning chunks_of_keys of ATTENTION on Forward if |case, _| {
        scores_are(case, |s| {
            s.sequences == Sequences::Dense && s.extents.keys > 1 && s.extents.queries > 0
        }) && small(case)
    }, favour combines, core DEAREST;
    /// Tokens in chunks, the last alone, give the losses of the whole, and gradients that add up to those of the
    /// whole.
    Meaning chunks_of_tokens of LINEAR_CROSS_ENTROPY if |case, _| {
        losses(case).is_ok_and(|x| {
            x.tokens > 1 && matches!(x.reduction, Reduction::None | Reduction::Sum)
        })
    }, core DEAREST;
}

fn losses(case: &Case) -> Result<&LinearCrossEntropy, Error> {
    (&case.problem).try_into()
}

/// True if a mask stands beside an option: few cases of a single query have both.
fn continues(case: &Case, _: Pass) -> bool {
    scores_are(case, |s| s.mask != Mask::Full && (s.softcap.is_some() || s.sinks))
}

/// True if a chunk without the sink has options together that no case has without it.
fn combines(case: &Case, _: Pass) -> bool {
    scores_are(case, |s| s.sinks && s.softcap.is_some())
}

/// True unless the keys up to the end of a chunk count distances from elsewhere.
fn ends_with_its_keys(case: &Case) -> bool {
    let Problem::LazyAttention(problem) = &case.problem else { return true };
    let e = problem.scores.extents;
    problem.bias.is_none_or(|bias| {
        let causal = problem.scores.mask == Mask::causal();
        causal && bias.align == Align::BottomRight && e.keys >= e.queries
    })
}

/// Each sequence as a part.
fn sequences(problem: &Problem) -> Vec<Part> {
    match problem {
        Problem::LinearAttention(x) => {
            x.list_sequences().iter().map(Part::token_sequence).collect()
        }
        _ => problem
            .scores()
            .map_or(Vec::new(), |scores| scores.sequences().iter().map(Part::sequence).collect()),
    }
}

/// Axes along which results of a sequence are its own.
const ROWS: &[Axis] = &[Axis::Batch, Axis::Sequences];

/// Sequences that are tried of one case.
const TRIED: usize = 3;

fn sequences_alone(trial: &Trial<'_>) -> Judgement {
    let parts = sequences(&trial.case.problem);
    let first = Stream::new(trial.case.spec.seed, "sequences_alone").below(0, parts.len());
    worst((0..parts.len().min(TRIED)).map(|i| {
        let at = (first + i * parts.len().div_ceil(TRIED)) % parts.len();
        let what = format!("sequence {at} alone");
        same_alone(trial, Strict::Bound, &parts[at], ROWS, &what)
    }))
}

/// A part as a problem of its own.
struct Chunk {
    part: Part,
    problem: Problem,
    what: String,
}

/// Some queries and keys of every batch element with the pairs that the whole allows: by the mask of the whole where
/// that says so, else by none, a causal one, or an array.
fn chunk(whole: &Problem, allowed: &Visible, queries: Range<usize>, keys: Range<usize>) -> Chunk {
    let what = format!("queries {queries:?} with keys {keys:?}");
    let part = Part::of(Axis::Queries, queries.clone()).and(Axis::Keys, keys.clone());
    let mut problem = part.problem(whole);
    if let Some(scores) = problem.scores_mut() {
        let pairs = allowed.pairs.slice(s![.., .., queries, keys]);
        let flags: Vec<bool> = pairs.iter().copied().collect();
        let array = Mask::Array(NamedArray::new("visible", pairs.shape(), flags));
        for mask in [scores.mask.clone(), Mask::Full, Mask::causal(), array] {
            scores.mask = mask;
            if Visible::new(scores, &Tensors::new()).pairs == pairs {
                break;
            }
        }
    }
    Chunk { part, problem, what }
}

/// The chunks at the first place at which a tier takes all; of one that takes at none all, the first `least`.
fn drawn(
    trial: &Trial<'_>,
    n: usize,
    least: usize,
    chunks: &dyn Fn(usize) -> Vec<Chunk>,
) -> Vec<Chunk> {
    let takes = |chunk: &Chunk| trial.tier.takes(&chunk.problem, trial.pass, trial.case.dtype);
    let found = [usize::MAX, least].into_iter().find_map(|least| {
        let mut all =
            places(trial, n).map(|at| chunks(at).into_iter().take(least).collect::<Vec<_>>());
        all.find(|chunks| chunks.iter().all(takes))
    });
    found.unwrap_or_else(|| places(trial, n).next().map_or(Vec::new(), chunks))
}

/// Places from 1 to n − 1 to cut a case: one that is drawn, then such as kernels take that want halves or whole tiles.
pub(super) fn places(trial: &Trial<'_>, n: usize) -> impl Iterator<Item = usize> {
    let stream = Stream::new(trial.case.spec.seed, &trial.case.name);
    let at = 1 + stream.below(0, n - 1);
    let all = [at, n / 2, at / 64 * 64, at / 16 * 16, at / 8 * 8, n - 1];
    all.into_iter().filter(move |at| (1..n).contains(at))
}

/// The rows up to a place, those behind it, and the last alone.
fn stretches(at: usize, n: usize) -> impl Iterator<Item = Range<usize>> {
    [0..at, at..n - 1, n - 1..n].into_iter().filter(|rows| !rows.is_empty())
}

fn chunks_of_queries(trial: &Trial<'_>) -> Judgement {
    let (whole, scores) = (&trial.case.problem, trial.case.scores()?);
    let (n, m) = (scores.extents.queries, scores.extents.keys);
    let allowed = Visible::new(scores, &Tensors::new());
    // The keys up to the end of the first rows, unless these see more.
    let keys = |rows: usize| {
        let end = (rows + m).checked_sub(n).filter(|&end| end > 0).unwrap_or(m);
        let later = allowed.pairs.slice(s![.., .., ..rows, end.min(m)..]);
        if later.iter().any(|seen| *seen) { m } else { end.min(m) }
    };
    let chunks = drawn(trial, n, 1, &|at| {
        let chunk = |rows: Range<usize>| {
            let keys = if rows.end == n { m } else { keys(rows.end) };
            chunk(whole, &allowed, rows, 0..keys)
        };
        stretches(at, n).map(chunk).collect()
    });
    add_up(trial, &chunks)
}

fn chunks_of_tokens(trial: &Trial<'_>) -> Judgement {
    let (whole, tokens) = (&trial.case.problem, losses(trial.case)?.tokens);
    let chunk = |tokens: Range<usize>| {
        let (what, part) = (format!("tokens {tokens:?}"), Part::of(Axis::Targets, tokens));
        Chunk { problem: part.problem(whole), part, what }
    };
    add_up(trial, &drawn(trial, tokens, 1, &|at| stretches(at, tokens).map(&chunk).collect()))
}

/// The roundings of sums of this size that are computed here, in f64.
fn here(x: f64) -> f64 {
    x.abs() * 0.5f64.powi(40)
}

/// The results of a chunk with their bounds.
fn asked(trial: &Trial<'_>, chunk: &Chunk) -> Result<(Tensors, Bounds), Flaw> {
    let inputs = chunk.part.tensors(&trial.case.problem, trial.inputs());
    let outputs = trial.ask(&chunk.problem, &inputs).map_err(|flaw| flaw.of(&chunk.what))?;
    Ok((outputs, trial.bounds_of(&chunk.problem, &inputs)?))
}

/// Fails unless the results of chunks are those of the whole: rows one after the other, and sums over rows added up
/// (N112). Of a first chunk alone its rows are compared.
fn add_up(trial: &Trial<'_>, chunks: &[Chunk]) -> Judgement {
    if let [Chunk { part, problem, what }] = chunks {
        let rows = [Axis::Queries, Axis::Targets];
        return same_as(trial, Strict::Bound, (part, problem), &rows, what);
    }
    let (whole, clean, bounds) = (&trial.case.problem, trial.clean()?, trial.bounds()?);
    let mut sums = BTreeMap::new();
    // Without a mean its divisor is no sum.
    for name in clean.keys().filter(|name| *name != "normaliser") {
        let limit = allowance(&bounds.outputs[name]);
        sums.insert(name.as_str(), (ArrayD::<f64>::zeros(limit.raw_dim()), limit));
    }
    for chunk in chunks {
        let (outputs, bounds) = asked(trial, chunk)?;
        for (name, (sum, limit)) in &mut sums {
            let value = returned(&outputs, name)?.numbers(name)?;
            let own = allowance(&bounds.outputs[*name]) + value.mapv(here);
            let mut place = chunk.part.place(whole, name, sum);
            place += &value;
            let mut place = chunk.part.place(whole, name, limit);
            place += &own;
        }
    }
    worst(
        sums.iter()
            .map(|(name, (sum, limit))| close(name, &clean[*name].numbers(name)?, sum, limit)),
    )
    .map_err(|flaw| flaw.of(&together(chunks)))
}

/// The chunks in words.
fn together(chunks: &[Chunk]) -> String {
    chunks.iter().map(|chunk| chunk.what.as_str()).collect::<Vec<_>>().join(", and ")
}

/// The rows whose keys are cut: all, or under a causal mask those that see the second chunk.
fn chunks_of_keys(trial: &Trial<'_>) -> Judgement {
    let (whole, scores) = (&trial.case.problem, trial.case.scores()?);
    let (n, m) = (scores.extents.queries, scores.extents.keys);
    let allowed = Visible::new(scores, &Tensors::new());
    let before = |at: usize| match scores.mask == Mask::causal() {
        true => (at + n).saturating_sub(m).min(n - 1),
        false => 0,
    };
    let chunks = drawn(trial, m, 2, &|at| {
        let [first, mut last] =
            [0..at, at..m].map(|keys| chunk(whole, &allowed, before(at)..n, keys));
        // A sink is a logit of one of them.
        if let Some(scores) = last.problem.scores_mut() {
            scores.sinks = false;
        }
        vec![first, last]
    });
    let parts = chunks.iter().map(|chunk| asked(trial, chunk)).collect::<Result<Vec<_>, _>>()?;
    let (clean, bounds, rows) = (trial.clean()?, trial.bounds()?, &chunks[0].part);
    let lse = of_parts(&parts, "lse")?;
    worst(clean.iter().map(|(name, got)| {
        let exact = &bounds.outputs[name];
        let of_rows = |x: &ArrayD<f64>| rows.array(whole, name, x);
        let (value, bound) = merge(&lse, &of_parts(&parts, name)?, &of_rows(&exact.value));
        // Of the rows before them nothing is required.
        let mut merged = exact.value.clone();
        let mut limit = ArrayD::from_elem(merged.raw_dim(), f64::INFINITY);
        rows.place(whole, name, &mut merged).assign(&value);
        rows.place(whole, name, &mut limit).assign(&(bound + of_rows(&allowance(exact))));
        close(name, &got.numbers(name)?, &merged, &limit)
    }))
    .map_err(|flaw| flaw.of(&together(&chunks)))
}

/// An output of a chunk: what the kernel returns, the exact values, and how far they may lie apart.
struct Output {
    got: ArrayD<f64>,
    exact: ArrayD<f64>,
    limit: ArrayD<f64>,
}

fn of_parts(parts: &[(Tensors, Bounds)], name: &str) -> Result<Vec<Output>, Flaw> {
    let part = |(outputs, bounds): &(Tensors, Bounds)| {
        let (got, exact) = (result(outputs, name)?, &bounds.outputs[name]);
        Ok(Output { got, exact: exact.value.clone(), limit: allowance(exact) })
    };
    parts.iter().map(part).collect()
}

/// The output of chunks of keys together, and how far it may be off: (N113). `whole` has the exact one.
fn merge(lse: &[Output], x: &[Output], whole: &ArrayD<f64>) -> (ArrayD<f64>, ArrayD<f64>) {
    let (mut value, mut limit) = (whole.clone(), whole.clone());
    let of_lse = whole.ndim() == 3;
    change_each(&mut value, |at, value| {
        let row = &at[..3];
        let (w, all) = weights(lse.iter().map(|x| x.got[row]));
        let (exact, _) = weights(lse.iter().map(|x| x.exact[row]));
        // A chunk without a visible key has no weight.
        let most = lse.iter().filter(|x| x.exact[row] > f64::NEG_INFINITY);
        let most = most.fold(0.0f64, |most, x| most.max(x.limit[row]));
        let sum = |of: &dyn Fn(usize) -> f64| (0..x.len()).map(of).sum::<f64>();
        let (merged, bound) = match of_lse {
            true => (all, most),
            false => {
                let apart = sum(&|i| exact[i] * (x[i].exact[at] - *value).abs());
                let own = sum(&|i| if w[i] == 0.0 { 0.0 } else { w[i] * x[i].limit[at] });
                (sum(&|i| w[i] * x[i].got[at]), own + (2.0 * most).exp_m1() * apart)
            }
        };
        *value = merged;
        limit[at] = if most == f64::INFINITY { most } else { bound + here(merged) };
    });
    (value, limit)
}

/// The weights of chunks with these lse, and the lse of all.
fn weights(lse: impl Iterator<Item = f64> + Clone) -> (Vec<f64>, f64) {
    let most = lse.clone().fold(f64::NEG_INFINITY, f64::max);
    if most == f64::NEG_INFINITY {
        return (lse.map(|_| 0.0).collect(), most);
    }
    let sum: f64 = lse.clone().map(|x| (x - most).exp()).sum();
    (lse.map(|x| (x - most).exp() / sum).collect(), most + sum.ln())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounds::bounds;
    use crate::cases::{Depth, specs};
    use crate::laws::Exact;
    use crate::laws::law::SEQUENCES;
    use crate::profile::Profile;

    /// Comparisons with a sequence alone take it for granted.
    #[test]
    fn no_bound_of_a_sequence_alone_is_larger_than_in_the_whole() {
        let mut compared = 0;
        for algorithm in SEQUENCES {
            let several = |case: &Case| small(case) && sequences(&case.problem).len() > 1;
            let cases = specs(*algorithm, Depth::Smoke, 0).filter(|spec| !spec.is_large());
            let cases = cases.map(|spec| spec.build()).filter(several).take(6);
            for (case, pass) in
                cases.flat_map(|x| [(x.clone(), Pass::Forward), (x, Pass::Backward)])
            {
                let profile = Profile::flash(case.dtype);
                let exact = Exact::new(case.clone(), profile);
                let whole = exact.pass(pass).unwrap();
                for part in sequences(&case.problem) {
                    let inputs = part.tensors(&case.problem, &case.inputs);
                    let problem = part.problem(&case.problem);
                    let alone = bounds(&problem, pass, case.dtype, &profile, &inputs).unwrap();
                    for (name, alone) in alone.outputs {
                        if !part.cuts_along(&case.problem, &name, ROWS) {
                            continue;
                        }
                        let whole = part.array(&case.problem, &name, &whole.outputs[&name].bound);
                        let fits = |(alone, whole): (&f64, &f64)| *alone <= whole * (1.0 + 1e-9);
                        assert!(alone.bound.iter().zip(&whole).all(fits), "{} {name}", case.name);
                        compared += alone.bound.len();
                    }
                }
            }
        }
        assert!(compared > 3_000, "{compared}");
    }
}
