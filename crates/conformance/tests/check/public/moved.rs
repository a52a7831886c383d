//! Right results that stand elsewhere, were not written, or not in time.

use super::Bug;
use super::kernel::{ask, with};
use crate::bench::{Bench, attention};
use etalon_conformance::tensor::Tensors;
use etalon_problem::{Dtype, Pass};
use ndarray::{ArrayD, Axis as Along};

/// A right o with a change.
fn o(change: impl FnOnce(&mut ArrayD<f64>)) -> (Bench, Tensors) {
    let bench = ask(attention(), Pass::Forward, Dtype::Bf16);
    let mut o = bench.right()["o"].numbers("o").unwrap();
    change(&mut o);
    let got = with(&bench, [("o".to_string(), o)].into());
    (bench, got)
}

pub const BUGS: &[Bug] = &[
    Bug {
        story: "the last tile of rows is not written",
        ids: &["zero"],
        make: || o(|x| x.slice_axis_mut(Along(2), (32..).into()).fill(0.0)),
    },
    Bug {
        story: "heads beyond the first are not written",
        ids: &["nan"],
        make: || o(|x| x.slice_axis_mut(Along(1), (1..).into()).fill(f64::NAN)),
    },
    Bug {
        story: "a tile holds what was left by the tile before",
        ids: &["rows-shifted", "rows-permuted"],
        make: || {
            o(|x| {
                let stale = x.slice_axis(Along(2), (0..16).into()).to_owned();
                x.slice_axis_mut(Along(2), (16..32).into()).assign(&stale);
            })
        },
    },
    Bug {
        story: "a tile of one head holds that of another",
        ids: &["heads-permuted", "rows-permuted"],
        make: || {
            o(|x| {
                let stale =
                    x.index_axis(Along(1), 0).slice_axis(Along(1), (16..32).into()).to_owned();
                x.index_axis_mut(Along(1), 2)
                    .slice_axis_mut(Along(1), (16..32).into())
                    .assign(&stale);
            })
        },
    },
    Bug {
        story: "the second batch element holds the results of the first",
        ids: &["batch-permuted"],
        make: || {
            o(|x| {
                let first = x.index_axis(Along(0), 0).to_owned();
                x.index_axis_mut(Along(0), 1).assign(&first);
            })
        },
    },
    Bug {
        story: "the fragments of a tile are stored in another order of rows",
        ids: &["rows-permuted"],
        make: || {
            o(|x| {
                let order: Vec<usize> = (0..37)
                    .map(|i| if i < 32 { i / 16 * 16 + i % 2 * 8 + i % 16 / 2 } else { i })
                    .collect();
                *x = x.select(Along(2), &order);
            })
        },
    },
    Bug {
        story: "columns are stored in the order of another fragment",
        ids: &["columns-permuted"],
        make: || {
            o(|x| {
                let order: Vec<usize> = (0..16).map(|c| c % 2 * 8 + c / 2).collect();
                *x = x.select(Along(3), &order);
            })
        },
    },
    Bug {
        story: "the output lies as [B, N, H, D]",
        ids: &["layout"],
        make: || {
            o(|x| {
                let flat: Vec<f64> =
                    x.clone().permuted_axes(vec![0, 2, 1, 3]).iter().copied().collect();
                *x = ArrayD::from_shape_vec(x.raw_dim(), flat).unwrap();
            })
        },
    },
    Bug {
        story: "the output lies as [N, B, H, D]",
        ids: &["layout"],
        make: || {
            o(|x| {
                let flat: Vec<f64> =
                    x.clone().permuted_axes(vec![2, 0, 1, 3]).iter().copied().collect();
                *x = ArrayD::from_shape_vec(x.raw_dim(), flat).unwrap();
            })
        },
    },
    Bug {
        story: "rows stand one too late",
        ids: &["rows-shifted"],
        make: || {
            o(|x| {
                let order: Vec<usize> = (0..37).map(|i| if i == 0 { 0 } else { i - 1 }).collect();
                *x = x.select(Along(2), &order);
            })
        },
    },
    Bug {
        story: "sums beyond f16 become infinite",
        ids: &["infinite"],
        make: || o(|x| x.mapv_inplace(|x| if x > 1.0 { f64::INFINITY } else { x })),
    },
];
