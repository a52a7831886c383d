//! What a range of classes adds to the rows of some tokens: the elements of a monoid (C33), (C34).

use super::tokens::{Token, weigh};
use crate::workspace::Parts;

/// A row of logits over a set of classes. What depends on the classes alone, Σ cw and their number, is
/// kept once for all tokens, and of a row that does not hold the target `target` is any number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Partial {
    /// The largest logit: −∞ where there is none, NaN where one is.
    pub m: f32,
    /// Σ e^{z_v − m}
    pub l: f32,
    /// Σ e^{z_v − m} (z_v − m)
    pub u: f32,
    /// Σ cw_v (z_v − m); Σ cw_v z_v while m = −∞.
    pub s: f32,
    /// z_y
    pub target: f32,
    /// The class whose logit is m, the first of equals.
    pub argmax: u32,
}

/// x > y, where NaN counts as the largest.
fn exceeds(x: f32, y: f32) -> bool {
    x > y || (x.is_nan() && !y.is_nan())
}

/// weight · x, but 0·∞ = 0.
fn weigh_wide(weight: f32, x: f32) -> f32 {
    weigh(f64::from(weight), f64::from(x)) as f32
}

impl Partial {
    /// The classes `first..` with the logits `z` and their weights: as [`super::logits`] does, for rows
    /// that hold a NaN or +∞, or nothing but −∞.
    pub fn of(first: usize, z: impl Iterator<Item = (f32, f32)> + Clone, target: f32) -> Self {
        let (mut m, mut argmax) = (f32::NEG_INFINITY, 0);
        for (v, (z, _)) in z.clone().enumerate() {
            if exceeds(z, m) {
                (m, argmax) = (z, v);
            }
        }
        let mut all =
            Partial { m, l: 0.0, u: 0.0, s: 0.0, target, argmax: (first + argmax) as u32 };
        for (z, weight) in z {
            if m == f32::NEG_INFINITY {
                all.s += weigh_wide(weight, z);
                continue;
            }
            let shift = z - m;
            let e = shift.exp();
            all.l += e;
            all.u += if e == 0.0 { 0.0 } else { e * shift };
            all.s += weigh_wide(weight, shift);
        }
        all
    }

    /// Both sets of classes as one (C34), `other` of classes behind these. `weights`: Σ cw of either;
    /// `owned`: whether the target is one of the other classes.
    pub fn combine(self, other: Self, weights: [f32; 2], owned: bool) -> Self {
        let best = if exceeds(other.m, self.m) { other } else { self };
        let ([l1, u1, s1], [l2, u2, s2]) =
            (self.relative_to(best.m, weights[0]), other.relative_to(best.m, weights[1]));
        Partial {
            m: best.m,
            l: l1 + l2,
            u: u1 + u2,
            s: s1 + s2,
            target: if owned { other.target } else { self.target },
            argmax: best.argmax,
        }
    }

    /// l, u and s with `m` in place of its own maximum.
    fn relative_to(&self, m: f32, weight: f32) -> [f32; 3] {
        if self.m == m {
            return [self.l, self.u, self.s]; // also where ∞ − ∞ is no shift
        }
        if self.m == f32::NEG_INFINITY {
            return [0.0, 0.0, self.s - weigh_wide(weight, m)]; // (−∞)·0 is no entropy
        }
        let shift = self.m - m;
        let (k, s) = (shift.exp(), self.s + weigh_wide(weight, shift));
        // Where k is 0, u may be −∞ · 0.
        let u = if k == 0.0 { 0.0 } else { k * (self.u + shift * self.l) };
        [k * self.l, u, s]
    }

    /// ln l; NaN where every logit is −∞: no probabilities exist.
    pub fn ln_l(&self) -> f64 {
        if self.l == 0.0 { f64::NAN } else { f64::from(self.l).ln() }
    }

    /// (C3)
    pub fn lse(&self) -> f64 {
        f64::from(self.m) + f64::from(self.l).ln()
    }

    /// (C5), of a row that holds the target.
    pub fn logprob(&self) -> f64 {
        (f64::from(self.target) - f64::from(self.m)) - self.ln_l()
    }

    /// Σ p (z − m)
    pub fn mean_shift(&self) -> f64 {
        f64::from(self.u) / f64::from(self.l)
    }

    /// (C6)
    pub fn entropy(&self) -> f64 {
        self.ln_l() - self.mean_shift()
    }
}

/// The partials of some tokens, side by side.
#[derive(Debug)]
pub struct Partials<'m> {
    pub m: &'m mut [f32],
    pub l: &'m mut [f32],
    pub u: &'m mut [f32],
    pub s: &'m mut [f32],
    pub target: &'m mut [f32],
    pub argmax: &'m mut [u32],
}

impl<'m> Partials<'m> {
    /// Elements of memory for `len` tokens, a multiple of those of a cache line.
    pub fn elements(len: usize) -> usize {
        Parts::count(|parts| Partials::cut(parts, len))
    }

