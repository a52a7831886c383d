//! Lazy attention: what may not change a bit, and what a kernel may not leave out.

use crate::common::wave;
use etalon_problem::{Align, Blocking, Extents, LazyAttention, Mask, Sequence, Sequences, Views};
use etalon_simd::{Mode, Options, Workspace, lazy_attention};
use lazy_attention::{Cotangents, Gradients, GradientsMut, Inputs, Output};
use ndarray::{Array1, Array2, Array3, Array4, ArrayD, s};

/// The operands of a problem. The bias falls with the distance, so that far tiles are inactive.
struct Operands {
    problem: LazyAttention,
    q: Array4<f32>,
    k: Array4<f32>,
    v: Array4<f32>,
    bias: Array2<f32>,
    tau: Array1<f32>,
    dout: Array4<f32>,
    dlse: Array3<f32>,
}

impl Operands {
    fn new(problem: LazyAttention, slope: f32) -> Self {
        let [heads, width] = problem.bias_shape().unwrap();
        let rows = problem.scores.row_shape();
        Operands {
            q: wave(problem.scores.q_shape(), 0.7),
            k: wave(problem.scores.k_shape(), 1.1),
            v: wave(problem.v_shape(), 1.3),
            bias: Array2::from_shape_fn((heads, width), |(_, d)| -slope * d as f32),
            tau: Array1::from_shape_fn(heads, |h| [-1.0, -0.6, 0.3, -2.5][h % 4]),
            dout: wave(problem.o_shape(), 1.7),
            dlse: wave([1, rows[0], rows[1], rows[2]], 1.9).slice_move(s![0, .., .., ..]),
            problem,
        }
    }

    fn inputs(&self) -> Inputs<'_, f32> {
        let Operands { q, k, v, bias, tau, .. } = self;
        Inputs::new(q.view(), k.view(), v.view(), tau.view()).bias(bias.view())
    }

    fn forward(&self, options: &Options) -> Output<f32> {
        lazy_attention::forward(&self.problem, &self.inputs(), options).unwrap()
    }

    fn backward(&self, out: &Output<f32>, options: &Options) -> Gradients<f32> {
        let cotangents = Cotangents::new(self.dout.view()).dlse(self.dlse.view());
        lazy_attention::backward(&self.problem, &self.inputs(), out, &cotangents, options).unwrap()
    }
}

fn problem(queries: usize, keys: usize, width: usize) -> LazyAttention {
    let extents = Extents { batch: 1, query_heads: 4, key_heads: 2, queries, keys, dim: 24 };
    LazyAttention::new(extents).bias(width).value_dim(20)
}

fn bits<'a>(x: impl IntoIterator<Item = &'a f32>) -> Vec<u32> {
    x.into_iter().map(|x| x.to_bits()).collect()
}

fn all(Gradients { dq, dk, dv, dbias, dtau }: &Gradients<f32>) -> Vec<Vec<u32>> {
    let dbias = dbias.as_ref().unwrap();
    vec![bits(dq), bits(dk), bits(dv), bits(dbias), bits(dtau)]
}

#[test]
fn modes_threads_and_budgets_change_no_bit() {
    let packed = Sequences::Packed { cu_query: vec![0, 120, 290], cu_key: vec![0, 180, 320] };
    let window = Mask::Window { left: Some(90), right: Some(5), align: Align::TopLeft };
    for problem in [
        problem(300, 331, 64),
        problem(300, 331, 500).mask(Mask::Full),
        problem(300, 331, 40).mask(window).sequences(packed),
    ] {
        let operands = Operands::new(problem, 0.2);
        let blocking = Some(Blocking::new(32, 32));
        let options = Options { blocking, mode: Mode::Separate, ..Options::default() };
        let out = operands.forward(&options);
        let separate = all(&operands.backward(&out, &options));
        for threads in [1, 2, 3, 7] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                assert!(operands.forward(&options) == out, "{threads} threads");
                for partials_budget in [0, usize::MAX] {
                    let options = Options { mode: Mode::FusedPartials, partials_budget, ..options };
                    let fused = all(&operands.backward(&out, &options));
                    assert!(fused == separate, "{threads} threads");
                }
            });
        }
    }
}

/// A tile of many queries has no room for the weights of all its keys: those of the last tiles are
/// computed twice.
#[test]
fn weights_that_are_computed_again_have_the_same_bits() {
    let operands = Operands::new(problem(900, 1000, 1000).mask(Mask::Full), 0.05);
    let [one, other] = [48, 900].map(|queries| {
        let blocking = Some(Blocking::new(queries, 64));
        operands.forward(&Options { blocking, ..Options::default() })
    });
    assert_eq!((bits(&one.o), bits(&one.lse)), (bits(&other.o), bits(&other.lse)));
}

