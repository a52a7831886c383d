//! The numbers of a row that one sweep over the scores leaves for the next.

use super::packs::Packing;
use super::tasks::Task;

/// Numbers of the rows of a tile of queries.
#[derive(Debug, Clone, Copy)]
pub struct Stats<'a> {
    /// The row of the first numbers, within the sequence.
    pub first: usize,
    /// (B1); of lazy attention Δ − dlse.
    pub delta: &'a [f32],
    /// Of the second order: (D4), (E21).
    pub u: &'a [f32],
    /// Of the second order: (D6); of lazy attention (E24) less cot_lse.
    pub z: &'a [f32],
    /// Of lazy attention: τ/n.
    pub offset: &'a [f32],
    /// Of lazy attention: 1/n.
    pub share: &'a [f32],
}

impl<'a> Stats<'a> {
    /// Of rows of which nothing is known yet.
    pub const NONE: Stats<'static> =
        Stats { first: 0, delta: &[], u: &[], z: &[], offset: &[], share: &[] };
    /// As many numbers of a row as there are of lazy attention.
    pub const LAZY: usize = 5;

    /// The numbers in the part of a tile of `size` queries.
    pub fn of(part: &'a [f32], first: usize, size: usize) -> Self {
        let mut numbers = part.chunks_exact(size);
        let [delta, u, z, offset, share] = [(); 5].map(|()| numbers.next().unwrap_or_default());
        Stats { first, delta, u, z, offset, share }
    }

    /// Writes δ, u and z of row `r` into the part of a tile of `size` queries.
    pub fn write(part: &mut [f32], size: usize, r: usize, numbers: [f32; 3]) {
        part[r..].iter_mut().step_by(size).zip(numbers).for_each(|(to, x)| *to = x);
    }

    /// τ/n and 1/n of the rows, in the part of a tile of `size` queries.
    pub fn counts(part: &mut [f32], size: usize) -> [&mut [f32]; 2] {
        part[3 * size..].split_at_mut(size).into()
    }
}

/// The numbers of the rows of a wave. Those of a tile of queries lie together: first the tiles with
/// which heads begin, one head after the other, then the tiles behind those.
pub struct RowStats<'m> {
    memory: &'m mut [f32],
    /// Query heads of all slots of a wave.
    heads: usize,
    /// Of a slot.
    group: usize,
    /// Queries of a tile.
    size: usize,
    /// Numbers of a tile.
    part: usize,
}

impl<'m> RowStats<'m> {
    /// Elements of those of a slot.
    pub fn slot(packing: &Packing<'_>, numbers: usize) -> usize {
        let head = packing.longest_tiles().saturating_mul(packing.cut.queries);
        head.saturating_mul(packing.scores.group() * numbers)
    }

    /// The statistics of `slots`, `numbers` of a row, in memory for as many.
    pub fn new(memory: &'m mut [f32], slots: usize, packing: &Packing<'_>, numbers: usize) -> Self {
        let (size, group) = (packing.cut.queries, packing.scores.group());
        RowStats { memory, heads: slots * group, group, size, part: size * numbers }
    }

    /// Of the tile that begins at row `first` of a query head, counted from the first of the wave.
    pub fn tile(&self, head: usize, first: usize) -> Stats<'_> {
        let at = (first / self.size * self.heads + head) * self.part;
        Stats::of(&self.memory[at..][..self.part], first, self.size)
    }

    /// The tasks of the wave from slot `first` on, with the parts of their tiles, which lie from the last
    /// to the first.
    pub fn with_tasks<'t, 'o>(
        &'t mut self,
        tasks: &'t mut [Task<'o>],
        first: usize,
    ) -> impl Iterator<Item = (&'t mut Task<'o>, &'t mut [f32])> + Send {
        let RowStats { heads, group, size, part, .. } = *self;
        let mut rest = &mut *self.memory;
        tasks.iter_mut().map(move |task| {
            let head = (task.slot - first) * group + task.member;
            let at = (task.place.rows.start / size * heads + head) * part;
            let (before, here) = std::mem::take(&mut rest).split_at_mut(at);
            rest = before;
            (task, &mut here[..part])
        })
    }
}
