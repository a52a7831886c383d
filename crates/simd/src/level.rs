//! Instruction sets, chosen when the program runs.

use crate::lanes::pairs::{PairKernel, Pairs};
use crate::lanes::{Isa, Kernel, Tile, portable};
use std::fmt;
use std::sync::LazyLock;

#[cfg(target_arch = "x86_64")]
use crate::lanes::{avx2, avx512, avx512bf16};

/// An instruction set that this CPU has: the only source of the tokens that prove so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level(Token);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token {
    Portable(portable::Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(avx512bf16::Avx512Bf16),
    #[cfg(test)]
    Emulated(crate::lanes::emulation::Emulated),
}

impl Level {
    /// The levels of this CPU that differ in f32, narrowest first; `portable` is always there.
    pub fn available() -> &'static [Level] {
        static ALL: LazyLock<Vec<Level>> = LazyLock::new(|| {
            #[allow(unused_mut)] // elsewhere than on x86-64 there is one level
            let mut all = vec![Level(Token::Portable(portable::Portable))];
            #[cfg(target_arch = "x86_64")]
            {
                all.extend(avx2::Avx2::detect().map(|isa| Level(Token::Avx2(isa))));
                all.extend(avx512::Avx512::detect().map(|isa| Level(Token::Avx512(isa))));
            }
            all
        });
        &ALL
    }

    /// The level of this CPU that multiplies pairs of bf16, if it has one: `avx512bf16`. It is `avx512`
    /// but for passes that [`Precision::Flash`](crate::Precision::Flash) lets round to bf16.
    pub fn of_pairs() -> Option<Level> {
        #[cfg(target_arch = "x86_64")]
        if let Some(pairs) = avx512bf16::Avx512Bf16::detect() {
            return Some(Level(Token::Avx512Bf16(pairs)));
        }
        None
    }

    /// The fastest level of this CPU: the widest, with pairs where these are faster than f32.
    pub fn best() -> Level {
        static BEST: LazyLock<Level> = LazyLock::new(|| {
            #[cfg(target_arch = "x86_64")]
            if let Some(level) = Level::of_pairs().filter(|_| avx512bf16::Avx512Bf16::is_fast()) {
                return level;
            }
            *Level::available().last().expect("`portable` is always there")
        });
        *BEST
    }

    /// The level of that name, if this CPU has it.
    pub fn by_name(name: &str) -> Option<Level> {
        Level::all().find(|level| level.name() == name)
    }

    /// The level of f32 that it is but for pairs.
    pub fn in_f32(self) -> Level {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Token::Avx512Bf16(pairs) => Level(Token::Avx512(pairs.isa())),
            #[cfg(test)]
            Token::Emulated(pairs) => Level(Token::Portable(pairs.isa())),
            _ => self,
        }
    }

    /// Every level of this CPU: those of [`Level::available`], and [`Level::of_pairs`].
    pub fn all() -> impl Iterator<Item = Level> {
        Level::available().iter().copied().chain(Level::of_pairs())
    }

    /// True if it multiplies pairs of bf16.
    pub fn has_pairs(self) -> bool {
        self.in_f32() != self
    }

    /// A level of pairs on every machine, by the rules of `vdpbf16ps`.
    #[cfg(test)]
    pub(crate) fn emulated() -> Level {
        Level(Token::Emulated(crate::lanes::emulation::Emulated))
    }

    /// Its name: `portable`, `avx2`, `avx512` or `avx512bf16`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Token::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Token::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Token::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Token::Avx512Bf16(..) => "avx512bf16",
            #[cfg(test)]
            Token::Emulated(..) => "emulated",
        }
    }

    /// Rows and columns of its register block.
    pub(crate) fn block(self) -> (usize, usize) {
        self.run(Blocks)[0]
    }

    /// Rows and columns of its short register block.
    pub(crate) fn short_block(self) -> (usize, usize) {
        self.run(Blocks)[1]
    }

    /// Runs a kernel with this instruction set. Called inside each task, never around a parallel
    /// loop: a closure handed to another function loses the features of its surroundings.
    #[inline]
    pub(crate) fn run<T>(self, kernel: impl Kernel<T>) -> T {
        match self.0 {
            Token::Portable(isa) => kernel.run(isa),
            #[cfg(target_arch = "x86_64")]
            Token::Avx2(isa) => isa.enter(kernel),
            #[cfg(target_arch = "x86_64")]
            Token::Avx512(isa) => isa.enter(kernel),
            #[cfg(target_arch = "x86_64")]
            Token::Avx512Bf16(pairs) => pairs.isa().enter(kernel),
            #[cfg(test)]
            Token::Emulated(pairs) => kernel.run(pairs.isa()),
        }
    }

    /// Runs a kernel of pairs; `None` if the level multiplies none.
    #[inline]
    pub(crate) fn run_pairs<T>(self, kernel: impl PairKernel<T>) -> Option<T> {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Token::Avx512Bf16(pairs) => Some(pairs.enter(kernel)),
            #[cfg(test)]
            Token::Emulated(pairs) => Some(kernel.run(pairs)),
            _ => None,
        }
    }
}

/// Rows and columns of the register blocks of an instruction set.
struct Blocks;

impl Kernel<[(usize, usize); 2]> for Blocks {
    #[inline(always)]
    fn run<I: Isa>(self, _: I) -> [(usize, usize); 2] {
        [(I::Tile::ROWS, I::Tile::COLS), (I::Short::ROWS, I::Short::COLS)]
    }
}

impl Default for Level {
    fn default() -> Self {
        Level::best()
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
