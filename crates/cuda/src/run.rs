//! The door of the tier: every pass of every algorithm, by name.

use crate::host::compute;
use crate::levels;
use crate::linear_attention::check_log_decays;
use crate::options::Options;
use crate::plan::draft;
use crate::workspace::Workspace;
use etalon_problem::{Pass, Problem, Result, Views, ViewsMut};

/// Computes a pass on a device: reads `inputs` and writes those outputs that have a place in `outputs`, both by name,
/// of any strides, on the host.
///
/// The tensors of a pass, with their shapes and types, are those of [`Problem::operands`]. What a later pass reads of
/// the forward pass (o and lse of attention) is an input; with [`Options::recompute`] an absent one is computed anew.
///
/// On an error nothing has been written, unless a device fails while it hands over its results. Fails as
/// [`Unsupported`](etalon_problem::Error::Unsupported) where there is no driver, device or compiler, and where the
/// tier has no kernel; as [`Device`](etalon_problem::Error::Device) where a device fails, and as
/// [`ContextLost`](etalon_problem::Error::ContextLost) from the fault on that ends its context. Compiles the kernels
/// on every call: a caller with more than one uses [`run_in`].
///
/// ```
/// use etalon_cuda::{Options, run};
/// use etalon_problem::{AttentionLse, Error, Extents, Pass, Problem, Views, ViewsMut};
/// use ndarray::{Array3, Array4};
///
/// let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 2, keys: 4, dim: 8 };
/// let problem: Problem = AttentionLse::new(extents).into();
/// let (q, k) = (Array4::<f32>::zeros((1, 1, 2, 8)), Array4::<f32>::ones((1, 1, 4, 8)));
/// let mut lse = Array3::<f32>::zeros((1, 1, 2));
///
/// let inputs = Views::new().with("q", &q).with("k", &k);
/// let mut outputs = ViewsMut::new().with("lse", &mut lse);
/// match run(&problem, Pass::Forward, &inputs, &mut outputs, &Options::default()) {
///     Ok(()) => {
///         drop(outputs); // gives lse back
///         assert!((lse[[0, 0, 1]] - 4f32.ln()).abs() < 1e-6);
///     }
///     Err(Error::Unsupported { reason, .. }) => println!("no CUDA: {reason}"),
///     Err(error) => return Err(error),
/// }
/// # Ok::<(), etalon_problem::Error>(())
/// ```
pub fn run(
    problem: &Problem,
    pass: Pass,
    inputs: &Views<'_>,
    outputs: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<()> {
    run_in(&Workspace::new(), problem, pass, inputs, outputs, options)
}

/// As [`run`], with the devices, kernels and memory of a workspace that the caller keeps.
pub fn run_in(
    workspace: &Workspace,
    problem: &Problem,
    pass: Pass,
    inputs: &Views<'_>,
    outputs: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<()> {
    let table = levels::table_of(problem, pass)?;
    let storage = table.check_call(inputs, outputs, options.recompute)?;
    levels::check(options, problem.algorithm(), pass, storage)?;
    if let Problem::LinearAttention(problem) = problem {
        check_log_decays(problem, pass, inputs)?;
    }
    let call = (pass, storage, &table);
    compute(workspace, call, (inputs, outputs), options, |call| draft(problem, call))
}
