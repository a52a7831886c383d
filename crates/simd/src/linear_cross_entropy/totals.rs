//! Logits of all classes in a streaming softmax: the totals of tokens, and the logits that are kept.

use super::cut::{Cut, LogitScratch, Shared};
use super::kept::Kept;
use super::logits::{Link, Products, Rows, SLICE, Wanted};
use super::matrix;
use super::operands::Operands;
use super::pack;
use super::partial::Partial;
use super::second::motion::Motion;
use super::second::rows::MotionRows;
use super::tokens::Token;
use super::tree::{self, Node, combine, fold};
use crate::element::Tensor;
use crate::lanes::matrix::SIDE;
use crate::lanes::prefetch::Lines;
use crate::pack::{BitRows, Form};
use crate::parallel::share;
use crate::tile::BAND;
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
    /// The number of the first of the tokens, within the chunk.
    first: usize,
    tokens: &'t [Token],
    across: &'t [f32],
    ddh_across: &'t [f32],
    tiles: Range<usize>,
    store: Option<&'t mut [f32]>,
    motion: Option<&'t mut [f32]>,
    node: Option<&'t mut [f32]>,
}

/// Classes of a tile.
pub struct Classes<'c> {
    /// Counted from the first of the sweep.
    pub range: Range<usize>,
    /// The number of the first among all classes of the problem.
    pub first: usize,
    /// The bias of every class, its motion, and its weight; none where there are none.
    pub bias: &'c [f32],
    pub ddbias: &'c [f32],
    pub weights: Option<&'c [f32]>,
}

/// The next of some parts of memory, for ever; none of memory that is not there.
pub fn in_turn<'m>(
    memory: Option<impl Iterator<Item = &'m mut [f32]>>,
) -> impl Iterator<Item = Option<&'m mut [f32]>> {
    let mut memory = memory;
    repeat_with(move || memory.as_mut().and_then(Iterator::next))
}

