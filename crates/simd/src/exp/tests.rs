//! 2ˣ and tanh over every binade, on every level.

use super::*;
use crate::Level;
use crate::lanes::Kernel;
use rayon::prelude::*;

#[derive(Clone, Copy)]
enum Function {
    Exp2,
    Exp,
    Tanh,
}

/// A function applied to every element of a slice, whose length is a multiple of 16.
struct Map<'a> {
    x: &'a mut [f32],
    function: Function,
}

impl Kernel for Map<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        for x in self.x.chunks_exact_mut(I::F32::N) {
            let value = I::F32::load(isa, x);
            let result = match self.function {
                Function::Exp2 => exp2(isa, value),
                Function::Exp => exp(isa, value),
                Function::Tanh => tanh(isa, value),
            };
            result.store(x);
        }
    }
}

fn map(level: Level, x: &[f32], function: Function) -> Vec<f32> {
    let mut padded = x.to_vec();
    padded.resize(x.len().next_multiple_of(16), 0.0);
    level.run(Map { x: &mut padded, function });
    padded.truncate(x.len());
    padded
}

/// 2¹³ floats of every binade up to `limit`, and of every half in reach the floats around it,
/// where the nearest integer changes.
fn every_binade(limit: f32) -> Vec<f32> {
    let step = 1u32 << 10;
    let mut x: Vec<f32> = (0..limit.to_bits()).step_by(step as usize).map(f32::from_bits).collect();
    for half in 1..=(2.0 * limit) as u32 {
        let bits = (half as f32 / 2.0).to_bits();
        x.extend((bits - 64..bits + 64).map(f32::from_bits).filter(|&x| x <= limit));
    }
    x
}

/// The largest error in units of 2⁻²⁴ of the exact value, and where.
fn worst(x: &[f32], got: &[f32], exact: impl Fn(f64) -> f64) -> (f64, f32) {
    let unit = 0.5f64.powi(24);
    x.iter().zip(got).fold((0.0, 0.0), |worst, (&x, &got)| {
        let exact = exact(f64::from(x));
        let error = (f64::from(got) - exact).abs() / (exact.abs() * unit);
        if error > worst.0 || error.is_nan() { (error, x) } else { worst }
    })
}

/// Portable lanes fuse on aarch64 only; elsewhere a product and a sum round twice.
fn fuses(level: Level) -> bool {
    level.name() != "portable" || cfg!(target_arch = "aarch64")
}

#[test]
fn exp2_is_within_its_bound_on_every_binade() {
    // Below 2⁻¹²⁶ the result is flushed: that range has a test of its own.
    let x: Vec<f32> = every_binade(126.0).into_iter().map(|x| -x).collect();
    for &level in Level::available() {
        let bound = if fuses(level) { 1.5 } else { 2.0 };
        let (error, at) = worst(&x, &map(level, &x, Function::Exp2), f64::exp2);
        assert!(error <= bound, "{level}: {error} units at {at:e}, more than {bound}");
    }
}

/// log₂ e in f32 errs by 0.22 units of 2⁻²⁴; its product with x rounds where lanes do not fuse.
#[test]
fn exp_is_within_its_bound_on_every_binade() {
    let x: Vec<f32> = every_binade(87.0).into_iter().map(|x| -x).collect();
    for &level in Level::available() {
        let (fixed, each) = if fuses(level) { (1.5, 0.25) } else { (2.0, 1.25) };
        for (&x, got) in x.iter().zip(map(level, &x, Function::Exp)) {
            let exact = f64::from(x).exp();
            let error = (f64::from(got) - exact).abs() / (exact * 0.5f64.powi(24));
            let bound = fixed + each * f64::from(-x);
            assert!(error <= bound, "{level}: {error} units at {x:e}, more than {bound}");
        }
        let limits = [f32::NEG_INFINITY, f32::MIN, -88.1, 0.0];
        assert_eq!(map(level, &limits, Function::Exp), [0.0, 0.0, 0.0, 1.0], "{level}");
        assert!(map(level, &[f32::NAN], Function::Exp)[0].is_nan(), "{level}: a NaN must survive");
    }
}

