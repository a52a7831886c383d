//! Every operation of every level against the same operation on single floats.

use super::*;
use crate::Level;
use crate::tile::{STRIDE, Tile};
use proptest::prelude::*;

/// The operations that map lane by lane.
const OPS: [&str; 8] = ["add", "sub", "mul", "div", "mul_add", "max", "mul_sub", "select_less"];

struct Apply<'a> {
    a: &'a [f32],
    b: &'a [f32],
    c: &'a [f32],
}

impl Kernel<[Vec<f32>; 8]> for Apply<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> [Vec<f32>; 8] {
        let mut out = [(); 8].map(|()| vec![0.0; self.a.len()]);
        for at in (0..self.a.len()).step_by(I::F32::N) {
            let load = |x: &[f32]| I::F32::load(isa, &x[at..]);
            let (a, b, c) = (load(self.a), load(self.b), load(self.c));
            let select = a.select_less(b, c, a);
            let results =
                [a + b, a - b, a * b, a / b, a.mul_add(b, c), a.max(b), a.mul_sub(b, c), select];
            for (result, out) in results.into_iter().zip(&mut out) {
                result.store(&mut out[at..]);
            }
        }
        out
    }
}

/// Results that one lane must give; two where fused and unfused are both right.
fn scalar(a: f32, b: f32, c: f32) -> [Vec<f32>; 8] {
    [
        vec![a + b],
        vec![a - b],
        vec![a * b],
        vec![a / b],
        vec![a.mul_add(b, c), a * b + c],
        vec![if a > b { a } else { b }],
        vec![a.mul_add(b, -c), a * b - c],
        vec![if a < b { c } else { a }],
    ]
}

fn same(a: f32, b: f32) -> bool {
    a == b || (a.is_nan() && b.is_nan())
}

fn check(a: &[f32], b: &[f32], c: &[f32]) -> Result<(), TestCaseError> {
    for &level in Level::available() {
        for ((op, got), name) in level.run(Apply { a, b, c }).into_iter().enumerate().zip(OPS) {
            for (i, got) in got.into_iter().enumerate() {
                let (a, b, c) = (a[i], b[i], c[i]);
                let allowed = &scalar(a, b, c)[op];
                prop_assert!(
                    allowed.iter().any(|&x| same(x, got)),
                    "{level} {name}({a:e}, {b:e}, {c:e}) = {got:e}, not one of {allowed:?}",
                );
            }
        }
    }
    Ok(())
}

fn floats(strategy: impl Strategy<Value = f32>) -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec(strategy, 16)
}

proptest! {
    #[test]
    fn lanes_agree_with_single_floats(
        a in floats(-1e6f32..1e6), b in floats(-1e6f32..1e6), c in floats(-1e6f32..1e6),
    ) {
        check(&a, &b, &c)?;
    }

    #[test]
    fn reductions_halve(x in floats(-1e3f32..1e3)) {
        for &level in Level::available() {
            let (sum, max, width) = level.run(Reduce(&x));
            let mut lanes = [0.0; 16];
            lanes[..width].copy_from_slice(&x[..width]);
            let (halved_sum, halved_max) = match width {
                8 => {
                    let eight: [f32; 8] = lanes[..8].try_into().unwrap();
                    (halve(eight, |a, b| a + b), halve(eight, f32::max))
                }
                _ => (halve(lanes, |a, b| a + b), halve(lanes, f32::max)),
            };
            prop_assert_eq!((sum, max), (halved_sum, halved_max), "{}", level);
        }
    }

    #[test]
    fn powers_of_two_scale_exactly(n in -127i32..=127) {
        for &level in Level::available() {
            let got = level.run(Scale { x: 1.25, n: n as f32 });
            let expected = if n == -127 { 0.0 } else { 1.25 * (n as f32).exp2() };
            prop_assert_eq!(got, expected, "{}: 1.25·2^{}", level, n);
        }
    }
}

struct Reduce<'a>(&'a [f32]);
impl Kernel<(f32, f32, usize)> for Reduce<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> (f32, f32, usize) {
        let x = I::F32::load(isa, self.0);
        (x.reduce_add(), x.reduce_max(), I::F32::N)
    }
}

struct Scale {
    x: f32,
    n: f32,
}
impl Kernel<f32> for Scale {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> f32 {
        I::F32::splat(isa, self.x).mul_pow2(I::F32::splat(isa, self.n)).reduce_max()
    }
}

#[test]
fn special_values_pass_as_single_floats_do() {
    let special = [0.0, -0.0, 1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, 1e-40];
    for &x in &special {
        let a = [x; 16];
        let b: Vec<f32> = special.iter().chain(&special).copied().collect();
        check(&a, &b, &[2.0; 16]).unwrap();
    }
}

/// The three products of a register block, on matrices of small integers: exact in any order.
struct Products<'a> {
    panel: &'a [f32],
    matrix: &'a [f32],
    b: &'a [f32],
    depth: usize,
}

impl Kernel<([Vec<f32>; 3], usize, usize)> for Products<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> ([Vec<f32>; 3], usize, usize) {
        let (rows, cols) = (I::Tile::ROWS, I::Tile::COLS);
        let b = &self.b[..self.depth * cols];
        let mut out = [(); 3].map(|()| vec![1.0; rows * cols]);
        let mut tiles = [(); 3].map(|()| I::Tile::load(isa, &out[0], cols));
        tiles[0].add_panel(isa, &self.panel[..self.depth * rows], b, self.depth);
        tiles[1].add_rows(isa, self.matrix, b, self.depth);
        tiles[2].add_columns(isa, self.matrix, b, self.depth);
        for (tile, out) in tiles.into_iter().zip(&mut out) {
            tile.store(out, cols);
        }
        (out, rows, cols)
    }
}

#[test]
fn products_are_exact_on_integers() {
    for depth in [0, 1, 2, 7] {
        let panel: Vec<f32> = (0..16 * 7).map(|i| (i % 5) as f32 - 2.0).collect();
        let matrix: Vec<f32> = (0..16 * STRIDE).map(|i| (i % 7) as f32 - 3.0).collect();
        let b: Vec<f32> = (0..7 * 32).map(|i| (i % 9) as f32 - 4.0).collect();
        for &level in Level::available() {
            let products = Products { panel: &panel, matrix: &matrix, b: &b, depth };
            let (out, rows, cols) = level.run(products);
            let a = [
                |r: usize, k: usize, rows: usize| k * rows + r,
                |r, k, _| r * STRIDE + k,
                |r, k, _| k * STRIDE + r,
            ];
            for (way, out) in out.iter().enumerate() {
                let a = |r, k| {
                    let at = a[way](r, k, rows);
                    if way == 0 { panel[at] } else { matrix[at] }
                };
                for r in 0..rows {
                    for c in 0..cols {
                        let sum: f32 = (0..depth).map(|k| a(r, k) * b[k * cols + c]).sum();
                        assert_eq!(out[r * cols + c], 1.0 + sum, "{level} way {way} [{r}, {c}]");
                    }
                }
            }
        }
    }
}