impl Sweep<'_, '_> {
    /// The logits of the tokens of a chunk in a span of tiles, and in the second order their motions, kept
    /// where the sweep is for gradients; and the partials of its nodes, where it is for the totals. With `known`,
    /// what the totals are, the gradients of the logits are kept in their place.
    pub fn logits(
        &self,
        tokens: &[Token],
        span: Range<usize>,
        shared: &mut Shared<'_>,
        scratch: &mut [f32],
        known: Option<&Kept<'_>>,
    ) {
        let cut = self.cut;
        let kept = |memory, wanted: bool| wanted.then(|| self.parts(memory, span.len()));
        let gradients = cut.spec.gradients();
        let stores = in_turn(kept(&mut *shared.store, gradients));
        let motions = in_turn(kept(&mut *shared.motion, cut.motions_apart()));
        let nodes = cut.spec.totals.then(|| shared.nodes.chunks_mut(cut.node_len()));
        let nodes = in_turn(nodes);
        let each = cut.range * cut.words();
        let (across, ddh_across) = (&*shared.across, &*shared.ddh_across);
        let ranges = tokens.chunks(cut.range).zip(across.chunks(each)).enumerate();
        let places = ranges.flat_map(|(range, (tokens, across))| {
            let ddh_across = ddh_across.get(range * each..).unwrap_or_default();
            let first = range * cut.range;
            tiles(span.clone(), cut.node)
                .map(move |tiles| (first, tokens, across, ddh_across, tiles))
        });
        let tasks = places.zip(stores).zip(motions).zip(nodes);
        let tasks = tasks.map(|(((place, store), motion), node)| {
            let (first, tokens, across, ddh_across, tiles) = place;
            Task { first, tokens, across, ddh_across, tiles, store, motion, node }
        });
        let rooms = scratch.chunks_exact_mut(cut.scratch()).take(cut.threads);
        let enter = |room| LogitScratch::cut(&mut Parts::of(room), cut);
        share(rooms, enter, tasks, |task, scratch| self.task(task, known, scratch));
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

    fn task(&self, mut task: Task<'_>, known: Option<&Kept<'_>>, scratch: &mut LogitScratch<'_>) {
        let (cut, tokens) = (self.cut, task.tokens);
        let LogitScratch { w, z, motion, bias, ddbias, weights, stack } = scratch;
        stack.clear();
        for (number, tile) in task.tiles.clone().enumerate() {
            let range = cut.classes(tile);
            let classes = Classes {
                first: cut.first_class(tile),
                bias: read_bias(self.operands.bias, &range, bias),
                ddbias: read_bias(self.operands.ddbias, &range, ddbias),
                weights: self.class_weights(&range, weights),
                range,
            };
            let place = number * cut.tile_len()..(number + 1) * cut.tile_len();
            let store = task.store.as_deref_mut().map(|store| &mut store[place.clone()]);
            let mut next = task.node.is_some().then(|| stack.next());
            let across = [task.across, task.ddh_across];
            if cut.spec.bf16 {
                let memory = (&mut **w, [&mut **z, &mut **motion], store);
                self.bands((task.first, tokens, across), &classes, memory, next.as_mut(), known);
            } else {
                let z = store.unwrap_or(z);
                let motion = match task.motion.as_deref_mut() {
                    Some(store) => &mut store[place],
                    None => &mut *motion,
                };
                let then = cut.classes((tile + 1).min(task.tiles.end));
                self.products(tokens.len(), across, [&classes.range, &then], (w, z, motion));
                self.rows(&classes, (tokens, 0), [z, motion], next.as_mut());
                if let Some(kept) = known {
                    let all = tiles(task.first..task.first + tokens.len(), BAND);
                    for (tokens, z) in all.zip(z.chunks_mut(cut.padded * BAND)) {
                        self.band_gradients(kept, &classes, tokens, [z, &mut []]);
                    }
                }
            }
            if task.node.is_some() {
                stack.push(tokens, cut.first_class(tile), self.weights[tile]);
            }
        }
        if let Some(node) = task.node {
            let totals = stack.finish(tokens);
            let mut node = Node::cut(&mut Parts::of(node), cut.range, cut.spec.second);
            (0..tokens.len()).for_each(|i| node.set(i, totals.get(i)));
        }
    }

    /// z of some tokens in place of a, and what they add to the partials, from number `at` on; in the second order
    /// also ż in place of ȧ, and what moves of the partials.
    fn rows(
        &self,
        classes: &Classes<'_>,
        (tokens, at): (&[Token], usize),
        [z, motion]: [&mut [f32]; 2],
        mut sums: Option<&mut Node<'_>>,
    ) {
        let (Sweep { cut, link, wanted, .. }, count) = (*self, classes.range.len());
        let &Classes { first, bias, ddbias, weights, .. } = classes;
        cut.level.run(Rows {
            link,
            first,
            bias,
            weights,
            classes: count,
            padded: cut.padded,
            z,
            tokens,
            wanted,
            sums: sums.as_deref_mut().map(|sums| (&mut sums.rows, at)),
        });
        if !cut.spec.second {
            return;
        }
        cut.level.run(MotionRows {
            link,
            first,
            ddbias,
            weights,
            classes: count,
            padded: cut.padded,
            z,
            motion,
            tokens,
            wanted,
            sums: sums.and_then(|sums| Some((&sums.rows, sums.motions.as_mut()?, at))),
        });
    }

    /// The same of products in bf16, band by band: what is made of a band follows its last product, while it is in
    /// the L2 cache.
    fn bands(
        &self,
        (first, tokens, across): (usize, &[Token], [&[f32]; 2]),
        classes: &Classes<'_>,
        (w, [z, motion], mut store): (&mut [f32], [&mut [f32]; 2], Option<&mut [f32]>),
        mut sums: Option<&mut Node<'_>>,
        known: Option<&Kept<'_>>,
    ) {
        let (cut, dim, len) = (self.cut, self.cut.words(), self.cut.padded * BAND);
        for words in tiles(0..dim, matrix::SLICE) {
            self.copy_classes(&classes.range, &words, w);
            for (band, tokens) in tokens.chunks(BAND).enumerate() {
                let here = band * len..(band + 1) * len;
                let mut place = store.as_deref_mut().map(|store| cut.places(store, band));
                let [z_of, motion_of] = match &mut place {
                    Some([place, _]) if known.is_none() || !cut.by_band() => {
                        let (z, motion) = place.split_at_mut(len);
                        [z, motion]
                    }
                    None if !cut.by_band() => {
                        [&mut z[here.clone()], motion.get_mut(here).unwrap_or_default()]
                    }
                    _ => [&mut z[..len], motion.get_mut(..len).unwrap_or_default()],
                };
                let of = across.map(|x| x.get(band * BAND * dim..).unwrap_or_default());
                let shape = (classes.range.len(), tokens.len());
                self.bf16_products(&words, (w, of), shape, [&mut *z_of, &mut *motion_of]);
                if words.end < dim {
                    continue;
                }
                let sums = sums.as_deref_mut();
                self.rows(classes, (tokens, band * BAND), [z_of, motion_of], sums);
                let (Some(kept), Some(to)) = (known, place) else { continue };
                if !cut.by_band() {
                    z.copy_from_slice(&to[0][..len]);
                    motion.copy_from_slice(&to[0][len..]);
                }
                let first = first + band * BAND;
                let tokens = first..first + tokens.len();
                self.rounded_gradients(kept, classes, tokens, [&mut *z, &mut *motion], to);
            }
        }
    }

    /// Copies some words of rows of w, and behind them those of ddw, into tiles.
    fn copy_classes(&self, classes: &Range<usize>, words: &Range<usize>, into: &mut [f32]) {
        let cut = self.cut;
        let elements = 2 * words.start..cut.dim.min(2 * words.end);
        let all = [Some(self.operands.w), self.operands.ddw].into_iter().flatten();
        for (rows, into) in all.zip(into.chunks_mut(cut.copy_len())) {
            let Some(rows) = rows.bf16() else { return };
            pack::class_tiles(&BitRows::new(rows), classes, &elements, Form::Rows, into);
        }
    }

    /// [`Sweep::products`] of some words of rows in tiles, for the tokens of a band.
    fn bf16_products(
        &self,
        words: &Range<usize>,
        (w, [across, ddh_across]): (&[f32], [&[f32]; 2]),
        (classes, tokens): (usize, usize),
        [z, motion]: [&mut [f32]; 2],
    ) {
        let (cut, spec) = (self.cut, self.cut.spec);
        let (w, ddw) = w.split_at(cut.copy_len());
        let add = |w: &[f32], h: &[f32], z: &mut [f32], first: bool| {
            let products = matrix::Logits {
                w,
                words: words.len(),
                h: &h[words.start * SIDE..],
                dim: cut.words(),
                classes,
                tokens,
                z,
                fresh: first && words.start == 0,
            };
            cut.level.run_tiles(products).unwrap_or_default();
        };
        add(w, across, z, true);
        if spec.ddh {
            add(w, ddh_across, motion, true);
        }
        if spec.ddw {
            add(ddw, across, motion, !spec.ddh);
        }
        if spec.second && !spec.ddh && !spec.ddw {
            motion.fill(0.0);
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
        let Cut { rows, padded, dim, spec, level, .. } = *self.cut;
        let add = |w: &[f32], h, elements: Range<usize>, z: &mut [f32], (fresh, then)| {
            let classes = classes.len();
            level.run(Products { w, h, dim, elements, classes, padded, tokens, z, fresh, then });
        };
        if spec.second && !spec.ddh && self.operands.ddw.is_none() {
            motion.fill(0.0);
        }
        for elements in tiles(0..dim, SLICE) {
            let fresh = elements.start == 0;
            pack::slice(self.operands.w, classes, elements.clone(), rows, w);
            let (rows_then, columns) = match elements.end < dim {
                true => (classes, elements.end..dim.min(elements.end + SLICE)),
                false => (next, 0..dim.min(SLICE)),
            };
            let then = self.operands.w.lines(rows_then.clone(), columns);
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
        let mut motions = motions.chunks_mut(BAND);
        let motions = repeat_with(move || motions.next().unwrap_or_default());
        let tasks = tokens.chunks(BAND).zip(totals.chunks_mut(BAND)).zip(motions).enumerate();
        share(
            0..cut.threads,
            |_| (),
            tasks,
            |(band, ((tokens, totals), motions)), ()| {
                let (range, first) = (band * BAND / cut.range, band * BAND % cut.range);
                let nodes = &nodes[range * count * elements..];
                let weight = |node: usize| {
                    let tiles = node * cut.node..cut.tiles.min((node + 1) * cut.node);
                    fold(tiles, &|tile| self.weights[tile], &|x, y| x + y)
                };
                for (i, (token, total)) in tokens.iter().zip(totals).enumerate() {
                    let leaf = |node: usize| {
                        let place = &nodes[node * elements..][..elements];
                        let sums = tree::at(place, cut.range, first + i, second);
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
