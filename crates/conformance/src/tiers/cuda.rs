//! The cuda tier: it has no kernels yet and says so.

use crate::tensor::Tensors;
use crate::tier::{Refusal, Request, Tier};
use etalon_problem::{Algorithm, Dtype, Pass};

/// The cuda tier.
#[derive(Debug, Clone, Copy, Default)]
pub struct Cuda;

impl Cuda {
    /// Why the tier is not there.
    pub fn reason() -> String {
        match etalon_cuda::probe() {
            Ok(devices) => format!("{devices} device(s) found, but no kernel is written yet"),
            Err(absent) => absent.to_string(),
        }
    }
}

impl Tier for Cuda {
    fn name(&self) -> String {
        "cuda".to_string()
    }

    fn offers(&self, _: Algorithm, _: Pass, _: Dtype) -> Result<(), String> {
        Err(Cuda::reason())
    }

    fn run(&self, _: &Request<'_>) -> Result<Tensors, Refusal> {
        Err(Refusal::Unsupported(Cuda::reason()))
    }
}
