//! A pass as its caller asks for it, before anything is drafted.

use crate::device_tensor::{DeviceTensors, GivenArray};
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
    pub holds: Holds<'a>,
    pub operands: Operands<'a, 'v>,
    pub options: &'a Options,
}

/// Layout of the caller's operand of a name, if there is one: as an input, or (`true`) as a result.
pub(crate) type Holds<'a> = &'a dyn Fn(&str, bool) -> Option<OperandLayout>;

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

/// The memory in which the operands of a pass lie.
#[derive(Clone, Copy)]
pub(crate) enum Operands<'a, 'v> {
    /// The host's, as these inputs do.
    Host(&'a Views<'v>),
    /// The device's, with these arrays of the problem.
    Device(&'a [GivenArray]),
}

impl<'a, 'v> Operands<'a, 'v> {
    /// The inputs in memory of the host; on a device nobody can look.
    pub fn inputs(self) -> Option<&'a Views<'v>> {
        match self {
            Operands::Host(inputs) => Some(inputs),
            Operands::Device(_) => None,
        }
    }

    /// The arrays of the problem that calls give on the device.
    pub fn arrays(self) -> &'a [GivenArray] {
        match self {
            Operands::Host(_) => &[],
            Operands::Device(arrays) => arrays,
        }
    }
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
