//! Products in bf16, on every machine by the rules of the instructions, and with them where they are there.

use super::matrix::Logits;
use super::pack;
use super::tokens::Token;
use crate::lanes::matrix::{BLOCK, SIDE};
use crate::pack::{BitRows, Form};
use crate::tile::BAND;
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

/// a of every class and of the tokens of a band, of the first 32 elements and then of all.
fn logits(x: &Operands, level: Level) -> Vec<f32> {
    let (tokens, classes, dim) = (BAND - 1, 255, x.h.ncols());
    let (all, padded) = (dim.next_multiple_of(BLOCK) / 2, 256);
    let counted: Vec<Token> =
        (0..tokens).map(|index| Token { index, ..Token::default() }).collect();
    let mut across = vec![f32::NAN; Form::len(tokens, dim)];
    let (h, w) = (Tensor::from(x.h.view()), Tensor::from(x.w.view()));
    let (h, of_w) = (h.bf16().unwrap(), &BitRows::new(w.bf16().unwrap()));
    pack::across_tiles(h, &counted, 1, &mut across);
    let (mut z, mut w) = (vec![f32::NAN; padded * BAND], vec![f32::NAN; padded * all]);
    for words in [0..SIDE, SIDE..all] {
        let elements = 2 * words.start..dim.min(2 * words.end);
        pack::class_tiles(of_w, &(0..classes), &elements, Form::Rows, &mut w);
        let products = Logits {
            w: &w,
            words: words.len(),
            h: &across[words.start * SIDE..],
            dim: all,
            classes,
            tokens,
            z: &mut z,
            fresh: words.start == 0,
        };
        level.run_tiles(products).expect("a level of bf16");
    }
    (0..tokens)
        .flat_map(|t| (0..classes).map(move |v| (t, v)))
        .map(|(t, v)| z[v * BAND + t])
        .collect()
}

/// The emulations have the bits of the instructions in products of whole operands; both are the sums that they should
/// be.
#[test]
fn products_are_those_of_the_emulation() {
    let x = Operands::new();
    for (emulated, name) in Level::emulated().into_iter().zip(["avx512bf16", "amx"]) {
        let all = logits(&x, emulated);
        for (i, &got) in all.iter().enumerate() {
            let [h, w] = [x.h.row(i / 255), x.w.row(i % 255)].map(|row| row.mapv(f64::from));
            let (exact, size) = (h.dot(&w), h.mapv(f64::abs).dot(&w.mapv(f64::abs)));
            let error = (f64::from(got) - exact).abs();
            assert!(error <= 72.0 * 0.5f64.powi(24) * size, "{i}: {got}, not {exact}");
        }
        let Some(level) = Level::by_name(name) else {
            println!("skipped: {}", Level::lacks(name));
            continue;
        };
        let bits = |all: Vec<f32>| all.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(logits(&x, level)), bits(all), "{name}");
    }
}
