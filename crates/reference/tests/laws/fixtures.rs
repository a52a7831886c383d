//! What PyTorch's autograd says of the same problems: `tests/fixtures/record.py` wrote it down.

use crate::cases::PASSES;
use crate::tensors::{Tensors, run};
use etalon_problem::{NamedArray, Problem, Role};
use ndarray::{ArrayD, IxDyn};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::path::{Path, PathBuf};

/// Both sides round in f64, in another order; operands are of the size of 1.
const TOLERANCE: f64 = 1e-13;

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn words<'a>(view: &'a TensorView<'_>) -> impl Iterator<Item = [u8; 8]> + 'a {
    let (words, rest) = view.data().as_chunks::<8>();
    assert!(rest.is_empty());
    words.iter().copied()
}

fn load(path: &Path) -> (Problem, Tensors<f64>) {
    let bytes = std::fs::read(path).expect("a fixture");
    let (_, header) = SafeTensors::read_metadata(&bytes).expect("a header");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let metadata = header.metadata().as_ref().expect("metadata");
    let mut problem: Problem = serde_json::from_str(&metadata["problem"]).expect("a problem");
    let ids = |name: &str| {
        let view = file.tensor(name).expect("the segment ids");
        assert_eq!(view.dtype(), Dtype::I64);
        let ids: Vec<i64> = words(&view).map(i64::from_le_bytes).collect();
        Ok(Some(NamedArray::new(name, view.shape(), ids)))
    };
    let flags = |name: &str| {
        let view = file.tensor(name).expect("the mask");
        assert_eq!(view.dtype(), Dtype::BOOL);
        let flags: Vec<bool> = view.data().iter().map(|&flag| flag != 0).collect();
        Ok(Some(NamedArray::new(name, view.shape(), flags)))
    };
    problem.bind(ids, flags).expect("the arrays of the mask");
    let floats = file.iter().filter(|(_, view)| view.dtype() == Dtype::F64);
    let tensors = floats.map(|(name, view)| {
        let values = words(&view).map(f64::from_le_bytes).collect();
        let tensor = ArrayD::from_shape_vec(IxDyn(view.shape()), values).expect("its shape");
        (name.to_string(), tensor)
    });
    (problem, tensors.collect())
}

#[test]
fn every_pass_agrees_with_autograd() {
    let files = std::fs::read_dir(directory()).expect("the fixtures");
    let mut paths: Vec<PathBuf> = files.map(|file| file.expect("a file").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    paths.sort();
    assert_eq!(paths.len(), 48, "24 problems of each algorithm");
    let mut worst = 0.0f64;
    for path in paths {
        let (problem, tensors) = load(&path);
        for pass in PASSES {
            let operands = problem.operands(pass);
            let read = operands.iter().filter(|operand| operand.role != Role::Output);
            let x = read.map(|operand| (operand.name.to_string(), tensors[operand.name].clone()));
            for (result, found) in run(&problem, pass, &x.collect()).expect("a result") {
                let expected = &tensors[&result];
                assert_eq!(found.shape(), expected.shape());
                let largest = expected.iter().filter(|y| y.is_finite());
                let scale = largest.fold(1.0f64, |scale, y| scale.max(y.abs()));
                for (&found, &expected) in found.iter().zip(expected) {
                    let error =
                        if found == expected { 0.0 } else { (found - expected).abs() / scale };
                    worst = worst.max(error);
                    assert!(
                        error <= TOLERANCE,
                        "{}: {result} is {found}, not {expected}",
                        path.display()
                    );
                }
            }
        }
    }
    println!("largest error: {worst:.1e} of its tensor");
}
