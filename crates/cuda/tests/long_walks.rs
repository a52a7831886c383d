//! Walks over so many tiles that every ring of stages goes round several times, on every level: results are near
//! those of the portable level. Without a device a test says that it was skipped.

mod gpu;
#[path = "gpu/operands.rs"]
mod operands;

use etalon_cuda::{Level, Options, Workspace};
use etalon_problem::{
    Attention, AttentionLse, Decay, Extents, LazyAttention, LinearAttention, LinearExtents, Mask, Pass, Problem, Role,
};
use operands::Operands;

/// Sixteen blocks of 64 rows, and a part of one; heads for more tiles than a device has multiprocessors.
const TOKENS: usize = 1050;
const HEADS: [usize; 2] = [8, 4];

fn extents(dim: usize) -> Extents {
    Extents { batch: 5, query_heads: HEADS[0], key_heads: HEADS[1], queries: TOKENS, keys: TOKENS, dim }
}

/// The results of a pass, by name.
fn names(problem: &Problem, pass: Pass) -> Vec<&'static str> {
    let outputs = problem.operands(pass).into_iter().filter(|x| x.role == Role::Output);
    // Results of a mode alone are left out.
    outputs.map(|x| x.name).filter(|name| !matches!(*name, "gradient" | "pv_sum")).collect()
}

/// Compares the root mean squares of the results of each level and of their differences from the portable level's.
/// Factors of 16 bits err by 2⁻⁹ each, and log-decays and cotangents of -1 to 1 leave few of a sum's terms to cancel:
/// 2⁻⁵ is far above what a right kernel errs, and below what one wrong tile of sixteen does.
fn check(name: &str, problem: impl Into<Problem>) {
    let Some(_) = gpu::stream() else { return };
    let (workspace, problem) = (Workspace::new(), problem.into());
    let mut inputs = Operands::inputs(&problem, Pass::Backward);
    for (_, decay) in inputs.wide.iter_mut().filter(|(name, _)| matches!(**name, "g" | "g_gamma")) {
        decay.mapv_inplace(|x| -x.abs() / 8.0);
    }
    let portable = Options { level: Level::Portable, ..Options::default() };
    for pass in [Pass::Forward, Pass::Backward] {
        let names = names(&problem, pass);
        let of = |inputs: &Operands, options: &Options| inputs.results(&workspace, &problem, pass, &names, options);
        let wanted = of(&inputs, &portable);
        let expected = wanted.clone().in_f32();
        for options in gpu::options(&workspace).iter().skip(1).filter(|x| !x.assume_finite) {
            for (result, found) in of(&inputs, options).in_f32() {
                let rms = |x: f64| (x / found.len() as f64).sqrt();
                let square = |x: f32| f64::from(x).powi(2);
                let error = rms(found.iter().zip(&expected[result]).map(|(x, y)| square(x - y)).sum());
                let size = rms(expected[result].iter().map(|x| square(*x)).sum());
                assert!(error <= size / 32.0, "{name} {pass} {result} on {}: {error} of {size}", options.level);
            }
        }
        inputs.extend(wanted);
    }
}

#[test]
fn of_attention() {
    [64, 128].iter().for_each(|&dim| check("attention", Attention::new(extents(dim)).mask(Mask::causal())));
}

#[test]
fn of_attention_lse() {
    [64, 128].iter().for_each(|&dim| check("attention_lse", AttentionLse::new(extents(dim)).mask(Mask::causal())));
}

#[test]
fn of_lazy_attention() {
    for dim in [64, 128] {
        check("lazy_attention", LazyAttention::new(extents(dim)).bias(300).mask(Mask::causal()));
    }
}

fn check_linear_attention(decay: Decay) {
    let [query_heads, key_heads] = HEADS;
    for dim in [64, 128] {
        let extents = LinearExtents { batch: 5, query_heads, key_heads, tokens: TOKENS, dim };
        check("linear_attention", LinearAttention::new(extents).decay(decay));
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
