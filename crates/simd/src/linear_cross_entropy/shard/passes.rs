//! The passes of a shard: those of each of its nodes, as if these were all classes.

use super::super::cut::{Cut, SweepSpec, TILE};
use super::super::gradient::Pull;
use super::super::gradients::is_apart;
use super::super::logits::{Link, Wanted};
use super::super::named::{Call, PerToken, clear, lists_bytes, room};
use super::super::operands::{Cotangents, Gradients, Operands, Outputs};
use super::super::output::write;
use super::super::partial::Partial as Sums;
use super::super::sweeps::{after_totals, totals};
use super::super::tokens::Tokens;
use super::super::totals::Sweep;
use super::super::tree::fold;
use crate::named::Inputs;
use crate::workspace::{Lists, Region};
use crate::{Options, TensorMut, Workspace};
use etalon_problem::linear_cross_entropy::shard::{Partial, Shard};
use etalon_problem::{Error, LinearCrossEntropy, Views};
use ndarray::{ArrayView1, ArrayViewMut2, ArrayViewMut3, Axis, s};
use std::ops::Range;

/// Memory for the lists of a pass.
fn lists(workspace: &Workspace, problem: &LinearCrossEntropy) -> Result<Lists, Error> {
    workspace.lists(lists_bytes(problem, SweepSpec::default()), "the tokens that count")
}

/// Writes what every node of a shard adds to the rows, `[nodes][T]`.
pub fn forward(
    workspace: &Workspace,
    shard: &Shard<'_>,
    inputs: &Views<'_>,
    mut partials: ArrayViewMut2<'_, Partial>,
    options: &Options,
) -> Result<(), Error> {
    let problem = shard.problem();
    let operands = Operands::new(Inputs(inputs))?;
    let lists = lists(workspace, problem)?;
    let tokens = Tokens::new(problem, &operands, &lists)?;
    let weights = lists.repeat(most_tiles(shard), 0.0, "weights of tiles")?;
    let totals_of = lists.repeat(tokens.counted.len(), Sums::default(), "the totals of tokens")?;
    let mut rows = of_tokens(totals_of, &mut []);
    let cut = |node: &Range<usize>| {
        let threads = rayon::current_num_threads();
        let spec = SweepSpec { bf16: operands.bf16(options), ..SweepSpec::default() };
        let problem = of_node(problem, node);
        let cut = totals(&problem, options.level, spec, threads, options.memory_budget);
        Cut { first: node.start, ..cut }
    };
    let bytes = shard.nodes().map(|node| cut(&node).bytes()).max().unwrap_or(0);
    let mut room = room(workspace, bytes)?;
    // From here on nothing fails.
    partials.fill(Partial::identity());
    // All that a partial has is computed, whatever the problem asks for.
    let wanted = Wanted { u: true, s: true, argmax: true };
    for (node, mut partials) in shard.nodes().zip(partials.outer_iter_mut()) {
        let pass = pass_of(shard, &node, &operands, &Cotangents::default(), &tokens);
        let weights = pass.tile_weights(&mut weights[..node.len().div_ceil(TILE)]);
        let cut = &cut(&node);
        sweep(&pass, (cut, wanted, weights), &mut room, &mut rows, &mut Gradients::default());
        let weight = fold(0..weights.len(), &|tile| weights[tile], &|x, y| x + y);
        for (token, sums) in tokens.counted.iter().zip(&*rows.totals) {
            let owned = node.contains(&(token.target as usize));
            partials[token.index] = sums.of_classes(weight, node.len() as u32, owned);
        }
    }
    Ok(())
}

/// Places of the gradients of a shard: dh `[1][T][D]` or `[nodes][T][D]`.
pub struct Places<'o> {
    pub dh: Option<ArrayViewMut3<'o, f32>>,
    /// dw and dbias.
    pub head: Gradients<'o>,
}

impl Places<'_> {
    /// The places of the node of this number, some of the rows of the shard.
    fn of(&mut self, number: usize, rows: Range<usize>) -> Gradients<'_> {
        // Of a sum over all nodes, the first is written and the others are added.
        let dh_adds = number > 0 && self.dh.as_ref().is_some_and(|dh| dh.len_of(Axis(0)) == 1);
        let part = if dh_adds { 0 } else { number };
        let dh = self.dh.as_mut().map(|dh| TensorMut::from(dh.index_axis_mut(Axis(0), part)));
        let Gradients { dw, dbias, .. } = &mut self.head;
        let dw = dw.as_mut().map(|dw| dw.view_mut().slice(s![rows.clone(), ..]));
        let dbias = dbias.as_mut().map(|dbias| dbias.view_mut().slice(s![rows]));
        Gradients { dh, dw, dbias, dh_adds }
    }
}

