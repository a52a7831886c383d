//! Asking a tier without trusting it.

use crate::tensor::{Data, Stored, Tensors};
use crate::tier::{Filtered, Refusal, Request, Tier};
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Axis, Dtype, Error, Operand, Pass, Precision, Problem, Role};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Asks a tier. Outputs that come back are complete: every output of the pass that the tier returns at all is
/// there, in its shape and type, and nothing else; the inputs are untouched.
pub fn ask(tier: &dyn Tier, request: &Request<'_>) -> Result<Tensors, Refusal> {
    let mut outputs = guarded(tier, &[*request], || tier.run(request))?;
    let operands = request.problem.operands(request.pass).into_iter();
    let own = operands.filter(|x| x.role == Role::Output && tier.returns(x.name));
    let own: Vec<String> = own.map(|x| x.name.to_string()).collect();
    check_outputs(request.problem, request.pass, request.dtype, &outputs, &own)
        .map_err(something_else)?;
    outputs.retain(|name, _| own.contains(name));
    Ok(outputs)
}

/// The same of a filtered backward pass of linear_cross_entropy: a bound comes back for each token and class.
pub fn ask_filtered(
    tier: &dyn Tier,
    request: &Request<'_>,
    filter: Filter,
) -> Result<Option<Filtered>, Refusal> {
    let Some(found) = guarded(tier, &[*request], || tier.filtered(request, filter))? else {
        return Ok(None);
    };
    let Filtered { outputs, dh, dw, classes, .. } = &found;
    check_outputs(request.problem, request.pass, request.dtype, outputs, &[])
        .and_then(|()| {
            let extent = |axis| request.problem.extent(axis);
            Error::expect_shape("certificate.dh", &[extent(Axis::Targets)], &[dh.len()])?;
            Error::expect_shape("certificate.dw", &[extent(Axis::Classes)], &[dw.len()])?;
            let some = (*classes > 0).then_some(());
            some.ok_or_else(|| Error::value("classes of a tile", "at least 1", classes))
        })
        .map_err(something_else)?;
    Ok(Some(found))
}

