//! Families of elements: the data on which particular bugs show.

use crate::cases::axis;
use crate::generate::Stream;
use etalon_problem::{Dtype, Operand, Scores};
use ndarray::{ArrayD, IxDyn};

axis! {
    "family",
    /// Families of elements. Upstream gradients are random and signed in each of them, never ones.
    Family {
        /// Mean 0, variance 1.
        Generic = "generic",
        /// Scores with deviation 3: one key has most of the weight, as in trained models.
        Peaked = "peaked",
        /// Every score far below any finite stand-in for −∞.
        Large = "large",
        /// Five distinct keys, repeated: equal maxima in every tile.
        Ties = "ties",
        /// Scores that climb with the key: each tile has a new maximum.
        Ascending = "ascending",
        /// Scores that fall with the key: no tile but the first has a new maximum.
        Descending = "descending",
        /// Every 64th key takes almost all weight.
        SinkKey = "sink_key",
        /// A bias with −∞: rows, tiles and batch elements that see nothing.
        Holes = "holes",
        /// Channels of very different size, subnormal numbers among them.
        Range = "range",
        /// Half of all elements are +0 or −0.
        Zeros = "zeros",
    }
}

impl Family {
    /// The elements of an operand, before they are rounded to its type.
    pub(in crate::cases) fn values(
        self,
        scores: &Scores,
        operand: &Operand,
        dtype: Dtype,
        seed: u64,
    ) -> ArrayD<f64> {
        let stream = Stream::new(seed, operand.name);
        let shape = &operand.shape;
        let mut at = 0;
        ArrayD::from_shape_fn(IxDyn(shape), |index| {
            let x = stream.normal(at);
            at += 1;
            let coin = Stream::new(seed, "coin").uniform(at);
            match (operand.name, shape.len()) {
                ("q", _) => self.query(scores, dtype, index[3], x, coin),
                ("k", _) => self.key(scores, dtype, index[2], index[3], x, coin, &stream, shape),
                ("v", _) => self.value(dtype, index[3], x, coin),
                ("bias", _) => self.bias([index[0], index[2], index[3]], x, coin, shape),
                ("sinks", _) if self == Family::Large => x - lowest(scores),
                ("sinks", _) => 2.0 * x,
                ("dout", 4) if self == Family::Zeros => zero_half(x, coin),
                _ => x,
            }
        })
    }

    fn query(self, scores: &Scores, dtype: Dtype, c: usize, x: f64, coin: f64) -> f64 {
        let unit = scores.scale().abs().sqrt().recip();
        match self {
            Family::Peaked => 3.0 * x,
            Family::Large if c == 0 => unit * lowest(scores).sqrt(),
            Family::Ascending | Family::Descending | Family::SinkKey if c == 0 => unit,
            Family::Range => x * channel(c, dtype),
            Family::Zeros => zero_half(x, coin),
            _ => x,
        }
    }

    #[expect(clippy::too_many_arguments, reason = "one element: where it stands, what was drawn")]
    fn key(
        self,
        scores: &Scores,
        dtype: Dtype,
        j: usize,
        c: usize,
        x: f64,
        coin: f64,
        stream: &Stream,
        shape: &[usize],
    ) -> f64 {
        let unit = scores.scale().abs().sqrt().recip();
        // Half a unit per key: every tile of two keys or more moves the maximum by at least 1.
        let climb = 0.5 * unit * (j as f64 - shape[2] as f64 / 2.0);
        match self {
            Family::Large if c == 0 => -unit * lowest(scores).sqrt(),
            Family::Ties => stream.normal(j % 5 * shape[3] + c),
            Family::Ascending if c == 0 => climb,
            Family::Descending if c == 0 => -climb,
            // e⁸ ≈ 3000 outweighs 63 keys of weight about 1.
            Family::SinkKey if c == 0 && j.is_multiple_of(64) => 8.0 * unit,
            Family::Range => x / channel(c, dtype),
            Family::Zeros => zero_half(x, coin),
            _ => x,
        }
    }

    fn value(self, dtype: Dtype, c: usize, x: f64, coin: f64) -> f64 {
        match self {
            Family::Range if coin < 0.08 => x * 0.5 * dtype.min_positive(),
            Family::Range => x * channel(c, dtype),
            Family::Zeros => zero_half(x, coin),
            _ => x,
        }
    }

    fn bias(self, [b, i, j]: [usize; 3], x: f64, coin: f64, shape: &[usize]) -> f64 {
        if self != Family::Holes {
            return x;
        }
        let edge_row = i == 0 || i + 1 == shape[2];
        let tile = (32..48).contains(&i) || (16..32).contains(&j);
        let last_batch = shape[0] > 1 && b + 1 == shape[0];
        if edge_row || tile || last_batch || coin < 0.25 {
            f64::NEG_INFINITY
        } else if j % 7 == 3 {
            -3e4 // finite in every storage type; exp of it is 0
        } else {
            x
        }
    }
}

/// How far below 0 the scores of [`Family::Large`] lie: as far as leaves the dot product's own
/// rounding, (D + 1) u |s|, at 3 %, and no farther than 6e4.
fn lowest(scores: &Scores) -> f64 {
    let rounding = (scores.extents.dim + 1) as f64 * Dtype::F32.unit_roundoff();
    (0.03 / rounding).min(6e4)
}

/// The size of a channel: 2⁻¹² to 2¹², or 2⁻⁴ to 2⁴ in f16.
fn channel(c: usize, dtype: Dtype) -> f64 {
    let width = if dtype == Dtype::F16 { 4 } else { 12 };
    2f64.powi((c * 5 % (2 * width as usize + 1)) as i32 - width)
}

fn zero_half(x: f64, coin: f64) -> f64 {
    match coin {
        c if c < 0.4 => 0.0,
        c if c < 0.5 => -0.0,
        _ => x,
    }
}
