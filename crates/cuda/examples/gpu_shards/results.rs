//! Results as they lie in memory, read as numbers and compared.

use etalon_problem::Dtype;
use half::bf16;
use std::collections::BTreeMap;

/// Results by name, as they lie in memory.
pub type Results = BTreeMap<&'static str, Vec<u8>>;

/// The numbers that lie in memory.
pub fn numbers(bytes: &[u8], storage: Dtype) -> Vec<f64> {
    match storage {
        Dtype::Bf16 => {
            let two = bytes.as_chunks::<2>().0.iter();
            two.map(|&x| f64::from(bf16::from_ne_bytes(x).to_f32())).collect()
        }
        _ => bytes.as_chunks::<4>().0.iter().map(|&x| f64::from(f32::from_ne_bytes(x))).collect(),
    }
}

/// The largest difference as a part of the largest number; NaN is far from anything.
pub fn distance(x: &[f64], exact: &[f64]) -> f64 {
    let size = exact.iter().fold(f64::MIN_POSITIVE, |size, x| size.max(x.abs()));
    let far = |(x, y): (&f64, &f64)| if x.is_nan() { f64::INFINITY } else { (x - y).abs() };
    x.iter().zip(exact).map(far).fold(0.0, f64::max) / size
}
