//! The modules whose kernels compute a pass.

use crate::options::{Level, Precision};
use crate::softmax::blocks;
use crate::softmax::spec::Spec;
use crate::variant::{self, Variant};
use etalon_problem::{Dtype, Pass};

/// The modules of a level.
#[derive(Debug)]
pub(crate) struct Modules {
    pub portable: Variant,
    /// Modules of the level sm80, whose kernels take the place of portable ones.
    pub tensor: Option<Variant>,
    /// The module of a backward pass of wide operands.
    pub wide: Option<Variant>,
    /// The module of the pass by keys with what these add to dq.
    pub fused: Option<Variant>,
    /// The module of the gradient of the bias.
    pub by_pairs: Option<Variant>,
    pub second: Variant,
    /// The second order on tensor cores, which takes the place of the portable one where all is finite.
    pub tensor_second: Option<Variant>,
}

/// Threads of a block of the level sm80.
pub(crate) const TENSOR_THREADS: u32 = 128;

impl Modules {
    /// Of attention and attention_lse, as a level computes them.
    pub fn new(spec: &Spec, level: Level) -> Modules {
        let of = (spec.storage, spec.extents.dim, spec.value_dim, spec.has_options);
        let (sm80, portable_alone) = (level == Level::Sm80, level == Level::Portable);
        let tensor = tensor_variant(spec);
        let has_dbias = tensor.kernels().contains(&"dbias") && !spec.is_wide();
        Modules {
            portable: Variant::portable(of.0, of.1, of.2, of.3),
            by_pairs: (!portable_alone && has_dbias).then(|| tensor.clone()),
            tensor: sm80.then_some(tensor),
            wide: wide_variant(spec).filter(|_| sm80),
            fused: sm80.then(|| fused_variant(spec)),
            second: Variant::second(of.0, of.1, of.2, of.3),
            tensor_second: tensor_second_variant(spec),
        }
    }

    /// Of lazy_attention, with a bias by distance or without.
    pub fn lazy(spec: &Spec, level: Level, has_bias: bool) -> Modules {
        let (dim, value_dim) = (spec.extents.dim, spec.value_dim.unwrap_or(1));
        let options = has_bias || spec.counts.flags.is_some();
        let tensor = || Variant::lazy_tensor(spec.storage, dim, value_dim, options, spec.whole);
        let portable = Variant::lazy(spec.storage, dim, value_dim, options);
        let tensor = (level == Level::Sm80).then(tensor);
        Modules { portable, tensor, ..Modules::new(spec, Level::Portable) }
    }

    /// The module of the level sm80 which has a kernel.
    pub fn tensor_with(&self, kernel: &str) -> Option<&Variant> {
        let has = |variant: &&Variant| variant.kernels().contains(&kernel);
        self.wide.iter().chain(&self.tensor).find(has)
    }
}

/// Threads of a block of a module of the portable level.
pub(crate) fn threads(variant: &Variant, spec: &Spec) -> u32 {
    variant::threads(variant.family, spec.extents.dim, spec.value_dim)
}

/// The kernels of the level sm80 for a backward pass of wide operands: their tiles have as many stages as fit the
/// shared memory.
fn wide_variant(spec: &Spec) -> Option<Variant> {
    if spec.pass != Pass::Backward || !spec.is_wide() {
        return None;
    }
    let (dim, flags) = (spec.extents.dim, [spec.has_options, spec.whole]);
    let of = |stages| Variant::tensor_wide(spec.storage, dim, spec.value_dim, flags, stages);
    Some(if of(2).shared() <= spec.shared_memory() { of(2) } else { of(1) })
}

/// The kernels of the second order on tensor cores, where they compute it.
fn tensor_second_variant(spec: &Spec) -> Option<Variant> {
    let flags = [spec.has_options, spec.whole];
    spec.has_tensor_second()
        .then(|| Variant::tensor_second(spec.extents.dim, spec.value_dim, flags))
}

/// The kernels of the level sm80 for the forward pass, and for the backward pass that is not wide.
fn tensor_variant(spec: &Spec) -> Variant {
    let (dim, flags) = (spec.extents.dim, [spec.has_options, spec.whole]);
    if spec.storage == Dtype::F32 {
        let bf16x3 = spec.options.precision == Precision::Bf16x3;
        return Variant::tensor_f32(bf16x3, dim, spec.value_dim, flags);
    }
    let variant = Variant::tensor(spec.storage, dim, spec.value_dim, flags[0], flags[1]);
    variant.with("TILES", blocks::number(spec))
}

/// Modules for its pass by keys with what these add to dq.
fn fused_variant(spec: &Spec) -> Variant {
    let flags = [spec.has_options, spec.whole];
    Variant::tensor_fused(spec.storage, spec.extents.dim, spec.value_dim, flags)
}