/// All scores are nearly equal, so that at τ = −1 every pair lies within rounding of its threshold: the
/// sum of the forward pass must be one over the pairs that the backward pass holds for active.
#[test]
fn both_passes_hold_the_same_pairs_for_active() {
    let mut operands = Operands::new(problem(300, 331, 20), 0.0);
    operands.q.mapv_inplace(|x| 1e-6 * x);
    operands.tau.fill(-1.0);
    let options = Options { mode: Mode::ForwardGradient, ..Options::default() };
    let saved = operands.forward(&options);
    let plain = Output { pv_sum: None, ..operands.forward(&options) };
    let [with, without] = [&saved, &plain].map(|out| operands.backward(out, &options));
    let size = without.dk.iter().fold(0.0, |size: f32, x| size.max(x.abs()));
    let close = with.dk.iter().zip(&without.dk).all(|(x, y)| (x - y).abs() <= 1e-5 * size);
    assert!(close, "roundings alone");
}

#[test]
fn every_gradient_is_the_same_alone() {
    let operands = Operands::new(problem(150, 170, 60), 0.1);
    let options = Options::default();
    let out = operands.forward(&options);
    let together = all(&operands.backward(&out, &options));
    let cotangents = Cotangents::new(operands.dout.view()).dlse(operands.dlse.view());
    for (number, together) in together.into_iter().enumerate() {
        let Gradients { mut dq, mut dk, mut dv, dbias, mut dtau } =
            operands.backward(&out, &options);
        let mut dbias = dbias.unwrap();
        dq.fill(f32::NAN);
        dk.fill(f32::NAN);
        dv.fill(f32::NAN);
        dbias.fill(f32::NAN);
        dtau.fill(f32::NAN);
        let place = GradientsMut::default();
        let place = match number {
            0 => GradientsMut { dq: Some(dq.view_mut()), ..place },
            1 => GradientsMut { dk: Some(dk.view_mut()), ..place },
            2 => GradientsMut { dv: Some(dv.view_mut()), ..place },
            3 => GradientsMut { dbias: Some(dbias.view_mut()), ..place },
            _ => GradientsMut { dtau: Some(dtau.view_mut()), ..place },
        };
        let (problem, inputs) = (&operands.problem, operands.inputs());
        let workspace = Workspace::new();
        lazy_attention::backward_into(
            &workspace,
            problem,
            &inputs,
            &out,
            &cotangents,
            place,
            &options,
        )
        .unwrap();
        let results: [ArrayD<f32>; 5] =
            [dq.into_dyn(), dk.into_dyn(), dv.into_dyn(), dbias.into_dyn(), dtau.into_dyn()];
        assert_eq!(bits(&results[number]), together, "result {number}");
    }
}

/// With the sum of the forward pass Δ needs no sweep: dv and dtau have the same bits, the others differ
/// by roundings, as o does.
#[test]
fn the_saved_sum_gives_the_same_gradients() {
    let operands = Operands::new(problem(300, 331, 64), 0.2);
    let options = Options { mode: Mode::ForwardGradient, ..Options::default() };
    let saved = operands.forward(&options);
    assert!(saved.pv_sum.is_some());
    let plain = operands.forward(&Options::default());
    assert_eq!(bits(&saved.lse), bits(&plain.lse));
    assert!(saved.o.iter().zip(&plain.o).all(|(x, y)| (x - y).abs() <= 1e-5), "roundings alone");
    let [with, without] = [&saved, &plain].map(|out| operands.backward(out, &options));
    assert_eq!((bits(&with.dv), bits(&with.dtau)), (bits(&without.dv), bits(&without.dtau)));
    for (x, y) in [(&with.dq, &without.dq), (&with.dk, &without.dk)] {
        assert!(x.iter().zip(y).all(|(x, y)| (x - y).abs() <= 1e-5), "roundings alone");
    }
}

/// A tile without an active pair still adds −P Δ: without it the sums of dS over rows would not vanish,
/// and dbias at these distances would be 0.
#[test]
fn inactive_tiles_reach_dbias() {
    let operands = Operands::new(problem(400, 400, 400), 0.05);
    let options = Options { blocking: Some(Blocking::new(48, 48)), ..Options::default() };
    let out = operands.forward(&options);
    let cotangents = Cotangents::new(operands.dout.view());
    let (problem, inputs) = (&operands.problem, operands.inputs());
    let gradients =
        lazy_attention::backward(problem, &inputs, &out, &cotangents, &options).unwrap();
    let dbias = gradients.dbias.unwrap();
    for row in dbias.outer_iter() {
        let size: f32 = row.iter().map(|x| x.abs()).sum();
        assert!(row.sum().abs() <= 1e-4 * size, "{} of {size}", row.sum());
        assert!(row.slice(s![200..250]).iter().all(|&x| x != 0.0));
    }
}