    /// Those of `len` tokens, from the next part.
    pub fn cut(parts: &mut Parts<'m>, len: usize) -> Self {
        Partials {
            m: parts.room(len),
            l: parts.room(len),
            u: parts.room(len),
            s: parts.room(len),
            target: parts.room(len),
            argmax: bytemuck::cast_slice_mut(parts.room(len)),
        }
    }

    pub fn get(&self, i: usize) -> Partial {
        let Partials { m, l, u, s, target, argmax } = self;
        Partial { m: m[i], l: l[i], u: u[i], s: s[i], target: target[i], argmax: argmax[i] }
    }

    pub fn set(&mut self, i: usize, x: Partial) {
        (self.m[i], self.l[i], self.u[i], self.s[i]) = (x.m, x.l, x.u, x.s);
        (self.target[i], self.argmax[i]) = (x.target, x.argmax);
    }
}

/// Those of token `i`, in memory that [`Partials`] of `len` tokens take.
pub fn at(memory: &[f32], len: usize, i: usize) -> Partial {
    let step = Partials::elements(len) / 6;
    let x = |column: usize| memory[column * step + i];
    Partial { m: x(0), l: x(1), u: x(2), s: x(3), target: x(4), argmax: x(5).to_bits() }
}

/// Puts partials of tiles, in the order of their classes, together along the tree.
pub struct Stack<'m> {
    /// The partials of the next tile, and those of nodes of 1, 2, 4 … tiles.
    memory: &'m mut [f32],
    len: usize,
    count: usize,
    /// Σ cw of a node, and its first class.
    nodes: [(f32, usize); usize::BITS as usize],
}

impl<'m> Stack<'m> {
    /// For so many tiles, and so many tokens.
    pub fn cut(parts: &mut Parts<'m>, tiles: usize, len: usize) -> Self {
        let memory = parts.room((levels(tiles) + 1).saturating_mul(Partials::elements(len)));
        Stack { memory, len, count: 0, nodes: [(0.0, 0); usize::BITS as usize] }
    }

    pub fn clear(&mut self) {
        self.count = 0;
    }

    /// Where the partials of the next tile are written.
    pub fn next(&mut self) -> Partials<'_> {
        Partials::cut(&mut Parts::of(&mut *self.memory), self.len)
    }

    /// Adds the next tile: its first class, and Σ cw.
    pub fn push(&mut self, tokens: &[Token], first: usize, weight: f32) {
        let level = self.count.trailing_ones() as usize;
        let (weight, first) = self.merge(tokens, 0..level, (weight, first));
        let (next, mut slot) = self.two(level);
        (0..tokens.len()).for_each(|i| slot.set(i, next.get(i)));
        self.nodes[level] = (weight, first);
        self.count += 1;
    }

    /// Puts what there is together: the partials of all tiles.
    pub fn finish(&mut self, tokens: &[Token]) -> Partials<'_> {
        let lowest = self.count.trailing_zeros() as usize;
        let (mut next, slot) = self.two(lowest);
        (0..tokens.len()).for_each(|i| next.set(i, slot.get(i)));
        let levels = usize::BITS as usize - self.count.leading_zeros() as usize;
        self.merge(tokens, lowest + 1..levels, self.nodes[lowest]);
        self.next()
    }

    /// Puts the nodes of some levels in front of what `next` holds.
    fn merge(
        &mut self,
        tokens: &[Token],
        levels: std::ops::Range<usize>,
        (mut weight, mut first): (f32, usize),
    ) -> (f32, usize) {
        let count = self.count;
        for level in levels.filter(|level| count >> level & 1 == 1) {
            let node = self.nodes[level];
            let (mut next, slot) = self.two(level);
            for (i, token) in tokens.iter().enumerate() {
                let owned = token.target as usize >= first;
                next.set(i, slot.get(i).combine(next.get(i), [node.0, weight], owned));
            }
            (weight, first) = (node.0 + weight, node.1);
        }
        (weight, first)
    }

    /// Those of the next tile, and of the node of a level.
    fn two(&mut self, level: usize) -> (Partials<'_>, Partials<'_>) {
        let elements = Partials::elements(self.len);
        let (next, slots) = self.memory.split_at_mut(elements);
        let slot = &mut slots[level * elements..];
        (
            Partials::cut(&mut Parts::of(next), self.len),
            Partials::cut(&mut Parts::of(slot), self.len),
        )
    }
}

/// The nodes that a stack holds at most at once, of so many tiles.
pub fn levels(tiles: usize) -> usize {
    (usize::BITS - tiles.leading_zeros()) as usize
}

/// What `combine` makes of the elements of a range along the tree.
pub fn fold<X>(
    range: std::ops::Range<usize>,
    leaf: &impl Fn(usize) -> X,
    combine: &impl Fn(X, X) -> X,
) -> X {
    if range.len() <= 1 {
        return leaf(range.start);
    }
    let middle = range.start + range.len().next_power_of_two() / 2;
    combine(fold(range.start..middle, leaf, combine), fold(middle..range.end, leaf, combine))
}
