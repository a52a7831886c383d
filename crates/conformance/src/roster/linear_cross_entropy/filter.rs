//! The host's filter: a tile is a token by some classes.

use super::bugs;
use crate::zoo::job::Job;
use crate::zoo::rows::{Results, Rows, dot};
use etalon_problem::linear_cross_entropy::Filter;
use std::ops::Range;

/// Names of B of (C37) and C of (C38) in [`Filtering::results`], and of the tiles that were kept and all of them.
pub(crate) const BOUNDS_OF_DH: &str = "certificate.dh";
pub(crate) const BOUNDS_OF_DW: &str = "certificate.dw";
pub(crate) const TILES: &str = "certificate.tiles";

/// A filter at work.
pub(super) struct Filtering<'a> {
    job: &'a Job,
    filter: Filter,
    dh: Vec<f32>,
    dw: Vec<f32>,
    kept: usize,
    all: usize,
}

impl<'a> Filtering<'a> {
    /// The filter of the job, if it has one.
    pub fn new(job: &'a Job, tokens: usize, vocab: usize) -> Option<Self> {
        let (dh, dw) = (vec![0.0; tokens], vec![0.0; vocab]);
        Some(Filtering { job, filter: job.filter?, dh, dw, kept: 0, all: 0 })
    }

    /// Returns true if a tile is left out of dh and dw; its contribution is then added to the bounds.
    pub fn leave_out(
        &mut self,
        i: usize,
        classes: &Range<usize>,
        da: &[f32],
        h: &[f32],
        w: &[&[f32]],
    ) -> bool {
        let bug = |bug| self.job.is(bug);
        let mut rows = w.iter().map(|w| norm(w));
        let widest = match bug(bugs::BOUND_OF_FIRST_ROW) {
            true => rows.next().unwrap_or(0.0),
            false => rows.fold(0.0, f32::max),
        };
        let by_token = self.dh[i] + da.iter().map(|da| da.abs()).sum::<f32>() * widest; // (C37)
        let by_class = |(dw, da): (&f32, &f32)| dw + da.abs() * norm(h); // (C38)
        let by_class: Vec<f32> = self.dw[classes.clone()].iter().zip(da).map(by_class).collect();
        let below = |da: f32, eps: f64| match () {
            () if bug(bugs::THRESHOLD_WITH_SIGN) => f64::from(da) < eps,
            () if bug(bugs::THRESHOLD_LEFT_OUT) => f64::from(da.abs()) <= eps,
            () => f64::from(da.abs()) < eps,
        };
        let left_out = match self.filter {
            Filter::Below { eps } => da.iter().all(|&da| below(da, eps)),
            Filter::Within { dh, dw } => {
                f64::from(by_token) <= dh && by_class.iter().all(|&bound| f64::from(bound) <= dw)
            }
        };
        self.all += 1;
        self.kept += usize::from(!left_out);
        if left_out {
            self.dh[i] = by_token;
            self.dw[classes.clone()].copy_from_slice(&by_class);
        }
        left_out
    }

    pub fn results(self) -> Results {
        let rows = |data: Vec<f32>| Rows { shape: [data.len(), 1, 1, 1], data };
        Results::from([
            (BOUNDS_OF_DH, rows(self.dh)),
            (BOUNDS_OF_DW, rows(self.dw)),
            (TILES, rows(vec![self.kept as f32, self.all as f32])),
        ])
    }
}

/// 0..n in tiles, whatever a bug drops.
pub(super) fn tiles_of(n: usize, tile: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n).step_by(tile).map(move |first| first..n.min(first + tile))
}

fn norm(x: &[f32]) -> f32 {
    dot(x, x).sqrt()
}
