//! Instruction sets, chosen when the program runs.

use crate::lanes::{Isa, Kernel, Tile, portable};
use std::fmt;
use std::sync::LazyLock;

#[cfg(target_arch = "x86_64")]
use crate::lanes::{avx2, avx512};

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
}

impl Level {
    /// The levels of this CPU, narrowest first; `portable` is always there.
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

    /// The widest level of this CPU.
    pub fn best() -> Level {
        *Level::available().last().expect("`portable` is always there")
    }

    /// The level of that name, if this CPU has it.
    pub fn by_name(name: &str) -> Option<Level> {
        Level::available().iter().copied().find(|level| level.name() == name)
    }

    /// Its name: `portable`, `avx2` or `avx512`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Token::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Token::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Token::Avx512(_) => "avx512",
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
