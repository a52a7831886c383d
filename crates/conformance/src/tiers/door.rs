//! Requests of the suite through the door of a tier: `run` over borrowed tensors by name.

use super::memory::Placed;
use crate::tensor::{Stored, Tensor, Tensors, views, views_mut};
use crate::tier::Request;
use etalon_problem::{Dtype, Error, Mode, Operand, Pass, Problem, Role, Views, ViewsMut};

/// `run` of a tier, its options set.
pub type Run<'a> =
    &'a (dyn Fn(&Problem, Pass, &Views<'_>, &mut ViewsMut<'_>) -> Result<(), Error> + Sync);

/// What a tier returns. What the pass reads again of the forward pass is from the tier's own, unless
/// the request wants it computed again.
pub(super) fn outputs(request: &Request<'_>, run: Run<'_>) -> Result<Tensors, Error> {
    let &Request { problem, pass, dtype, hints, .. } = request;
    let saved = saved(request, run)?;
    let inputs = request.inputs.iter().chain(&saved);
    let inputs: Vec<(&str, Placed)> = inputs
        .map(|(name, x)| Ok((name.as_str(), Placed::input(name, x, hints.layout)?)))
        .collect::<Result<_, Error>>()?;
    let mut views = Views::new();
    for (name, x) in &inputs {
        views.push(name, x.view(name)?);
    }
    let operands = problem.operands(pass);
    let wanted: Vec<&Operand> = operands.iter().filter(|x| x.role == Role::Output).collect();
    let together = if hints.alone { 1 } else { wanted.len().max(1) };
    let mut outputs = Tensors::new();
    for wanted in wanted.chunks(together) {
        let place = |x: &&Operand| {
            let stored = Stored::of(x.precision, dtype);
            (x.name, Placed::output(&x.shape, stored, hints.layout, hints.filled))
        };
        let mut places: Vec<(&str, Placed)> = wanted.iter().map(place).collect();
        let mut out = ViewsMut::new();
        for (name, place) in &mut places {
            out.push(name, place.view_mut(name)?);
        }
        run(problem, pass, &views, &mut out)?;
        drop(out);
        for (name, place) in places {
            outputs.insert(name.to_string(), place.into_tensor(name)?);
        }
    }
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