/// Writes the gradients of a shard, from the totals of all classes.
pub fn backward(
    workspace: &Workspace,
    shard: &Shard<'_>,
    inputs: &Views<'_>,
    totals: ArrayView1<'_, Partial>,
    mut places: Places<'_>,
    options: &Options,
) -> Result<(), Error> {
    let problem = shard.problem();
    let operands = Operands::new(Inputs(inputs))?;
    let cotangents = Cotangents::new(Inputs(inputs))?;
    let lists = lists(workspace, problem)?;
    let tokens = Tokens::new(problem, &operands, &lists)?;
    let totals = checked(&tokens, totals, &lists)?;
    let spec = SweepSpec {
        totals: false,
        dh: places.dh.is_some(),
        dw: places.head.dw.is_some(),
        dbias: places.head.dbias.is_some(),
        dw_apart: is_apart(&mut places.head),
        bf16: operands.bf16(options),
        pieces: options.precision.pieces(),
        ..SweepSpec::default()
    };
    if !spec.gradients() {
        return Ok(());
    }
    let weights = lists.repeat(most_tiles(shard), 0.0, "weights of tiles")?;
    let pulls = lists.repeat(tokens.counted.len(), Pull::default(), "what tokens pull with")?;
    let mut rows = of_tokens(totals, pulls);
    let threads = rayon::current_num_threads();
    let cuts = |node: &Range<usize>| {
        let (problem, budget) = (of_node(problem, node), options.memory_budget);
        let cuts = after_totals(&problem, options.level, spec, threads, budget);
        let first = node.start;
        cuts.into_iter().flatten().map(move |cut| Cut { first, ..cut })
    };
    let bytes = shard.nodes().flat_map(|node| cuts(&node)).map(|cut| cut.bytes()).max();
    let mut room = room(workspace, bytes.unwrap_or(0))?;
    // From here on nothing fails.
    let (u, s) = (cotangents.dentropy.is_some(), problem.label_smoothing > 0.0);
    let wanted = Wanted { u, s, argmax: false };
    if let Some(dh) = places.dh.as_mut().filter(|_| shard.classes().is_empty()) {
        dh.fill(0.0);
    }
    for (number, node) in shard.nodes().enumerate() {
        let pass = pass_of(shard, &node, &operands, &cotangents, &tokens);
        let weights = pass.tile_weights(&mut weights[..node.len().div_ceil(TILE)]);
        if number == 0 {
            pass.pull(threads, 0..tokens.counted.len(), &mut rows);
        }
        let mut gradients = places.of(number, rows_of(shard, &node));
        let counted = tokens.counted.len();
        clear(&mut gradients, counted < problem.tokens, counted == 0);
        for cut in cuts(&node) {
            sweep(&pass, (&cut, wanted, weights), &mut room, &mut rows, &mut gradients);
        }
    }
    Ok(())
}

/// Writes the outputs that have a place, from the totals of all classes.
pub fn output(
    workspace: &Workspace,
    problem: &LinearCrossEntropy,
    inputs: &Views<'_>,
    totals: ArrayView1<'_, Partial>,
    outputs: Outputs<'_>,
) -> Result<(), Error> {
    let operands = Operands::new(Inputs(inputs))?;
    let lists = lists(workspace, problem)?;
    let tokens = Tokens::new(problem, &operands, &lists)?;
    let totals = checked(&tokens, totals, &lists)?;
    // From here on nothing fails.
    write(&tokens, totals, outputs);
    Ok(())
}

/// Numbers that are kept of the tokens that count, in the first order.
fn of_tokens<'l>(totals: &'l mut [Sums], pulls: &'l mut [Pull]) -> PerToken<'l> {
    PerToken { totals, pulls, motions: &mut [], pull_motions: &mut [] }
}

/// The problem of which the classes of a node are all classes, as far as memory goes.
fn of_node(problem: &LinearCrossEntropy, node: &Range<usize>) -> LinearCrossEntropy {
    LinearCrossEntropy { vocab: node.len(), ..problem.clone() }
}

/// One sweep over all tokens and the classes of a node.
fn sweep(
    pass: &Call<'_, '_>,
    (cut, wanted, weights): (&Cut, Wanted, &[f32]),
    room: &mut Region,
    rows: &mut PerToken<'_>,
    gradients: &mut Gradients<'_>,
) {
    let sweep = Sweep { cut, operands: &pass.operands, link: pass.link, wanted, weights };
    let (shared, scratch) = room.split_at_mut(cut.shared_bytes() / size_of::<f32>());
    pass.sweep(&sweep, (shared, scratch), rows, gradients, None);
}

/// The rows of w and bias of a shard that belong to a node.
fn rows_of(shard: &Shard<'_>, node: &Range<usize>) -> Range<usize> {
    let first = shard.classes().start;
    node.start - first..node.end - first
}

/// The most tiles of a node of a shard.
fn most_tiles(shard: &Shard<'_>) -> usize {
    shard.nodes().map(|node| node.len().div_ceil(TILE)).max().unwrap_or(0)
}

/// The pass over a node of a shard.
fn pass_of<'t, 'a>(
    shard: &Shard<'_>,
    node: &Range<usize>,
    operands: &Operands<'a>,
    cotangents: &Cotangents<'a>,
    tokens: &'t Tokens<'a>,
) -> Call<'t, 'a> {
    Call {
        operands: operands.of(rows_of(shard, node), node.clone()),
        cotangents: cotangents.clone(),
        second: None,
        tokens,
        link: Link::new(shard.problem()),
    }
}

/// The totals of the tokens that count, in their order. Fails where one is not of all classes, or has no
/// target.
fn checked<'l>(
    tokens: &Tokens<'_>,
    totals: ArrayView1<'_, Partial>,
    lists: &'l Lists,
) -> Result<&'l mut [Sums], Error> {
    let LinearCrossEntropy { tokens: all, vocab, .. } = *tokens.problem;
    Error::expect_shape("totals", &[all], totals.shape())?;
    for token in tokens.counted {
        let (i, total) = (token.index, totals[token.index]);
        total.check_total(tokens.problem, i, i64::from(token.target))?;
        if total.argmax.is_none_or(|class| class as usize >= vocab) {
            let expected = format!("a class below {vocab}");
            let found = format!("{:?}", total.argmax);
            return Err(Error::value(format!("totals[{i}].argmax"), expected, found));
        }
    }
    let sums = lists.repeat(tokens.counted.len(), Sums::default(), "the totals of tokens")?;
    for (token, sums) in tokens.counted.iter().zip(&mut *sums) {
        *sums = totals[token.index].into();
    }
    Ok(sums)
}
