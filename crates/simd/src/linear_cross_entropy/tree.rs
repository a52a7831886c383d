//! Partials of tiles of classes put together along the tree of tiles, (C34); in the second order with their
//! motions, (C40).

use super::partial::{Partial, Partials};
use super::second::motion::{Motion, Motions};
use super::tokens::Token;
use crate::workspace::Parts;

/// The partials of some tokens over the classes of a node of the tree, and in the second order their
/// motions.
pub struct Node<'m> {
    pub rows: Partials<'m>,
    pub motions: Option<Motions<'m>>,
}

impl<'m> Node<'m> {
    /// Elements of memory for `len` tokens, a multiple of those of a cache line.
    pub fn elements(len: usize, second: bool) -> usize {
        Parts::count(|parts| Node::cut(parts, len, second))
    }

    pub fn cut(parts: &mut Parts<'m>, len: usize, second: bool) -> Self {
        let rows = Partials::cut(parts, len);
        Node { rows, motions: second.then(|| Motions::cut(parts, len)) }
    }

    pub fn get(&self, i: usize) -> (Partial, Motion) {
        let motion = self.motions.as_ref().map_or(Motion::default(), |motions| motions.get(i));
        (self.rows.get(i), motion)
    }

    pub fn set(&mut self, i: usize, (row, motion): (Partial, Motion)) {
        self.rows.set(i, row);
        self.motions.iter_mut().for_each(|motions| motions.set(i, motion));
    }
}

/// The partial and motion of token `i`, in memory that a [`Node`] of `len` tokens takes.
pub fn at(memory: &[f32], len: usize, i: usize, second: bool) -> (Partial, Motion) {
    let step = Parts::count(|parts| parts.room(len));
    let x = |column: usize| memory[column * step + i];
    let row = Partial { m: x(0), l: x(1), u: x(2), s: x(3), target: x(4), argmax: x(5).to_bits() };
    let motion = || Motion { m: x(6), l: x(7), u: x(8), s: x(9), target: x(10) };
    (row, if second { motion() } else { Motion::default() })
}

/// Partials and motions of two sets of classes as one, `y` of classes behind those of `x`: see
/// [`Partial::combine`].
pub fn combine(
    x: (Partial, Motion),
    y: (Partial, Motion),
    weights: [f32; 2],
    owned: bool,
    second: bool,
) -> (Partial, Motion) {
    let motion = match second {
        true => Motion::combine([x.1, y.1], [&x.0, &y.0], weights, owned),
        false => Motion::default(),
    };
    (x.0.combine(y.0, weights, owned), motion)
}

/// Puts partials of tiles, in the order of their classes, together along the tree.
pub struct Stack<'m> {
    /// The partials of the next tile, and those of nodes of 1, 2, 4 … tiles.
    memory: &'m mut [f32],
    len: usize,
    /// True if motions come along.
    second: bool,
    count: usize,
    /// Σ cw of a node, and its first class.
    nodes: [(f32, usize); usize::BITS as usize],
}

impl<'m> Stack<'m> {
    /// For so many tiles, and so many tokens.
    pub fn cut(parts: &mut Parts<'m>, tiles: usize, len: usize, second: bool) -> Self {
        let memory = parts.room((levels(tiles) + 1).saturating_mul(Node::elements(len, second)));
        Stack { memory, len, second, count: 0, nodes: [(0.0, 0); usize::BITS as usize] }
    }

    pub fn clear(&mut self) {
        self.count = 0;
    }

    /// The node that takes the partials of the next tile.
    pub fn next(&mut self) -> Node<'_> {
        Node::cut(&mut Parts::of(&mut *self.memory), self.len, self.second)
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
    pub fn finish(&mut self, tokens: &[Token]) -> Node<'_> {
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
        let (count, second) = (self.count, self.second);
        for level in levels.filter(|level| count >> level & 1 == 1) {
            let node = self.nodes[level];
            let (mut next, slot) = self.two(level);
            for (i, token) in tokens.iter().enumerate() {
                let owned = token.target as usize >= first;
                let weights = [node.0, weight];
                next.set(i, combine(slot.get(i), next.get(i), weights, owned, second));
            }
            (weight, first) = (node.0 + weight, node.1);
        }
        (weight, first)
    }

    /// The node of the next tile, and that of a level.
    fn two(&mut self, level: usize) -> (Node<'_>, Node<'_>) {
        let elements = Node::elements(self.len, self.second);
        let (next, slots) = self.memory.split_at_mut(elements);
        let slot = &mut slots[level * elements..];
        (
            Node::cut(&mut Parts::of(next), self.len, self.second),
            Node::cut(&mut Parts::of(slot), self.len, self.second),
        )
    }
}

/// The nodes that a stack holds at most at once, of so many tiles.
pub fn levels(tiles: usize) -> usize {
    (usize::BITS - tiles.leading_zeros()) as usize
}

/// The elements of a range, put together by `combine` along the tree.
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

#[cfg(test)]
mod tests {
    use super::fold;
    use etalon_problem::linear_cross_entropy::shard;

    /// A sum that tells the order in which it was made.
    fn join(x: String, y: String) -> String {
        format!("({x} {y})")
    }

    #[test]
    fn tiles_are_put_together_as_shards_of_a_tile_are() {
        let text = |tile: usize| tile.to_string();
        for tiles in 1..20 {
            let parts = (0..tiles).map(|tile| tile * shard::TILE..(tile + 1) * shard::TILE);
            let parts: Vec<_> = parts.collect();
            let wanted = shard::fold(&parts, &text, &join);
            assert_eq!(Some(fold(0..tiles, &text, &join)), wanted);
        }
    }
}
