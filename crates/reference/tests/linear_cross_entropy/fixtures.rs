//! What PyTorch's autograd says of the same problems:
//! `tests/fixtures/record_linear_cross_entropy.py` wrote it down.

use crate::tensors::{Operands, PASSES, Tensors, run};
use etalon_problem::{Problem, Role};
use ndarray::{Array1, ArrayD, IxDyn};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::path::{Path, PathBuf};

/// Both sides round in f64, in another order; operands are of the size of 1, temperature and scale
/// double some logits.
const TOLERANCE: f64 = 1e-13;

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
    let problem: Problem = serde_json::from_str(&metadata["problem"]).expect("a problem");
    let tensors = file.iter().map(|(name, view)| {
        let values = words(&view);
        let values = match view.dtype() {
            Dtype::I64 => values.map(|x| i64::from_le_bytes(x) as f64).collect(),
            _ => values.map(f64::from_le_bytes).collect(),
        };
        let tensor = ArrayD::from_shape_vec(IxDyn(view.shape()), values).expect("its shape");
        (name.to_string(), tensor)
    });
    (problem, tensors.collect())
}

#[test]
fn every_pass_agrees_with_autograd() {
    let directory =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/linear_cross_entropy");
    let files = std::fs::read_dir(directory).expect("the fixtures");
    let mut paths: Vec<PathBuf> = files.map(|file| file.expect("a file").path()).collect();
    paths.sort();
    assert_eq!(paths.len(), 27);
    let mut worst = 0.0f64;
    for path in paths {
        let (problem, mut tensors) = load(&path);
        let Problem::LinearCrossEntropy(problem) = problem else { panic!("{}", path.display()) };
        let targets: Array1<i64> = tensors["targets"].iter().map(|&y| y as i64).collect();
        for pass in PASSES {
            let operands = problem.operands(pass);
            let read = operands.iter().filter(|x| x.role != Role::Output && x.name != "targets");
            let floats = read.map(|x| (x.name.to_string(), tensors[x.name].clone())).collect();
            let x = Operands { floats, targets: targets.clone() };
            for (result, found) in run(&problem, pass, &x).expect("a result") {
                let expected = tensors.get_mut(&result).expect("the result");
                assert_eq!(found.shape(), expected.shape());
                let scale = expected.iter().fold(1.0f64, |scale, y| scale.max(y.abs()));
                for (&found, &expected) in found.iter().zip(&*expected) {
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
