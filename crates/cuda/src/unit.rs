//! The arithmetic of a device whose peak is measured.

/// Arithmetic that multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Fused multiply-adds in f32.
    Ffma,
    /// `mma.sync` on 16-bit numbers, with sums in f32.
    Mma,
    /// `wgmma` of compute capability 9.0, on 16-bit numbers, with sums in f32.
    Wgmma,
}

impl Unit {
    /// Flops of a thread in a round.
    pub(crate) fn flops(self) -> f64 {
        match self {
            Unit::Ffma => 2.0 * 32.0,
            Unit::Mma => 12.0 * 2.0 * (16 * 8 * 16) as f64 / 32.0,
            Unit::Wgmma => 8.0 * 2.0 * (64 * 128 * 16) as f64 / 128.0,
        }
    }

    /// Blocks that a multiprocessor has at a time.
    pub(crate) fn blocks(self) -> usize {
        match self {
            Unit::Ffma => 6,
            Unit::Mma => 2,
            Unit::Wgmma => 1,
        }
    }
}
