//! A pass as its caller asks for it.

use crate::device_tensor::{DeviceTensors, GivenArray};
use crate::level_table::Facts;
use crate::options::{Level, Options};
use crate::target::Target;
use etalon_problem::{Dtype, Operand, Pass, Result, Role, Stored, Table, Views, find};

#[derive(Clone, Copy)]
pub(crate) enum Operands<'a, 'v> {
    /// Inputs and results that lie on the device.
    Device(&'a DeviceTensors<'a>, &'a DeviceTensors<'a>),
    /// Inputs of the host, and which results have a place; without places all are computed. On the device they are
    /// dense and begin where ranges do.
    Host(&'a Views<'v>, Option<&'a dyn Fn(&str) -> bool>),
    /// All that a plan counts, dense; with the gradient that attention_lse may return and take, or without.
    All { gradient: bool },
}

/// A pass that has passed [`Table::check_call`], for a device like `target`.
#[derive(Clone, Copy)]
pub(crate) struct PassCall<'a, 'v> {
    pub target: Target,
    pub pass: Pass,
    pub storage: Dtype,
    pub table: &'a Table,
    pub operands: Operands<'a, 'v>,
    /// The arrays of the problem that calls give on the device.
    pub arrays: &'a [GivenArray],
    pub options: Options,
}

impl<'a, 'v> PassCall<'a, 'v> {
    pub fn on(self, level: Level) -> Self {
        PassCall { options: Options { level, ..self.options }, ..self }
    }

    pub fn facts(&self) -> Facts {
        Facts { target: self.target, pass: self.pass, storage: self.storage, precision: self.options.precision }
    }

    /// The inputs in memory of the host; on a device nobody can look.
    pub fn inputs(&self) -> Option<&'a Views<'v>> {
        if let Operands::Host(inputs, _) = self.operands { Some(inputs) } else { None }
    }

    /// Layout of the caller's operand, if there is one: as an input, or (`result`) as a result.
    pub fn held(&self, name: &str, result: bool) -> Option<OperandLayout> {
        let operand = || find(&self.table.operands, name);
        let there = match self.operands {
            Operands::Device(inputs, outputs) => {
                let tensor = (if result { outputs } else { inputs }).get(name)?;
                return Some(OperandLayout { strides: Some(tensor.strides.to_vec()), aligned: tensor.is_aligned() });
            }
            Operands::Host(inputs, _) if !result => inputs.get(name).is_some(),
            Operands::Host(_, Some(has_place)) => has_place(name),
            Operands::Host(_, None) => operand().is_some_and(|x| x.role == Role::Output),
            Operands::All { gradient } => {
                let is_planned =
                    |x: &&Operand| gradient || !matches!(x.role, Role::OptionalSaved | Role::OptionalOutput);
                let planned = operand().filter(is_planned);
                planned.is_some_and(|x| matches!(x.role, Role::Output | Role::OptionalOutput) == result)
            }
        };
        there.then_some(OperandLayout { strides: None, aligned: true })
    }
}

pub(crate) struct OperandLayout {
    /// In elements; none where it is dense.
    pub strides: Option<Vec<i64>>,
    /// True if it begins at a multiple of 16 bytes.
    pub aligned: bool,
}

/// The type of floating-point numbers. Fails where the tier does not store it.
pub(crate) fn storage_of(stored: Stored) -> Result<Dtype> {
    let storage = match stored {
        Stored::Float(dtype) => dtype,
        Stored::Integer => Dtype::F64, // refused, too
    };
    storage.refuse_f64()?;
    Ok(storage)
}
