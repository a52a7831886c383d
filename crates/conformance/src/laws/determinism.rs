//! What etalon promises of bits: they depend on nothing but the one sequence and key head.

use super::flaw::{Flaw, Judgement};
use super::law::{laws, many_ways, scores_are};
use super::part::Part;
use super::tensors::{Equality, everywhere, same};
use super::trial::Trial;
use crate::generate::Stream;
use crate::tensor::{Tensor, Tensors};
use crate::tier::{Hints, Layout};
use etalon_problem::{Axis, Sequences};
use ndarray::{ArrayD, IxDyn};

laws! {
    SCORES;
    /// Two runs, and runs on 1, 2, 3 and 7 threads, give the same bits.
    Contract determinism of EVERY on Any, favour many_ways;
    /// Operands and results that lie in memory as columns, backwards, with gaps, or operands that overlap
    /// give the same bits, and nothing is written beside results.
    Contract layouts of EVERY on Any, favour many_ways;
    /// What the memory of results holds before changes no bit.
    Contract filled_places of EVERY on Any, favour many_ways;
    /// A result that is asked for alone has the bits that it has beside the others, where all are finite.
    Contract alone_bits of ATTENTION on Any, favour many_ways;
    /// A batch element gives the same bits alone as in its batch.
    Contract batch_invariance
        if |case, _| scores_are(case, |s| s.extents.batch > 1), favour many_ways;
    /// A key head with its query heads gives the same bits alone and with others.
    Contract head_invariance
        if |case, _| scores_are(case, |s| s.extents.key_heads > 1), favour many_ways;
    /// A packed or padded sequence gives the same bits as its rows alone.
    Contract sequence_invariance
        if |case, _| scores_are(case, |s| s.sequences != Sequences::Dense), favour many_ways;
}

fn determinism(trial: &Trial<'_>) -> Judgement {
    let threads = [None, Some(1), Some(3), Some(2), Some(7)];
    let most = if trial.case.spec.is_large() { 3 } else { threads.len() };
    for threads in threads.into_iter().take(most) {
        let again = trial.ask_hinted(Hints { threads, ..Hints::default() })?;
        let threads = threads.map_or("again".to_string(), |n| format!("{n} threads"));
        same(&again, trial.clean()?, Equality::Bits, everywhere)
            .map_err(|flaw| flaw.of(&threads))?;
    }
    Ok(None)
}

fn alone_bits(trial: &Trial<'_>) -> Judgement {
    let together = trial.clean()?;
    let finite = |(name, x): (&String, &Tensor)| {
        Ok::<_, Flaw>(x.numbers(name)?.iter().all(|number| number.is_finite()))
    };
    // What is not finite may be mended after other results.
    for result in together {
        if !finite(result)? {
            return Ok(None);
        }
    }
    let alone = trial.ask_hinted(Hints { alone: true, ..Hints::default() })?;
    same(&alone, together, Equality::Bits, everywhere)
}

fn layouts(trial: &Trial<'_>) -> Judgement {
    for layout in [Layout::Transposed, Layout::Reversed, Layout::Strided] {
        let outputs = trial.ask_hinted(Hints { layout, ..Hints::default() })?;
        same(&outputs, trial.clean()?, Equality::Bits, everywhere)
            .map_err(|flaw| flaw.of(layout.name()))?;
    }
    if trial.case.spec.is_large() {
        return Ok(None); // overlaps need no size
    }
    let inputs = shared(trial)?;
    let ask = |layout| trial.ask_hinted_with(&inputs, Hints { layout, ..Hints::default() });
    same(&ask(Layout::Overlapping)?, &ask(Layout::RowMajor)?, Equality::Bits, everywhere)
        .map_err(|flaw| flaw.of(Layout::Overlapping.name()))
}

/// Inputs that may share memory, of the elements of the case: some of equal heads or batch elements,
/// others of rows that are windows of one list.
fn shared(trial: &Trial<'_>) -> Result<Tensors, Flaw> {
    let stream = Stream::new(trial.case.spec.seed, &trial.case.name);
    let inputs = trial.inputs().iter().enumerate().map(|(number, (name, tensor))| {
        let (stored, axes) = (tensor.stored(), tensor.shape.len());
        let (Some(stored), 3.., false) = (stored, axes, tensor.is_empty()) else {
            return Ok((name.clone(), tensor.clone()));
        };
        let values = tensor.numbers(name)?;
        let (rows, cols) = (tensor.shape[axes - 2], tensor.shape[axes - 1]);
        let way = stream.below(number, 3);
        let element = |mut at: IxDyn| {
            match way {
                0 => at[1] = 0,
                1 => at[0] = 0,
                _ => {
                    let place = (at[axes - 2] + at[axes - 1]) % (rows * cols);
                    (at[axes - 2], at[axes - 1]) = (place / cols, place % cols);
                }
            }
            values[at]
        };
        let values = ArrayD::from_shape_fn(values.raw_dim(), element);
        Ok((name.clone(), Tensor::store(&values, stored)))
    });
    inputs.collect()
}

fn filled_places(trial: &Trial<'_>) -> Judgement {
    let filled = Some(1e30);
    let outputs = trial.ask_hinted(Hints { filled, ..Hints::default() })?;
    same(&outputs, trial.clean()?, Equality::Bits, everywhere).map_err(|flaw| flaw.of("1e30"))
}

/// Runs a part alone and compares it with its place in the whole: outputs that it cuts along one of
/// `axes`; the others are sums over more than the part.
pub(super) fn same_alone(trial: &Trial<'_>, part: &Part, axes: &[Axis], what: &str) -> Judgement {
    let (problem, inputs) = (&trial.case.problem, &trial.case.inputs);
    let mut alone = trial.ask(&part.problem(problem), &part.tensors(problem, inputs))?;
    alone.retain(|name, _| part.cuts_along(problem, name, axes));
    let places = part.tensors(problem, trial.clean()?);
    same(&places, &alone, Equality::Bits, everywhere).map_err(|flaw| flaw.of(what))
}

fn batch_invariance(trial: &Trial<'_>) -> Judgement {
    for b in 0..trial.case.scores()?.extents.batch {
        let part = Part::of(Axis::Batch, [b]);
        same_alone(trial, &part, &[Axis::Batch], &format!("batch element {b}"))?;
    }
    Ok(None)
}

fn head_invariance(trial: &Trial<'_>) -> Judgement {
    let scores = trial.case.scores()?;
    for h in 0..scores.extents.key_heads {
        let part = Part::key_head(h, scores.group());
        let heads = [Axis::QueryHeads, Axis::KeyHeads];
        same_alone(trial, &part, &heads, &format!("key head {h}"))?;
    }
    Ok(None)
}

fn sequence_invariance(trial: &Trial<'_>) -> Judgement {
    for (i, s) in trial.case.scores()?.sequences().into_iter().enumerate() {
        let part = Part::of(Axis::Batch, [s.batch])
            .and(Axis::Queries, s.query_start..s.query_start + s.queries)
            .and(Axis::Keys, s.key_start..s.key_start + s.keys);
        same_alone(trial, &part, &[Axis::Batch], &format!("sequence {i}"))?;
    }
    Ok(None)
}
