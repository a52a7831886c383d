//! The emulation against recordings, and against the instructions of this machine.

use super::cases::{Bits, Case, parse};
use super::*;
use crate::Level;
use crate::lanes::matrix::{BLOCK, F32, MatrixKernel, Tiles};
use crate::tile::STRIDE;

fn one_pair(case: &Case) -> u32 {
    vdpbf16ps(case.sum, case.a[0], case.b[0])
}

fn any_pairs(case: &Case) -> u32 {
    tdpbf16ps(case.sum, &case.a, &case.b)
}

/// Fails at the first result that the emulation does not have.
fn check(name: &str, emulated: fn(&Case) -> u32, results: impl IntoIterator<Item = (Case, u32)>) {
    for (case, expected) in results {
        let got = emulated(&case);
        assert_eq!(got, expected, "{name} {case:08x?}: {got:08x}, not {expected:08x}");
    }
}

#[test]
fn floats_are_rounded_to_the_nearest_even() {
    let edges = [0.0, 1.0, 1.003_906_3, 1.011_718_8, 3.39e38, f32::MAX, f32::INFINITY, f32::NAN];
    let many = (0..1 << 16).map(|i: u32| f32::from_bits(i.wrapping_mul(0x9e37_79b9)));
    for x in edges.into_iter().flat_map(|x| [x, -x]).chain(many) {
        assert_eq!(rounded(x), u32::from(half::bf16::from_f32(x).to_bits()), "{x:e}");
    }
}

#[test]
fn vdpbf16ps_is_as_recorded() {
    let recorded = parse(include_str!("vdpbf16ps.txt"));
    assert!(recorded.len() > 500, "{} cases", recorded.len());
    check("vdpbf16ps", one_pair, recorded);
}

#[test]
fn tdpbf16ps_is_as_recorded() {
    let recorded = parse(include_str!("tdpbf16ps.txt"));
    assert!(recorded.len() > 800, "{} cases", recorded.len());
    assert!(recorded.iter().any(|(case, _)| case.a.len() == 16));
    check("tdpbf16ps", any_pairs, recorded);
}

/// Bits of two factors that are rounded, neighbours in pairs and rows in pairs; of words that moved to other places;
/// and of the product of the factors, added to what was there.
struct Rounded<'a> {
    a: &'a [f32],
    b: &'a [f32],
    c: &'a [f32],
}

impl MatrixKernel<Vec<u32>> for Rounded<'_> {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) -> Vec<u32> {
        let (isa, lanes) = (by.isa(), F32::<M>::N);
        let [mut a, mut b] = [self.a, self.b].map(|x| vec![0.0; x.len() / 2]);
        for (to, pair) in a.chunks_mut(lanes).zip(self.a.chunks(2 * lanes)) {
            let [low, high] = [0, lanes].map(|at| F32::<M>::load(isa, &pair[at..]));
            by.neighbours(low, high).store(to);
        }
        for (number, to) in b.chunks_mut(lanes).enumerate() {
            let at = number * lanes / SIDE * BLOCK + number * lanes % SIDE;
            let [even, odd] = [at, at + SIDE].map(|at| F32::<M>::load(isa, &self.b[at..]));
            by.stacked(even, odd).store(to);
        }
        let mut moved = vec![0.0; WORDS + 6 * SIDE];
        let (turned, rows) = moved.split_at_mut(WORDS);
        by.turn(&a, turned);
        let (zipped, rows) = rows.split_at_mut(2 * SIDE);
        let (halves, pieces) = rows.split_at_mut(2 * SIDE);
        for at in (0..SIDE).step_by(lanes) {
            let [even, odd] = [at, SIDE + at].map(|at| F32::<M>::load(isa, &a[at..]));
            for (n, words) in by.zipped(even, odd).into_iter().enumerate() {
                words.store(&mut zipped[2 * at + n * lanes..]);
            }
            for (n, half) in by.halves(even).into_iter().enumerate() {
                half.store(&mut halves[n * SIDE + at..]);
            }
            let number = F32::<M>::load(isa, &self.a[at..]);
            for (n, piece) in by.split(number).into_iter().enumerate() {
                piece.store(&mut pieces[n * SIDE + at..]);
            }
        }
        let mut c = self.c.to_vec();
        for fresh in [true, false] {
            let (left, right) =
                (Tiles { words: &a, steps: [3, 1] }, Tiles { words: &b, steps: [1, 2] });
            let (stride, rows, cols) = (STRIDE, 4, 2);
            // The second time half as deep a product is added.
            let depth = if fresh { 2 } else { 3 };
            by.multiply(Product { c: &mut c, stride, fresh, a: left, b: right, rows, cols, depth });
        }
        [a, b, moved, c].concat().into_iter().map(f32::to_bits).collect()
    }
}

