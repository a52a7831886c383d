//! The statistics, counted again from the pairs.

use super::cases::{TOLERANCE, cases, extents};
use super::naive;
use super::tensors::{inputs, operands, run};
use etalon_problem::{Blocking, LazyAttention, Pass};
use etalon_reference::lazy_attention::{SpeedUp, Stats, stats};
use std::collections::BTreeSet;

fn ratio(part: f64, whole: f64) -> f64 {
    if whole == 0.0 { 0.0 } else { part / whole }
}

/// (E37)–(E44) from the list of pairs; the speed-ups are left to their own test.
fn counted(problem: &LazyAttention, tile: Blocking, speed: &Stats) -> Stats {
    let x = operands(problem, Pass::Forward, 81);
    let rows = naive::rows(problem, &x);
    let pairs: Vec<_> = rows.iter().flat_map(|(_, row)| row).collect();
    let tiles = |wanted: &dyn Fn(&&&naive::Pair) -> bool| {
        let tiles = pairs.iter().filter(wanted);
        let place = |p: &&naive::Pair| (p.b, p.h, p.i / tile.queries, p.j / tile.keys);
        tiles.map(place).collect::<BTreeSet<_>>().len() as f64
    };
    let left = |p: &naive::Pair| if p.is_active() { p.p + p.offset } else { 0.0 };
    let active = pairs.iter().filter(|p| p.is_active()).count() as f64;
    let long: Vec<_> = rows.iter().filter(|(_, row)| row.len() > 1).collect();
    let first = |of: &dyn Fn(&naive::Pair) -> f64| -> f64 {
        let pairs = long.iter().flat_map(|(_, row)| row).filter(|p| p.first_key);
        pairs.map(of).sum()
    };
    let long_left: f64 = long.iter().flat_map(|(_, row)| row).map(left).sum();
    let dead = rows.iter().filter(|(_, row)| !row.iter().any(|p| p.is_active())).count() as f64;
    let inactive: f64 = pairs.iter().filter(|p| !p.is_active()).map(|p| p.p).sum();
    Stats {
        element_density: ratio(active, pairs.len() as f64),
        tile_density: ratio(tiles(&|p| p.is_active()), tiles(&|_| true)),
        surviving_mass: ratio(pairs.iter().map(|p| left(p)).sum(), rows.len() as f64),
        inactive_mass: ratio(inactive, rows.len() as f64),
        dead_rows: ratio(dead, rows.len() as f64),
        first_key_weight: ratio(first(&|p| p.p), long.len() as f64),
        first_key_kept: ratio(first(&left), long.len() as f64),
        first_key_share: ratio(first(&left), long_left),
        ..*speed
    }
}

fn numbers(s: &Stats) -> [f64; 8] {
    [
        s.element_density,
        s.tile_density,
        s.surviving_mass,
        s.inactive_mass,
        s.dead_rows,
        s.first_key_weight,
        s.first_key_kept,
        s.first_key_share,
    ]
}

#[test]
fn statistics_are_what_the_pairs_say() {
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::Forward, 81);
        for tile in [Blocking::new(1, 1), Blocking::new(2, 3), Blocking::new(64, 64)] {
            let found = stats(&problem, &inputs(&x), tile).expect(name);
            let expected = counted(&problem, tile, &found);
            for (found, expected) in numbers(&found).into_iter().zip(numbers(&expected)) {
                assert!((found - expected).abs() <= TOLERANCE, "{name}: {found}, {expected}");
            }
        }
    }
}

/// (E45) and (E46), at the densities where they are known numbers.
#[test]
fn predicted_speed_ups() {
    // τ = 0: all is active. Forward as without skipping; over softmax attention 7/9 and 7/7.
    let problem = LazyAttention::new(extents([1, 2, 1, 8, 8, 2]));
    let mut x = operands(&problem, Pass::Forward, 82);
    x.get_mut("tau").expect("tau").fill(0.0);
    let tile = Blocking::new(4, 4);
    let dense = stats(&problem, &inputs(&x), tile).expect("stats");
    let none = SpeedUp { forward: 1.0, backward: 1.0, both: 1.0, over_attention: 1.0 };
    assert_eq!(dense.by_pairs, none);
    assert_eq!(dense.by_tiles, SpeedUp { over_attention: 7.0 / 9.0, ..none });
    // Nothing is active: 4 and 2 times forward, and never more than 5/3 backward.
    x.get_mut("tau").expect("tau").fill(-100.0);
    let empty = stats(&problem, &inputs(&x), tile).expect("stats");
    let most =
        |forward, both| SpeedUp { forward, backward: 5.0 / 3.0, both, over_attention: 7.0 / 4.0 };
    assert_eq!(empty.by_tiles, most(4.0, 9.0 / 4.0));
    assert_eq!(empty.by_pairs, most(2.0, 7.0 / 4.0));
    assert_eq!((empty.dead_rows, empty.inactive_mass.round()), (1.0, 1.0));
    // Half of the tiles: 9/6.5 together. One key head apart, both heads alike but for τ.
    x.insert("tau".to_string(), ndarray::arr1(&[0.0, -100.0]).into_dyn());
    let half = stats(&problem, &inputs(&x), tile).expect("stats");
    assert_eq!((half.tile_density, half.element_density), (0.5, 0.5));
    let by_tiles = [4.0 / 2.5, 5.0 / 4.0, 9.0 / 6.5, 7.0 / 6.5];
    let by_pairs = [2.0 / 1.5, 5.0 / 4.0, 7.0 / 5.5, 7.0 / 5.5];
    for (found, expected) in [(half.by_tiles, by_tiles), (half.by_pairs, by_pairs)] {
        let found = [found.forward, found.backward, found.both, found.over_attention];
        assert_eq!(found, expected);
    }
}

/// Every number is 0 if nothing is visible.
#[test]
fn nothing_visible_is_all_zero() {
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::Forward, 83);
        if naive::rows(&problem, &x).is_empty() {
            let s = stats(&problem, &inputs(&x), Blocking::new(2, 2)).expect(name);
            assert_eq!(numbers(&s), [0.0; 8], "{name}");
            let zero = SpeedUp { forward: 0.0, backward: 0.0, both: 0.0, over_attention: 0.0 };
            assert_eq!((s.by_tiles, s.by_pairs), (zero, zero), "{name}");
        }
    }
}

/// Surviving mass is what a value of 1 returns; what survives, what is subtracted from it and what
/// is inactive add up to 1.
#[test]
fn masses_add_up() {
    let problem = LazyAttention::new(extents([1, 1, 1, 9, 9, 3])).bias(4);
    let mut x = operands(&problem, Pass::Forward, 84);
    x.get_mut("v").expect("v").fill(1.0);
    let s = stats(&problem, &inputs(&x), Blocking::new(3, 3)).expect("stats");
    let o = run(&problem, Pass::Forward, &x).expect("forward")["o"].clone();
    assert!((s.surviving_mass - o.mean().expect("rows")).abs() <= TOLERANCE);
    let rows = naive::rows(&problem, &x);
    let subtracted: f64 =
        rows.iter().flat_map(|(_, row)| row).filter(|p| p.is_active()).map(|p| -p.offset).sum();
    let whole = s.surviving_mass + subtracted / rows.len() as f64 + s.inactive_mass;
    assert!((whole - 1.0).abs() <= TOLERANCE, "{whole}");
}
