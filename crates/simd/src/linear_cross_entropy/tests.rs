//! Passes over pairs of bf16, on every machine by the rules of the instruction, and with it where it is there.

use super::cut::TILE;
use super::logits::Products;
use super::pack;
use super::tokens::Token;
use super::{Cotangents, GradientsMut, Inputs, backward_into, forward};
use crate::lanes::prefetch::Lines;
use crate::tile::{BAND, STRIDE};
use crate::{Level, Options, Precision, Tensor, Workspace};
use etalon_problem::LinearCrossEntropy;
use half::bf16;
use ndarray::{Array1, Array2, ArrayD, ArrayView2, ShapeBuilder, arr0};

/// Levels of pairs.
fn levels() -> impl Iterator<Item = Level> {
    [Level::emulated()].into_iter().chain(Level::of_pairs())
}

fn flash(level: Level) -> Options {
    Options { level, precision: Precision::Flash, ..Options::default() }
}

/// Odd numbers of tokens that count, of elements and of classes, in several bands and tiles.
struct Operands {
    problem: LinearCrossEntropy,
    h: Array2<bf16>,
    w: Array2<bf16>,
    targets: Array1<i64>,
    dloss: ArrayD<f32>,
}

impl Operands {
    fn new() -> Self {
        let wave = |x: usize, y: usize| ((17 * x + 5 * y) as f32 * 0.37).sin();
        let target = |i: usize| if i == 7 { -100 } else { (i * 389 % 301) as i64 };
        Operands {
            problem: LinearCrossEntropy {
                wide_gradients: true,
                ..LinearCrossEntropy::new(198, 71, 301)
            },
            h: Array2::from_shape_fn((198, 71), |(i, c)| bf16::from_f32(wave(i, c))),
            w: Array2::from_shape_fn((301, 71), |(v, c)| bf16::from_f32(wave(c, v * v))),
            targets: (0..198).map(target).collect(),
            dloss: arr0(100.0).into_dyn(),
        }
    }

    fn inputs<'a>(&'a self, h: ArrayView2<'a, bf16>, w: ArrayView2<'a, bf16>) -> Inputs<'a, bf16> {
        Inputs::new(h, w, self.targets.view())
    }
    /// dh and dw in f32.
    fn gradients(
        &self,
        h: ArrayView2<'_, bf16>,
        w: ArrayView2<'_, bf16>,
        options: &Options,
    ) -> [Array2<f32>; 2] {
        let mut all = [self.h.dim(), self.w.dim()].map(Array2::zeros);
        let [dh, dw] = all.each_mut().map(|x| Some(x.view_mut()));
        let places = GradientsMut { dh, dw, ..GradientsMut::default() };
        let cotangents = Cotangents::default().dloss(self.dloss.view());
        let (workspace, inputs) = (Workspace::new(), self.inputs(h, w));
        backward_into(&workspace, &self.problem, &inputs, &cotangents, places, options).unwrap();
        all
    }

    /// da of every token and class, in f64.
    fn exact(&self) -> Array2<f64> {
        let [h, w] = [&self.h, &self.w].map(|x| x.mapv(f64::from));
        let counted = self.targets.iter().filter(|&&y| y >= 0).count() as f64;
        let mut da = h.dot(&w.t());
        for (mut row, &y) in da.outer_iter_mut().zip(&self.targets) {
            let sum: f64 = row.iter().map(|z| z.exp()).sum();
            row.mapv_inplace(|z| z.exp() / sum);
            match usize::try_from(y) {
                Ok(y) => row[y] -= 1.0,
                Err(_) => row.fill(0.0),
            }
        }
        da * (self.dloss.sum() as f64 / counted)
    }
}

/// Twice what the rounding of da may do leaves room for sums in f32; strict gradients are closer by far.
#[test]
fn gradients_are_those_of_rounded_gradients_of_logits() {
    let x = Operands::new();
    let da = x.exact();
    let [h, w] = [&x.h, &x.w].map(|x| x.mapv(f64::from));
    let exact = [da.dot(&w), da.t().dot(&h)];
    let sizes =
        [da.mapv(f64::abs).dot(&w.mapv(f64::abs)), da.t().mapv(f64::abs).dot(&h.mapv(f64::abs))];
    let worst = |options: &Options| {
        let got = x.gradients(x.h.view(), x.w.view(), options);
        let of = |(got, (exact, size)): (Array2<f32>, (&Array2<f64>, &Array2<f64>))| {
            let errors = got.iter().zip(exact).map(|(&got, exact)| (f64::from(got) - exact).abs());
            errors
                .zip(size)
                .map(|(error, size)| if *size > 0.0 { error / size } else { error })
                .fold(0.0, f64::max)
        };
        let [dh, dw] = got;
        [of((dh, (&exact[0], &sizes[0]))), of((dw, (&exact[1], &sizes[1])))]
    };
    for level in levels() {
        for worst in worst(&flash(level)) {
            assert!((1.0 / 8192.0..1.0 / 256.0).contains(&worst), "{level}: {worst:e}");
        }
        for worst in worst(&Options { level, ..Options::default() }) {
            assert!(worst < 1e-5, "{level}, strict: {worst:e}");
        }
    }
}

/// Loss and gradients have the same bits with the least budget, and of operands whose elements lie apart.
#[test]
fn no_bit_depends_on_budget_or_strides() {
    let x = Operands::new();
    let columns = |x: &Array2<bf16>| {
        let mut y = Array2::from_elem(x.dim().f(), bf16::ZERO);
        y.assign(x);
        y
    };
    let (h, w) = (columns(&x.h), columns(&x.w));
    for level in levels() {
        let (usual, least) = (flash(level), Options { memory_budget: 0, ..flash(level) });
        let gradients = x.gradients(x.h.view(), x.w.view(), &usual);
        assert_eq!(gradients, x.gradients(h.view(), w.view(), &usual), "{level}: strides");
        assert_eq!(gradients, x.gradients(x.h.view(), x.w.view(), &least), "{level}: budget");
        let loss = |h, w, options| forward(&x.problem, &x.inputs(h, w), options).unwrap().loss;
        let usual_loss = loss(x.h.view(), x.w.view(), &usual);
        assert_eq!(usual_loss, loss(h.view(), w.view(), &least), "{level}: loss");
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
    let emulated = logits(&x, Level::emulated());
    for (i, &got) in emulated.iter().enumerate() {
        let [h, w] = [x.h.row(i / 255), x.w.row(i % 255)].map(|row| row.mapv(f64::from));
        let (exact, size) = (h.dot(&w), h.mapv(f64::abs).dot(&w.mapv(f64::abs)));
        assert!(
            (f64::from(got) - exact).abs() <= 72.0 * 0.5f64.powi(24) * size,
            "{i}: {got}, not {exact}"
        );
    }
    let Some(level) = Level::of_pairs() else { return println!("skipped: no AVX-512 BF16") };
    let bits = |all: Vec<f32>| all.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    assert_eq!(bits(logits(&x, level)), bits(emulated));
}
