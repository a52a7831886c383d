//! The operands of a pass: which take part, where the caller holds them, where kernels find them.

use crate::call::{OperandLayout, PassCall};
use crate::memory::{Layout, MemoryRange, check_extents};
use crate::strided::{StridedTensor, dense, of_four};
use crate::target::Target;
use etalon_problem::{Dtype, Error, Operand, Pass, Result, Stored};

/// Operands for any memory that holds them with the same shapes and strides.
#[derive(Debug)]
pub(crate) struct Parts {
    pub target: Target,
    pub pass: Pass,
    pub storage: Dtype,
    pub list: Vec<Part>,
    /// True if all operands of the caller begin at multiples of 16 bytes.
    pub aligned: bool,
}

#[derive(Debug)]
pub(crate) struct Part {
    pub operand: Operand,
    pub bytes: usize,
    /// True if its elements come from the caller; true if they go there.
    pub given: bool,
    pub wanted: bool,
    extents: [usize; 4],
    strides: [i64; 4],
    /// The range in which kernels find it, dense, where they do not take its strides or it is made on the way.
    pub range: Option<MemoryRange>,
}

impl Part {
    /// As the caller holds it, at an address.
    pub fn caller(&self, address: u64) -> StridedTensor {
        StridedTensor { address, extents: self.extents, strides: self.strides }
    }

    /// As kernels see it, at the address of its range or of the caller's memory.
    pub fn place(&self, address: u64) -> StridedTensor {
        match self.range {
            Some(_) => StridedTensor::dense(address, self.extents),
            None => self.caller(address),
        }
    }

    /// True if kernels read or write the memory of the caller.
    pub fn is_direct(&self) -> bool {
        self.range.is_none()
    }
}

impl Parts {
    /// Operands that the caller holds, and those that are `made` on the way whether the caller holds them or not.
    pub fn new(call: &PassCall<'_, '_>, made: impl Fn(&Operand) -> bool, layout: &mut Layout) -> Result<Parts> {
        let PassCall { target, pass, storage, table, .. } = *call;
        let (mut list, mut aligned) = (Vec::new(), true);
        for operand in &table.operands {
            let [read, written] = [false, true].map(|result| call.held(operand.name, result));
            let (given, wanted) = (read.is_some(), written.is_some());
            if !(given || wanted || made(operand)) {
                continue;
            }
            let laid = read.or(written);
            aligned &= laid.as_ref().is_none_or(|x| x.aligned);
            list.push(part(operand, storage, (given, wanted), laid, layout)?);
        }
        Ok(Parts { target, pass, storage, list, aligned })
    }

    pub fn part(&self, name: &str) -> Option<&Part> {
        self.list.iter().find(|part| part.operand.name == name)
    }

    /// True if the caller gave an operand, or the pass has none of this name.
    pub fn is_given(&self, name: &str) -> bool {
        self.part(name).is_none_or(|part| part.given)
    }

    pub fn has(&self, name: &str) -> bool {
        self.part(name).is_some_and(|part| part.given || part.wanted)
    }

    /// True if kernels find these operands at multiples of 16 bytes.
    pub fn begin_aligned(&self, names: &[&str]) -> bool {
        self.aligned || names.iter().filter_map(|name| self.part(name)).all(|part| !part.is_direct())
    }

    /// True if rows of these operands, of two bytes an element, begin and end at multiples of 16 bytes.
    pub fn have_whole_rows(&self, names: &[&str]) -> bool {
        let is_whole = |part: &Part| {
            let StridedTensor { extents, strides, .. } = part.place(0);
            let walked = (0..3).filter(|&axis| extents[axis] > 1);
            extents[3] % 8 == 0 && walked.map(|axis| strides[axis]).all(|stride| stride % 8 == 0)
        };
        self.begin_aligned(names) && names.iter().filter_map(|name| self.part(name)).all(is_whole)
    }
}

fn part(
    operand: &Operand,
    storage: Dtype,
    (given, wanted): (bool, bool),
    laid: Option<OperandLayout>,
    layout: &mut Layout,
) -> Result<Part> {
    let bytes = Stored::of(operand.precision, storage).bytes();
    let extents = of_four(&operand.shape, [1; 4]).ok_or_else(|| {
        Error::value(format!("number of axes of `{}`", operand.name), "at most 4", operand.shape.len())
    })?;
    check_extents(&extents)?;
    let laid_out = laid.as_ref().and_then(|laid| of_four(laid.strides.as_ref()?, dense(extents)));
    let strides = laid_out.unwrap_or_else(|| dense(extents));
    let own = StridedTensor { address: 0, extents, strides };
    // Rows are read as they lie, side by side; of four axes those before may lie anywhere.
    let taken = if operand.shape.len() == 4 { own.has_whole_rows() } else { own.is_dense() };
    let range = if laid.is_some() && taken {
        None
    } else {
        let all = operand.shape.iter().try_fold(bytes, |n, &extent| n.checked_mul(extent));
        let all = all.ok_or_else(|| Error::memory(operand.name, usize::MAX))?;
        Some(layout.named("operands with strides that kernels do not take", all)?)
    };
    Ok(Part { operand: operand.clone(), bytes, given, wanted, extents, strides, range })
}
