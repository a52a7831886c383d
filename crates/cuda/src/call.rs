//! A pass as its caller asks for it, before anything is drafted.

use crate::device_tensor::{DeviceTensors, GivenArray};
use crate::level_table::Facts;
use crate::options::Options;
use crate::target::Target;
use etalon_problem::{Dtype, Error, Pass, Stored, Table, Views, ViewsMut};

/// A pass that has passed [`Table::check_call`], for a device like `target`.
#[derive(Clone, Copy)]
pub(crate) struct PassCall<'a, 'v> {
    pub target: Target,
    pub pass: Pass,
    pub storage: Dtype,
    pub table: &'a Table,
    /// Layout of the caller's operand of a name, if there is one: as an input, or (`true`) as a result.
    pub holds: &'a dyn Fn(&str, bool) -> Option<OperandLayout>,
    /// The inputs in memory of the host; on a device nobody can look.
    pub inputs: Option<&'a Views<'v>>,
    /// The arrays of the problem that calls give on the device.
    pub arrays: &'a [GivenArray],
    pub options: &'a Options,
}

impl<'a, 'v> PassCall<'a, 'v> {
    /// Of operands on the device, which give no arrays of the problem.
    pub fn new(
        target: Target,
        (pass, storage): (Pass, Dtype),
        table: &'a Table,
        holds: &'a dyn Fn(&str, bool) -> Option<OperandLayout>,
        options: &'a Options,
    ) -> Self {
        PassCall { target, pass, storage, table, holds, inputs: None, arrays: &[], options }
    }

    /// The facts that rules of levels ask for.
    pub fn facts(&self) -> Facts {
        Facts { target: self.target, pass: self.pass, storage: self.storage, precision: self.options.precision }
    }

    /// Of these operands of the host.
    pub fn of_host(self, inputs: &'a Views<'v>) -> Self {
        PassCall { inputs: Some(inputs), ..self }
    }
}

/// Layout of an operand of the caller: its strides in elements, none where it is dense; and whether it begins
/// at a multiple of 16 bytes.
pub(crate) struct OperandLayout {
    pub strides: Option<Vec<i64>>,
    pub aligned: bool,
}

impl OperandLayout {
    /// A dense operand that begins where ranges begin, as operands of the host are copied to the device.
    pub const DENSE: OperandLayout = OperandLayout { strides: None, aligned: true };
}

/// Layout of an operand of the host, as an input or a result, dense on the device.
pub(crate) fn held_by_host(
    inputs: &Views<'_>,
    outputs: &ViewsMut<'_>,
    (name, result): (&str, bool),
) -> Option<OperandLayout> {
    let there = if result { outputs.get(name).is_some() } else { inputs.get(name).is_some() };
    there.then_some(OperandLayout::DENSE)
}

/// Layout of an operand on a device, as an input or a result.
pub(crate) fn held_by_device(
    inputs: &DeviceTensors<'_>,
    outputs: &DeviceTensors<'_>,
    (name, result): (&str, bool),
) -> Option<OperandLayout> {
    let tensor = (if result { outputs } else { inputs }).get(name)?;
    Some(OperandLayout { strides: Some(tensor.strides.to_vec()), aligned: tensor.is_aligned() })
}

/// The type of the numbers of a tensor that must be floating-point ones. Fails where the tier does not store it.
pub(crate) fn storage_of(stored: Stored) -> Result<Dtype, Error> {
    let storage = match stored {
        Stored::Float(dtype) => dtype,
        Stored::Integer => Dtype::F64, // refused, too
    };
    storage.refuse_f64()?;
    Ok(storage)
}
