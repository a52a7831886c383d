//! Whose kernels compute a pass of attention or attention_lse.

use crate::options::{Level, Options};
use crate::softmax::asked::Asked;
use crate::softmax::slots::Shares;
use crate::softmax::variants::CONSUMER;
use crate::softmax::{hopper, portable};
use crate::variant::Variant;
use etalon_problem::{Dtype, Error, Pass};

/// The kernels of a level.
pub(crate) enum Way {
    Portable,
    Tensor,
    Hopper(Box<hopper::Plan>),
}

impl Way {
    pub fn is_tensor(&self) -> bool {
        matches!(self, Way::Tensor)
    }

    /// How slots share their memory, where the gradient of q is computed in the pass by keys.
    pub fn shares(&self, asked: &Asked<'_>, options: &Options) -> Option<Shares> {
        let by_pass = match (self, asked.pass) {
            (Way::Portable, Pass::Backward) => true,
            (Way::Portable, Pass::DoubleBackward) => {
                portable::tensor_second_variant(asked).is_none()
            }
            (Way::Tensor, _) => asked.insists(options.mode),
            _ => false,
        };
        Shares::new(asked, options.mode, options.partials_budget).filter(|_| by_pass)
    }
}

/// Why a level cannot compute a pass, if so; and what it is computed by.
pub(crate) fn on_level(
    asked: &Asked<'_>,
    level: Level,
    options: &Options,
) -> Result<Way, &'static str> {
    let flash = options.precision.refuses_tensor_cores().map_or(Ok(()), Err);
    match level {
        Level::Portable => Ok(Way::Portable),
        Level::Sm90a | Level::Sm90aSegments => {
            flash?;
            let plan = hopper::Plan::new(asked, options)?;
            Ok(Way::Hopper(Box::new(plan)))
        }
        Level::Sm80 | Level::Sm80Narrow => {
            match asked.storage {
                Dtype::F32 if options.precision.narrows_f32() => {}
                Dtype::F32 => {
                    return Err(
                        "tensor cores multiply f32 with the precisions `tf32` and `bf16x3`",
                    );
                }
                _ => flash?,
            }
            portable::refuses_tensor(asked, options.mode).map_or(Ok(Way::Tensor), Err)
        }
        Level::Auto => [Level::Sm90a, Level::Sm80, Level::Portable]
            .into_iter()
            .find_map(|level| on_level(asked, level, options).ok())
            .ok_or("no level computes it"),
    }
}

/// Fails where the level that is asked for cannot compute the pass.
pub(crate) fn choose(asked: &Asked<'_>, options: &Options) -> Result<Way, Error> {
    on_level(asked, options.level, options).map_err(|reason| options.level.refusal(reason))
}

/// The kernels of the level sm80 for a pass.
pub(crate) struct TensorVariants {
    /// Those of the forward pass, and of the backward pass that is not wide.
    pub tensor: Variant,
    pub wide: Option<Variant>,
}

pub(crate) fn tensor_variants(asked: &Asked<'_>, options: &Options) -> TensorVariants {
    let most = match options.level {
        Level::Sm80Narrow => CONSUMER,
        _ => asked.target.shared_memory,
    };
    let wide = portable::wide_variant(asked, most);
    TensorVariants { tensor: portable::tensor_variant(asked, options), wide }
}
