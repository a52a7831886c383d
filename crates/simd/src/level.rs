//! Instruction sets, chosen when the program runs.

#[cfg(any(test, feature = "emulation"))]
use crate::lanes::emulation::Emulated;
use crate::lanes::matrix::MatrixKernel;
#[cfg(target_arch = "x86_64")]
use crate::lanes::pairs::Pairs;
use crate::lanes::{Isa, Kernel, Tile, portable};
use std::fmt;
use std::sync::LazyLock;

#[cfg(target_arch = "x86_64")]
use crate::lanes::{amx, avx2, avx512, avx512bf16, multiplier::Multiplier};

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
    #[cfg(target_arch = "x86_64")]
    Amx(amx::Amx),
    #[cfg(any(test, feature = "emulation"))]
    Emulated(Emulated),
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

    /// The levels of this CPU that multiply bf16, of `avx512bf16` and `amx`. They are `avx512` but for passes that
    /// [`Precision::Flash`](crate::Precision::Flash) lets round to bf16. The first call asks Linux for the tiles of
    /// AMX, for this process and for all time.
    pub fn of_pairs() -> &'static [Level] {
        static ALL: LazyLock<Vec<Level>> = LazyLock::new(|| {
            #[allow(unused_mut)] // elsewhere than on x86-64 there are none
            let mut all = vec![];
            #[cfg(target_arch = "x86_64")]
            {
                let pairs = avx512bf16::Avx512Bf16::detect();
                all.extend(pairs.map(|pairs| Level(Token::Avx512Bf16(pairs))));
                all.extend(amx::Amx::detect().map(|tiles| Level(Token::Amx(tiles))));
            }
            all
        });
        &ALL
    }

    /// The fastest level of this CPU: the widest, with tiles of bf16 where it has them, or with pairs where these are
    /// faster than f32.
    pub fn best() -> Level {
        static BEST: LazyLock<Level> = LazyLock::new(|| {
            let fast = |level: &&Level| match level.0 {
                #[cfg(target_arch = "x86_64")]
                Token::Avx512Bf16(_) => avx512bf16::Avx512Bf16::is_fast(),
                _ => true,
            };
            let widest = Level::available().last().expect("`portable` is always there");
            *Level::of_pairs().iter().rfind(fast).unwrap_or(widest)
        });
        *BEST
    }

    /// Why this machine lacks the level of that name.
    pub fn lacks(name: &str) -> String {
        #[cfg(target_arch = "x86_64")]
        if let ("amx", Err(reason)) = (name, amx::Amx::detect()) {
            return reason.to_string();
        }
        format!("this CPU has no {name}")
    }

    /// The level of that name, if this CPU has it.
    pub fn by_name(name: &str) -> Option<Level> {
        Level::all().find(|level| level.name() == name)
    }

    /// The level of f32 that it is but for pairs.
    pub fn in_f32(self) -> Level {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Token::Avx512Bf16(pairs) => Level(Token::Avx512(Pairs::isa(pairs))),
            #[cfg(target_arch = "x86_64")]
            Token::Amx(tiles) => Level(Token::Avx512(Pairs::isa(tiles.pairs()))),
            #[cfg(any(test, feature = "emulation"))]
            Token::Emulated(_) => Level(Token::Portable(portable::Portable)),
            _ => self,
        }
    }

    /// Every level of this CPU: those of [`Level::available`], and [`Level::of_pairs`].
    pub fn all() -> impl Iterator<Item = Level> {
        Level::available().iter().chain(Level::of_pairs()).copied()
    }

    /// True if it multiplies bf16, of some algorithms.
    pub fn has_pairs(self) -> bool {
        self.in_f32() != self
    }

    /// Levels on every machine, by the rules of `vdpbf16ps` and of `tdpbf16ps`.
    #[cfg(any(test, feature = "emulation"))]
    #[doc(hidden)]
    pub fn emulated() -> [Level; 2] {
        [Emulated::Pairs, Emulated::Tiles].map(|instruction| Level(Token::Emulated(instruction)))
    }

    /// Its name: `portable`, `avx2`, `avx512`, `avx512bf16` or `amx`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Token::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Token::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Token::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Token::Avx512Bf16(..) => "avx512bf16",
            #[cfg(target_arch = "x86_64")]
            Token::Amx(..) => "amx",
            #[cfg(any(test, feature = "emulation"))]
            Token::Emulated(Emulated::Pairs) => "emulated",
            #[cfg(any(test, feature = "emulation"))]
            Token::Emulated(Emulated::Tiles) => "emulated tiles",
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
    #[allow(clippy::match_single_binding)] // elsewhere than on x86-64 all are portable
    pub(crate) fn run<T>(self, kernel: impl Kernel<T>) -> T {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Token::Avx2(isa) => isa.enter(kernel),
            #[cfg(target_arch = "x86_64")]
            Token::Avx512(isa) => isa.enter(kernel),
            #[cfg(target_arch = "x86_64")]
            Token::Avx512Bf16(pairs) => Pairs::isa(pairs).enter(kernel),
            #[cfg(target_arch = "x86_64")]
            Token::Amx(tiles) => Pairs::isa(tiles.pairs()).enter(kernel),
            // One place for all that are portable: of a second, closures of kernels would be functions.
            _ => kernel.run(portable::Portable),
        }
    }

    /// Runs a kernel of tiles of bf16; `None` if the level multiplies none.
    #[inline]
    pub(crate) fn run_tiles<T>(self, kernel: impl MatrixKernel<T>) -> Option<T> {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Token::Avx512Bf16(pairs) => Some(Multiplier::new(pairs, None).enter(kernel)),
            #[cfg(target_arch = "x86_64")]
            Token::Amx(amx) => Some(
                amx.configured(|tiles| Multiplier::new(amx.pairs(), Some(tiles)).enter(kernel)),
            ),
            #[cfg(any(test, feature = "emulation"))]
            Token::Emulated(instruction) => Some(kernel.run(instruction)),
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
