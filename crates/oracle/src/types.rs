//! The types in which the tensors of a pass are stored.

use crate::tensor::{Stored, Tensor, Tensors};
use etalon_problem::{Dtype, Operand, Pass, Precision, Problem};
use std::collections::BTreeMap;

/// The outputs of a forward pass that a later pass of a kernel may read.
pub(crate) const SAVED: [&str; 3] = ["o", "lse", "entropy"];

/// The types in which a kernel stores its results, and the o, lse and entropy of a forward pass that a later
/// pass of it reads: those that go with its main tensors, but for some that have one of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Types {
    /// The type of the main tensors.
    pub storage: Dtype,
    own: BTreeMap<String, Dtype>,
}

impl From<Dtype> for Types {
    fn from(storage: Dtype) -> Self {
        Types { storage, own: BTreeMap::new() }
    }
}

impl From<&Types> for Types {
    fn from(types: &Types) -> Self {
        types.clone()
    }
}

impl Types {
    /// The same with a tensor in a type of its own.
    pub fn with(mut self, name: &str, dtype: Dtype) -> Self {
        self.own.insert(name.to_string(), dtype);
        self
    }

    /// Types that go with main tensors of a type, where a kernel reads what its forward pass has stored among
    /// these inputs: o, lse and entropy in the types that they have there, if those are narrower than usual.
    pub fn reading(problem: &Problem, storage: Dtype, inputs: &Tensors) -> Self {
        let forward = problem.operands(Pass::Forward);
        let read = forward.iter().filter(|x| SAVED.contains(&x.name));
        read.fold(storage.into(), |types: Types, operand| {
            let own = inputs.get(operand.name).and_then(Tensor::dtype);
            let own = own.map(|dtype| types.clone().with(operand.name, dtype));
            own.filter(|own| own.narrows(operand.name, operand.precision)).unwrap_or(types)
        })
    }

    /// The same with the types of these tensors, as far as they hold floating-point numbers.
    pub fn as_in(mut self, tensors: &Tensors) -> Self {
        let floats = tensors.iter().filter_map(|(name, x)| Some((name.clone(), x.dtype()?)));
        self.own.extend(floats);
        self
    }

    /// The type in which a tensor is stored.
    pub fn stored(&self, name: &str, precision: Precision) -> Stored {
        let own = self.own.get(name).filter(|_| precision != Precision::Integer);
        own.map_or(Stored::of(precision, self.storage), |&dtype| Stored::Float(dtype))
    }

    /// As [`Types::stored`], of an operand.
    pub fn of(&self, operand: &Operand) -> Stored {
        self.stored(operand.name, operand.precision)
    }

    /// True where a tensor is stored in a type of larger roundoff than goes with the main tensors.
    pub fn narrows(&self, name: &str, precision: Precision) -> bool {
        let usual = Stored::of(precision, self.storage);
        match (self.stored(name, precision), usual) {
            (Stored::Float(own), Stored::Float(usual)) => {
                own.unit_roundoff() > usual.unit_roundoff()
            }
            _ => false,
        }
    }

    /// Every type that occurs.
    pub(crate) fn all(&self) -> impl Iterator<Item = Dtype> + '_ {
        self.own.values().copied().chain([self.storage])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_has_its_own_type_or_the_one_that_goes_with_the_main_tensors() {
        let types = Types::from(Dtype::Bf16).with("lse", Dtype::Bf16).with("dq", Dtype::F32);
        assert_eq!(types.stored("dq", Precision::Storage), Stored::Float(Dtype::F32));
        assert_eq!(types.stored("dk", Precision::Storage), Stored::Float(Dtype::Bf16));
        assert_eq!(types.stored("dlse", Precision::Wide), Stored::Float(Dtype::F32));
        assert_eq!(types.stored("lse", Precision::Wide), Stored::Float(Dtype::Bf16));
        // No float is an integer.
        let types = types.with("argmax", Dtype::F32);
        assert_eq!(types.stored("argmax", Precision::Integer), Stored::Integer);
        assert!(types.narrows("lse", Precision::Wide) && !types.narrows("o", Precision::Storage));
        assert!(!types.narrows("dq", Precision::Storage));
    }
}
