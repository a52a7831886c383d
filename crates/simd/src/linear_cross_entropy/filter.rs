//! A backward pass that leaves out what is small, and says how much that is at most.
//!
//! A *tile* is a band of 96 tokens that count, in their order, by 256 classes. The products of a tile whose
//! gradients of logits are small are left out of dh (C17) and dw (C18): both products of it, so that where
//! few tiles are kept a call costs little more than the logits. The [`Certificate`] bounds what was left out
//! without computing it (C37), (C38). A tile with a NaN or an infinity is kept, and so is one whose bounds
//! would be infinite. Nothing is left out of dbias. Off unless called: a threshold that does no harm at the
//! end of a training drops every gradient but those of the targets at its [beginning](super#gradient-filtering).
//!
//! ```
//! use etalon_problem::LinearCrossEntropy;
//! use etalon_simd::linear_cross_entropy::filter::{Filter, backward};
//! use etalon_simd::linear_cross_entropy::{self, Cotangents, Inputs};
//! use etalon_simd::Options;
//! use ndarray::{Array2, arr0, array};
//!
//! // Classes of the first tile are likely, those of the other are not.
//! let problem = LinearCrossEntropy::new(2, 1, 512); // tokens, elements, classes
//! let (h, targets) = (array![[1f32], [2.0]], array![2, 5]);
//! let w = Array2::from_shape_fn((512, 1), |(v, _)| if v < 256 { 0.0 } else { -9.0 });
//! let inputs = Inputs::new(h.view(), w.view(), targets.view());
//! let dloss = arr0(1.0).into_dyn();
//! let cotangents = Cotangents::default().dloss(dloss.view());
//! let options = Options::default();
//!
//! let filter = Filter::Below { eps: 1e-3 };
//! let (found, certificate) = backward(&problem, &inputs, &cotangents, filter, &options)?;
//! assert_eq!(certificate.tiles, (1, 2)); // one of two is kept
//! let exact = linear_cross_entropy::backward(&problem, &inputs, &cotangents, &options)?;
//! let error = found.dh.unwrap()[[0, 0]] - exact.dh.unwrap()[[0, 0]];
//! assert!(error != 0.0 && error.abs() <= certificate.dh[0]);
//! assert_eq!(certificate.dw[0], 0.0); // nothing is left out of the first tile
//! assert!(certificate.dw[256] > 0.0);
//! # Ok::<(), etalon_problem::Error>(())
//! ```

pub use super::choice::CertificateMut;
pub use etalon_problem::linear_cross_entropy::Filter;

use super::choice::{Limits, up};
use super::named::run_filtered;
use crate::element::Element;
use crate::known::Known;
use crate::memory::zeros;
use crate::run::Call;
use crate::{Options, Plan, Workspace};
use etalon_problem::linear_cross_entropy::{Cotangents, Gradients, GradientsMut, Inputs};
use etalon_problem::{Error, LinearCrossEntropy, Pass, ViewsMut};
use ndarray::Array1;

/// The filter as the kernels know it. Fails where [`Filter::check`] does.
fn limits(filter: Filter) -> Result<Limits, Error> {
    filter.check()?;
    let most = f64::from(f32::MAX);
    Ok(match filter {
        Filter::Below { eps } => Limits { eps: up(eps), dh: most, dw: most },
        Filter::Within { dh, dw } => {
            Limits { eps: f32::INFINITY, dh: dh.min(most), dw: dw.min(most) }
        }
    })
}

/// Bounds of the error of leaving tiles out: the distance of exact sums over the tiles that were kept from
/// exact sums over all, for the same gradients of logits. They are rounded up; the rounding of dh and dw
/// comes on top. A gradient that has no place has its bounds all the same.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Certificate {
    /// B_i ≥ ‖error of dh_i‖ (C37), `[T]`; of ignored tokens 0.
    pub dh: Array1<f32>,
    /// C_v ≥ ‖error of dw_v‖ (C38), `[V]`.
    pub dw: Array1<f32>,
    /// Tiles that were kept, and all of them.
    pub tiles: (usize, usize),
}

impl Certificate {
    /// Its arrays and counts, to be written.
    pub fn view_mut(&mut self) -> CertificateMut<'_> {
        let Certificate { dh, dw, tiles } = self;
        CertificateMut { dh: dh.view_mut(), dw: dw.view_mut(), tiles }
    }
}

/// dh, dw and dbias without the tiles that `filter` leaves out, and what is certain about them. Fails as
/// [`backward`](super::backward) does, and at a threshold or a budget below 0, infinite or NaN. A threshold
/// of 0 leaves out nothing and gives the bits of that function.
pub fn backward<T: Element>(
    problem: &LinearCrossEntropy,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    filter: Filter,
    options: &Options,
) -> Result<(Gradients<T>, Certificate), Error> {
    let limits = limits(filter)?;
    let mut certificate = Certificate::default();
    let call = Call::new(problem, Pass::Backward).with(inputs).with(cotangents);
    let gradients = call.results_by(options, |call, workspace, outputs| {
        certificate.dh = zeros(problem.tokens, "certificate.dh")?;
        certificate.dw = zeros(problem.vocab, "certificate.dw")?;
        let filter = (limits, certificate.view_mut());
        run(workspace, problem, call, filter, outputs, options)
    })?;
    Ok((gradients, certificate))
}

/// As [`backward`], into arrays of the caller, and only what is asked for, with memory of a workspace; on an
/// error nothing has been written. With [`wide_gradients`](LinearCrossEntropy::wide_gradients) gradients are
/// of f32, whatever the inputs are.
#[allow(clippy::too_many_arguments)]
pub fn backward_into<T: Element, G: Element>(
    workspace: &Workspace,
    problem: &LinearCrossEntropy,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    filter: Filter,
    gradients: GradientsMut<'_, G>,
    certificate: CertificateMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    let limits = limits(filter)?;
    let call = Call::new(problem, Pass::Backward).with(inputs).with(cotangents);
    call.write_by(gradients, |call, outputs| {
        run(workspace, problem, call, (limits, certificate), outputs, options)
    })
}

/// The plan of [`backward`], as [`super::plan`] gives it for the pass without a filter.
pub fn plan<T: Element>(problem: &LinearCrossEntropy, options: &Options) -> Result<Plan, Error> {
    super::plan::of::<T>(problem, Pass::Backward, true, options)
}

fn run(
    workspace: &Workspace,
    problem: &LinearCrossEntropy,
    call: &Call<'_>,
    (limits, certificate): (Limits, CertificateMut<'_>),
    outputs: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    let known = Known::of(workspace, &call.problem, Pass::Backward)?;
    known.table.check_call(&call.inputs, outputs, options.recompute)?.refuse_f64()?;
    Error::expect_shape("certificate.dh", &[problem.tokens], certificate.dh.shape())?;
    Error::expect_shape("certificate.dw", &[problem.vocab], certificate.dw.shape())?;
    let filter = Some((limits, certificate));
    run_filtered(workspace, &known, problem, &call.inputs, outputs, filter, options)
}
