//! Walks over so many tiles that every ring of stages goes round several times, on every level: results are near
//! those of the portable level. Without a device a test says that it was skipped.

mod gpu;
#[path = "gpu/numbers.rs"]
mod numbers;
#[path = "gpu/tensors.rs"]
mod tensors;

use etalon_cuda::{Level, Options, Workspace};
use etalon_problem::{
    Align, Attention, AttentionLse, Decay, Extents, LazyAttention, LinearAttention, LinearExtents, Mask, Pass, Problem,
    Role,
};
use tensors::{Tensor, Tensors, random, results};

/// Sixteen blocks of 64 rows, and a part of one; heads for more tiles than a device has multiprocessors.
const TOKENS: usize = 1050;
const HEADS: [usize; 2] = [8, 4];

fn extents(dim: usize) -> Extents {
    Extents { batch: 5, query_heads: HEADS[0], key_heads: HEADS[1], queries: TOKENS, keys: TOKENS, dim }
}

/// The numbers of a tensor in f64.
fn in_f64(x: &Tensor) -> Vec<f64> {
    match x {
        Tensor::Bf16(x) => x.iter().map(|x| x.to_f64()).collect(),
        Tensor::F32(x) => x.iter().map(|x| f64::from(*x)).collect(),
    }
}

fn rms(numbers: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = numbers.len() as f64;
    (numbers.map(|x| x * x).sum::<f64>() / count).sqrt()
}

/// Compares the root mean squares of the results of each level and of their differences from the portable level's.
/// Factors of 16 bits err by 2⁻⁹ each, and log-decays and cotangents of -1 to 1 leave few of a sum's terms to cancel:
/// 2⁻⁵ is far above what a right kernel errs, and below what one wrong tile of sixteen does.
fn check(problem: impl Into<Problem>) {
    if gpu::stream().is_none() {
        return;
    }
    let (workspace, problem) = (Workspace::new(), problem.into());
    let roles = [Role::Input, Role::Cotangent, Role::OptionalCotangent];
    let mut inputs = random(&problem, Pass::Backward, &roles);
    for (name, x) in &mut inputs {
        if let ("g" | "g_gamma", Tensor::F32(decays)) = (*name, x) {
            decays.mapv_inplace(|x| -x.abs() / 8.0);
        }
    }
    let portable = Options { level: Level::Portable, ..Options::default() };
    for pass in [Pass::Forward, Pass::Backward] {
        // Results of a mode alone are left out.
        let is_wanted = |name: &str| !matches!(name, "gradient" | "pv_sum");
        let of = |inputs: &Tensors, options| results(&workspace, &problem, pass, inputs, is_wanted, options).unwrap();
        let wanted = of(&inputs, &portable);
        for options in gpu::options(&workspace).iter().skip(1).filter(|x| !x.assume_finite) {
            for (name, found) in of(&inputs, options) {
                let (found, expected) = (in_f64(&found), in_f64(&wanted[name]));
                let error = rms(found.iter().zip(&expected).map(|(x, y)| x - y));
                let size = rms(expected.iter().copied());
                let what = format!("{} {pass} {name} on {}", problem.algorithm(), options.level);
                assert!(error <= size / 32.0, "{what}: {error} of {size}");
            }
        }
        inputs.extend(wanted);
    }
}

#[test]
fn of_attention() {
    [64, 128].iter().for_each(|&dim| check(Attention::new(extents(dim)).mask(Mask::causal())));
}

#[test]
fn of_wide_attention() {
    let chunked = Mask::ChunkedCausal { chunk: 700, align: Align::BottomRight };
    for (dim, value_dim, mask) in [(192, 128, Mask::Full), (256, 256, Mask::causal()), (256, 256, chunked)] {
        let mut attention = Attention::new(extents(dim)).mask(mask);
        attention.value_dim = value_dim;
        check(attention);
    }
}

#[test]
fn of_attention_lse() {
    [64, 128].iter().for_each(|&dim| check(AttentionLse::new(extents(dim)).mask(Mask::causal())));
}

#[test]
fn of_lazy_attention() {
    for dim in [64, 128] {
        check(LazyAttention::new(extents(dim)).bias(300).mask(Mask::causal()));
    }
}

fn check_linear_attention(decay: Decay) {
    let [query_heads, key_heads] = HEADS;
    for dim in [64, 128] {
        let extents = LinearExtents { batch: 5, query_heads, key_heads, tokens: TOKENS, dim };
        check(LinearAttention::new(extents).decay(decay));
    }
}

#[test]
fn of_linear_attention_by_head() {
    check_linear_attention(Decay::PerHead);
}

#[test]
fn of_linear_attention_by_token() {
    check_linear_attention(Decay::PerToken);
}
