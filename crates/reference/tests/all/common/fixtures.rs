//! Results of PyTorch's autograd for the same problems: the scripts `tests/fixtures/record….py` recorded
//! them.

use super::tensors::Tensors;
use etalon_problem::{NamedArray, Pass, Problem};
use ndarray::{ArrayD, IxDyn};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::path::{Path, PathBuf};

/// Both sides round in f64, in another order; operands are of the size of 1.
const TOLERANCE: f64 = 1e-13;

fn words<'a>(view: &'a TensorView<'_>) -> impl Iterator<Item = [u8; 8]> + 'a {
    let (words, rest) = view.data().as_chunks::<8>();
    assert!(rest.is_empty());
    words.iter().copied()
}

/// The problem of a file with its numbers: whole ones are given as f64, too.
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
    let numbers = file.iter().filter_map(|(name, view)| {
        let values = match view.dtype() {
            Dtype::F64 => words(&view).map(f64::from_le_bytes).collect(),
            Dtype::I64 => words(&view).map(|word| i64::from_le_bytes(word) as f64).collect(),
            _ => return None,
        };
        let tensor = ArrayD::from_shape_vec(IxDyn(view.shape()), values).expect("its shape");
        Some((name.to_string(), tensor))
    });
    (problem, numbers.collect())
}

/// Fails unless `run` returns what the files of `folder` hold, `count` of them, for every pass.
pub fn agree(
    folder: &str,
    count: usize,
    passes: &[Pass],
    run: impl Fn(&Problem, Pass, Tensors<f64>) -> Tensors<f64>,
) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(folder);
    let files = std::fs::read_dir(folder).expect("the fixtures");
    let mut paths: Vec<PathBuf> = files.map(|file| file.expect("a file").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    paths.sort();
    assert_eq!(paths.len(), count, "one file for each problem of the script");
    let mut worst = 0.0f64;
    for path in paths {
        let (problem, tensors) = load(&path);
        for &pass in passes {
            let operands = problem.operands(pass);
            let read = operands.iter().filter(|operand| operand.role.is_given());
            let x = read.map(|operand| (operand.name.to_string(), tensors[operand.name].clone()));
            for (result, found) in run(&problem, pass, x.collect()) {
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
