//! `etalon bench`: how fast the simd or the cuda tier is, against the peak measured in the same run.

mod arguments;
mod candidate;
mod masks;
mod passes;
mod rival;
mod subject;
pub mod summary;
pub mod tune;

pub use arguments::Arguments;

use crate::outcome::{Failure, Outcome, say};
use crate::output;
use etalon_conformance::report::Status;
use etalon_conformance::vectors::Draft;
use etalon_problem::{
    Algorithm, Attention, AttentionLse, BiasExtents, Decay, Extents, LazyAttention,
    LinearAttention, LinearCrossEntropy, LinearExtents, Problem, Scores,
};
use passes::Bench;
use summary::Figures;

pub fn run(arguments: &Arguments) -> Outcome {
    if arguments.brought.is_wanted() {
        return candidate::run(arguments);
    }
    let pool = arguments.threads.pool()?;
    let draft = arguments.json.as_deref().map(Draft::new).transpose()?;
    let mut bench = Bench::new(arguments)?;
    let figures = pool.install(|| -> Result<Figures, Failure> {
        // Problems that cannot be timed are reported before anything is timed.
        problems(arguments, |problem, _| bench.afford(problem))?;
        bench.peak = bench.measure_peak()?;
        problems(arguments, |problem, mask| bench.problem(problem, mask))?;
        let after = bench.measure_peak()?;
        bench.into_figures(after, pool.current_num_threads())
    })?;
    for line in figures.lines() {
        say(&line)?;
    }
    if let Some(draft) = draft {
        output::finish(draft, serde_json::to_string_pretty(&figures)?.as_bytes())?;
    }
    Ok(Status::Passed)
}

/// Every problem that was asked for, with its mask or decay in words.
fn problems(
    arguments: &Arguments,
    mut each: impl FnMut(&Problem, &str) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let Arguments {
        algorithm, length, dim, mask, decay, batch, heads, softcap, bias, width, ..
    } = arguments;
    let wanted = |name| algorithm.is_empty() || algorithm.contains(&name);
    let (batch, query_heads) = (*batch, *heads);
    let key_heads = arguments.key_heads.unwrap_or(query_heads);
    let bias = bias.then_some(BiasExtents { batch: 1, heads: query_heads });
    let scored = [Algorithm::Attention, Algorithm::AttentionLse, Algorithm::LazyAttention];
    let scores = scored.into_iter().any(wanted);
    for &length in length {
        for &dim in dim {
            let extents =
                Extents { batch, query_heads, key_heads, queries: length, keys: length, dim };
            for name in mask.iter().filter(|_| scores) {
                let plain = Scores { softcap: *softcap, bias, ..Scores::new(extents) };
                // Before its mask, which may be an array.
                AttentionLse { scores: plain.clone() }.check()?;
                let scores = Scores { mask: masks::mask(name, batch, length)?, ..plain };
                if wanted(Algorithm::Attention) {
                    let problem = Attention { scores: scores.clone(), ..Attention::new(extents) };
                    each(&problem.into(), name)?;
                }
                if wanted(Algorithm::LazyAttention) {
                    let mut problem = LazyAttention::new(extents).bias(*width);
                    problem.scores.mask = scores.mask.clone();
                    each(&problem.into(), name)?;
                }
                if wanted(Algorithm::AttentionLse) {
                    each(&AttentionLse { scores }.into(), name)?;
                }
            }
            if wanted(Algorithm::LinearCrossEntropy) {
                let mut problem = LinearCrossEntropy::new(length, dim, arguments.vocab);
                problem.wide_gradients = arguments.wide_gradients;
                each(&problem.into(), &format!("{} classes", arguments.vocab))?;
            }
            for &decay in decay.iter().filter(|_| wanted(Algorithm::LinearAttention)) {
                let extents = LinearExtents { batch, query_heads, key_heads, tokens: length, dim };
                let name = match decay {
                    Decay::None => "no decay",
                    Decay::PerHead => "decay per head",
                    Decay::PerToken => "decay per token",
                };
                each(&LinearAttention::new(extents).decay(decay).into(), name)?;
            }
        }
    }
    Ok(())
}
