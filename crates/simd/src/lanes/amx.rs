//! AMX-BF16: tiles of 16 rows of 16 pairs of bf16, multiplied by `tdpbf16ps`, beside AVX-512 with AVX-512 BF16.
//!
//! Tiles belong to a thread. Linux lets a process have them only after it asked, once and for all of its threads:
//! [`Amx::detect`] asks. [`Amx::configured`] configures the tiles of its thread, and leaves none behind.

use super::avx512bf16::Avx512Bf16;
use super::matrix::{Product, SIDE, WORDS};
use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::marker::PhantomData;
use std::sync::LazyLock;

/// The token of amx-tile and amx-bf16, which the system lets this process use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amx(Avx512Bf16);

impl Amx {
    /// The token, or the reason why this machine has none. The first call asks the system for tiles, for this process
    /// and for all time.
    pub fn detect() -> Result<Self, &'static str> {
        static ANSWER: LazyLock<Result<Amx, &'static str>> = LazyLock::new(|| {
            const TILES: u32 = 1 << 24 | 1 << 22;
            const STATE: u64 = 3 << 17;
            let pairs = Avx512Bf16::detect().ok_or("this CPU has no avx512bf16")?;
            if __cpuid_count(7, 0).edx & TILES != TILES {
                return Err("this CPU has no amx-tile and amx-bf16");
            }
            if enabled_state() & STATE != STATE {
                return Err("the system keeps no tiles (XCR0)");
            }
            match request_tiles() {
                0 => Ok(Amx(pairs)),
                _ => Err("the system refuses tiles (arch_prctl)"),
            }
        });
        *ANSWER
    }

    /// The token of the registers, and of their pairs.
    pub fn pairs(self) -> Avx512Bf16 {
        self.0
    }

    /// Runs what multiplies tiles while those of this thread are configured. It must not come here again: that would
    /// leave it without tiles.
    #[inline]
    pub fn configured<T>(self, run: impl for<'a> FnOnce(Tiled<'a>) -> T) -> T {
        let _configured = Configured::new(self);
        run(Tiled(PhantomData))
    }
}

/// XCR0: the parts of the state that the system keeps. A CPU with tiles has the instruction.
fn enabled_state() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: `xgetbv` of register 0 reads; the caller has seen a CPU that has it.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack));
    }
    u64::from(high) << 32 | u64::from(low)
}

/// Asks Linux for tiles, for this process and for all time: 0, or a negative number of an error.
fn request_tiles() -> i64 {
    #[cfg(target_os = "linux")]
    {
        // `arch_prctl` with ARCH_REQ_XCOMP_PERM, and the number of the state of tiles.
        const CALL: i64 = 158;
        const REQUEST: u64 = 0x1023;
        const TILE_DATA: u64 = 18;
        let answer: i64;
        // SAFETY: the call takes two numbers, touches no memory of this process, and answers in rax.
        unsafe {
            asm!("syscall", inlateout("rax") CALL => answer, in("rdi") REQUEST,
                in("rsi") TILE_DATA, out("rcx") _, out("r11") _, options(nostack));
        }
        answer
    }
    #[cfg(not(target_os = "linux"))]
    -1
}

/// The tiles of this thread, configured until it is dropped: eight of 16 rows of 64 bytes.
struct Configured;

/// Bytes that `ldtilecfg` reads: palette 1, at byte 16 the bytes of a row of each tile, at byte 48 its rows.
#[repr(align(64))]
struct Shapes([u8; 64]);

impl Shapes {
    const ALL: Shapes = {
        let mut bytes = [0; 64];
        bytes[0] = 1;
        let mut tile = 0;
        while tile < 8 {
            bytes[16 + 2 * tile] = (4 * SIDE) as u8;
            bytes[48 + tile] = SIDE as u8;
            tile += 1;
        }
        Shapes(bytes)
    };
}

impl Configured {
    #[inline(always)]
    fn new(_: Amx) -> Self {
        static SHAPES: Shapes = Shapes::ALL;
        // SAFETY: a token is in hand, so tiles are there and allowed. 64 bytes are read, which are a valid palette.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) SHAPES.0.as_ptr(), options(nostack, readonly));
        }
        Configured
    }
}

impl Drop for Configured {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: it was made with a token in hand. Nothing reads tiles behind it.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// The token of tiles that are configured: a kernel has it while it runs, on that thread, and cannot keep it.
#[derive(Clone, Copy)]
pub struct Tiled<'a>(PhantomData<(&'a Configured, *const ())>);

