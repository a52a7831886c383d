//! Gate G3: inputs on which the right answer is known to the last bit, or to the last count,
//! whatever the order, the tile sizes and the hardware.
//!
//! A probe keeps the structure of a case (extents, mask, sequences) and replaces its elements.
//! Expected values are integers or exact binary fractions computed here, without the reference.

mod arrays;
mod count;
mod dyadic;
mod edge;
mod inputs;
mod lazy_attention;
pub(crate) mod linear_attention;

use crate::laws::law::{ATTENTION, BACKWARD, FORWARD, Kind, LAZY_ATTENTION, Law, scores_are};

pub(crate) const LAWS: &[Law] = &[
    Law::new("edge_probe", Kind::Probe, ATTENTION, edge::check)
        .says("With one-hot weights both edges of every row are exact to the last bit.")
        .when(|case, _| scores_are(case, |s| s.extents.dim >= 2 || s.extents.keys <= 256)),
    Law::new("count_probe", Kind::Probe, ATTENTION, count::check)
        .says("With equal scores every row counts its visible keys, tile by tile.")
        .on(FORWARD),
    Law::new("dyadic_probe", Kind::Probe, ATTENTION, dyadic::check)
        .says("With weights 2^−m and integer cotangents the gradients are exact fractions.")
        .on(BACKWARD),
    Law::new("kink_probe", Kind::Probe, LAZY_ATTENTION, lazy_attention::kink)
        .says("A row of one key has weight 1: e = 1 + τ to the last bit, inactive at τ = −1."),
    Law::new("reach_probe", Kind::Probe, LAZY_ATTENTION, lazy_attention::reach)
        .says("Where the bias gives one key all weight, e = 1 + τ/n there to the last bit."),
];
