//! Logits of all classes in a streaming softmax: the totals of tokens, and the logits that are kept.

use super::cut::{Cut, LogitScratch, Shared};
use super::logits::{Link, Products, Rows, SLICE, Wanted};
use super::operands::Operands;
use super::pack;
use super::partial::Partial;
use super::second::motion::Motion;
use super::second::rows::MotionRows;
use super::tokens::Token;
use super::tree::{self, Node, combine, fold};
use crate::element::Tensor;
use crate::lanes::prefetch::Lines;
use crate::parallel::share;
use crate::tiles::tiles;
use crate::workspace::Parts;
use ndarray::{Ix1, s};
use std::iter::repeat_with;
use std::ops::Range;

/// Input of every sweep.
#[derive(Clone, Copy)]
pub struct Sweep<'a, 'o> {
    pub cut: &'a Cut,
    pub operands: &'a Operands<'o>,
    pub link: Link,
    pub wanted: Wanted,
    /// Σ cw of every tile.
    pub weights: &'a [f32],
}

/// A task: the tokens of a range, some tiles, and where their logits, the motions of these and partials go.
struct Task<'t> {
    tokens: &'t [Token],
    across: &'t [f32],
    ddh_across: &'t [f32],
    tiles: Range<usize>,
    store: Option<&'t mut [f32]>,
    motion: Option<&'t mut [f32]>,
    node: Option<&'t mut [f32]>,
}

/// The next of some parts of memory, for ever; none of memory that is not there.
fn in_turn<'m>(
    memory: Option<impl Iterator<Item = &'m mut [f32]>>,
) -> impl Iterator<Item = Option<&'m mut [f32]>> {
    let mut memory = memory;
    repeat_with(move || memory.as_mut().and_then(Iterator::next))
}

impl Sweep<'_, '_> {
    /// The logits of the tokens of a chunk in a span of tiles, and in the second order their motions, kept
    /// where the sweep is for gradients; and the partials of its nodes, where it is for the totals.
    pub fn logits(
        &self,
        tokens: &[Token],
        span: Range<usize>,
        shared: &mut Shared<'_>,
        scratch: &mut [f32],
    ) {
        let cut = self.cut;
        let kept = |memory, wanted: bool| wanted.then(|| self.parts(memory, span.len()));
        let gradients = cut.spec.gradients();
        let stores = in_turn(kept(&mut *shared.store, gradients));
        let motions = in_turn(kept(&mut *shared.motion, gradients && cut.spec.second));
        let nodes = cut.spec.totals.then(|| shared.nodes.chunks_mut(cut.node_len()));
        let nodes = in_turn(nodes);
        let each = cut.range * cut.words();
        let (across, ddh_across) = (&*shared.across, &*shared.ddh_across);
        let ranges = tokens.chunks(cut.range).zip(across.chunks(each)).enumerate();
        let places = ranges.flat_map(|(range, (tokens, across))| {
            let ddh_across = ddh_across.get(range * each..).unwrap_or_default();
            tiles(span.clone(), cut.node).map(move |tiles| (tokens, across, ddh_across, tiles))
        });
        let tasks = places.zip(stores).zip(motions).zip(nodes);
        let tasks = tasks.map(|(((place, store), motion), node)| {
            let (tokens, across, ddh_across, tiles) = place;
            Task { tokens, across, ddh_across, tiles, store, motion, node }
        });
        let rooms = scratch.chunks_exact_mut(cut.scratch()).take(cut.threads);
        let enter = |room| LogitScratch::cut(&mut Parts::of(room), cut);
        share(rooms, enter, tasks, |task, scratch| self.task(task, scratch));
    }

