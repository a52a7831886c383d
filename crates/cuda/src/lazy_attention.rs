//! Sparsity of the weights of lazy attention, on a device: [`stats`] and [`activity`]. Its passes are
//! those of [`run_in`](crate::run_in).
#![doc = include_str!("../../../docs/assets/links.md")]

pub use etalon_problem::lazy_attention::{SpeedUp, Stats};

use crate::host::Placed;
use crate::options::Options;
use crate::parts::Laid;
use crate::softmax::draft_stats;
use crate::workspace::Workspace;
use etalon_problem::lazy_attention::Figure;
use etalon_problem::{Blocking, Error, LazyAttention, Pass, Problem, Views, ViewsMut};
use ndarray::Array4;

/// Sparsity of the weights, (E37)–(E46), with tiles of this size. The inputs are those of the forward
/// pass, by name; v is not read. The level is always the portable one.
pub fn stats(
    workspace: &Workspace,
    problem: &LazyAttention,
    inputs: &Views<'_>,
    tile: Blocking,
    options: &Options,
) -> Result<Stats, Error> {
    let Found { figures, states } = measure(workspace, problem, inputs, tile, options)?;
    let count = |least: u32| states.iter().filter(|&&state| state >= least).count();
    Ok(Stats::of_rows(figures, [count(SEEN), count(FULL)]))
}

/// Flags of tiles that hold an active pair: `[B, Hq, ⌈N/queries⌉, ⌈M/keys⌉]`, as the kernels decide it.
/// Tiles lie on the arrays, those of packed sequences across the sequences. The inputs are those of
/// [`stats`].
pub fn activity(
    workspace: &Workspace,
    problem: &LazyAttention,
    inputs: &Views<'_>,
    tile: Blocking,
    options: &Options,
) -> Result<Array4<bool>, Error> {
    let found = measure(workspace, problem, inputs, tile, options)?;
    Ok(found.states.mapv(|state| state >= FULL))
}

/// States of a tile in which a pair is visible, and in which one is active.
const SEEN: u32 = 1;
const FULL: u32 = 2;

/// Results of the kernels.
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
) -> Result<Found, Error> {
    let (bias, problem) = (problem.bias, Problem::from(problem.clone()));
    let table = problem.checked_table(Pass::Forward)?;
    let storage = table.check_call(inputs, &ViewsMut::new(), false)?;
    storage.refuse_f64()?;
    tile.check()?;
    let held = workspace.device(options.device)?;
    let holds = |name: &str, result: bool| {
        let given = !result && inputs.get(name).is_some();
        given.then_some(Laid { strides: None, aligned: true })
    };
    let mut found = room_for(&problem, tile)?;
    let bytes = [size_of_val(&found.figures[..]), 4 * found.states.len()];
    let (problem, call) = ((&problem, bias), (Pass::Forward, storage));
    let tiles = (tile, bytes);
    let (plan, [figures, states]) =
        draft_stats(held.device.target(), problem, call, &table, &holds, tiles, options)?;
    let placed = Placed::of(&held, plan, inputs, None)?;
    placed.enqueue()?;
    placed.queue()?.finish()?;
    placed.download(figures, bytemuck::cast_slice_mut(&mut found.figures))?;
    if let Some(to) = found.states.as_slice_mut() {
        placed.download(states, bytemuck::cast_slice_mut(to))?;
    }
    placed.finish();
    Ok(found)
}

/// Zeros for every row and every tile.
fn room_for(problem: &Problem, tile: Blocking) -> Result<Found, Error> {
    let Problem::LazyAttention(problem) = problem else {
        return Err(Error::value("algorithm", "lazy_attention", problem.algorithm()));
    };
    let [batch, heads, queries, keys] = problem.scores.pair_shape();
    let shape = [batch, heads, queries.div_ceil(tile.queries), keys.div_ceil(tile.keys)];
    let states: usize = shape.iter().product();
    let rows = batch * heads * queries;
    let memory = |bytes: usize| Error::Memory { what: "statistics".to_string(), bytes };
    let (mut figures, mut list) = (Vec::new(), Vec::new());
    let short = |_| memory(size_of::<[f32; Figure::COUNT]>() * rows);
    figures.try_reserve_exact(rows).map_err(short)?;
    figures.resize(rows, [0.0; Figure::COUNT]);
    list.try_reserve_exact(states).map_err(|_| memory(4 * states))?;
    list.resize(states, 0);
    let states = Array4::from_shape_vec(shape, list);
    let states = states.map_err(|error| Error::value("tiles", "an addressable array", error))?;
    Ok(Found { figures, states })
}
