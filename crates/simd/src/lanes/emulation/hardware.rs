//! Both instructions as this CPU has them, with any MXCSR.

use crate::lanes::amx::Amx;
use std::arch::asm;

/// Words of a register, rows of a tile, and words of such a row.
pub const LANES: usize = 16;

/// The words of a tile.
pub type Words = [[u32; LANES]; LANES];

/// MXCSR as programs start with it.
pub const DEFAULT: u32 = 0x1f80;

/// True if there is `vdpbf16ps`.
pub fn has_vdpbf16ps() -> bool {
    is_x86_feature_detected!("avx512bf16")
}

/// `Ok` if there is `tdpbf16ps` and the system lets this process use tiles, else the reason.
pub fn has_tdpbf16ps() -> Result<(), &'static str> {
    Amx::detect().map(|_| ())
}

/// Lane by lane sum + the products of a pair, computed with this MXCSR, and MXCSR afterwards.
/// `None` without the instruction.
pub fn vdpbf16ps(
    sum: &[u32; LANES],
    a: &[u32; LANES],
    b: &[u32; LANES],
    mxcsr: u32,
) -> Option<([u32; LANES], u32)> {
    if !has_vdpbf16ps() {
        return None;
    }
    let (mut result, mut before, mut after) = (*sum, 0, mxcsr);
    // SAFETY: AVX-512 BF16 is there. Every address is of 64 readable bytes, that of the result is
    // writable, and MXCSR is what it was when the block ends.
    unsafe {
        asm!(
            "stmxcsr [{before}]",
            "ldmxcsr [{mxcsr}]",
            "vmovups zmm0, [{sum}]",
            "vmovups zmm1, [{a}]",
            "vdpbf16ps zmm0, zmm1, [{b}]",
            "vmovups [{sum}], zmm0",
            "stmxcsr [{mxcsr}]",
            "ldmxcsr [{before}]",
            mxcsr = in(reg) &mut after,
            before = in(reg) &mut before,
            sum = in(reg) &mut result,
            a = in(reg) a,
            b = in(reg) b,
            out("zmm0") _,
            out("zmm1") _,
            options(nostack),
        );
    }
    Some((result, after))
}

/// Shapes of tiles, as `ldtilecfg` reads them.
#[repr(align(64))]
struct Shapes([u8; 64]);

impl Shapes {
    /// Tiles of so many rows, and words in a row: palette 1, at byte 16 the bytes of a row of each, at byte
    /// 48 its rows.
    fn new(tiles: [(usize, usize); 3]) -> Self {
        let mut bytes = [0; 64];
        bytes[0] = 1;
        for (tile, (rows, words)) in tiles.into_iter().enumerate() {
            bytes[16 + 2 * tile] = (4 * words) as u8;
            bytes[48 + tile] = rows as u8;
        }
        Shapes(bytes)
    }
}

/// The first `rows` rows and `columns` columns of sum + A · B, where A has `depth` pairs in a row and
/// B as many rows, computed with this MXCSR, and MXCSR afterwards. Other words of `sum` stay as they are.
/// `None` without the instruction.
pub fn tdpbf16ps(
    sum: &Words,
    a: &Words,
    b: &Words,
    (rows, columns, depth): (usize, usize, usize),
    mxcsr: u32,
) -> Option<(Words, u32)> {
    let fits = [rows, columns, depth].iter().all(|n| (1..=LANES).contains(n));
    if !fits || has_tdpbf16ps().is_err() {
        return None;
    }
    let shapes = Shapes::new([(rows, columns), (rows, depth), (depth, columns)]);
    let (mut result, mut before, mut after) = (*sum, 0, mxcsr);
    // SAFETY: AMX-BF16 is there and allowed. Tiles have at most 16 rows of 64 bytes, which lie in arrays of as
    // many, of which that of the result is writable. Tiles are released, and MXCSR is what it was, when
    // the block ends.
    unsafe {
        asm!(
            "ldtilecfg [{shapes}]",
            "stmxcsr [{before}]",
            "ldmxcsr [{mxcsr}]",
            "tileloadd tmm0, [{sum} + {stride}*1]",
            "tileloadd tmm1, [{a} + {stride}*1]",
            "tileloadd tmm2, [{b} + {stride}*1]",
            "tdpbf16ps tmm0, tmm1, tmm2",
            "tilestored [{sum} + {stride}*1], tmm0",
            "stmxcsr [{mxcsr}]",
            "ldmxcsr [{before}]",
            "tilerelease",
            shapes = in(reg) shapes.0.as_ptr(),
            mxcsr = in(reg) &mut after,
            before = in(reg) &mut before,
            sum = in(reg) &mut result,
            a = in(reg) a,
            b = in(reg) b,
            stride = in(reg) 4 * LANES,
            out("tmm0") _,
            out("tmm1") _,
            out("tmm2") _,
            options(nostack),
        );
    }
    Some((result, after))
}
