//! Families of elements: the data on which particular bugs show.

use super::cases::Family;
use crate::generate::Stream;
use crate::laws::tensors::from_indices;
use etalon_problem::{Dtype, Operand, Scores};
use ndarray::ArrayD;

impl Family {
    /// The elements of an operand, before they are rounded to its type.
    pub(crate) fn values(
        self,
        scores: &Scores,
        operand: &Operand,
        dtype: Dtype,
        seed: u64,
    ) -> ArrayD<f64> {
        let (stream, coins) = (Stream::new(seed, operand.name), Stream::new(seed, "coin"));
        let mut at = 0;
        from_indices(&operand.shape, |index| {
            let (x, coin) = (stream.normal(at), coins.uniform(at + 1));
            at += 1;
            let element = Element { scores, shape: &operand.shape, dtype, x, coin };
            match (operand.name, operand.shape.len()) {
                ("q", _) => element.of_query(self, index[3]),
                ("k", _) => element.of_key(self, [index[1], index[2], index[3]], &stream),
                ("v", _) => element.of_value(self, index[3]),
                ("bias", _) => element.of_bias(self, [index[0], index[1], index[2], index[3]]),
                ("sinks", _) if self == Family::Large => x - lowest(scores),
                ("sinks", _) if self == Family::Holes => match index[0] % 4 {
                    1 => f64::INFINITY,     // leaves NaN in every row of its head that sees a key
                    2 => f64::NEG_INFINITY, // is none
                    _ => 2.0 * x,
                },
                ("sinks", _) => 2.0 * x,
                ("dout", 4) if self == Family::Zeros => zero_half(x, coin),
                _ => x,
            }
        })
    }
}

/// The random numbers of an element, and its operand.
struct Element<'a> {
    scores: &'a Scores,
    shape: &'a [usize],
    dtype: Dtype,
    /// Of mean 0 and variance 1.
    x: f64,
    /// Uniform in [0, 1), and the same for all operands.
    coin: f64,
}

impl Element<'_> {
    /// The value of a query and a key in column 0 for a score of 1; without a scale no score is.
    fn unit(&self) -> f64 {
        match self.scores.scale().abs() {
            0.0 => 1.0,
            scale => scale.sqrt().recip(),
        }
    }

    fn of_query(&self, family: Family, c: usize) -> f64 {
        let unit = self.unit();
        match family {
            Family::Peaked => 3.0 * self.x,
            Family::Large if c == 0 => unit * lowest(self.scores).sqrt(),
            Family::Ascending | Family::Descending | Family::SinkKey if c == 0 => unit,
            _ => self.of_any(family, channel(c, self.dtype)),
        }
    }

    fn of_key(&self, family: Family, [head, j, c]: [usize; 3], stream: &Stream) -> f64 {
        let unit = self.unit();
        // Half a unit per key: every tile of two keys or more moves the maximum by at least 1.
        let climb = 0.5 * unit * (j as f64 - self.shape[2] as f64 / 2.0);
        match family {
            Family::Large if c == 0 => -unit * lowest(self.scores).sqrt(),
            Family::Ties => stream.normal(j % 5 * self.shape[3] + c),
            Family::Ascending if c == 0 => climb,
            Family::Descending if c == 0 => -climb,
            // e⁸ ≈ 3000 outweighs 63 keys of weight about 1.
            Family::SinkKey if c == 0 && (j + 8 * head).is_multiple_of(64) => 8.0 * unit,
            _ => self.of_any(family, 1.0 / channel(c, self.dtype)),
        }
    }

    fn of_value(&self, family: Family, c: usize) -> f64 {
        match family {
            Family::Range if self.coin < 0.08 => self.x * 0.5 * self.dtype.min_positive(),
            _ => self.of_any(family, channel(c, self.dtype)),
        }
    }

    /// An element like any other of its operand; `size` is that of its channel.
    fn of_any(&self, family: Family, size: f64) -> f64 {
        match family {
            Family::Range => self.x * size,
            Family::Zeros => zero_half(self.x, self.coin),
            _ => self.x,
        }
    }

    /// Of [`Family::Holes`] each head hides other pairs: its first and last row, or its second, a band of rows
    /// and one of keys, and in the last batch element all; one head of four sees nothing at all.
    fn of_bias(&self, family: Family, [b, h, i, j]: [usize; 4]) -> f64 {
        if family != Family::Holes {
            return self.x;
        }
        let edge_row = if h % 2 == 0 { i == 0 || i + 1 == self.shape[2] } else { i == 1 };
        let tile = (32..48).contains(&(i + 16 * (h % 3))) || (16..32).contains(&(j + 8 * (h % 4)));
        let last_batch = self.shape[0] > 1 && b + 1 == self.shape[0];
        let blind_head = (b + h) % 4 == 3;
        match edge_row || tile || last_batch || blind_head || self.coin < 0.25 {
            true => f64::NEG_INFINITY,
            false if j % 7 == 3 => -3e4, // finite in every storage type; exp of it is 0
            false => self.x,
        }
    }
}

/// Depth of the scores of [`Family::Large`] below 0: as far as leaves the dot product's own rounding, (D + 1) u |s|,
/// at 3 %, and no farther than 6e4.
fn lowest(scores: &Scores) -> f64 {
    let rounding = (scores.extents.dim + 1) as f64 * Dtype::F32.unit_roundoff();
    (0.03 / rounding).min(6e4)
}

/// The size of a channel: 2⁻¹² to 2¹², or 2⁻⁴ to 2⁴ in f16.
fn channel(c: usize, dtype: Dtype) -> f64 {
    let width = if dtype == Dtype::F16 { 4 } else { 12 };
    2f64.powi((c * 5 % (2 * width as usize + 1)) as i32 - width)
}

/// Of half of all elements ±0.
pub(crate) fn zero_half(x: f64, coin: f64) -> f64 {
    match coin {
        c if c < 0.4 => 0.0,
        c if c < 0.5 => -0.0,
        _ => x,
    }
}
