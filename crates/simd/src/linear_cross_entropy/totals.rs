//! Logits of all classes in a streaming softmax: the totals of tokens, and the logits that are kept.

use super::cut::{Cut, LogitScratch, TILE};
use super::logits::{Link, Products, Rows, SLICE, Wanted};
use super::operands::Operands;
use super::partial::{Partial, Partials, fold};
use super::tokens::Token;
use super::{pack, partial};
use crate::parallel::share;
use crate::tiles::tiles;
use crate::workspace::Parts;
use ndarray::s;
use std::iter::repeat_with;
use std::ops::Range;

/// What every sweep reads.
#[derive(Clone, Copy)]
pub struct Sweep<'a, 'o> {
    pub cut: &'a Cut,
    pub operands: &'a Operands<'o>,
    pub link: Link,
    pub wanted: Wanted,
    /// Σ cw of every tile.
    pub weights: &'a [f32],
}

/// A task: the tokens of a range, some tiles, and where their logits and partials go.
struct Task<'t> {
    tokens: &'t [Token],
    across: &'t [f32],
    tiles: Range<usize>,
    store: Option<&'t mut [f32]>,
    node: Option<&'t mut [f32]>,
}

impl Sweep<'_, '_> {
    /// The logits of the tokens of a chunk in a span of tiles, kept where there is a `store`; and the
    /// partials of its nodes, where the sweep is for the totals.
    pub fn logits(
        &self,
        tokens: &[Token],
        span: Range<usize>,
        across: &[f32],
        store: Option<&mut [f32]>,
        nodes: &mut [f32],
        scratch: &mut [f32],
    ) {
        let cut = self.cut;
        let (len, node) = (span.len() * cut.tile_len(), cut.node * cut.tile_len());
        let stores = store.map(|store| store.chunks_mut(len).flat_map(|x| x.chunks_mut(node)));
        let mut stores = stores;
        let stores = repeat_with(move || stores.as_mut().and_then(Iterator::next));
        let nodes = cut.asked.totals.then(|| nodes.chunks_mut(Partials::elements(cut.range)));
        let mut nodes = nodes;
        let nodes = repeat_with(move || nodes.as_mut().and_then(Iterator::next));
        let across = across.chunks(cut.range * cut.dim);
        let places = tokens.chunks(cut.range).zip(across).flat_map(|(tokens, across)| {
            tiles(span.clone(), cut.node).map(move |tiles| (tokens, across, tiles))
        });
        let tasks = places.zip(stores).zip(nodes);
        let tasks = tasks.map(|(((tokens, across, tiles), store), node)| Task {
            tokens,
            across,
            tiles,
            store,
            node,
        });
        let rooms = scratch.chunks_exact_mut(cut.scratch()).take(cut.threads);
        let enter = |room| LogitScratch::cut(&mut Parts::of(room), cut);
        share(rooms, enter, tasks, |task, scratch| self.task(task, scratch));
    }

    fn task(&self, mut task: Task<'_>, scratch: &mut LogitScratch<'_>) {
        let Cut { level, padded, .. } = *self.cut;
        let LogitScratch { w, z, bias, weights, stack } = scratch;
        stack.clear();
        for (number, tile) in task.tiles.clone().enumerate() {
            let classes = self.cut.classes(tile);
            let z = match task.store.as_deref_mut() {
                Some(store) => &mut store[number * self.cut.tile_len()..][..self.cut.tile_len()],
                None => &mut *z,
            };
            self.products((task.tokens, task.across), &classes, w, z);
            let bias = self.bias(&classes, bias);
            let weights = self.class_weights(&classes, weights);
            let mut next = task.node.is_some().then(|| stack.next());
            level.run(Rows {
                link: self.link,
                first: self.cut.first + classes.start,
                bias,
                weights,
                classes: classes.len(),
                padded,
                z,
                tokens: task.tokens,
                wanted: self.wanted,
                sums: next.as_mut().map(|next| (next, 0)),
            });
            if task.node.is_some() {
                let first = self.cut.first + classes.start;
                stack.push(task.tokens, first, self.weights[tile]);
            }
        }
        if let Some(node) = task.node {
            let totals = stack.finish(task.tokens);
            let mut node = Partials::cut(&mut Parts::of(node), self.cut.range);
            (0..task.tokens.len()).for_each(|i| node.set(i, totals.get(i)));
        }
    }

    /// (C1) without the bias.
    fn products(
        &self,
        (tokens, across): (&[Token], &[f32]),
        classes: &Range<usize>,
        w: &mut [f32],
        z: &mut [f32],
    ) {
        let Cut { level, rows, dim, padded, .. } = *self.cut;
        for elements in tiles(0..dim, SLICE) {
            pack::slice(self.operands.w, classes, elements.clone(), rows, w);
            level.run(Products {
                w,
                h: across,
                dim,
                elements,
                classes: classes.len(),
                padded,
                tokens: tokens.len(),
                z,
            });
        }
    }

    /// The biases of some classes; none where there are none.
    fn bias<'b>(&self, classes: &Range<usize>, into: &'b mut [f32]) -> &'b [f32] {
        let Some(bias) = self.operands.bias else { return &[] };
        let into = &mut into[..classes.len()];
        bias.slice(s![classes.clone()]).read(into);
        into
    }

    /// The weights of some classes.
    pub fn class_weights<'b>(
        &self,
        classes: &Range<usize>,
        into: &'b mut [f32],
    ) -> Option<&'b [f32]> {
        let weights = self.operands.class_weights?;
        let into = &mut into[..classes.len()];
        into.iter_mut().zip(weights.slice(s![classes.clone()])).for_each(|(to, &x)| *to = x);
        Some(into)
    }

    /// The totals of the tokens of a chunk, from the partials of its nodes, which hold all
    /// classes of the sweep.
    pub fn totals(&self, tokens: &[Token], nodes: &mut [f32], totals: &mut [Partial]) {
        let cut = self.cut;
        let elements = Partials::elements(cut.range);
        let count = cut.tiles.div_ceil(cut.node);
        let ranges = nodes.chunks_mut(count * elements);
        let tasks = tokens.chunks(cut.range).zip(totals.chunks_mut(cut.range)).zip(ranges);
        share(
            0..cut.threads,
            |_| (),
            tasks,
            |((tokens, totals), nodes), ()| {
                let weight = |node: usize| {
                    let tiles = node * cut.node..cut.tiles.min((node + 1) * cut.node);
                    fold(tiles, &|tile| self.weights[tile], &|x, y| x + y)
                };
                for (i, (token, total)) in tokens.iter().zip(totals).enumerate() {
                    let leaf = |node: usize| {
                        let place = &nodes[node * elements..][..elements];
                        let first = cut.first + node * cut.node * TILE;
                        (partial::at(place, cut.range, i), weight(node), first)
                    };
                    let combine = |x: (Partial, f32, usize), y: (Partial, f32, usize)| {
                        let owned = token.target as usize >= y.2;
                        (x.0.combine(y.0, [x.1, y.1], owned), x.1 + y.1, x.2)
                    };
                    *total = fold(0..count, &leaf, &combine).0;
                }
            },
        );
    }
}
