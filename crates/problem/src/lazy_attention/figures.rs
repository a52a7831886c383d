//! Figures that a tier finds in the rows of a problem; the statistics are made of them: (E37)–(E46).

use super::{SpeedUp, Stats};

/// The figures of a row, which a tier keeps in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Figure {
    /// Number of visible pairs.
    Visible,
    /// Number of active pairs.
    Active,
    /// Σ e.
    Surviving,
    /// Σ P of the inactive pairs.
    Inactive,
    /// P of the first key of the sequence.
    FirstWeight,
    /// Its e.
    FirstKept,
}

impl Figure {
    /// Number of figures of a row.
    pub const COUNT: usize = 6;
}

impl Stats {
    /// From the figures of every row, and the number of tiles in which a pair is visible, and in which one is
    /// active. Rows are added up in their order, in f64.
    pub fn of_rows(
        rows: impl IntoIterator<Item = [f32; Figure::COUNT]>,
        [seen, full]: [usize; 2],
    ) -> Stats {
        let (mut sums, mut rows_seen, mut dead) = ([0.0; Figure::COUNT], 0.0, 0.0);
        let (mut long, mut long_surviving) = (0.0, 0.0);
        for row in rows {
            let of = |figure: Figure| f64::from(row[figure as usize]);
            if of(Figure::Visible) == 0.0 {
                continue;
            }
            rows_seen += 1.0;
            dead += f64::from(u8::from(of(Figure::Active) == 0.0));
            let is_long = of(Figure::Visible) > 1.0;
            let of_first = [Figure::FirstWeight as usize, Figure::FirstKept as usize];
            for (at, (sum, x)) in sums.iter_mut().zip(row).enumerate() {
                *sum += if is_long || !of_first.contains(&at) { f64::from(x) } else { 0.0 };
            }
            if is_long {
                (long, long_surviving) = (long + 1.0, long_surviving + of(Figure::Surviving));
            }
        }
        let of = |figure: Figure| sums[figure as usize];
        let element_density = ratio(of(Figure::Active), of(Figure::Visible));
        let tile_density = ratio(full as f64, seen as f64);
        Stats {
            element_density,
            tile_density,
            surviving_mass: ratio(of(Figure::Surviving), rows_seen),
            inactive_mass: ratio(of(Figure::Inactive), rows_seen),
            dead_rows: ratio(dead, rows_seen),
            first_key_weight: ratio(of(Figure::FirstWeight), long),
            first_key_kept: ratio(of(Figure::FirstKept), long),
            first_key_share: ratio(of(Figure::FirstKept), long_surviving),
            by_tiles: SpeedUp::new(seen, [1.0, 3.0], [3.0, 2.0], tile_density),
            by_pairs: SpeedUp::new(seen, [1.0, 1.0], [3.0, 2.0], element_density),
        }
    }
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole == 0.0 { 0.0 } else { part / whole }
}
