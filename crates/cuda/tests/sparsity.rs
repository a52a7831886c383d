//! The statistics of lazy attention on a device, beside those of its formulas. Without a device the test says
//! that it was skipped.

use etalon_cuda::{Options, Workspace, lazy_attention, probe};
use etalon_problem::lazy_attention::{Figure, Stats};
use etalon_problem::{Blocking, Extents, LazyAttention, Mask, Sequences, Views};
use ndarray::{Array1, Array2, Array4};

const TILE: Blocking = Blocking { queries: 32, keys: 48 };

fn numbers(shape: [usize; 4], seed: u64) -> Array4<f32> {
    let mut at = seed;
    Array4::from_shape_simple_fn(shape, || {
        at = at.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((at >> 40) % 257) as f32 / 128.0 - 1.0
    })
}

/// The figures of every row, and of every tile whether a pair is visible (1) or active (2), by (E1)–(E5) in f64.
fn expected(
    problem: &LazyAttention,
    q: &Array4<f32>,
    k: &Array4<f32>,
    bias: &Array2<f32>,
    tau: &Array1<f32>,
) -> (Vec<[f32; Figure::COUNT]>, Array4<u32>) {
    let e = problem.scores.extents;
    let tiles = (e.queries.div_ceil(TILE.queries), e.keys.div_ceil(TILE.keys));
    let mut states = Array4::<u32>::zeros((e.batch, e.query_heads, tiles.0, tiles.1));
    let mut figures = Vec::new();
    for s in problem.scores.sequences() {
        for (h, i) in (0..e.query_heads).flat_map(|h| (0..s.queries).map(move |i| (h, i))) {
            let score = |j: usize| {
                let key = [s.batch, h / problem.scores.group(), s.key_start + j];
                let product = (0..e.dim).map(|d| {
                    let row = [s.batch, h, s.query_start + i, d];
                    f64::from(q[row]) * f64::from(k[[key[0], key[1], key[2], d]])
                });
                let near = problem.bias.and_then(|bias| bias.distance(&s, i, j));
                let near = near.map_or(0.0, |d| f64::from(bias[[h, d]]));
                product.sum::<f64>() * problem.scores.scale() + near
            };
            let seen = (0..s.keys).filter(|&j| problem.scores.mask.allows(&s, h, i, j));
            let weights: Vec<(usize, f64)> = seen.map(|j| (j, score(j).exp())).collect();
            let (all, n) = (weights.iter().map(|x| x.1).sum::<f64>(), weights.len() as f64);
            let mut row = [0.0; Figure::COUNT];
            for (j, weight) in weights {
                let p = weight / all;
                let kept = (p + f64::from(tau[h]) / n).max(0.0);
                row[Figure::Visible as usize] += 1.0;
                row[Figure::Active as usize] += f64::from(u8::from(kept > 0.0));
                row[Figure::Surviving as usize] += kept;
                row[Figure::Inactive as usize] += if kept > 0.0 { 0.0 } else { p };
                if j == 0 {
                    row[Figure::FirstWeight as usize] = p;
                    row[Figure::FirstKept as usize] = kept;
                }
                let tile = [(s.query_start + i) / TILE.queries, (s.key_start + j) / TILE.keys];
                let state = &mut states[[s.batch, h, tile[0], tile[1]]];
                *state = (*state).max(1 + u32::from(kept > 0.0));
            }
            figures.push(row.map(|x| x as f32));
        }
    }
    (figures, states)
}

#[test]
fn a_device_finds_the_sparsity_of_the_formulas() {
    if let Err(absent) = probe() {
        println!("skipped: {absent}");
        return;
    }
    let extents = Extents { batch: 1, query_heads: 4, key_heads: 2, queries: 150, keys: 170, dim: 24 };
    let packed = Sequences::Packed { cu_query: vec![0, 70, 70, 149], cu_key: vec![0, 66, 66, 170] };
    let workspace = Workspace::new();
    for (mask, sequences) in [(Mask::causal(), Sequences::Dense), (Mask::Full, packed)] {
        let mut problem = LazyAttention::new(extents).bias(40).mask(mask);
        problem.scores.sequences = sequences;
        let (q, k) = (numbers(problem.scores.q_shape(), 1), numbers(problem.scores.k_shape(), 2));
        let v = numbers(problem.v_shape(), 3);
        let bias = Array2::from_shape_fn((4, 40), |(h, d)| 3.0 - 0.1 * (h * d) as f32);
        let tau = Array1::from(vec![-1.013, -0.61, 0.3, -7.7]);
        let inputs = Views::new().with("q", &q).with("k", &k).with("v", &v);
        let inputs = inputs.with("bias", &bias).with("tau", &tau);
        let options = Options::default();
        let (figures, states) = expected(&problem, &q, &k, &bias, &tau);
        let count = |least: u32| states.iter().filter(|&&state| state >= least).count();
        let wanted = Stats::of_rows(figures, [count(1), count(2)]);
        let found = lazy_attention::stats(&workspace, &problem, &inputs, TILE, &options).unwrap();
        for (found, wanted, allowed) in [
            (found.element_density, wanted.element_density, 1e-3), // pairs near the kink
            (found.tile_density, wanted.tile_density, 0.0),
            (found.surviving_mass, wanted.surviving_mass, 1e-5),
            (found.inactive_mass, wanted.inactive_mass, 1e-3),
            (found.dead_rows, wanted.dead_rows, 0.0),
            (found.first_key_weight, wanted.first_key_weight, 1e-5),
            (found.first_key_kept, wanted.first_key_kept, 1e-5),
            (found.first_key_share, wanted.first_key_share, 1e-5),
            (found.by_tiles.both, wanted.by_tiles.both, 0.0),
        ] {
            assert!((found - wanted).abs() <= allowed, "{found} instead of {wanted}");
        }
        let found = lazy_attention::activity(&workspace, &problem, &inputs, TILE, &options).unwrap();
        assert_eq!(found, states.mapv(|state| state == 2));
    }
}
