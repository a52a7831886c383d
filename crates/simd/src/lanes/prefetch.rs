//! A hint that memory will be read soon.

/// Bytes of a cache line.
const LINE: usize = 64;

/// Asks for the cache line of an address, which may be any. No result depends on it.
#[inline(always)]
pub fn prefetch_line<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every CPU of x86-64 has SSE, and a hint neither faults nor changes memory.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    let _ = at;
}

/// The same, of a line that is not read so soon: into the L2 cache.
#[inline(always)]
fn prefetch_line_later<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: as above.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
    }
    let _ = at;
}

/// Prefetches that a product issues while it multiplies, every few steps.
pub trait Ask {
    /// Asks for what comes next, if anything does.
    fn ask(&mut self);
}

/// Nothing.
impl Ask for () {
    #[inline(always)]
    fn ask(&mut self) {}
}

/// The cache lines of rows that lie apart, in their order.
#[derive(Debug, Clone, Copy)]
pub struct Lines {
    /// An address alone: nothing is read.
    at: usize,
    /// Rows that are left, and lines of the first of them.
    rows: usize,
    left: usize,
    /// Lines of a row, and bytes from the end of one to the next.
    each: usize,
    step: usize,
}

impl Lines {
    /// None.
    pub const NONE: Lines = Lines { at: 0, rows: 0, left: 0, each: 0, step: 0 };

    /// Of `rows` rows of `len` elements, of which the first begins at `at`, `stride` elements from one to
    /// the next. Nothing is read: they may lie anywhere.
    #[inline(always)]
    pub fn new<T>(at: *const T, (rows, len): (usize, usize), stride: usize) -> Self {
        if len == 0 {
            return Self::NONE;
        }
        let at = at.addr();
        let within = at % LINE;
        let each = (within + len * size_of::<T>()).div_ceil(LINE);
        let step = (stride * size_of::<T>()).wrapping_sub(each * LINE);
        Lines { at: at - within, rows, left: each, each, step }
    }

    /// Lines that each of `products` products must ask for beyond its `asks`, so that all are asked for.
    pub fn beyond(&self, products: usize, asks: usize) -> usize {
        self.rows.saturating_mul(self.each).div_ceil(products.max(1)).saturating_sub(asks)
    }

    /// Asks for so many lines.
    #[inline(always)]
    pub fn ask_more(&mut self, count: usize) {
        (0..count).for_each(|_| self.ask());
    }

    /// Asks for all lines that are left.
    pub fn ask_all(&mut self) {
        while self.rows > 0 {
            self.next();
        }
    }

    #[inline(always)]
    fn next(&mut self) {
        prefetch_line_later(std::ptr::without_provenance::<u8>(self.at));
        self.at = self.at.wrapping_add(LINE);
        self.left -= 1;
        if self.left == 0 {
            self.at = self.at.wrapping_add(self.step);
            (self.rows, self.left) = (self.rows - 1, self.each);
        }
    }
}

impl Ask for Lines {
    #[inline(always)]
    fn ask(&mut self) {
        if self.rows > 0 {
            self.next();
        }
    }
}

/// Lines of several matrices, of which those that were pushed last come first; two at a time.
#[derive(Debug, Clone, Copy)]
pub struct Queue {
    now: Lines,
    waiting: [Lines; Queue::WAITING],
    count: usize,
}

impl Queue {
    const WAITING: usize = 7;

    /// None.
    pub fn new() -> Self {
        Queue { now: Lines::NONE, waiting: [Lines::NONE; Self::WAITING], count: 0 }
    }

    /// Lines more; where too many wait, they are asked for at once.
    pub fn push(&mut self, mut lines: Lines) {
        if lines.rows == 0 {
            return;
        }
        if self.now.rows > 0 {
            match self.waiting.get_mut(self.count) {
                Some(place) => *place = self.now,
                None => return lines.ask_all(),
            }
            self.count += 1;
        }
        self.now = lines;
    }

    /// Asks for all lines that are left.
    pub fn ask_all(&mut self) {
        while self.now.rows > 0 {
            self.next();
        }
    }

    #[inline(always)]
    fn next(&mut self) {
        self.now.next();
        if self.now.rows == 0 && self.count > 0 {
            self.count -= 1;
            self.now = self.waiting[self.count];
        }
    }
}

impl Ask for Queue {
    #[inline(always)]
    fn ask(&mut self) {
        for _ in 0..2 {
            if self.now.rows > 0 {
                self.next();
            }
        }
    }
}

/// Asks for the cache lines of a slice.
#[inline(always)]
pub fn prefetch<T>(x: &[T]) {
    let line = (LINE / size_of::<T>().max(1)).max(1);
    x.chunks(line).for_each(|line| prefetch_line(line.as_ptr()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_those_of_the_rows() {
        // Rows of 80 bytes that begin 16 bytes behind the begin of a line, 256 bytes apart.
        let base = std::ptr::without_provenance::<f32>(0x1000 + 16);
        let mut lines = Lines::new(base, (3, 20), 64);
        let mut asked = vec![];
        while lines.rows > 0 {
            asked.push(lines.at);
            lines.ask();
        }
        assert_eq!(asked, [0x1000, 0x1040, 0x1100, 0x1140, 0x1200, 0x1240]);
        lines.ask_more(2);
        assert_eq!(lines.rows, 0, "there is nothing left to ask for");
        // Six lines in two products: one that asks once leaves two.
        assert_eq!(Lines::new(base, (3, 20), 64).beyond(2, 1), 2);
        assert_eq!(Lines::new(base, (3, 0), 64).rows, 0);
    }

    #[test]
    fn a_queue_asks_for_two_lines_at_a_time_of_what_was_pushed_last() {
        let of = |line: usize, rows| {
            Lines::new(std::ptr::without_provenance::<f32>(line * LINE), (rows, 16), 16)
        };
        let mut queue = Queue::new();
        queue.push(of(1, 3));
        queue.push(of(10, 0));
        queue.push(of(20, 1));
        let mut next = vec![];
        while queue.now.rows > 0 {
            next.push(queue.now.at / LINE);
            queue.ask();
        }
        assert_eq!(next, [20, 2], "20 and 1, then 2 and 3");
        // More than wait are asked for at once.
        (0..2 * Queue::WAITING).for_each(|n| queue.push(of(n, 1)));
        assert_eq!(queue.count, Queue::WAITING);
        queue.ask_all();
        assert_eq!((queue.now.rows, queue.count), (0, 0));
    }
}
