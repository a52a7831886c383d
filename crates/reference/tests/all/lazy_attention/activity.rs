//! Active pairs and tiles, pairs near the kink, and the effect of a flipped decision.

use super::cases::{TOLERANCE, cases, extents};
use super::naive::{self, Pair};
use super::tensors::{
    Tensors, assert_all_close, assert_close, assert_same, cotangents, gradients, inputs, operands,
    run,
};
use etalon_problem::{Blocking, LazyAttention, Pass};
use etalon_reference::lazy_attention::{self, active_pairs, activity, ambiguous, backward_under};
use ndarray::{Array4, Dimension};

fn pairs(problem: &LazyAttention, x: &Tensors<f64>) -> Vec<Pair> {
    naive::rows(problem, x).into_iter().flat_map(|(_, row)| row).collect()
}

fn under(problem: &LazyAttention, x: &Tensors<f64>, active: &Array4<bool>) -> Tensors<f64> {
    let y = backward_under(problem, &inputs(x), &cotangents(x), &active.view());
    gradients(y.expect("the backward pass"))
}

#[test]
fn active_pairs_are_those_above_the_threshold() {
    let (mut active, mut idle) = (0, 0);
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::Forward, 71);
        let found = active_pairs(&problem, &inputs(&x)).expect(name);
        let mut expected = Array4::from_elem(found.dim(), false);
        for pair in pairs(&problem, &x) {
            expected[[pair.b, pair.h, pair.i, pair.j]] = pair.is_active();
            *(if pair.is_active() { &mut active } else { &mut idle }) += 1;
        }
        assert_eq!(found, expected, "{name}");
    }
    assert!(active > 500 && idle > 500, "{active} active and {idle} inactive pairs");
}

#[test]
fn a_tile_is_active_if_one_of_its_pairs_is() {
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::Forward, 72);
        let by_pair = active_pairs(&problem, &inputs(&x)).expect(name);
        for (rows, cols) in [(1, 1), (2, 3), (3, 2), (4, 100), (100, 1)] {
            let found = activity(&problem, &inputs(&x), Blocking::new(rows, cols)).expect(name);
            let (b, h, n, m) = by_pair.dim();
            let mut expected = Array4::from_elem((b, h, n.div_ceil(rows), m.div_ceil(cols)), false);
            for ((b, h, i, j), &active) in by_pair.indexed_iter() {
                expected[[b, h, i / rows, j / cols]] |= active;
            }
            assert_eq!(found, expected, "{name}: {rows} × {cols}");
        }
    }
}

/// Under its own decisions the backward pass is itself, bit for bit; what the bitmap says of pairs
/// that are not visible does not matter.
#[test]
fn the_own_activity_changes_nothing() {
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::Backward, 73);
        let expected = run(&problem, Pass::Backward, &x).expect(name);
        let mut active = active_pairs(&problem, &inputs(&x)).expect(name);
        assert_all_close(&under(&problem, &x, &active), &expected, 0.0, name);
        let seen: Vec<_> = pairs(&problem, &x).iter().map(|p| [p.b, p.h, p.i, p.j]).collect();
        for (place, active) in active.indexed_iter_mut() {
            *active |= !seen.contains(&[place.0, place.1, place.2, place.3]);
        }
        assert_all_close(&under(&problem, &x, &active), &expected, 0.0, name);
    }
}

/// One decision changed moves every gradient by (E31)–(E36), near the kink or not, whatever else
/// is active.
#[test]
fn a_flipped_pair_moves_the_gradients_by_the_formulas() {
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::Backward, 74);
        let scale = problem.scores.scale();
        let dot = |y: &str, at: [usize; 3], z: &str, to: [usize; 3]| -> f64 {
            let elements = 0..x[y].shape()[3];
            elements.map(|c| x[y][[at[0], at[1], at[2], c]] * x[z][[to[0], to[1], to[2], c]]).sum()
        };
        let own = active_pairs(&problem, &inputs(&x)).expect(name);
        let before = under(&problem, &x, &own);
        for (_, row) in naive::rows(&problem, &x).iter().step_by(5) {
            let pair = &row[row.len() / 2];
            let place = [pair.b, pair.h, pair.i, pair.j];
            let mut flipped = own.clone();
            flipped[place] ^= true;
            let sign = if own[place] { -1.0 } else { 1.0 };
            let key = [pair.b, pair.kh, pair.j];
            let g = dot("dout", pair.row(), "v", key);

            let mut expected = before.clone();
            for other in row {
                let same = f64::from(other.j == pair.j);
                let d_score = sign * pair.p * g * (same - other.p); // (E31)
                for c in 0..problem.scores.extents.dim {
                    let k = x["k"][[other.b, other.kh, other.j, c]];
                    let q = x["q"][[pair.b, pair.h, pair.i, c]];
                    expected.get_mut("dq").expect("dq")[[pair.b, pair.h, pair.i, c]] +=
                        scale * d_score * k; // (E32)
                    expected.get_mut("dk").expect("dk")[[other.b, other.kh, other.j, c]] +=
                        scale * d_score * q; // (E33)
                }
                if let Some(d) = other.distance {
                    expected.get_mut("dbias").expect("dbias")[[pair.h, d]] += d_score; // (E34)
                }
            }
            for c in 0..problem.value_dim {
                let dout = x["dout"][[pair.b, pair.h, pair.i, c]];
                expected.get_mut("dv").expect("dv")[[pair.b, pair.kh, pair.j, c]] +=
                    sign * (pair.p + pair.offset) * dout; // (E35)
            }
            expected.get_mut("dtau").expect("dtau")[[pair.h]] += sign * g / pair.n; // (E36)
            assert_all_close(&under(&problem, &x, &flipped), &expected, TOLERANCE, name);
        }
    }
}