/// Error of a function at a float in units of 2⁻²⁴: of its value, or of 1 for tanh. For an exponential, less
/// the error of log₂ e.
fn excess(function: Function, x: f32, got: f32) -> f64 {
    let (x, got, unit) = (f64::from(x), f64::from(got), 0.5f64.powi(24));
    let relative = |exact: f64| (got - exact).abs() / (exact.abs() * unit);
    match function {
        Function::Exp2 => relative(x.exp2()),
        Function::Exp => relative(x.exp()) - 0.25 * x.abs(),
        Function::Tanh => (got - x.tanh()).abs() / unit,
    }
}

/// Every float of both functions' ranges: what the profile `f32-simd` declares. Beyond, tanh is 1, and what
/// is smaller than 2⁻³⁰ is the argument, or 1 less it. Some minutes: it is not run with the others.
#[test]
#[ignore = "it takes minutes"]
fn every_float_is_within_what_is_declared() {
    let range = |least: f32, most: f32| (least.to_bits()..=most.to_bits()).step_by(1 << 16);
    let functions = [
        (Function::Exp2, "2ˣ", -1.0, 126.0, 2.0),
        (Function::Exp, "eˣ", -1.0, 87.3, 2.0),
        (Function::Tanh, "tanh", 1.0, 10.0, 2.0),
    ];
    for &level in Level::available() {
        for (function, name, sign, most, declared) in functions {
            let starts: Vec<u32> = range(0.5f32.powi(30), most).collect();
            let found = starts.par_iter().map(|&start| {
                let bits = start..(start + (1 << 16)).min(most.to_bits() + 1);
                let x: Vec<f32> = bits.map(|bits| sign * f32::from_bits(bits)).collect();
                let got = map(level, &x, function);
                let errors = x.iter().zip(got).map(|(&x, got)| (excess(function, x, got), x));
                errors.fold((f64::NEG_INFINITY, 0.0), |a, b| if b.0 > a.0 { b } else { a })
            });
            let most = found.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
            println!("{level}: {name} errs by {:.3} at {:e}", most.0, most.1);
            assert!(most.0 <= declared, "{level}: {name} errs by {} at {:e}", most.0, most.1);
        }
    }
}

#[test]
fn exp2_is_exact_where_exactness_is_promised() {
    for &level in Level::available() {
        let integers: Vec<f32> = (0..=126).map(|n| -(n as f32)).collect();
        for (x, got) in integers.iter().zip(map(level, &integers, Function::Exp2)) {
            assert_eq!(f64::from(got), f64::from(*x).exp2(), "{level}: 2^{x}");
        }
        let zeros = [-0.0, -127.0, -149.0, -1e4, f32::MIN, f32::NEG_INFINITY];
        let got = map(level, &zeros, Function::Exp2);
        assert_eq!(got, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0], "{level}");
        assert!(map(level, &[f32::NAN], Function::Exp2)[0].is_nan(), "{level}: a NaN must survive");
    }
}

#[test]
fn what_exp2_flushes_is_smaller_than_every_normal_number() {
    let x: Vec<f32> = (0..1024).map(|i| -126.0 - i as f32 / 512.0).collect();
    for &level in Level::available() {
        for (x, got) in x.iter().zip(map(level, &x, Function::Exp2)) {
            let error = (f64::from(got) - f64::from(*x).exp2()).abs();
            assert!(error <= f64::from(f32::MIN_POSITIVE), "{level}: 2^{x} = {got:e}");
        }
    }
}

#[test]
fn tanh_is_within_its_bound_on_every_binade() {
    let positive = every_binade(64.0);
    let x: Vec<f32> = positive
        .iter()
        .flat_map(|&x| [x, -x])
        .filter(|x| x.abs() >= f32::MIN_POSITIVE || *x == 0.0)
        .collect();
    for &level in Level::available() {
        let got = map(level, &x, Function::Tanh);
        let nonzero: Vec<usize> = (0..x.len()).filter(|&i| x[i] != 0.0).collect();
        let (x, got): (Vec<f32>, Vec<f32>) = nonzero.iter().map(|&i| (x[i], got[i])).unzip();
        let (error, at) = worst(&x, &got, f64::tanh);
        assert!(error <= 4.0, "{level}: {error} units at {at:e}, more than 4");
    }
}

#[test]
fn tanh_keeps_zero_and_limits() {
    for &level in Level::available() {
        let got = map(level, &[0.0, f32::INFINITY, f32::NEG_INFINITY, 1e30], Function::Tanh);
        assert_eq!(got, [0.0, 1.0, -1.0, 1.0], "{level}");
        assert!(map(level, &[f32::NAN], Function::Tanh)[0].is_nan(), "{level}: a NaN must survive");
    }
}
