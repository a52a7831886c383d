//! The kernels of `kernels/sm90a_linear.cu` that a pass needs, and their rooms.

use crate::gpu::Kernels;
use crate::room::Room;
use crate::variant::Variant;
use crate::workspace::Held;
use etalon_problem::{Decay, Dtype, Error, LinearAttention};
use std::sync::Arc;

/// The architecture of the kernels.
const ARCHITECTURE: &str = "sm_90a";

/// The kernels of a pass, and what they hand to one another.
#[derive(Debug)]
pub(super) struct Hopper {
    pub by_dim: (Arc<Kernels>, Variant),
    pub by_value: (Arc<Kernels>, Variant),
    /// The states that segments of long sequences begin with.
    pub between: Option<Room>,
    /// S before every chunk, rounded; the parts of dg_gamma; those of dσ.
    pub states: Option<Room>,
    pub gammas: Option<Room>,
    pub scales: Option<Room>,
    /// With a log-decay for each token: the decays of whole segments; x, y and <S, D> of dg.
    pub decays: Option<Room>,
    pub x_dots: Option<Room>,
    pub y_dots: Option<Room>,
    pub z_dots: Option<Room>,
}

impl Hopper {
    pub fn load(held: &Held, problem: &LinearAttention, storage: Dtype) -> Result<Hopper, Error> {
        let load = |columns: usize| {
            let by_token = problem.decay == Decay::PerToken;
            let variant = Variant::hopper_linear(storage, columns, by_token);
            Ok((held.device.kernels(variant.clone(), ARCHITECTURE)?, variant))
        };
        let (by_dim, by_value) = (load(problem.extents.dim)?, load(problem.value_dim)?);
        let [between, states, gammas, scales] = [None; 4];
        let [decays, x_dots, y_dots, z_dots] = [None; 4];
        Ok(Hopper {
            by_dim,
            by_value,
            between,
            states,
            gammas,
            scales,
            decays,
            x_dots,
            y_dots,
            z_dots,
        })
    }
}
