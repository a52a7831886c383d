//! Gate G3: inputs on which the right answer is known to the last bit, or to the last count,
//! whatever the order, the tile sizes and the hardware.
//!
//! A probe keeps the structure of a case (extents, mask, sequences) and replaces its elements.
//! Expected values are integers or exact binary fractions computed here, without the reference.

mod arrays;
mod count;
mod dyadic;
mod edge;
mod equal;
pub(crate) mod functions;
mod inputs;
mod lazy_attention;
pub(crate) mod linear_attention;
pub(crate) mod random;
pub(crate) mod rows;
mod values;

use crate::laws::law::{laws, scores_are};
use count::count_probe;
use dyadic::dyadic_probe;
use edge::edge_probe;
use etalon_problem::Dtype;
use functions::{exp_probe, fraction_probe, log_probe, rescale_probe, sink_probe, tanh_probe};
use lazy_attention::{kink_probe, reach_probe};
use values::value_probe;

/// At so many cases the probe of values looks: it takes nothing but tile sizes and the storage type from one.
const LOOKS_OF_VALUES: usize = 6;

/// At so many cases probes of functions look: they take nothing but tile sizes from a case; that of logarithms the
/// storage type, too.
const LOOKS: usize = 1;
const LOOKS_OF_LOG: usize = 3;

laws! {
    ATTENTION;
    /// With one-hot weights both edges of every row are exact, up to rounding.
    Probe edge_probe
        if |case, _| case.is_given() || scores_are(case, |s| s.extents.dim >= 2 || s.extents.keys <= 256);
    /// With equal scores every row counts its visible keys, tile by tile, and its sink.
    Probe count_probe on Forward;
    /// With weights 2^−m and integer cotangents the gradients are exact fractions.
    Probe dyadic_probe on Backward;
    /// The exponential of a weight is as exact as declared, over its whole range.
    Probe exp_probe of SOFTMAX if functions::has_weights, looks LOOKS;
    /// The exponential of a sink is as exact as declared, over its whole range.
    Probe sink_probe on Forward if functions::has_weights, looks LOOKS;
    /// A rescale by a larger maximum in another tile is as exact as declared, over the whole range of its factor.
    Probe rescale_probe of SOFTMAX on Forward if functions::has_weights, looks LOOKS;
    /// The logarithm of lse is as exact as declared between integers.
    Probe fraction_probe of SOFTMAX on Forward if functions::has_weights, looks LOOKS;
    /// The logarithm of lse is as exact as declared, over its whole range.
    Probe log_probe of SOFTMAX on Forward if |case, _| case.dtype != Dtype::F64, looks LOOKS_OF_LOG;
    /// The hyperbolic tangent of a softcap and its slope are as exact as declared, over their whole range.
    Probe tanh_probe of CAPPED if functions::has_weights, looks LOOKS;
    /// The only value of a row is its result, whichever number of the storage type it is.
    Probe value_probe of VALUES if |case, _| case.dtype != Dtype::F64, looks LOOKS_OF_VALUES;
    /// A row of one key has weight 1: e = 1 + τ up to rounding, inactive at τ = −1.
    Probe kink_probe of LAZY_ATTENTION;
    /// A key to which the bias gives all weight has e = 1 + τ/n, up to rounding.
    Probe reach_probe of LAZY_ATTENTION;
}
