//! Estimates of the allocations of an evaluation are at least what it allocates, and not many times as much: otherwise
//! it would be refused for nothing.

use etalon_cli::needs;
use etalon_conformance::bounds::bounds;
use etalon_conformance::cases::{Depth, specs};
use etalon_conformance::check::check;
use etalon_conformance::profile::Profile;
use etalon_conformance::tensor::{Stored, Tensor, Tensors};
use etalon_conformance::tier::{Hints, Request};
use etalon_conformance::tiers::{self, Simd};
use etalon_conformance::vectors::to_bytes;
use etalon_problem::{
    Algorithm, Attention, Dtype, Extents, LazyAttention, LinearAttention, LinearCrossEntropy,
    LinearExtents, Mask, Operand, Pass, Precision, Problem,
};
use etalon_reference::scalar::Real;
use etalon_simd::Level;
use ndarray::{Array2, ArrayD};
use peak_alloc::PeakAlloc;
use std::path::Path;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Bytes that the work allocates at once, at the most.
fn peak<R>(work: impl FnOnce() -> R) -> usize {
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    let result = work();
    let peak = ALLOCATOR.peak_usage();
    drop(result);
    peak.saturating_sub(before)
}

/// Bytes that are not worth a refusal: pools, names and lists of so many bytes are there anyway.
const SMALL: u128 = 1 << 20;

/// The estimate and the peak of an evaluation by the reference, with bounds, and by the simd tier.
fn evaluations(
    problem: &Problem,
    pass: Pass,
    dtype: Dtype,
    inputs: &Tensors,
) -> Vec<(&'static str, u128, usize)> {
    let request = Request { problem, pass, dtype, inputs, hints: Hints::default() };
    let path = Path::new("x");
    let written = |outputs: &Tensors| to_bytes(path, outputs).expect("a file");
    let simd = Simd::new(Level::best());
    let said = |tier, bounds| needs::evaluation(problem, pass, dtype, tier, bounds);
    let mut found = Vec::new();
    let reference =
        peak(|| tiers::oracle(&request).map(|outputs| (written(&outputs), outputs)).ok());
    found.push(("reference", said("reference", false), reference));
    let profile = if dtype == Dtype::F64 { Profile::ALL[0] } else { Profile::ALL[1] };
    if bounds(problem, pass, dtype, &profile, inputs).is_ok() {
        let bounded = peak(|| bounds(problem, pass, dtype, &profile, inputs).ok());
        found.push(("bounds", said("reference", true), bounded));
    }
    if tiers::ask(&simd, &request).is_ok() {
        let workspace = needs::workspace(problem, pass, dtype).expect("a plan");
        let own = peak(|| tiers::ask(&simd, &request).map(|outputs| (written(&outputs), outputs)));
        found.push(("simd", said("simd", false) + workspace, own));
    }
    found
}

fn given(problem: &Problem, pass: Pass, dtype: Dtype) -> Tensors {
    let tensor = |operand: &Operand| {
        let mut next = 0;
        let x = ArrayD::from_shape_simple_fn(operand.shape.as_slice(), || {
            next = (next + 5) % 11;
            // Decays are negative, and targets the first class.
            if operand.precision == Precision::Integer { 0.0 } else { -(next as f64) / 11.0 }
        });
        (operand.name.to_string(), Tensor::store(&x, Stored::of(operand.precision, dtype)))
    };
    problem.operands(pass).iter().filter(|x| x.role.is_given()).map(tensor).collect()
}