    /// The memory of the kept logits of a span, task by task.
    fn parts<'m>(
        &self,
        memory: &'m mut [f32],
        tiles: usize,
    ) -> impl Iterator<Item = &'m mut [f32]> {
        let (len, node) = (tiles * self.cut.tile_len(), self.cut.node * self.cut.tile_len());
        memory.chunks_mut(len).flat_map(move |range| range.chunks_mut(node))
    }

    fn task(&self, mut task: Task<'_>, scratch: &mut LogitScratch<'_>) {
        let Cut { level, padded, .. } = *self.cut;
        let LogitScratch { w, z, motion, bias, weights, stack } = scratch;
        stack.clear();
        for (number, tile) in task.tiles.clone().enumerate() {
            let (classes, first) = (self.cut.classes(tile), self.cut.first_class(tile));
            let place = number * self.cut.tile_len()..(number + 1) * self.cut.tile_len();
            let z = match task.store.as_deref_mut() {
                Some(store) => &mut store[place.clone()],
                None => &mut *z,
            };
            let motion = match task.motion.as_deref_mut() {
                Some(store) => &mut store[place],
                None => &mut *motion,
            };
            let across = [task.across, task.ddh_across];
            let next = self.cut.classes((tile + 1).min(task.tiles.end));
            self.products(task.tokens.len(), across, [&classes, &next], (w, z, motion));
            let weights = self.class_weights(&classes, weights);
            let mut next = task.node.is_some().then(|| stack.next());
            level.run(Rows {
                link: self.link,
                first,
                bias: read_bias(self.operands.bias, &classes, bias),
                weights,
                classes: classes.len(),
                padded,
                z,
                tokens: task.tokens,
                wanted: self.wanted,
                sums: next.as_mut().map(|next| (&mut next.rows, 0)),
            });
            if self.cut.spec.second {
                let sums =
                    next.as_mut().and_then(|next| Some((&next.rows, next.motions.as_mut()?)));
                level.run(MotionRows {
                    link: self.link,
                    first,
                    ddbias: read_bias(self.operands.ddbias, &classes, bias),
                    weights,
                    classes: classes.len(),
                    padded,
                    z,
                    motion,
                    tokens: task.tokens,
                    wanted: self.wanted,
                    sums,
                });
            }
            if task.node.is_some() {
                stack.push(task.tokens, first, self.weights[tile]);
            }
        }
        if let Some(node) = task.node {
            let totals = stack.finish(task.tokens);
            let mut node = Node::cut(&mut Parts::of(node), self.cut.range, self.cut.spec.second);
            (0..task.tokens.len()).for_each(|i| node.set(i, totals.get(i)));
        }
    }

    /// (C1) without the bias, and in the second order (C21) without its motion; the classes `next` come then.
    fn products(
        &self,
        tokens: usize,
        [across, ddh_across]: [&[f32]; 2],
        [classes, next]: [&Range<usize>; 2],
        (w, z, motion): (&mut [f32], &mut [f32], &mut [f32]),
    ) {
        let Cut { rows, padded, spec, .. } = *self.cut;
        let (words, each, rows) = (self.cut.words(), self.cut.each(), (rows, spec.pairs));
        let add = |w: &[f32], h, elements: Range<usize>, z: &mut [f32], (fresh, then)| {
            let classes = classes.len();
            let dim = words;
            let products =
                Products { w, h, dim, elements, classes, padded, tokens, z, fresh, then };
            self.cut.multiply(products);
        };
        if spec.second && !spec.ddh && self.operands.ddw.is_none() {
            motion.fill(0.0);
        }
        for elements in tiles(0..words, SLICE) {
            let fresh = elements.start == 0;
            pack::slice(self.operands.w, classes, elements.clone(), rows, w);
            let then = match elements.end < words {
                true => (classes, elements.end..words.min(elements.end + SLICE)),
                false => (next, 0..words.min(SLICE)),
            };
            let columns = then.1.start * each..self.cut.dim.min(then.1.end * each);
            let then = self.operands.w.lines(then.0.clone(), columns);
            add(w, across, elements.clone(), z, (fresh, then));
            if spec.ddh {
                add(w, ddh_across, elements.clone(), motion, (fresh, Lines::NONE));
            }
            if let Some(ddw) = self.operands.ddw {
                pack::slice(ddw, classes, elements.clone(), rows, w);
                add(w, across, elements, motion, (fresh && !spec.ddh, Lines::NONE));
            }
        }
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

    /// The totals of the tokens of a chunk, from the partials of its nodes, which hold all classes of the
    /// sweep; in the second order with their motions.
    pub fn totals(
        &self,
        tokens: &[Token],
        nodes: &[f32],
        totals: &mut [Partial],
        motions: &mut [Motion],
    ) {
        let cut = self.cut;
        let (elements, second) = (cut.node_len(), cut.spec.second);
        let count = cut.tiles.div_ceil(cut.node);
        let ranges = nodes.chunks(count * elements);
        let mut motions = motions.chunks_mut(cut.range);
        let motions = repeat_with(move || motions.next().unwrap_or_default());
        let tasks = tokens.chunks(cut.range).zip(totals.chunks_mut(cut.range));
        let tasks = tasks.zip(motions).zip(ranges);
        share(
            0..cut.threads,
            |_| (),
            tasks,
            |(((tokens, totals), motions), nodes), ()| {
                let weight = |node: usize| {
                    let tiles = node * cut.node..cut.tiles.min((node + 1) * cut.node);
                    fold(tiles, &|tile| self.weights[tile], &|x, y| x + y)
                };
                for (i, (token, total)) in tokens.iter().zip(totals).enumerate() {
                    let leaf = |node: usize| {
                        let place = &nodes[node * elements..][..elements];
                        let sums = tree::at(place, cut.range, i, second);
                        (sums, weight(node), cut.first_class(node * cut.node))
                    };
                    type Sums = ((Partial, Motion), f32, usize);
                    let combine = |x: Sums, y: Sums| {
                        let owned = token.target as usize >= y.2;
                        (combine(x.0, y.0, [x.1, y.1], owned, second), x.1 + y.1, x.2)
                    };
                    let motion;
                    (*total, motion) = fold(0..count, &leaf, &combine).0;
                    motions.get_mut(i).into_iter().for_each(|x| *x = motion);
                }
            },
        );
    }
}

/// Numbers of some classes; none where there are none.
fn read_bias<'b>(
    bias: Option<Tensor<'_, Ix1>>,
    classes: &Range<usize>,
    into: &'b mut [f32],
) -> &'b [f32] {
    let Some(bias) = bias else { return &[] };
    let into = &mut into[..classes.len()];
    bias.slice(s![classes.clone()]).read(into);
    into
}
