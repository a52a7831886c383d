//! Products of pairs of bf16, on every machine by the rules of the instruction, and with it where it is there.

use super::cut::TILE;
use super::logits::Products;
use super::pack;
use super::tokens::Token;
use crate::lanes::prefetch::Lines;
use crate::tile::{BAND, STRIDE};
use crate::{Level, Tensor};
use half::bf16;
use ndarray::Array2;

/// Odd numbers of tokens, of elements and of classes, in several bands and tiles.
struct Operands {
    h: Array2<bf16>,
    w: Array2<bf16>,
}

impl Operands {
    fn new() -> Self {
        let wave = |x: usize, y: usize| bf16::from_f32(((17 * x + 5 * y) as f32 * 0.37).sin());
        Operands {
            h: Array2::from_shape_fn((198, 71), |(i, c)| wave(i, c)),
            w: Array2::from_shape_fn((301, 71), |(v, c)| wave(c, v * v)),
        }
    }
}

/// a of every class and token, in the first of two slices of words and then in both.
fn logits(x: &Operands, level: Level) -> Vec<f32> {
    let (tokens, classes, dim, words) = (x.h.nrows(), 255, x.h.ncols(), x.h.ncols().div_ceil(2));
    let ((rows, cols), counted) =
        (level.block(), (0..tokens).map(|index| Token { index, ..Token::default() }));
    let padded = TILE.next_multiple_of(rows);
    let mut across = vec![f32::NAN; tokens.next_multiple_of(cols) * words];
    let counted: Vec<Token> = counted.collect();
    pack::across(Tensor::from(x.h.view()), &counted, cols, (true, 1), &mut across);
    let mut z = vec![f32::NAN; tokens.next_multiple_of(BAND) * padded];
    let mut w = vec![f32::NAN; padded * STRIDE];
    assert_eq!((dim, words), (71, 36), "two slices, the last with an element more than pairs");
    for elements in [0..19, 19..words] {
        let fresh = elements.start == 0;
        pack::slice(
            Tensor::from(x.w.view()),
            &(0..classes),
            elements.clone(),
            (rows, true),
            &mut w,
        );
        let (h, z, then) = (&across[..], &mut z[..], Lines::NONE);
        let products =
            Products { w: &w, h, dim: words, elements, classes, padded, tokens, z, fresh, then };
        level.run_pairs(products).expect("a level of pairs");
    }
    let at = |t: usize, v: usize| z[(t / BAND * padded + v) * BAND + t % BAND];
    (0..tokens).flat_map(|t| (0..classes).map(move |v| (t, v))).map(|(t, v)| at(t, v)).collect()
}

/// The emulation has the bits of the instruction in products of whole operands, whatever the register blocks;
/// both are the sums that they should be.
#[test]
fn products_are_those_of_the_emulation() {
    let x = Operands::new();
    let emulated = logits(&x, Level::emulated()[0]);
    for (i, &got) in emulated.iter().enumerate() {
        let [h, w] = [x.h.row(i / 255), x.w.row(i % 255)].map(|row| row.mapv(f64::from));
        let (exact, size) = (h.dot(&w), h.mapv(f64::abs).dot(&w.mapv(f64::abs)));
        assert!(
            (f64::from(got) - exact).abs() <= 72.0 * 0.5f64.powi(24) * size,
            "{i}: {got}, not {exact}"
        );
    }
    let Some(level) = Level::by_name("avx512bf16") else {
        return println!("skipped: no AVX-512 BF16");
    };
    let bits = |all: Vec<f32>| all.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    assert_eq!(bits(logits(&x, level)), bits(emulated));
}