/// The estimate and the peak of a check of results that are twice the exact ones, so that explanations are
/// looked for.
fn judgement(problem: &Problem, pass: Pass) -> (u128, usize) {
    let dtype = Dtype::F32;
    let inputs = given(problem, pass, dtype);
    let request = Request { problem, pass, dtype, inputs: &inputs, hints: Hints::default() };
    let exact = tiers::oracle(&request).expect("the reference");
    let operands = problem.operands(pass);
    let twice = |(name, x): (String, Tensor)| {
        let operand = operands.iter().find(|x| x.name == name).expect("an operand");
        let values = x.numbers(&name).expect("numbers") * 2.0;
        (name, Tensor::store(&values, Stored::of(operand.precision, dtype)))
    };
    let got: Tensors = exact.into_iter().map(twice).collect();
    let profile = Profile::strict(dtype);
    let peak = peak(|| check(&request, &profile, &got, &[]).expect("a check"));
    (needs::judgement(problem, pass, dtype), peak)
}

/// Lets every thread take what it keeps for good once it has multiplied matrices, which no estimate counts.
fn warm_up() {
    let (m, n, k) = (256, 512, 64); // a product for which one packs its operands
    rayon::broadcast(|_| {
        let (a, b) = (Array2::<f64>::ones((m, k)), Array2::<f64>::ones((k, n)));
        let mut c = Array2::<f64>::zeros((m, n));
        f64::add_product(c.view_mut(), a.view(), b.view());
        assert_eq!(c[[0, 0]], k as f64);
    });
}

/// One test: the allocator counts what all threads allocate.
#[test]
fn estimates_hold_and_are_near() {
    warm_up();
    let mut wrong = Vec::new();
    for algorithm in Algorithm::ALL {
        // Every fortieth: the structure of problems matters, not their number.
        for spec in specs(algorithm, Depth::Core, 0).step_by(40) {
            let case = spec.build();
            for &pass in algorithm.passes() {
                let inputs = given(&case.problem, pass, case.dtype);
                for (by, said, peak) in evaluations(&case.problem, pass, case.dtype, &inputs) {
                    if peak as u128 > said + SMALL {
                        wrong.push(format!(
                            "{} {pass} by {by}: {peak} bytes, not {said}",
                            case.name
                        ));
                    }
                }
            }
        }
    }
    let (long, wide) = (512, 256);
    let extents =
        Extents { batch: 1, query_heads: 2, key_heads: 1, queries: long, keys: long, dim: wide };
    let linear =
        LinearExtents { batch: 1, query_heads: 2, key_heads: 1, tokens: long, dim: wide / 4 };
    let mut lazy = LazyAttention::new(extents);
    lazy.scores.mask = Mask::window(3, 0);
    let large: [Problem; 4] = [
        Attention::new(extents).mask(Mask::window(3, 0)).into(),
        LinearAttention::new(linear).into(),
        lazy.into(),
        LinearCrossEntropy::new(long / 4, wide / 4, long / 2).into(),
    ];
    for problem in large {
        for &pass in problem.algorithm().passes() {
            let inputs = given(&problem, pass, Dtype::F32);
            for (by, said, peak) in evaluations(&problem, pass, Dtype::F32, &inputs) {
                let what = format!("{} {pass} by {by}", problem.algorithm());
                println!("{what}: {peak} bytes, said to be {said}");
                if peak as u128 > said + SMALL || said > 4 * peak as u128 + 8 * SMALL {
                    wrong.push(format!("{what}: {peak} bytes, not {said}"));
                }
            }
        }
    }
    let extents =
        Extents { batch: 2, query_heads: 4, key_heads: 2, queries: 128, keys: 128, dim: 64 };
    let linear = LinearExtents { batch: 2, query_heads: 4, key_heads: 2, tokens: 256, dim: 64 };
    let judged: [Problem; 3] = [
        Attention::new(extents).mask(Mask::causal()).into(),
        LinearAttention::new(linear).into(),
        LinearCrossEntropy::new(128, 64, 256).into(),
    ];
    for problem in judged {
        for pass in [Pass::Forward, Pass::Backward] {
            let (said, peak) = judgement(&problem, pass);
            println!("{} {pass}: {peak} bytes, said to be {said}", problem.algorithm());
            if peak as u128 > said + SMALL || said > 8 * peak as u128 + 8 * SMALL {
                wrong
                    .push(format!("a check of {} {pass}: {peak}, not {said}", problem.algorithm()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
