//! Requests of the suite through the door of a tier: `run` over borrowed tensors by name.

use super::ask::hash;
use super::memory::Placed;
use crate::tensor::{Stored, Tensor, Tensors, views, views_mut};
use crate::tier::{Layout, Refusal, Request, Wrong};
use etalon_problem::{Dtype, Error, Mode, Operand, Pass, Problem, Role, Views, ViewsMut};

/// `run` of a tier, its options set.
pub type Run<'a> =
    &'a (dyn Fn(&Problem, Pass, &Views<'_>, &mut ViewsMut<'_>) -> Result<(), Error> + Sync);

/// Results of a tier. Tensors that the pass reads again of the forward pass are the tier's own, unless the request
/// wants them computed again. A fault where the tier fails and has written nevertheless.
pub(super) fn outputs(request: &Request<'_>, run: Run<'_>) -> Result<Tensors, Refusal> {
    let &Request { problem, pass, hints, .. } = request;
    let saved = saved(request, run)?;
    let mut inputs = Inputs::default();
    for (name, x) in request.inputs.iter().chain(&saved) {
        inputs.place(name, x, hints.layout)?;
    }
    let operands = problem.operands(pass);
    let mut wanted: Vec<&Operand> = operands.iter().filter(|x| x.role == Role::Output).collect();
    // A state that becomes another one in place is no operand, but what the place of the other holds.
    let becomes = operands.iter().find_map(|x| Some((x.name, x.becomes?)));
    let in_place = becomes.filter(|_| hints.in_place);
    let without_state = becomes.filter(|_| hints.wrong == Some(Wrong::NoState));
    if let Some((before, _)) = in_place.or(without_state) {
        inputs.remove(before);
    }
    if let Some((_, after)) = without_state {
        wanted.retain(|x| x.name != after);
    }
    let views = inputs.views(hints.wrong == Some(Wrong::OperandTwice))?;
    let together = if hints.alone { 1 } else { wanted.len().max(1) };
    let mut outputs = Tensors::new();
    for wanted in wanted.chunks(together) {
        let held = |x: &Operand| {
            let (before, _) = in_place.filter(|(_, after)| *after == x.name)?;
            request.inputs.get(before)
        };
        outputs.extend(results(request, wanted, &held, &views, run)?);
    }
    Ok(outputs)
}

/// The operands of a call, each name with the number of its memory.
#[derive(Default)]
struct Inputs<'t> {
    places: Vec<(&'t Tensor, Placed)>,
    names: Vec<(&'t str, usize)>,
}

impl<'t> Inputs<'t> {
    /// Adds an operand. In [`Layout::Overlapping`] it shares the memory of one that equals it.
    fn place(&mut self, name: &'t str, x: &'t Tensor, layout: Layout) -> Result<(), Error> {
        let same = |other: &Tensor| other.shape == x.shape && other.data.same_bits(&x.data);
        let equal = self.places.iter().position(|(other, _)| same(other));
        let at = match equal.filter(|_| layout == Layout::Overlapping) {
            Some(at) => at,
            None => {
                let layout = layout.of_number(self.names.len());
                self.places.push((x, Placed::input(name, x, layout)?));
                self.places.len() - 1
            }
        };
        self.names.push((name, at));
        Ok(())
    }

    fn remove(&mut self, name: &str) {
        self.names.retain(|(other, _)| *other != name);
    }

    /// All of them, the first perhaps twice.
    fn views(&self, first_twice: bool) -> Result<Views<'_>, Error> {
        let mut views = Views::new();
        let again = self.names.first().filter(|_| first_twice);
        for (name, at) in self.names.iter().chain(again) {
            views.push(name, self.places[*at].1.view(name)?);
        }
        Ok(views)
    }
}

/// The results of one call: those that `wanted` has. Before it a place holds what `held` says, or that
/// with which places are filled.
fn results<'t>(
    request: &Request<'_>,
    wanted: &[&Operand],
    held: &dyn Fn(&Operand) -> Option<&'t Tensor>,
    inputs: &Views<'_>,
    run: Run<'_>,
) -> Result<Tensors, Refusal> {
    let &Request { problem, pass, dtype, hints, .. } = request;
    let place = |(number, x): (usize, &Operand)| {
        let stored = Stored::of(x.precision, dtype);
        let layout = hints.layout.of_number(number);
        match held(x) {
            Some(state) => Placed::input(x.name, state, layout.of_results()),
            None => Ok(Placed::output(&x.shape, stored, layout.of_results(), hints.filled)),
        }
    };
    let again = wanted.first().filter(|_| hints.wrong == Some(Wrong::ResultTwice));
    let all = || wanted.iter().chain(again).copied().enumerate();
    let places = || all().map(place).collect::<Result<Vec<Placed>, Error>>();
    let mut written = places()?;
    let mut out = ViewsMut::new();
    for (place, (_, x)) in written.iter_mut().zip(all()) {
        out.push(x.name, place.view_mut(x.name)?);
    }
    let failed = run(problem, pass, inputs, &mut out).err();
    drop(out);
    let tensors = |places: Vec<Placed>| -> Result<Vec<Tensor>, Error> {
        places.into_iter().zip(all()).map(|(place, (_, x))| place.into_tensor(x.name)).collect()
    };
    let found = tensors(written)?;
    let Some(error) = failed else {
        let named = all().zip(found).map(|((_, x), found)| (x.name.to_string(), found));
        return Ok(named.collect());
    };
    for ((before, after), (_, x)) in tensors(places()?)?.into_iter().zip(found).zip(all()) {
        if hash_of(before) != hash_of(after) {
            return Err(Refusal::Fault(format!("wrote to {}, and then failed: {error}", x.name)));
        }
    }
    Err(error.into())
}

fn hash_of(x: Tensor) -> u64 {
    hash(&Tensors::from([(String::new(), x)]))
}

/// The outputs of the forward pass that a later pass reads.
pub fn saved(request: &Request<'_>, run: Run<'_>) -> Result<Tensors, Error> {
    let &Request { problem, pass, dtype, inputs, hints } = request;
    let (with_optional, recompute) = (hints.mode == Mode::ForwardGradient, hints.recompute);
    let mut saved = unwritten(&problem.operands(pass), dtype, &|x| match x.role {
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
pub(super) fn unwritten(
    operands: &[Operand],
    dtype: Dtype,
    which: &dyn Fn(&Operand) -> bool,
) -> Tensors {
    let place = |x: &Operand| {
        (x.name.to_string(), Tensor::unwritten(&x.shape, Stored::of(x.precision, dtype)))
    };
    operands.iter().filter(|x| which(x)).map(place).collect()
}
