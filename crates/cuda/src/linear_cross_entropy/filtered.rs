//! The backward pass with a filter, over operands of the host.

use super::plan::{SIDE, TILE};
use super::run::draft_filtered;
use super::tokens::counted;
use crate::call::PassCall;
use crate::host::Placed;
use crate::memory::filled;
use crate::options::{Level, Options};
use crate::workspace::Workspace;
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{LinearCrossEntropy, Pass, Problem, Result, Views, ViewsMut};
use ndarray::Array1;

/// Certificate of a filter, as that of the simd tier: bounds of the distance of exact sums over the tiles that
/// were kept from exact sums over all, for the same gradients of logits.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Certificate {
    /// B_i ≥ ‖error of dh_i‖ (C37), `[T]`; of ignored tokens 0.
    pub dh: Array1<f32>,
    /// C_v ≥ ‖error of dw_v‖ (C38), `[V]`.
    pub dw: Array1<f32>,
    /// Tiles that were kept, and all of them: 128 tokens that count, in their order, by 256 classes.
    pub tiles: (usize, usize),
}

/// dh, dw and dbias without the tiles that `filter` leaves out, and what is certain about them. Operands are those of
/// [`run_in`](crate::run_in) for [`Pass::Backward`], by name, in memory of the host. Fails as that does, and at a
/// threshold or a budget below 0, infinite or NaN. A threshold of 0 leaves out nothing and gives the bits of the
/// portable level. That level computes it: the others answer that it is
/// [`Unsupported`](etalon_problem::Error::Unsupported).
pub fn filtered_backward(
    workspace: &Workspace,
    problem: &LinearCrossEntropy,
    inputs: &Views<'_>,
    outputs: &mut ViewsMut<'_>,
    filter: Filter,
    options: &Options,
) -> Result<Certificate> {
    filter.check()?;
    if !matches!(options.level, Level::Auto | Level::Portable) {
        return Err(options.level.refusal("the gradient filter is written for portable alone"));
    }
    let table = Problem::from(problem.clone()).checked_table(Pass::Backward)?;
    let storage = table.check_call(inputs, outputs, options.recompute)?;
    storage.refuse_f64()?;
    let LinearCrossEntropy { tokens, vocab, .. } = *problem;
    let what = "a certificate";
    let mut left_out = filled(0u8, &[tokens.div_ceil(SIDE), vocab.div_ceil(TILE)], what)?;
    let (mut dh, mut dw) = (filled(0f32, &[tokens], what)?, filled(0f32, &[vocab], what)?);
    let bands = counted(problem, inputs)?.div_ceil(SIDE);
    let draft = |call: &PassCall<'_, '_>| draft_filtered((problem, filter), &call.on(Level::Portable));
    let call = (Pass::Backward, storage, &table);
    let (placed, ranges) = Placed::new(workspace, call, (inputs, Some(outputs)), options, draft)?;
    let [of_tiles, of_tokens, of_classes] = ranges;
    placed.run()?;
    placed.download(of_tiles, &mut left_out)?;
    placed.download(of_tokens, bytemuck::cast_slice_mut(&mut dh))?;
    placed.download(of_classes, bytemuck::cast_slice_mut(&mut dw))?;
    placed.read(outputs)?;
    placed.finish();
    let all = bands * vocab.div_ceil(TILE);
    let left_out = left_out.iter().filter(|&&x| x != 0).count();
    Ok(Certificate { dh: dh.into(), dw: dw.into(), tiles: (all - left_out, all) })
}
