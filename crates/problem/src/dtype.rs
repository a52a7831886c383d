//! Element types and the rounding to them.

use crate::{Error, named};
use half::{bf16, f16};

// Widest first.
named! {
    /// The type in which a tensor's elements are stored.
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    #[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
    #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
    Dtype, "dtype" {
        /// IEEE binary64.
        F64 = "f64",
        /// IEEE binary32.
        F32 = "f32",
        /// bfloat16: the upper half of a binary32.
        Bf16 = "bf16",
        /// IEEE binary16.
        F16 = "f16",
    }
}

impl Dtype {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F64 => 8,
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
        }
    }

    /// Fails for f64, which the kernels do not store: the reference does.
    pub fn refuse_f64(self) -> Result<(), Error> {
        if self != Dtype::F64 {
            return Ok(());
        }
        Err(Error::Dtype {
            operand: "storage".to_string(),
            expected: "f32, bf16 or f16".to_string(),
            found: self.to_string(),
        })
    }

    /// u: the largest relative error of rounding a normal number to nearest.
    pub fn unit_roundoff(self) -> f64 {
        match self {
            Dtype::F64 => f64::EPSILON / 2.0,
            Dtype::F32 => f64::from(f32::EPSILON) / 2.0,
            Dtype::Bf16 => 0.5f64.powi(8), // 8 significant bits
            Dtype::F16 => 0.5f64.powi(11), // 11 significant bits
        }
    }

    /// The absolute error of rounding a number too small for this type. Units for f32 and bf16 may flush
    /// what is below the smallest normal number; conversions to f16 keep its subnormal numbers.
    pub fn underflow(self) -> f64 {
        match self {
            Dtype::F16 => 0.5f64.powi(25),
            _ => self.min_positive(),
        }
    }

    /// The smallest positive normal number.
    pub fn min_positive(self) -> f64 {
        match self {
            Dtype::F64 => f64::MIN_POSITIVE,
            Dtype::F32 | Dtype::Bf16 => f64::from(f32::MIN_POSITIVE),
            Dtype::F16 => 0.5f64.powi(14),
        }
    }

    /// The largest finite number.
    pub fn max(self) -> f64 {
        match self {
            Dtype::F64 => f64::MAX,
            Dtype::F32 => f64::from(f32::MAX),
            Dtype::Bf16 => bf16::MAX.to_f64(),
            Dtype::F16 => f16::MAX.to_f64(),
        }
    }

    /// The nearest number of this type, ties to even.
    pub fn round(self, x: f64) -> f64 {
        match self {
            Dtype::F64 => x,
            Dtype::F32 => f64::from(x as f32),
            Dtype::Bf16 => bf16::from_f64(x).to_f64(),
            Dtype::F16 => f16::from_f64(x).to_f64(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_roundoff_is_half_the_gap_above_one() {
        for dtype in Dtype::ALL {
            let gap = 2.0 * dtype.unit_roundoff();
            assert_eq!(dtype.round(1.0 + gap), 1.0 + gap, "{dtype}: 1 + 2u is representable");
            assert_eq!(dtype.round(1.0 + gap / 2.0), 1.0, "{dtype}: 1 + u ties to even");
        }
    }

    #[test]
    fn extremes_are_representable() {
        for dtype in Dtype::ALL {
            assert_eq!(dtype.round(dtype.max()), dtype.max());
            assert_eq!(dtype.round(dtype.min_positive()), dtype.min_positive());
        }
    }
}
