//! Sparsity of the weights of lazy attention on given tensors, and its value.

use crate::needs;
use crate::outcome::Failure;
use crate::table::Table;
use crate::units::{digits, time};
use etalon_conformance::tensor::{Stored, Tensor, Tensors, views, views_mut};
use etalon_problem::{Blocking, Dtype, Error, LazyAttention, Pass, Problem, Role, ViewsMut};
use etalon_simd::{Options, Workspace, lazy_attention, run_in};
use std::time::Instant;

/// Tiles of the report: as kernels of GPUs have them.
const TILE: Blocking = Blocking { queries: 64, keys: 64 };

/// Runs of each pass, of which the fastest counts: skipped and not skipped in turns.
const RUNS: usize = 5;

/// A section on the tensors of a problem; empty unless it is one of lazy attention, with every input of
/// the forward pass.
pub fn report(problem: &Problem, tensors: &Tensors, options: &Options) -> Result<String, Failure> {
    let Problem::LazyAttention(lazy) = problem else { return Ok(String::new()) };
    let operands = problem.operands(Pass::Forward);
    let mut inputs = tensors.clone();
    inputs.retain(|name, _| operands.iter().any(|x| x.name == name && x.role == Role::Input));
    if inputs.is_empty() {
        return Ok(String::new());
    }
    let dtype = problem.check_call(Pass::Forward, &views(&inputs)?, &ViewsMut::new(), false)?;
    for pass in [Pass::Forward, Pass::Backward] {
        needs::afford_run(problem, pass, dtype, Some(options))?;
    }
    Ok(density(lazy, &inputs, options)? + &speed(lazy, &inputs, dtype, options)?)
}

fn density(
    problem: &LazyAttention,
    inputs: &Tensors,
    options: &Options,
) -> Result<String, Failure> {
    let stats = lazy_attention::stats(problem, &views(inputs)?, TILE, options)?;
    let mut table = Table::new(["on these tensors", "", ""]);
    for (what, x, number) in [
        ("active pairs, of the visible ones", stats.element_density, "(E37)"),
        ("tiles of 64x64 with an active pair", stats.tile_density, "(E38)"),
        ("weight that is left in a row, mean", stats.surviving_mass, "(E39)"),
        ("weight of inactive pairs in a row, mean", stats.inactive_mass, "(E40)"),
        ("rows without an active pair", stats.dead_rows, "(E41)"),
        ("weight of the first key before the cut, mean", stats.first_key_weight, "(E42)"),
        ("weight of the first key behind it, mean", stats.first_key_kept, "(E43)"),
        ("share of the first key in what is left", stats.first_key_share, "(E44)"),
        ("predicted: forward, by tiles", stats.by_tiles.forward, "(E45)"),
        ("predicted: backward, by tiles", stats.by_tiles.backward, "(E45)"),
        ("predicted: both, by tiles", stats.by_tiles.both, "(E45)"),
        ("predicted: both, by pairs", stats.by_pairs.both, "(E46)"),
    ] {
        table.add_row([what.to_string(), digits(x), number.to_string()]);
    }
    Ok(format!("\n\n{table}"))
}

/// The times of both passes beside those with τ = 0, where every pair is active.
fn speed(
    problem: &LazyAttention,
    inputs: &Tensors,
    dtype: Dtype,
    options: &Options,
) -> Result<String, Failure> {
    let mut all = inputs.clone();
    if let Some(tau) = all.get_mut("tau") {
        *tau = Tensor::round(&tau.to_f64("tau")?.mapv(|_| 0.0), Dtype::F32);
    }
    let problem = Problem::from(problem.clone());
    let mut best = [[f64::INFINITY; 2]; 2];
    for _ in 0..RUNS {
        for (best, inputs) in best.iter_mut().zip([inputs, &all]) {
            let times = once(&problem, inputs, dtype, options)?;
            best.iter_mut().zip(times).for_each(|(best, time)| *best = best.min(time));
        }
    }
    let [skipped, dense] = best;
    let mut table = Table::new(["measured", "time", "at tau = 0", "speed-up"]);
    let sums = [("forward", 0..1), ("backward", 1..2), ("both", 0..2)];
    for (what, passes) in sums {
        let [skipped, dense] =
            [skipped, dense].map(|times| times[passes.clone()].iter().sum::<f64>());
        let row = [time(skipped), time(dense), digits(dense / skipped)];
        table.add_row([what.to_string()].into_iter().chain(row));
    }
    Ok(format!("\n{table}"))
}

/// Seconds of a forward and a backward pass, with o in place of dout.
fn once(
    problem: &Problem,
    inputs: &Tensors,
    dtype: Dtype,
    options: &Options,
) -> Result<[f64; 2], Error> {
    let workspace = Workspace::new();
    let mut given = inputs.clone();
    let mut seconds = [0.0; 2];
    for (seconds, pass) in seconds.iter_mut().zip([Pass::Forward, Pass::Backward]) {
        let operands = problem.operands(pass);
        let results = operands.iter().filter(|x| x.role == Role::Output);
        let mut results: Tensors = results
            .map(|x| {
                let stored = Stored::of(x.precision, dtype);
                (x.name.to_string(), Tensor::unwritten(&x.shape, stored))
            })
            .collect();
        let mut places = views_mut(&mut results)?;
        let given_views = views(&given)?;
        let start = Instant::now();
        run_in(&workspace, problem, pass, &given_views, &mut places, options)?;
        *seconds = start.elapsed().as_secs_f64();
        drop((places, given_views));
        if let (Some(o), Some(lse)) = (results.remove("o"), results.remove("lse")) {
            given.extend([("dout".to_string(), o), ("lse".to_string(), lse)]);
        }
    }
    Ok(seconds)
}
