//! The door of the tier: every pass of every algorithm, by name.

use crate::{Options, Workspace, linear_attention, softmax};
use etalon_problem::{Dtype, Error, Pass, Problem, Views, ViewsMut};

/// Computes a pass: reads `inputs` and writes those outputs that have a place in `outputs`, both by
/// name and of any strides.
///
/// The tensors of a pass, with their shapes and types, are those of [`Problem::operands`]. What a later
/// pass reads again of the forward pass (o and lse of attention) is an input; with
/// [`Options::recompute`] an absent one is computed anew. A `step` without `initial_state` works in
/// place: the place of `final_state` holds the states before the token.
///
/// On an error nothing has been written. Fails with [`Error::Unsupported`] where the tier has no kernel.
///
/// ```
/// use etalon_problem::{AttentionLse, Extents, Pass, Problem, Views, ViewsMut};
/// use etalon_simd::{Options, run};
/// use ndarray::{Array3, Array4};
///
/// let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 2, keys: 4, dim: 8 };
/// let problem: Problem = AttentionLse::new(extents).into();
/// let (q, k) = (Array4::<f32>::zeros((1, 1, 2, 8)), Array4::<f32>::ones((1, 1, 4, 8)));
/// let mut lse = Array3::<f32>::zeros((1, 1, 2));
///
/// let inputs = Views::new().with("q", &q).with("k", &k);
/// let mut outputs = ViewsMut::new().with("lse", &mut lse);
/// run(&problem, Pass::Forward, &inputs, &mut outputs, &Options::default())?;
/// drop(outputs); // gives lse back
/// assert!((lse[[0, 0, 1]] - 4f32.ln()).abs() < 1e-6);
/// # Ok::<(), etalon_problem::Error>(())
/// ```
pub fn run(
    problem: &Problem,
    pass: Pass,
    inputs: &Views<'_>,
    outputs: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    run_in(&Workspace::new(), problem, pass, inputs, outputs, options)
}

/// As [`run`], with memory of a workspace that the caller keeps.
pub fn run_in(
    workspace: &Workspace,
    problem: &Problem,
    pass: Pass,
    inputs: &Views<'_>,
    outputs: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    offers(problem, pass)?;
    let storage = problem.check_call(pass, inputs, outputs, options.recompute)?;
    if storage == Dtype::F64 {
        return Err(Error::Dtype {
            operand: "storage".to_string(),
            expected: "f32, bf16 or f16".to_string(),
            found: storage.to_string(),
        });
    }
    match problem {
        Problem::Attention(p) => softmax::run(workspace, &p.scores, pass, inputs, outputs, options),
        Problem::AttentionLse(p) => {
            softmax::run(workspace, &p.scores, pass, inputs, outputs, options)
        }
        Problem::LinearAttention(p) => {
            linear_attention::run(workspace, p, pass, inputs, outputs, options)
        }
        _ => Ok(()), // refused above
    }
}

/// Fails where the tier has no kernel.
fn offers(problem: &Problem, pass: Pass) -> Result<(), Error> {
    match problem {
        Problem::LazyAttention(_) | Problem::LinearCrossEntropy(_) => Err(Error::Unsupported {
            what: format!("{} {pass}", problem.algorithm()),
            reason: "not written yet for simd".to_string(),
        }),
        _ => Ok(()),
    }
}