/// Any bits, and numbers of like size.
#[test]
fn tiles_are_as_emulated() {
    let mut bits = Bits(5);
    for (name, emulated) in ["avx512bf16", "amx"].into_iter().zip(Level::emulated()) {
        for (and, or) in [(u32::MAX, 0), (0xbfff_ffff, 0), (0x807f_ffff, 0x3f80_0000)] {
            let mut numbers = |len: usize| -> Vec<f32> {
                (0..len).map(|_| f32::from_bits(bits.next() & and | or)).collect()
            };
            let (a, b, c) = (numbers(12 * 512), numbers(6 * 512), numbers(4 * SIDE * STRIDE));
            let rounded = |level: Level| level.run_tiles(Rounded { a: &a, b: &b, c: &c });
            let expected = rounded(emulated).expect("a level of tiles");
            match Level::by_name(name) {
                Some(level) => assert!(rounded(level) == Some(expected), "{name}, {and:x}"),
                None => println!("skipped: {}", Level::lacks(name)),
            }
        }
    }
}

/// More cases than are recorded, and MXCSR, on machines that have the instructions.
#[cfg(target_arch = "x86_64")]
mod machine {
    use super::super::cases::{Bits, KINDS, line, of_one_pair, of_several_pairs, random};
    use super::super::hardware::{self, DEFAULT, LANES, Words};
    use super::*;
    use std::fs;
    use std::path::Path;

    /// An instruction on cases of the same number of pairs, with this MXCSR, and MXCSR afterwards.
    type Instruction = fn(&[Case], u32) -> Option<(Vec<u32>, u32)>;

    /// `vdpbf16ps`, whose lanes take 16 cases at a time.
    fn vdpbf16ps(cases: &[Case], mxcsr: u32) -> Option<(Vec<u32>, u32)> {
        let (mut results, mut after) = (vec![], mxcsr);
        for cases in cases.chunks(LANES) {
            let lanes = |word: fn(&Case) -> u32| {
                let mut lanes = [0; LANES];
                lanes.iter_mut().zip(cases).for_each(|(lane, case)| *lane = word(case));
                lanes
            };
            let [sum, a, b] = [lanes(|x| x.sum), lanes(|x| x.a[0]), lanes(|x| x.b[0])];
            let (sums, flags) = hardware::vdpbf16ps(&sum, &a, &b, mxcsr)?;
            results.extend_from_slice(&sums[..cases.len()]);
            after |= flags;
        }
        Some((results, after))
    }

    /// `tdpbf16ps`, whose tiles take 16 cases at a time, along their diagonal.
    fn tdpbf16ps(cases: &[Case], mxcsr: u32) -> Option<(Vec<u32>, u32)> {
        let (mut results, mut after) = (vec![], mxcsr);
        for cases in cases.chunks(LANES) {
            let [mut sum, mut a, mut b]: [Words; 3] = [[[0x3f9d_c07b; LANES]; LANES]; 3];
            let depth = cases[0].a.len();
            for (i, case) in cases.iter().enumerate() {
                sum[i][i] = case.sum;
                a[i][..depth].copy_from_slice(&case.a);
                (0..depth).for_each(|k| b[k][i] = case.b[k]);
            }
            let shape = (cases.len(), cases.len(), depth);
            let (sums, flags) = hardware::tdpbf16ps(&sum, &a, &b, shape, mxcsr)?;
            results.extend((0..cases.len()).map(|i| sums[i][i]));
            after |= flags;
        }
        Some((results, after))
    }