/// A bound of 0 finds what lies exactly on the kink, one of ∞ everything visible, and one in
/// between what is as near, with the right numbers.
#[test]
fn ambiguous_pairs_are_those_within_the_bound() {
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::Forward, 75);
        let all = pairs(&problem, &x);
        let places = |bound: &(dyn Fn(&lazy_attention::Pair<f64>) -> f64 + Sync)| {
            let found = ambiguous(&problem, &inputs(&x), bound).expect(name);
            found.iter().map(|p| [p.batch, p.head, p.query, p.key]).collect::<Vec<_>>()
        };
        let within = |bound: &dyn Fn(&Pair) -> f64| {
            let near = all.iter().filter(|p| (p.p + p.offset).abs() <= bound(p));
            near.map(|p| [p.b, p.h, p.i, p.j]).collect::<Vec<_>>()
        };
        assert_eq!(places(&|_| f64::INFINITY), within(&|_| f64::INFINITY), "{name}");
        assert_eq!(places(&|_| f64::NAN), within(&|_| f64::INFINITY), "{name}");
        assert_eq!(places(&|_| 0.0), within(&|_| 0.0), "{name}");
        assert_eq!(places(&|_| 0.03), within(&|_| 0.03), "{name}");
        // Relative to the terms, and by a bound of each pair's own.
        let relative = |p: &lazy_attention::Pair<f64>| 0.1 * (p.weight + p.offset.abs());
        assert_eq!(places(&relative), within(&|p| 0.1 * (p.p + p.offset.abs())), "{name}");
        let even = |key: usize| if key.is_multiple_of(2) { 1.0 } else { -1.0 };
        assert_eq!(places(&|p| even(p.key)), within(&|p| even(p.j)), "{name}");

        let found = ambiguous(&problem, &inputs(&x), |_| f64::INFINITY).expect(name);
        for (found, pair) in found.iter().zip(&all) {
            assert!((found.weight - pair.p).abs() <= TOLERANCE, "{name}");
            assert_eq!(found.offset, pair.offset, "{name}");
        }
    }
}

/// At τ = −1 the first row is the only one on the kink, and flipping it is dout·v in dtau.
#[test]
fn the_first_row_at_minus_one_is_ambiguous() {
    let problem = LazyAttention::new(extents([1, 1, 1, 6, 6, 3]));
    let mut x = operands(&problem, Pass::Backward, 76);
    x.get_mut("tau").expect("tau").fill(-1.0);
    let found = ambiguous(&problem, &inputs(&x), |_| 0.0).expect("ambiguous");
    let expected =
        lazy_attention::Pair { batch: 0, head: 0, query: 0, key: 0, weight: 1.0, offset: -1.0 };
    assert_eq!(found, [expected]);

    let mut active = active_pairs(&problem, &inputs(&x)).expect("active pairs");
    let before = under(&problem, &x, &active);
    active[[0, 0, 0, 0]] = true;
    let after = under(&problem, &x, &active);
    let g: f64 = (0..3).map(|c| x["dout"][[0, 0, 0, c]] * x["v"][[0, 0, 0, c]]).sum();
    assert_close(&after["dtau"], &(&before["dtau"] + g), TOLERANCE, "dtau");
    // Its weight is 1, and dS of a single key dlse whatever it is worth.
    for result in ["dq", "dk", "dv"] {
        assert_close(&after[result], &before[result], TOLERANCE, result);
    }
    assert_same(&after["dv"], &before["dv"], "e is 0 on the kink");
}

/// Tiles of packed sequences lie on the arrays: one may hold the end of a sequence and the
/// beginning of the next.
#[test]
fn tiles_lie_across_packed_sequences() {
    use etalon_problem::Sequences;
    let packed = Sequences::Packed { cu_query: vec![0, 3, 6], cu_key: vec![0, 3, 6] };
    let problem = LazyAttention::new(extents([1, 1, 1, 6, 6, 2])).sequences(packed);
    let mut x = operands(&problem, Pass::Forward, 77);
    x.get_mut("tau").expect("tau").fill(0.5);
    let found = activity(&problem, &inputs(&x), Blocking::new(2, 2)).expect("activity");
    let expected = [[true, false, false], [true, true, false], [false, true, true]];
    for ((_, _, row, col), &active) in found.indexed_iter() {
        assert_eq!(active, expected[row][col], "tile {row}, {col}");
    }
    assert_eq!(found.raw_dim().slice(), [1, 1, 3, 3]);
}
