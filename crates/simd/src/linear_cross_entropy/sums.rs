//! Sums of matrices along the tree of tiles.

use super::tree::levels;
use crate::Level;
use crate::lanes::{Isa, Kernel, Lanes};
use crate::workspace::Parts;

/// Adds up matrices of the same number of elements, in their order, along the tree.
pub struct Sums<'m> {
    /// The next one, and the nodes of 1, 2, 4 … of them.
    memory: &'m mut [f32],
    len: usize,
    count: usize,
}

impl<'m> Sums<'m> {
    /// For so many matrices, of a multiple of the elements of a cache line.
    pub fn cut(parts: &mut Parts<'m>, matrices: usize, len: usize) -> Self {
        let memory = parts.room((levels(matrices) + 1).saturating_mul(len));
        Sums { memory, len, count: 0 }
    }

    pub fn clear(&mut self) {
        self.count = 0;
    }

    /// After so many matrices.
    pub fn after(self, count: usize) -> Self {
        Sums { count, ..self }
    }

    /// Adds the next one, which `make` writes.
    pub fn push(&mut self, level: Level, make: impl FnOnce(&mut [f32])) {
        let node = self.count.trailing_ones() as usize;
        let (next, slots) = self.memory.split_at_mut(self.len);
        if node == 0 {
            make(&mut slots[..self.len]);
        } else {
            make(next);
            let (below, slot) = slots.split_at_mut(node * self.len);
            level.run(Copy { from: next, to: &mut slot[..self.len], add: &below[..self.len] });
            for below in below.chunks_exact(self.len).skip(1) {
                level.run(Add { to: &mut slot[..self.len], x: below });
            }
        }
        self.count += 1;
    }

    /// The sum of all of them.
    pub fn finish(&mut self, level: Level) -> &mut [f32] {
        let lowest = self.count.trailing_zeros() as usize;
        let (_, slots) = self.memory.split_at_mut(self.len);
        let (below, above) = slots.split_at_mut((lowest + 1) * self.len);
        let sum = &mut below[lowest * self.len..];
        for (node, x) in above.chunks_exact(self.len).enumerate() {
            if self.count >> (lowest + 1 + node) & 1 == 1 {
                level.run(Add { to: sum, x });
            }
        }
        sum
    }
}

/// to += x
struct Add<'a> {
    to: &'a mut [f32],
    x: &'a [f32],
}

impl Kernel for Add<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let x = self.x.chunks_exact(I::F32::N);
        for (to, x) in self.to.chunks_exact_mut(I::F32::N).zip(x) {
            (I::F32::load(isa, x) + I::F32::load(isa, to)).store(to);
        }
    }
}

/// to = add + from
struct Copy<'a> {
    from: &'a [f32],
    to: &'a mut [f32],
    add: &'a [f32],
}

impl Kernel for Copy<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let from = self.from.chunks_exact(I::F32::N).zip(self.add.chunks_exact(I::F32::N));
        for (to, (x, y)) in self.to.chunks_exact_mut(I::F32::N).zip(from) {
            (I::F32::load(isa, y) + I::F32::load(isa, x)).store(to);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tree::fold;
    use super::*;

    #[test]
    fn matrices_add_up_along_the_tree() {
        for matrices in 1..20 {
            let x = |i: usize| (0.1 + i as f32).powi(3);
            let mut memory = vec![9.0; (levels(matrices) + 1) * 16];
            let mut sums = Sums::cut(&mut Parts::of(&mut memory), matrices, 16);
            for i in 0..matrices {
                sums.push(Level::best(), |to| to.fill(x(i)));
            }
            let wanted = fold(0..matrices, &x, &|x, y| x + y);
            assert_eq!(sums.finish(Level::best()), &[wanted; 16]);
        }
    }
}
