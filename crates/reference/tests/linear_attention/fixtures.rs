//! What PyTorch's autograd says of the same problems: `tests/fixtures/record_linear_attention.py`
//! wrote it down.

use crate::tensors::{Tensors, run};
use etalon_problem::{LinearAttention, Pass, Problem, Role};
use ndarray::{ArrayD, IxDyn};
use safetensors::{Dtype, SafeTensors};
use std::path::{Path, PathBuf};

/// Both sides round in f64, in another order; operands are of the size of 1.
const TOLERANCE: f64 = 1e-13;

fn load(path: &Path) -> (LinearAttention, Tensors<f64>) {
    let bytes = std::fs::read(path).expect("a fixture");
    let (_, header) = SafeTensors::read_metadata(&bytes).expect("a header");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let metadata = header.metadata().as_ref().expect("metadata");
    let problem: Problem = serde_json::from_str(&metadata["problem"]).expect("a problem");
    let Problem::LinearAttention(problem) = problem else { panic!("another algorithm") };
    let tensors = file.iter().map(|(name, view)| {
        assert_eq!(view.dtype(), Dtype::F64);
        let (words, rest) = view.data().as_chunks::<8>();
        assert!(rest.is_empty());
        let values = words.iter().map(|&word| f64::from_le_bytes(word)).collect();
        let tensor = ArrayD::from_shape_vec(IxDyn(view.shape()), values).expect("its shape");
        (name.to_string(), tensor)
    });
    (problem, tensors.collect())
}

#[test]
fn every_pass_agrees_with_autograd() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/linear_attention");
    let files = std::fs::read_dir(directory).expect("the fixtures");
    let mut paths: Vec<PathBuf> = files.map(|file| file.expect("a file").path()).collect();
    paths.sort();
    assert_eq!(paths.len(), 24, "problems");
    let mut worst = 0.0f64;
    for path in paths {
        let (problem, tensors) = load(&path);
        for pass in [Pass::Forward, Pass::Backward, Pass::DoubleBackward] {
            let operands = problem.operands(pass);
            let read = operands.iter().filter(|operand| operand.role != Role::Output);
            let x = read.map(|operand| (operand.name.to_string(), tensors[operand.name].clone()));
            for (result, found) in run(&problem, pass, &x.collect()).expect("a result") {
                let expected = &tensors[&result];
                assert_eq!(found.shape(), expected.shape());
                let scale = expected.iter().fold(1.0f64, |scale, y| scale.max(y.abs()));
                for (&found, &expected) in found.iter().zip(expected) {
                    let error = (found - expected).abs() / scale;
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