/// P and e of every visible pair of a head, by definition.
fn weights(operands: &Operands, s: &Sequence, head: usize) -> Vec<Vec<(usize, f64, f64)>> {
    let Operands { problem, q, k, bias, tau, .. } = operands;
    let score = |i: usize, j: usize| {
        let q = q.slice(s![s.batch, head, s.query_start + i, ..]);
        let k = k.slice(s![s.batch, head / 2, s.key_start + j, ..]);
        let product: f64 = q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
        let d = problem.bias.unwrap().distance(s, i, j);
        problem.scores.scale() * product + d.map_or(0.0, |d| f64::from(bias[[head, d]]))
    };
    let row = |i| {
        let seen = (0..s.keys).filter(|&j| problem.scores.mask.allows(s, head, i, j));
        let scores: Vec<_> = seen.map(|j| (j, score(i, j))).collect();
        let sum: f64 = scores.iter().map(|(_, s)| s.exp()).sum();
        let offset = f64::from(tau[head]) / scores.len() as f64;
        let pair = |(j, s): (usize, f64)| (j, s.exp() / sum, (s.exp() / sum + offset).max(0.0));
        scores.into_iter().map(pair).collect()
    };
    (0..s.queries).map(row).collect()
}

/// Packed sequences, whose tiles of statistics lie across them, and rows that see nothing.
#[test]
fn statistics_follow_their_definition() {
    let packed = Sequences::Packed { cu_query: vec![0, 120, 290], cu_key: vec![0, 100, 320] };
    let operands = Operands::new(problem(300, 331, 90).sequences(packed), 0.3);
    let Operands { problem, q, k, v, bias, tau, .. } = &operands;
    let inputs = Views::new().with("q", q).with("k", k).with("v", v);
    let inputs = inputs.with("bias", bias).with("tau", tau);
    let (tile, options) = (Blocking::new(33, 17), Options::default());
    let stats = lazy_attention::stats(problem, &inputs, tile, &options).unwrap();
    let activity = lazy_attention::activity(problem, &inputs, tile, &options).unwrap();

    let mut tiles = Array4::from_elem(activity.raw_dim(), None);
    let [mut visible, mut active, mut rows, mut left, mut lost, mut dead] = [0.0; 6];
    let [mut long, mut long_left, mut first_p, mut first_e] = [0.0; 4];
    for (sequence, head) in
        problem.scores.sequences().iter().flat_map(|s| (0..4).map(move |head| (s, head)))
    {
        for (i, row) in weights(&operands, sequence, head).iter().enumerate() {
            let Some((first, ..)) = row.first() else { continue };
            let of_row: f64 = row.iter().map(|(_, _, e)| e).sum();
            rows += 1.0;
            left += of_row;
            dead += f64::from(u8::from(of_row == 0.0));
            if row.len() > 1 {
                (long, long_left) = (long + 1.0, long_left + of_row);
                if *first == 0 {
                    (first_p, first_e) = (first_p + row[0].1, first_e + row[0].2);
                }
            }
            for &(j, p, e) in row {
                visible += 1.0;
                active += f64::from(u8::from(e > 0.0));
                lost += if e > 0.0 { 0.0 } else { p };
                let at = [(sequence.query_start + i) / 33, (sequence.key_start + j) / 17];
                let tile = &mut tiles[[0, head, at[0], at[1]]];
                *tile = Some(tile.unwrap_or(false) || e > 0.0);
            }
        }
    }
    assert_eq!(activity, tiles.mapv(|tile| tile == Some(true)));
    let [seen, full] = [tiles.iter().flatten().count(), activity.iter().filter(|&&x| x).count()];
    assert!(full < seen && dead > 0.0 && rows < 1160.0, "a case that shows something");
    for (found, expected) in [
        (stats.element_density, active / visible),
        (stats.tile_density, full as f64 / seen as f64),
        (stats.surviving_mass, left / rows),
        (stats.inactive_mass, lost / rows),
        (stats.dead_rows, dead / rows),
        (stats.first_key_weight, first_p / long),
        (stats.first_key_kept, first_e / long),
        (stats.first_key_share, first_e / long_left),
        (stats.by_tiles.forward, 4.0 / (1.0 + 3.0 * stats.tile_density)),
        (stats.by_pairs.both, 7.0 / (4.0 + 3.0 * stats.element_density)),
    ] {
        assert!((found - expected).abs() <= 1e-5, "{found} for {expected} in {stats:?}");
    }
}
