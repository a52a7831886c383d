//! Requests of the suite through the door of a tier: `run` over borrowed tensors by name.

use crate::tensor::{Stored, Tensor, Tensors, views, views_mut};
use crate::tier::Request;
use etalon_problem::{Dtype, Error, Mode, Operand, Pass, Problem, Role, Views, ViewsMut};

/// `run` of a tier, its options set.
pub type Run<'a> =
    &'a (dyn Fn(&Problem, Pass, &Views<'_>, &mut ViewsMut<'_>) -> Result<(), Error> + Sync);

/// What a tier returns. What the pass reads again of the forward pass is from the tier's own, unless
/// the request wants it computed again.
pub(super) fn outputs(request: &Request<'_>, run: Run<'_>) -> Result<Tensors, Error> {
    let &Request { problem, pass, dtype, .. } = request;
    let saved = saved(request, run)?;
    let mut inputs = views(request.inputs)?;
    for (name, tensor) in &saved {
        inputs = inputs.with(name, tensor.view(name)?);
    }
    let mut outputs = unwritten(&problem.operands(pass), dtype, |x| x.role == Role::Output);
    run(problem, pass, &inputs, &mut views_mut(&mut outputs)?)?;
    Ok(outputs)
}

/// The outputs of the forward pass that a later pass reads.
pub fn saved(request: &Request<'_>, run: Run<'_>) -> Result<Tensors, Error> {
    let &Request { problem, pass, dtype, inputs, hints } = request;
    let (with_optional, recompute) = (hints.mode == Mode::ForwardGradient, hints.recompute);
    let mut saved = unwritten(&problem.operands(pass), dtype, |x| match x.role {
        Role::Saved => !recompute,
        Role::OptionalSaved => with_optional,
        _ => false,
    });
    if !saved.is_empty() {
        let forward = problem.operands(Pass::Forward);
        let own = |name: &str| forward.iter().any(|x| x.name == name && x.role.is_given());
        let inputs = inputs.iter().filter(|(name, _)| own(name));
        let inputs: Tensors = inputs.map(|(name, x)| (name.clone(), x.clone())).collect();
        let places = &mut views_mut(&mut saved)?;
        run(problem, Pass::Forward, &views(&inputs)?, places)?;
    }
    Ok(saved)
}

/// Places for some operands, which nobody has written.
fn unwritten(operands: &[Operand], dtype: Dtype, which: impl Fn(&Operand) -> bool) -> Tensors {
    let place = |x: &Operand| {
        (x.name.to_string(), Tensor::unwritten(&x.shape, Stored::of(x.precision, dtype)))
    };
    operands.iter().filter(|x| which(x)).map(place).collect()
}
