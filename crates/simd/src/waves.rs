//! Waves: slots that are worked on together.

use std::ops::Range;

/// The most bytes of packed operands that are worked on together, if the threads are busy with fewer.
const WAVE: usize = 4 << 20;

/// Bytes of them that stay in the L2 cache of a core, for each thread.
const CACHE: usize = 1 << 20;

/// Tasks for each thread that keep it busy: the last to end then waits for less than one in this
/// many.
const BUSY: usize = 16;

/// The slots of a pass, a few at a time: each wave is packed into the memory of the one before, so
/// that packed operands stay in the cache and take little memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waves {
    slots: usize,
    /// Slots of a wave.
    pub size: usize,
}

impl Waves {
    /// Waves of slots of which each is `bytes` and which all together make `tasks`: as many as fit
    /// into the caches, more where threads would often wait for each other, but no more than fit into
    /// [`WAVE`]; and enough for `threads` threads; one for each is.
    pub fn new(slots: usize, bytes: usize, tasks: usize, threads: usize) -> Self {
        let (each, bytes) = ((tasks / slots.max(1)).max(1), bytes.max(1));
        let busy = (BUSY * threads).div_ceil(each);
        let cached = CACHE.saturating_mul(threads) / bytes;
        let alone = if threads == 1 { 0 } else { 4 * busy };
        let size = cached.max(alone).min(WAVE / bytes).max(busy.min(threads));
        Waves { slots, size: size.clamp(1, slots.max(1)) }
    }

    /// The same with waves of at most `size` slots, but one.
    pub fn at_most(self, size: usize) -> Self {
        Waves { size: self.size.min(size).max(1), ..self }
    }

    /// All slots at once.
    pub fn one(slots: usize) -> Self {
        Waves { slots, size: slots.max(1) }
    }

    /// The slots of each wave.
    pub fn iter(self) -> impl Iterator<Item = Range<usize>> {
        let starts = (0..self.slots).step_by(self.size);
        starts.map(move |start| start..self.slots.min(start + self.size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slot_is_in_one_wave() {
        for (slots, size) in [(0, 1), (1, 1), (7, 3), (8, 4), (3, 9)] {
            let waves = Waves { slots, size };
            assert_eq!(waves.iter().flatten().collect::<Vec<_>>(), (0..slots).collect::<Vec<_>>());
            assert!(waves.iter().enumerate().all(|(n, wave)| wave.start / size == n));
        }
    }

    #[test]
    fn a_wave_fits_the_cache_but_occupies_the_threads() {
        assert_eq!(Waves::new(64, CACHE / 4, 640, 1).size, 4, "as many as fit");
        assert_eq!(Waves::new(64, WAVE / 8, 64, 2).size, 8, "short sequences make few tasks");
        assert_eq!(Waves::new(64, WAVE / 8, 64 * 64, 2).size, 4, "as many as fit into two caches");
        assert_eq!(Waves::new(64, 2 * WAVE, 640, 1).size, 1, "at least one");
        assert_eq!(Waves::new(64, 2 * WAVE, 640, 8).size, 8, "one for each thread");
        assert_eq!(Waves::new(64, 2 * WAVE, 64 * 64, 8).size, 2, "long sequences make many tasks");
        assert_eq!(Waves::new(3, 1, 3, 1).size, 3, "no more than there are");
        assert_eq!(Waves::new(0, 0, 0, 1).size, 1);
    }
}
