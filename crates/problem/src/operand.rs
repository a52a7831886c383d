//! The tensors of a pass.

use crate::Error;

/// What a tensor is to a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// An input of the forward pass.
    Input,
    /// A gradient or tangent that is handed in.
    Cotangent,
    /// As [`Role::Cotangent`], but it may be absent: it then counts as zero.
    OptionalCotangent,
    /// A result.
    Output,
}

/// In which type a tensor is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// In the storage type of the problem's main tensors (f32, bf16, f16).
    Storage,
    /// In the type of the accumulation (f32, or f64 in the reference), whatever the storage type.
    Wide,
    /// As whole numbers (i64).
    Integer,
}

/// One tensor of a pass: its name, its shape and its part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operand {
    /// Its name: in Rust fields, files and reports alike.
    pub name: &'static str,
    /// Its shape.
    pub shape: Vec<usize>,
    /// What it is to the pass.
    pub role: Role,
    /// In which type it is stored.
    pub precision: Precision,
}

impl Operand {
    pub(crate) fn storage(name: &'static str, shape: &[usize], role: Role) -> Self {
        Operand { name, shape: shape.to_vec(), role, precision: Precision::Storage }
    }

    pub(crate) fn wide(name: &'static str, shape: &[usize], role: Role) -> Self {
        Operand { name, shape: shape.to_vec(), role, precision: Precision::Wide }
    }

    pub(crate) fn integer(name: &'static str, shape: &[usize], role: Role) -> Self {
        Operand { name, shape: shape.to_vec(), role, precision: Precision::Integer }
    }

    /// Its number of elements. The problem must have passed its check.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Fails where the tensor could not be addressed in f64.
    pub(crate) fn check_size(&self) -> Result<(), Error> {
        let elements =
            self.shape.iter().filter(|&&e| e > 0).try_fold(8usize, |n, &e| n.checked_mul(e));
        match elements {
            Some(bytes) if bytes <= isize::MAX as usize => Ok(()),
            _ => Err(Error::value(
                format!("shape of {}", self.name),
                "addressable",
                format!("{:?}", self.shape),
            )),
        }
    }
}

/// Fails unless every operand that the pass needs is given, every given operand belongs to the
/// problem, and every shape fits. Only the operands that are listed in `given` are looked at.
pub fn check_operands(
    operands: &[Operand],
    given: &[(&str, Option<&[usize]>)],
) -> Result<(), Error> {
    for &(name, shape) in given {
        let operand = operands.iter().find(|operand| operand.name == name);
        match (operand, shape) {
            (Some(operand), Some(shape)) => Error::expect_shape(name, &operand.shape, shape)?,
            (Some(Operand { role: Role::Input | Role::Cotangent, .. }), None) | (None, Some(_)) => {
                Error::expect_presence(name, option(name), operand.is_some(), shape.is_some())?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// The option of a problem that an operand, or its cotangent, belongs to.
fn option(operand: &str) -> &'static str {
    let options = [
        ("sinks", "sinks"),
        ("initial_state", "initial_state"),
        ("final_state", "final_state"),
        ("g_gamma", "decay"),
        ("g", "decay"),
    ];
    let found = options.into_iter().find(|(name, _)| operand.ends_with(name));
    found.map_or("bias", |(_, option)| option)
}
