//! Statistics of the filter, and the speed-up that it is worth: (E37)–(E46).

use super::Inputs;
use super::activity::{Tiles, add_row};
use super::row::{Operands, Row};
use crate::scalar::Real;
use etalon_problem::lazy_attention::{SpeedUp, Stats};
use etalon_problem::{Blocking, Error, LazyAttention};

/// The statistics of all rows and heads, with tiles of this size.
pub fn stats<T: Real>(
    problem: &LazyAttention,
    inputs: &Inputs<'_, T>,
    tile: Blocking,
) -> Result<Stats, Error> {
    let operands = Operands::checked(problem, inputs)?;
    tile.check()?;
    let parts = operands.each_row(
        |_, _| (Sums::default(), Tiles::new()),
        |(sums, tiles), row| {
            sums.add(&Sums::of_row(row));
            add_row(tiles, tile, row);
        },
    );
    let (mut sums, mut tiles) = (Sums::default(), Tiles::new());
    for (part, tiles_of_head) in parts {
        sums.add(&part);
        for (at, active) in tiles_of_head {
            *tiles.entry(at).or_default() |= active;
        }
    }
    let (active_tiles, visible_tiles) = (tiles.values().filter(|&&x| x).count(), tiles.len());
    let element_density = ratio(sums.active, sums.visible);
    let tile_density = ratio(active_tiles as f64, visible_tiles as f64);
    Ok(Stats {
        element_density,
        tile_density,
        surviving_mass: ratio(sums.surviving, sums.rows),
        inactive_mass: ratio(sums.inactive, sums.rows),
        dead_rows: ratio(sums.dead, sums.rows),
        first_key_weight: ratio(sums.first_key_weight, sums.long_rows),
        first_key_kept: ratio(sums.first_key_kept, sums.long_rows),
        first_key_share: ratio(sums.first_key_kept, sums.long_surviving),
        by_tiles: SpeedUp::new(visible_tiles, [1.0, 3.0], [3.0, 2.0], tile_density),
        by_pairs: SpeedUp::new(visible_tiles, [1.0, 1.0], [3.0, 2.0], element_density),
    })
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole == 0.0 { 0.0 } else { part / whole }
}

/// Sums of which the statistics are made.
#[derive(Default)]
struct Sums {
    rows: f64,
    dead: f64,
    visible: f64,
    active: f64,
    surviving: f64,
    inactive: f64,
    /// Rows that see more than one key, and their part of `surviving`.
    long_rows: f64,
    long_surviving: f64,
    first_key_weight: f64,
    first_key_kept: f64,
}

impl Sums {
    fn of_row<T: Real>(row: &Row<'_, T>) -> Self {
        let (keys, mut sums) = (&row.softmax.keys, Sums::default());
        if keys.is_empty() {
            return sums;
        }
        for (t, active) in row.active.iter().enumerate() {
            if active.is_some() {
                sums.active += 1.0;
                sums.surviving += row.e[t].to_f64();
            } else {
                sums.inactive += row.softmax.p[t].to_f64();
            }
        }
        (sums.rows, sums.visible) = (1.0, row.n.to_f64());
        sums.dead = f64::from(sums.active == 0.0);
        if keys.len() > 1 {
            (sums.long_rows, sums.long_surviving) = (1.0, sums.surviving);
            if keys[0] == 0 {
                sums.first_key_weight = row.softmax.p[0].to_f64();
                sums.first_key_kept = row.e[0].to_f64();
            }
        }
        sums
    }

    fn add(&mut self, other: &Sums) {
        self.rows += other.rows;
        self.dead += other.dead;
        self.visible += other.visible;
        self.active += other.active;
        self.surviving += other.surviving;
        self.inactive += other.inactive;
        self.long_rows += other.long_rows;
        self.long_surviving += other.long_surviving;
        self.first_key_weight += other.first_key_weight;
        self.first_key_kept += other.first_key_kept;
    }
}
