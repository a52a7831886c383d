//! On a machine without a GPU every call ends in an error with the reason; on one with a GPU these calls
//! are wrong for other reasons. Nothing panics.

use etalon_cuda::{Level, Options, Precision, Settings, Target, Workspace, levels, probe, run, run_in, time};
use etalon_problem::{Algorithm, Attention, Dtype, Error, Extents, LinearCrossEntropy, Pass, Problem, Views, ViewsMut};
use half::bf16;
use ndarray::{Array0, Array2, Array3, Array4, array};
use std::path::PathBuf;
use std::time::Duration;

fn problem() -> Problem {
    let extents = Extents { batch: 1, query_heads: 2, key_heads: 1, queries: 3, keys: 4, dim: 8 };
    Attention::new(extents).into()
}

#[test]
fn a_wrong_operand_is_named_before_a_device_is_looked_for() {
    let q = Array4::<f32>::zeros((1, 2, 3, 8));
    let inputs = Views::new().with("q", &q);
    let options = Options::default();
    let result = run(&problem(), Pass::Forward, &inputs, &mut ViewsMut::new(), &options);
    assert_eq!(result, Err(Error::missing("k", None)));
}

#[test]
fn what_is_absent_is_an_error_and_leaves_the_outputs_alone() {
    let q = Array4::<f32>::zeros((1, 2, 3, 8));
    let kv = Array4::<f32>::zeros((1, 1, 4, 8));
    let mut lse = Array3::<f32>::from_elem((1, 2, 3), 7.0);
    let inputs = Views::new().with("q", &q).with("k", &kv).with("v", &kv);
    let mut outputs = ViewsMut::new().with("lse", &mut lse);
    // No machine has as many devices.
    let options = Options { device: usize::MAX.into(), ..Options::default() };
    let error = run(&problem(), Pass::Forward, &inputs, &mut outputs, &options).unwrap_err();
    drop(outputs);
    assert!(lse.iter().all(|&x| x == 7.0));
    match (probe(), error) {
        (Ok(_), Error::Value { name, .. }) => assert_eq!(name, "device"),
        (Err(absent), Error::Unsupported { reason, .. }) => assert_eq!(reason, absent.to_string()),
        (_, error) => panic!("{error}"),
    }
}

#[test]
fn a_folder_without_a_compiler_is_an_error_and_no_other_compiler_is_taken() {
    if probe().is_err() {
        return; // the driver is missed first
    }
    let nvrtc = Some(PathBuf::from("/nowhere/at/all"));
    let workspace = Workspace::with(Settings { nvrtc, ..Settings::default() });
    let error = workspace.check(0).unwrap_err().to_string();
    assert!(error.contains("nvidia-cuda-nvrtc") && error.contains("/nowhere/at/all"), "{error}");
}

#[test]
fn passes_without_kernels_say_so() {
    let of = |level, algorithm, pass, storage| {
        let options = Options { level, ..Options::default() };
        levels::offers(&options, algorithm, pass, storage, &Target::default())
    };
    let (attention, lse) = (Algorithm::Attention, Algorithm::AttentionLse);
    assert_eq!(of(Level::Portable, attention, Pass::Jvp, Dtype::F16), Ok(()));
    assert_eq!(of(Level::Auto, Algorithm::LinearAttention, Pass::Step, Dtype::F16), Ok(()));
    assert_eq!(of(Level::Sm90a, lse, Pass::Backward, Dtype::Bf16), Ok(()));
    for (level, algorithm, pass, storage) in [
        (Level::Portable, attention, Pass::Forward, Dtype::F64),
        (Level::Sm80, attention, Pass::Backward, Dtype::F32),
        (Level::Sm80, lse, Pass::Jvp, Dtype::F16),
        (Level::Sm90a, attention, Pass::Forward, Dtype::F32),
        (Level::Sm90a, lse, Pass::DoubleBackward, Dtype::Bf16),
        (Level::Sm90aSegments, attention, Pass::Forward, Dtype::Bf16),
        (Level::Sm90aSegments, Algorithm::LinearAttention, Pass::Forward, Dtype::F32),
        (Level::Sm90a, Algorithm::LinearAttention, Pass::Step, Dtype::Bf16),
        (Level::Auto, Algorithm::LazyAttention, Pass::DoubleBackward, Dtype::F32),
    ] {
        let refused = of(level, algorithm, pass, storage);
        assert!(matches!(refused, Err(Error::Unsupported { .. })), "{algorithm} {pass} {level}");
    }
    let tf32 = Options { level: Level::Sm80, precision: Precision::Tf32, ..Options::default() };
    let of_tf32 = |algorithm, pass| levels::offers(&tf32, algorithm, pass, Dtype::F32, &Target::default());
    assert_eq!(of_tf32(attention, Pass::Backward), Ok(()));
    assert!(of_tf32(attention, Pass::Jvp).is_err());
    assert!(of_tf32(Algorithm::LazyAttention, Pass::Forward).is_err());
    let q = Array4::<f32>::zeros((1, 2, 3, 8));
    let lazy: Problem = etalon_problem::LazyAttention::new(Extents {
        batch: 1,
        query_heads: 2,
        key_heads: 1,
        queries: 3,
        keys: 4,
        dim: 8,
    })
    .into();
    let inputs = Views::new().with("q", &q);
    let (workspace, options) = (Workspace::new(), Options::default());
    let outputs = &mut ViewsMut::new();
    let refused = run_in(&workspace, &lazy, Pass::DoubleBackward, &inputs, outputs, &options);
    assert!(matches!(refused, Err(Error::Unsupported { .. })));
}

/// Checks that a pass that a level lacks is refused at every entry point, whatever the machine has.
#[test]
fn a_level_that_lacks_a_pass_is_no_other_level() {
    let problem: Problem = LinearCrossEntropy::new(2, 8, 3).into();
    let (h, w) = (Array2::<bf16>::zeros((2, 8)), Array2::<bf16>::zeros((3, 8)));
    let (targets, mut loss) = (array![0i64, 2], Array0::from_elem((), 7f32));
    let inputs = Views::new().with("h", &h).with("w", &w).with("targets", &targets);
    let workspace = Workspace::new();
    for level in [Level::Sm80, Level::Sm80Narrow] {
        let options = Options { level, precision: Precision::Flash, ..Options::default() };
        let mut outputs = ViewsMut::new().with("loss", &mut loss);
        let run = run_in(&workspace, &problem, Pass::Forward, &inputs, &mut outputs, &options);
        let timed = time(&workspace, &problem, Pass::Forward, &inputs, &options, Duration::ZERO);
        for refused in [run.err(), timed.err()] {
            let Some(Error::Unsupported { reason, .. }) = refused else { panic!("{refused:?}") };
            assert_eq!(reason, "not written yet for sm80");
        }
    }
    assert_eq!(loss[()], 7.0);
}
