//! Partials of shards, put together as the kernels put together those of tiles.

use super::super::partial::{Partial as Sums, exceeds};
use etalon_problem::Error;
use etalon_problem::linear_cross_entropy::shard::Partial;

/// The operation of (C34), for [`Partial`].
pub trait Combine: Sized {
    /// Both sets of classes as one, in either order. Fails if both own the target, or if they have
    /// more than 2³² − 1 classes together. In another grouping the result agrees up to rounding; along the
    /// tree, as [`combine`](super::combine()) goes, it has the bits of the unsharded one.
    fn combine(self, other: Self) -> Result<Self, Error>;
}

impl Combine for Partial {
    fn combine(self, other: Self) -> Result<Self, Error> {
        if self.target.is_some() && other.target.is_some() {
            return Err(Error::value("shards", "owners of each target once", "two owners"));
        }
        if self.classes.checked_add(other.classes).is_none() {
            let found = u64::from(self.classes) + u64::from(other.classes);
            return Err(Error::value("classes", format!("at most {}", u32::MAX), found));
        }
        Ok(join(self, other))
    }
}

/// As [`Combine::combine`], where neither can be.
pub fn join(x: Partial, y: Partial) -> Partial {
    let (first, second) = match (x, y) {
        (x, y) if y.classes == 0 => return x,
        (x, y) if x.classes == 0 => return y,
        // Of equal maxima the first class counts.
        (x, y) if y.argmax < x.argmax => (y, x),
        both => both,
    };
    let best = if exceeds(second.largest, first.largest) { second } else { first };
    let weights = [first.weight, second.weight];
    let both = Sums::from(first).combine(second.into(), weights, second.target.is_some());
    let classes = first.classes.saturating_add(second.classes);
    Partial {
        target: first.target.or(second.target),
        argmax: first.argmax.and(second.argmax).and(best.argmax),
        largest: best.largest,
        ..both.of_classes(first.weight + second.weight, classes, false)
    }
}

impl Sums {
    /// The partial of so many classes with Σ cw, of which one is the target if it is `owned`; m is the largest logit.
    pub fn of_classes(self, weight: f32, classes: u32, owned: bool) -> Partial {
        let Sums { m, l, u, s, target, argmax } = self;
        let target = owned.then_some(target);
        Partial { m, l, u, s, weight, classes, target, argmax: Some(argmax), largest: m }
    }
}

impl From<Partial> for Sums {
    fn from(x: Partial) -> Self {
        let Partial { m, l, u, s, target, argmax, .. } = x;
        Sums { m, l, u, s, target: target.unwrap_or(0.0), argmax: argmax.unwrap_or(0) }
    }
}
