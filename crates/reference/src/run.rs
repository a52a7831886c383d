//! The door of the tier: every pass of every algorithm, over borrowed tensors of any storage type.

use crate::named::Tensors;
use crate::{Arithmetic, evaluate_in};
use etalon_problem::{Error, Pass, Problem, View, ViewMut, Views, ViewsMut};
use half::{bf16, f16};
use ndarray::{ArrayD, ArrayViewMutD};

/// The numbers of a tensor, or of a place.
macro_rules! read {
    ($view:expr, $View:ident) => {
        match $view {
            $View::F64(x) => x.to_owned(),
            $View::F32(x) => x.mapv(f64::from),
            $View::Bf16(x) => x.mapv(f64::from),
            $View::F16(x) => x.mapv(f64::from),
            $View::I64(x) => x.mapv(|x| x as f64),
        }
    };
}

/// Computes a pass: reads `inputs` exactly, computes in f64, and writes those outputs that have a place
/// in `outputs`, each rounded once to the type of its place. Names and shapes are those of
/// [`Problem::operands`]; strides may be any. Results that the forward pass could have saved are computed again,
/// given or not. On an error nothing has been written.
///
/// ```
/// use etalon_problem::{AttentionLse, Extents, Pass, Problem, Views, ViewsMut};
/// use ndarray::{Array3, Array4};
///
/// let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 2, keys: 4, dim: 8 };
/// let problem: Problem = AttentionLse::new(extents).into();
/// let (q, k) = (Array4::<f32>::zeros((1, 1, 2, 8)), Array4::<f32>::ones((1, 1, 4, 8)));
/// let mut lse = Array3::<f32>::zeros((1, 1, 2));
///
/// let inputs = Views::new().with("q", &q).with("k", &k);
/// let mut outputs = ViewsMut::new().with("lse", &mut lse);
/// etalon_reference::run(&problem, Pass::Forward, &inputs, &mut outputs)?;
/// drop(outputs); // gives lse back
/// assert_eq!(lse[[0, 0, 1]], 4f64.ln() as f32);
/// # Ok::<(), etalon_problem::Error>(())
/// ```
pub fn run(
    problem: &Problem,
    pass: Pass,
    inputs: &Views<'_>,
    outputs: &mut ViewsMut<'_>,
) -> Result<(), Error> {
    problem.check_call(pass, inputs, outputs, true)?;
    let mut given = Tensors::new();
    for operand in problem.operands(pass).iter().filter(|operand| operand.role.is_given()) {
        let input = inputs.get(operand.name).map(|view| read!(view, View));
        let place = operand.becomes.and_then(|output| outputs.get(output));
        if let Some(x) = input.or_else(|| Some(read!(place?, ViewMut))) {
            given.insert(operand.name.to_string(), x);
        }
    }
    let mut results = evaluate_in(Arithmetic::F64, problem, pass, &given)?;
    if let Some((name, _)) = outputs.iter().find(|(name, _)| !results.contains_key(*name)) {
        return Err(Error::Unsupported {
            what: format!("`{name}`"),
            reason: "the reference saves nothing for later passes".to_string(),
        });
    }
    while let Some((name, values)) = results.pop_first() {
        if let Some(place) = outputs.take(&name) {
            write(place, &values);
        }
    }
    Ok(())
}

fn write(place: ViewMut<'_>, values: &ArrayD<f64>) {
    fn each<T>(mut place: ArrayViewMutD<'_, T>, values: &ArrayD<f64>, round: fn(f64) -> T) {
        place.zip_mut_with(values, |place, &x| *place = round(x));
    }
    match place {
        ViewMut::F64(place) => each(place, values, |x| x),
        ViewMut::F32(place) => each(place, values, |x| x as f32),
        ViewMut::Bf16(place) => each(place, values, bf16::from_f64),
        ViewMut::F16(place) => each(place, values, f16::from_f64),
        ViewMut::I64(place) => each(place, values, |x| x.round() as i64),
    }
}
