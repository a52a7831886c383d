//! Sparsity of the weights of lazy attention, on a device: [`stats`] and [`activity`]. Its passes are
//! those of [`run_in`](crate::run_in).
#![cfg_attr(doc, doc = include_str!("../../../docs/assets/links.md"))]

pub use etalon_problem::lazy_attention::{SpeedUp, Stats};

use crate::call::PassCall;
use crate::host::Placed;
use crate::memory::filled;
use crate::options::Options;
use crate::softmax::draft_stats;
use crate::workspace::Workspace;
use etalon_problem::lazy_attention::Figure;
use etalon_problem::{Blocking, Error, LazyAttention, Pass, Problem, Result, Views, ViewsMut};
use ndarray::Array4;

/// Sparsity of the weights, (E37)–(E46), with tiles of this size. The inputs are those of the forward pass, by name; v
/// is not read. The level is always the portable one.
pub fn stats(
    workspace: &Workspace,
    problem: &LazyAttention,
    inputs: &Views<'_>,
    tile: Blocking,
    options: &Options,
) -> Result<Stats> {
    let Found { figures, states } = measure(workspace, problem, inputs, tile, options)?;
    let count = |least: u32| states.iter().filter(|&&state| state >= least).count();
    Ok(Stats::of_rows(figures, [count(SEEN), count(FULL)]))
}

/// Flags of tiles that hold an active pair, as the kernels decide it: `[B, Hq, ⌈N/queries⌉, ⌈M/keys⌉]`. Tiles lie on
/// the arrays, those of packed sequences across the sequences. The inputs are those of [`stats`].
pub fn activity(
    workspace: &Workspace,
    problem: &LazyAttention,
    inputs: &Views<'_>,
    tile: Blocking,
    options: &Options,
) -> Result<Array4<bool>> {
    Ok(measure(workspace, problem, inputs, tile, options)?.states.mapv(|state| state >= FULL))
}

/// States of a tile with a visible pair, and with an active one.
const SEEN: u32 = 1;
const FULL: u32 = 2;

struct Found {
    figures: Vec<[f32; Figure::COUNT]>,
    states: Array4<u32>,
}

fn measure(
    workspace: &Workspace,
    problem: &LazyAttention,
    inputs: &Views<'_>,
    tile: Blocking,
    options: &Options,
) -> Result<Found> {
    let (pair_shape, problem) = (problem.scores.pair_shape(), Problem::from(problem.clone()));
    let (table, none) = (problem.checked_table(Pass::Forward)?, ViewsMut::new());
    let storage = table.check_call(inputs, &none, false)?;
    storage.refuse_f64()?;
    tile.check()?;
    let draft = |call: &PassCall<'_, '_>| {
        let found = room_for(pair_shape, tile)?;
        let bytes = [size_of_val(&found.figures[..]), 4 * found.states.len()];
        let (plan, ranges) = draft_stats(&problem, call, (tile, bytes))?;
        Ok((plan, (found, ranges)))
    };
    let call = (Pass::Forward, storage, &table);
    let (placed, (mut found, [figures, states])) = Placed::new(workspace, call, (inputs, Some(&none)), options, draft)?;
    placed.run()?;
    placed.download(figures, bytemuck::cast_slice_mut(&mut found.figures))?;
    if let Some(to) = found.states.as_slice_mut() {
        placed.download(states, bytemuck::cast_slice_mut(to))?;
    }
    placed.finish();
    Ok(found)
}

fn room_for([batch, heads, queries, keys]: [usize; 4], tile: Blocking) -> Result<Found> {
    let shape = [batch, heads, queries.div_ceil(tile.queries), keys.div_ceil(tile.keys)];
    let figures = filled([0.0; Figure::COUNT], &[batch, heads, queries], "statistics")?;
    let states = Array4::from_shape_vec(shape, filled(0, &shape, "statistics")?);
    let states = states.map_err(|error| Error::value("tiles", "an addressable array", error))?;
    Ok(Found { figures, states })
}
