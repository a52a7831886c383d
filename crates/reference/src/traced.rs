//! Tensors of traces, and the pieces that they are put together from.

use crate::scalar::Real;
use crate::tensor::filled;
use etalon_problem::{Error, Operand, Pass, Problem, Walk};
use ndarray::{ArrayD, IxDyn};

/// A tensor of a trace.
#[derive(Debug, Clone)]
pub struct Traced<T> {
    /// Its name, axes and shape.
    pub operand: Operand,
    /// Its elements.
    pub values: ArrayD<T>,
    /// The elements that every right kernel has, in row-major order. Of others the style of a kernel decides: of
    /// tiles without a visible pair, which it may skip; of rows that have seen no key yet, whose sum is 0; of rows
    /// and tokens of no sequence. They hold NaN.
    pub compared: Vec<bool>,
}

/// Neighbouring elements of a tensor of a trace.
pub struct Piece<T> {
    /// The number of the tensor in the list of those that are wanted.
    pub tensor: usize,
    /// The place of the first element in row-major order.
    pub at: usize,
    /// The elements.
    pub elements: Vec<T>,
}

/// Pieces of those tensors of a trace that are wanted.
pub struct Pieces<'a, T> {
    wanted: &'a [Operand],
    list: Vec<Piece<T>>,
}

impl<'a, T> Pieces<'a, T> {
    /// None so far.
    pub fn new(wanted: &'a [Operand]) -> Self {
        Pieces { wanted, list: Vec::new() }
    }

    /// Adds neighbouring elements, the first at this index, if their tensor is wanted.
    pub fn push(&mut self, name: &str, index: &[usize], elements: impl FnOnce() -> Vec<T>) {
        if let Some(tensor) = self.wanted.iter().position(|operand| operand.name == name) {
            let at = place(&self.wanted[tensor], index);
            self.list.push(Piece { tensor, at, elements: elements() });
        }
    }

    /// The list of them.
    pub fn finish(self) -> Vec<Piece<T>> {
        self.list
    }
}

/// The tensors of these names. Fails where the trace has no such tensor.
pub fn wanted(
    problem: &Problem,
    pass: Pass,
    walk: &Walk,
    only: &[&str],
) -> Result<Vec<Operand>, Error> {
    let tensors = walk.tensors(problem, pass)?;
    if let Some(name) = only.iter().find(|name| !tensors.iter().any(|x| x.name == **name)) {
        let known = tensors.iter().map(|x| x.name).collect::<Vec<_>>().join(", ");
        let mut reason = format!("a trace of {} {pass} holds {known}", problem.algorithm());
        if matches!(*name, "dk" | "dv") && walk.rows.is_some() {
            reason += ": `dk` and `dv` are sums over all rows, and the walk names some";
        }
        return Err(Error::Unexpected { operand: name.to_string(), reason });
    }
    Ok(tensors.into_iter().filter(|x| only.contains(&x.name)).collect())
}

/// Tensors of their pieces.
pub(crate) fn joined<T: Real>(
    wanted: Vec<Operand>,
    pieces: Vec<Piece<T>>,
) -> Result<Vec<Traced<T>>, Error> {
    let room = |operand: Operand| {
        let what = format!("the trace of `{}`", operand.name);
        let values = filled(&what, operand.len(), T::from_f64(f64::NAN))?;
        Ok((values, filled(&what, operand.len(), false)?, operand))
    };
    let mut tensors = wanted.into_iter().map(room).collect::<Result<Vec<_>, Error>>()?;
    for Piece { tensor, at, elements } in pieces {
        let (values, compared, _) = &mut tensors[tensor];
        compared[at..at + elements.len()].fill(true);
        values[at..at + elements.len()].copy_from_slice(&elements);
    }
    let tensor = |(values, compared, operand): (Vec<T>, Vec<bool>, Operand)| {
        let values = ArrayD::from_shape_vec(IxDyn(&operand.shape), values);
        let values = values.map_err(|_| Error::memory(operand.name, compared.len()))?;
        Ok(Traced { operand, values, compared })
    };
    tensors.into_iter().map(tensor).collect()
}

/// The place of an element, the last axes of whose index may be left out: they are 0.
pub fn place(operand: &Operand, index: &[usize]) -> usize {
    let extents = operand.shape.iter().enumerate();
    extents.fold(0, |place, (axis, extent)| place * extent + index.get(axis).copied().unwrap_or(0))
}
