//! Laws: what every tier must satisfy, written once.
//!
//! A law takes a case, changes something that must not matter (or must matter in a known way),
//! asks the tier again and compares. Four kinds, by what they presuppose:
//!
//! * [`Kind::Gate`]: the result against the exact one, within its proven bound;
//! * [`Kind::Probe`]: inputs on which the right answer is known to the last bit (`probes`);
//! * [`Kind::Meaning`]: what follows from the definition alone, whoever wrote the kernel;
//! * [`Kind::Contract`]: what etalon's own tiers promise beyond that: bitwise reproducibility.

mod beside;
mod chunks;
pub(crate) mod compare;
mod determinism;
mod ends;
pub(crate) mod flaw;
mod forms;
pub(crate) mod gate;
mod identities;
mod kept;
pub(crate) mod law;
pub(crate) mod lazy_attention;
mod linear_attention;
mod linear_cross_entropy;
pub(crate) mod part;
mod places;
mod second_order;
mod sensitivity;
mod statistics;
mod sums;
pub(crate) mod tensors;
pub(crate) mod trial;
mod values;
mod visibility;
pub(crate) mod visible;

pub use flaw::{Flaw, Judgement};
pub use law::{Kind, Law};
pub use trial::{Exact, Trial};

/// Every law.
pub fn all() -> Vec<Law> {
    [
        gate::LAWS,
        statistics::LAWS,
        ends::LAWS,
        crate::probes::LAWS,
        determinism::LAWS,
        places::LAWS,
        kept::LAWS,
        beside::LAWS,
        visibility::LAWS,
        forms::LAWS,
        chunks::LAWS,
        values::LAWS,
        identities::LAWS,
        second_order::LAWS,
        linear_attention::LAWS,
        lazy_attention::LAWS,
        linear_cross_entropy::LAWS,
        sensitivity::LAWS,
    ]
    .concat()
}

/// Every probe: those among the laws, and those that are asked of a problem which somebody brings alone.
pub(crate) fn probes() -> Vec<Law> {
    let mut probes = all();
    probes.retain(|law| law.kind == Kind::Probe);
    probes.extend([crate::probes::rows::LAWS, crate::probes::random::LAWS].concat());
    probes
}

/// The law of that name.
pub fn find(name: &str) -> Option<Law> {
    all().into_iter().find(|law| law.name == name)
}