/// The same of several requests that share a workspace.
pub fn ask_in_turn(
    tier: &dyn Tier,
    requests: &[Request<'_>],
) -> Result<Option<Vec<Tensors>>, Refusal> {
    let Some(answers) = guarded(tier, requests, || tier.in_turn(requests))? else {
        return Ok(None);
    };
    if answers.len() != requests.len() {
        let (found, expected) = (answers.len(), requests.len());
        return Err(Refusal::Fault(format!("answered {found} of {expected} requests")));
    }
    for (request, outputs) in requests.iter().zip(&answers) {
        check_outputs(request.problem, request.pass, request.dtype, outputs, &[])
            .map_err(something_else)?;
    }
    Ok(Some(answers))
}

/// The answer of a tier; a fault where it panics or writes to its inputs.
fn guarded<R>(
    tier: &dyn Tier,
    requests: &[Request<'_>],
    run: impl FnOnce() -> Result<R, Refusal>,
) -> Result<R, Refusal> {
    for request in requests {
        let algorithm = request.problem.algorithm();
        tier.offers(algorithm, request.pass, request.dtype).map_err(Refusal::Unsupported)?;
    }
    let hashes = || requests.iter().map(|request| hash(request.inputs)).collect::<Vec<_>>();
    let before = hashes();
    let answer = catch_unwind(AssertUnwindSafe(run))
        .map_err(|panic| Refusal::Fault(format!("panicked: {}", message(&*panic))))?;
    if hashes() != before {
        return Err(Refusal::Fault("wrote to its inputs".to_string()));
    }
    answer
}

fn something_else(error: Error) -> Refusal {
    Refusal::Fault(format!("returned something else: {error}"))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
}

/// Fails unless these are the outputs of a pass: all of them, each in its shape and type, and nothing
/// else. Of some that `only` names, the others may be absent.
pub fn check_outputs(
    problem: &Problem,
    pass: Pass,
    dtype: Dtype,
    outputs: &Tensors,
    only: &[String],
) -> Result<(), Error> {
    check_each(problem, pass, outputs, only, |operand, found| {
        let stored = Stored::of(operand.precision, dtype);
        if found == Some(stored) { Ok(()) } else { Err(stored.to_string()) }
    })
}

/// The same of results that are floating-point numbers of any type, where the pass returns such numbers.
pub fn check_results(
    problem: &Problem,
    pass: Pass,
    outputs: &Tensors,
    only: &[String],
) -> Result<(), Error> {
    let integer = |operand: &Operand| operand.precision == Precision::Integer;
    check_each(problem, pass, outputs, only, |operand, found| match found {
        Some(Stored::Float(_)) if !integer(operand) => Ok(()),
        Some(Stored::Integer) if integer(operand) => Ok(()),
        _ if integer(operand) => Err("i64 or i32".to_string()),
        _ => Err("f64, f32, bf16 or f16".to_string()),
    })
}

/// A name that is no output of a pass, and the passes that return it.
pub fn no_output(problem: &Problem, pass: Pass, name: &str) -> Error {
    let returns = |other: &Pass| {
        problem.operands(*other).iter().any(|x| x.role == Role::Output && x.name == name)
    };
    let others: Vec<&str> = Pass::ALL.iter().filter(|x| returns(x)).map(|x| x.name()).collect();
    let of_others = match others.as_slice() {
        [] => String::new(),
        [one] => format!("; {one} returns it"),
        [some @ .., last] => format!("; {} and {last} return it", some.join(", ")),
    };
    let reason = format!("{} {pass} has no such output{of_others}", problem.algorithm());
    Error::Unexpected { operand: name.to_string(), reason }
}

/// Fails as [`check_outputs`] does; `fits` says of a type that is wrong which one would be right.
fn check_each(
    problem: &Problem,
    pass: Pass,
    outputs: &Tensors,
    only: &[String],
    fits: impl Fn(&Operand, Option<Stored>) -> Result<(), String>,
) -> Result<(), Error> {
    let operands = problem.operands(pass);
    let expected: Vec<&Operand> = operands.iter().filter(|x| x.role == Role::Output).collect();
    let known = |name: &String| expected.iter().any(|operand| operand.name == name);
    if let Some(name) = outputs.keys().chain(only).find(|name| !known(name)) {
        return Err(no_output(problem, pass, name));
    }
    let wanted = |operand: &&&Operand| only.is_empty() || only.iter().any(|x| x == operand.name);
    for operand in expected.iter().filter(wanted) {
        let name = operand.name;
        let tensor = outputs.get(name).ok_or_else(|| {
            let reason = format!("{} {pass} returns it", problem.algorithm());
            Error::Missing { operand: name.to_string(), reason }
        })?;
        Error::expect_shape(name, &operand.shape, &tensor.shape)?;
        Error::expect_shape(name, &[operand.len()], &[tensor.len()])?;
        fits(operand, tensor.stored()).map_err(|expected| {
            let (operand, found) = (name.to_string(), tensor.type_name().to_string());
            Error::Dtype { operand, expected, found }
        })?;
    }
    Ok(())
}

/// A hash of names, shapes and bits: quick, since every request is hashed twice.
pub(super) fn hash(tensors: &Tensors) -> u64 {
    tensors.iter().fold(0, |hash, (name, tensor)| {
        let hash = name.bytes().fold(hash, |hash, x| mix(hash, u64::from(x)));
        let hash = tensor.shape.iter().fold(hash, |hash, &x| mix(hash, x as u64));
        mix(
            hash,
            match &tensor.data {
                Data::F64(x) => of_all(x, |x| x.to_bits()),
                Data::F32(x) => of_all(x, |x| u64::from(x.to_bits())),
                Data::Bf16(x) => of_all(x, |x| u64::from(x.to_bits())),
                Data::F16(x) => of_all(x, |x| u64::from(x.to_bits())),
                Data::I64(x) => of_all(x, |x| x as u64),
                Data::Bool(x) => of_all(x, u64::from),
            },
        )
    })
}

/// Eight hashes, each of every eighth element, in one: none waits for another.
fn of_all<T: Copy>(data: &[T], bits: impl Fn(T) -> u64) -> u64 {
    let (whole, rest) = data.as_chunks::<8>();
    let mut hashes = [0; 8];
    for eight in whole {
        for (hash, &x) in hashes.iter_mut().zip(eight) {
            *hash = mix(*hash, bits(x));
        }
    }
    let rest = rest.iter().map(|&x| bits(x));
    hashes.into_iter().chain(rest).fold(0, mix)
}

/// A step that is one to one in `x` and in `hash`, so that a change of one element always shows.
fn mix(hash: u64, x: u64) -> u64 {
    (hash.rotate_left(5) ^ x).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Tensor;
    use crate::tier::Hints;
    use etalon_problem::{Algorithm, AttentionLse, Extents};
    use ndarray::ArrayD;

    /// A tier that answers with whatever it was made with.
    struct Says(fn() -> Result<Tensors, Refusal>);

    impl Tier for Says {
        fn name(&self) -> String {
            "says".to_string()
        }
        fn offers(&self, _: Algorithm, _: Pass, _: Dtype) -> Result<(), String> {
            Ok(())
        }
        fn run(&self, _: &Request<'_>) -> Result<Tensors, Refusal> {
            (self.0)()
        }
    }

    fn lse(shape: &[usize], dtype: Dtype) -> Tensors {
        let zeros = ArrayD::zeros(shape);
        Tensors::from([("lse".to_string(), Tensor::round(&zeros, dtype))])
    }

    /// The outcome for a pass whose one output is `lse`, [1, 1, 2] in f32.
    fn outcome(says: fn() -> Result<Tensors, Refusal>) -> Result<Tensors, Refusal> {
        let extents =
            Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 2, keys: 2, dim: 1 };
        let problem: Problem = AttentionLse::new(extents).into();
        let (inputs, hints) = (Tensors::new(), Hints::default());
        let (pass, dtype) = (Pass::Forward, Dtype::Bf16);
        ask(&Says(says), &Request { problem: &problem, pass, dtype, inputs: &inputs, hints })
    }

    fn fault(says: fn() -> Result<Tensors, Refusal>) -> String {
        match outcome(says) {
            Err(Refusal::Fault(text)) => text,
            other => panic!("no fault: {other:?}"),
        }
    }

    #[test]
    fn only_the_outputs_of_the_pass_are_taken() {
        assert!(outcome(|| Ok(lse(&[1, 1, 2], Dtype::F32))).is_ok());
        assert!(fault(|| Ok(Tensors::new())).contains("`lse` is missing: "));
        assert!(fault(|| Ok(lse(&[1, 2, 1], Dtype::F32))).contains("[1, 1, 2]"));
        assert!(fault(|| Ok(lse(&[1, 1, 2], Dtype::Bf16))).contains("found bf16"));
        let extra = || {
            let mut outputs = lse(&[1, 1, 2], Dtype::F32);
            outputs.extend(lse(&[1], Dtype::F32).into_values().map(|x| ("o".to_string(), x)));
            Ok(outputs)
        };
        assert!(fault(extra).contains("`o` was given, but "));
    }

    #[test]
    fn a_failure_is_a_fault_and_an_absence_is_not() {
        assert_eq!(
            fault(|| Err(Refusal::Fault("failed: no memory".to_string()))),
            "failed: no memory"
        );
        assert_eq!(fault(|| panic!("out of bounds")), "panicked: out of bounds");
        let absent = outcome(|| Err(Refusal::Unsupported("no kernel".to_string())));
        assert_eq!(absent, Err(Refusal::Unsupported("no kernel".to_string())));
    }
}