impl Tiled<'_> {
    /// C ← A · B, or C + A · B.
    #[inline(never)]
    pub fn gate(self, product: Product<'_>) {
        product.check();
        let Product { c, stride, fresh, a, b, rows, cols, depth } = product;
        if depth == 0 && !fresh {
            return;
        }
        for col in (0..cols).step_by(2) {
            for row in (0..rows).step_by(2) {
                let c = &mut c[row * SIDE * stride + col * SIDE..];
                let left = &a.words[row * a.steps[0] * WORDS..];
                let right = &b.words[col * b.steps[0] * WORDS..];
                if depth == 0 {
                    c.chunks_mut(stride).take(2 * SIDE).for_each(|row| row[..2 * SIDE].fill(0.0));
                    continue;
                }
                let block = Block {
                    c: c.as_mut_ptr(),
                    a: left.as_ptr(),
                    b: right.as_ptr(),
                    stride: stride * size_of::<f32>(),
                    steps: [a.steps, b.steps].map(|steps| steps.map(|step| step * TILE_BYTES)),
                    depth,
                    fresh,
                };
                // SAFETY: the token says that tiles are configured. By the check above C has 32 rows from here on and
                // 32 elements in each, and both factors a second tile beside the first and `depth` such pairs.
                unsafe { block.add() };
            }
        }
    }
}

impl Tiled<'_> {
    /// Four products of tiles that hold zeros, as many as hide the latency of one, so many times. Returns the
    /// operations.
    #[inline(never)]
    pub fn spin(self, rounds: usize) -> usize {
        // SAFETY: the token says that tiles are configured. No memory is touched, and no register but those named.
        unsafe {
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "tilezero tmm4", "tilezero tmm5", "tilezero tmm6", "tilezero tmm7",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {rounds}",
                "jnz 2b",
                rounds = inout(reg) rounds.max(1) => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, nomem),
            );
        }
        4 * rounds.max(1) * SIDE * WORDS * 4
    }
}

/// Bytes of a tile.
const TILE_BYTES: usize = WORDS * size_of::<f32>();

/// 32 × 32 sums, and the tiles whose products they are. Distances are in bytes.
struct Block {
    c: *mut f32,
    a: *const f32,
    b: *const f32,
    stride: usize,
    steps: [[usize; 2]; 2],
    depth: usize,
    fresh: bool,
}

impl Block {
    /// C ← C + A · B: four tiles of sums, as many as hide the latency of one product.
    ///
    /// # Safety
    /// The tiles of this thread must be configured; C writable, both factors readable as far as the product goes; the
    /// depth above 0.
    #[inline(always)]
    unsafe fn add(self) {
        let Block { c, a, b, stride, steps: [[a_next, a_deep], [b_next, b_deep]], depth, fresh } =
            self;
        // SAFETY: the caller vouches for the memory, and for tiles that are configured as 16 rows of 64 bytes. No
        // register but those named changes, and the flags.
        unsafe {
            asm!(
                "test {fresh:e}, {fresh:e}",
                "jnz 2f",
                "tileloadd tmm0, [{c} + {stride}*1]",
                "tileloadd tmm1, [{c} + {stride}*1 + 64]",
                "tileloadd tmm2, [{d} + {stride}*1]",
                "tileloadd tmm3, [{d} + {stride}*1 + 64]",
                "jmp 3f",
                "2:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "3:",
                "tileloadd tmm4, [{a} + {line}*1]",
                "tileloadd tmm6, [{b} + {line}*1]",
                "tileloadd tmm7, [{b1} + {line}*1]",
                "tileloadd tmm5, [{a1} + {line}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a}, {a_deep}",
                "add {a1}, {a_deep}",
                "add {b}, {b_deep}",
                "add {b1}, {b_deep}",
                "dec {depth}",
                "jnz 3b",
                "tilestored [{c} + {stride}*1], tmm0",
                "tilestored [{c} + {stride}*1 + 64], tmm1",
                "tilestored [{d} + {stride}*1], tmm2",
                "tilestored [{d} + {stride}*1 + 64], tmm3",
                fresh = in(reg) u32::from(fresh),
                c = in(reg) c,
                d = in(reg) c.wrapping_byte_add(SIDE * stride),
                stride = in(reg) stride,
                line = in(reg) SIDE * size_of::<f32>(),
                a = inout(reg) a => _,
                a1 = inout(reg) a.wrapping_byte_add(a_next) => _,
                b = inout(reg) b => _,
                b1 = inout(reg) b.wrapping_byte_add(b_next) => _,
                a_deep = in(reg) a_deep,
                b_deep = in(reg) b_deep,
                depth = inout(reg) depth => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}
