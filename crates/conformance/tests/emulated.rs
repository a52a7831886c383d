//! The laws on the levels that multiply bf16, by the rules of their instructions: so they hold of the kernels on
//! machines without the instructions too.

use etalon_conformance::cases::Depth;
use etalon_conformance::suite::{SuiteOptions, run};
use etalon_conformance::tier::Tier;
use etalon_conformance::tiers::Simd;
use etalon_problem::Algorithm;
use etalon_simd::{Level, Precision};

/// The laws of some algorithms, at smoke depth.
fn hold(algorithms: Vec<Algorithm>, precision: Precision) {
    let levels = Level::emulated().map(|level| Simd::of(level, precision));
    let options = SuiteOptions {
        depth: Depth::Smoke,
        algorithms,
        ..SuiteOptions::own(levels.iter().map(|level| level as &dyn Tier).collect())
    };
    let report = run(&options, &|_, _, _| {});
    assert!(report.checks() > 90, "{} checks", report.checks());
    let negative: Vec<_> = report.negative().take(5).collect();
    assert!(negative.is_empty(), "{negative:#?}");
}

#[test]
fn laws_of_attention_hold_of_kernels_in_bf16() {
    hold(vec![Algorithm::Attention, Algorithm::AttentionLse], Precision::Flash);
    hold(vec![Algorithm::Attention, Algorithm::AttentionLse], Precision::Split2);
}

#[test]
fn laws_of_lazy_attention_hold_of_kernels_in_bf16() {
    hold(vec![Algorithm::LazyAttention], Precision::Flash);
    hold(vec![Algorithm::LazyAttention], Precision::Split2);
}

#[test]
fn laws_of_linear_cross_entropy_hold_of_kernels_in_bf16() {
    hold(vec![Algorithm::LinearCrossEntropy], Precision::Flash);
    hold(vec![Algorithm::LinearCrossEntropy], Precision::Split2);
}

#[test]
fn laws_of_linear_attention_hold_of_kernels_in_bf16() {
    hold(vec![Algorithm::LinearAttention], Precision::Flash);
    hold(vec![Algorithm::LinearAttention], Precision::Split2);
}
