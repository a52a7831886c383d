//! The modules of kernels that compute a pass.

use crate::family::Family;
use crate::options::{Level, Precision};
use crate::softmax::blocks;
use crate::softmax::spec::Spec;
use crate::softmax::variants::AttentionShape;
use crate::variant::Variant;
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

impl Modules {
    /// Of attention and attention_lse, as a level computes them.
    pub fn new(spec: &Spec, level: Level) -> Modules {
        let (shape, sm80) = (spec.shape(), level == Level::Sm80);
        let tensor = tensor_variant(spec);
        let has_dbias = level != Level::Portable && !spec.is_wide();
        Modules {
            portable: shape.portable(Family::AttentionPortable),
            by_pairs: (has_dbias && tensor.kernels().contains(&"dbias")).then(|| tensor.clone()),
            tensor: sm80.then_some(tensor),
            wide: wide_variant(spec).filter(|_| sm80),
            fused: sm80.then(|| shape.sm80_fused()),
            second: shape.portable(Family::AttentionPortableSecondOrder),
            tensor_second: spec.has_tensor_second().then(|| shape.sm80_second_order()),
        }
    }

    /// Of lazy_attention, with a bias by distance or without.
    pub fn lazy(spec: &Spec, level: Level, has_bias: bool) -> Modules {
        let value_dim = spec.value_dim.or(Some(1));
        let options = has_bias || spec.counts.flags.is_some();
        let shape = AttentionShape { value_dim, options, ..spec.shape() };
        let portable = shape.portable(Family::LazyPortable);
        let tensor = (level == Level::Sm80).then(|| shape.lazy_sm80());
        Modules { portable, tensor, ..Modules::new(spec, Level::Portable) }
    }

    /// The module of the level sm80 which has a kernel.
    pub fn tensor_with(&self, kernel: &str) -> Option<&Variant> {
        let has = |variant: &&Variant| variant.kernels().contains(&kernel);
        self.wide.iter().chain(&self.tensor).find(has)
    }
}

/// The kernels of the level sm80 for a backward pass of wide operands: their tiles have as many stages as fit the
/// shared memory.
fn wide_variant(spec: &Spec) -> Option<Variant> {
    if spec.pass != Pass::Backward || !spec.is_wide() {
        return None;
    }
    let two = spec.shape().sm80_wide(2);
    Some(if two.shared() <= spec.shared_memory() { two } else { spec.shape().sm80_wide(1) })
}

/// The kernels of the level sm80 for the forward pass, and for the backward pass that is not wide.
fn tensor_variant(spec: &Spec) -> Variant {
    match spec.storage {
        Dtype::F32 => spec.shape().sm80_f32(spec.options.precision == Precision::Bf16x3),
        _ => spec.shape().sm80().with("TILES", blocks::number(spec)),
    }
}