    /// The line of a file that says what its others hold.
    const FORM: &str = "# sum, pairs of a, pairs of b, result: bits in hexadecimal, the odd element of a pair first\n";

    /// Random cases of every kind. Says so where the instruction is absent.
    fn agrees(name: &str, instruction: Instruction, emulated: fn(&Case) -> u32, depths: &[usize]) {
        let mut bits = Bits(3);
        for (&depth, kind) in depths.iter().flat_map(|depth| KINDS.map(|kind| (depth, kind))) {
            let cases: Vec<Case> =
                (0..8192 / depth).map(|_| random(&mut bits, kind, depth)).collect();
            let Some((results, _)) = instruction(&cases, DEFAULT) else {
                return println!("skipped: no {name}");
            };
            check(name, emulated, cases.into_iter().zip(results));
        }
    }

    /// Rounding to −∞, to +∞ and to zero, subnormal operands as zeros, and small results as zeros.
    const MODES: [u32; 5] = [0x2000, 0x4000, 0x6000, 0x0040, 0x8000];

    /// The recorded cases with every MXCSR: the same results, and no flag of an exception.
    fn ignores_mxcsr(instruction: Instruction, cases: &[Case]) {
        let Some(usual) = instruction(cases, DEFAULT) else { return };
        assert_eq!(usual.1, DEFAULT, "a flag of an exception");
        for mode in MODES {
            let (results, after) = instruction(cases, DEFAULT | mode).expect("it is there");
            assert_eq!((results, after), (usual.0.clone(), DEFAULT | mode), "MXCSR {mode:#x}");
        }
    }

    #[test]
    fn vdpbf16ps_is_as_emulated() {
        agrees("vdpbf16ps", vdpbf16ps, one_pair, &[1]);
        ignores_mxcsr(vdpbf16ps, &of_one_pair());
    }

    #[test]
    fn tdpbf16ps_is_as_emulated() {
        agrees("tdpbf16ps", tdpbf16ps, any_pairs, &[1, 2, 3, 16]);
        ignores_mxcsr(tdpbf16ps, &of_one_pair());
    }

    /// Writes what this machine does into `ETALON_RECORD`, a folder: a file for each instruction that it has.
    #[test]
    #[ignore = "it records this machine"]
    fn record() {
        let folder = std::env::var_os("ETALON_RECORD").expect("ETALON_RECORD, a folder");
        let cpu = raw_cpuid::CpuId::new().get_processor_brand_string();
        let cpu = cpu.as_ref().map_or("a CPU without a name", |name| name.as_str());
        let several = of_several_pairs();
        let pairs = [
            ("vdpbf16ps", vdpbf16ps as Instruction, &several[..0]),
            ("tdpbf16ps", tdpbf16ps, &several),
        ];
        for (name, instruction, more) in pairs {
            let mut text = format!("# {name} of {cpu}\n{FORM}");
            let cases = [of_one_pair(), more.to_vec()].concat();
            for cases in cases.chunk_by(|x, y| x.a.len() == y.a.len()) {
                let Some((results, _)) = instruction(cases, DEFAULT) else {
                    println!("no {name}");
                    text.clear();
                    break;
                };
                for (case, result) in cases.iter().zip(results) {
                    text += &(line(case, result) + "\n");
                }
            }
            if !text.is_empty() {
                fs::write(Path::new(&folder).join(format!("{name}.txt")), text)
                    .expect("a folder to write to");
            }
        }
    }
}
