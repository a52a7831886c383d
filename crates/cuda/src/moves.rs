//! Copies and fills of strided tensors: `kernels/move.cu`.

use crate::args::{ConstPtr, Declaration, Pointee, Ptr, declaration, kernel_args};
use crate::step::Draft;
use crate::variant::Variant;
use etalon_problem::Error;

/// A tensor of up to four axes on a device: batch, head, row, column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StridedTensor {
    pub address: u64,
    pub extents: [usize; 4],
    /// In elements.
    pub strides: [i64; 4],
}

/// The strides of a dense tensor.
pub(crate) fn dense(extents: [usize; 4]) -> [i64; 4] {
    let [_, heads, rows, columns] = extents.map(|x| x as i64);
    [heads * rows * columns, rows * columns, columns, 1]
}

/// Extents of a shape of up to four axes: of four as they are, of fewer the last one is that of the
/// columns, and those before are heads and batch elements.
pub(crate) fn extents(shape: &[usize]) -> Option<[usize; 4]> {
    Some(match *shape {
        [] => [1; 4],
        [n] => [1, 1, 1, n],
        [h, n] => [1, h, 1, n],
        [b, h, n] => [b, h, 1, n],
        [b, h, n, d] => [b, h, n, d],
        _ => return None,
    })
}

impl StridedTensor {
    /// Nowhere, without elements.
    pub const NOWHERE: StridedTensor = StridedTensor { address: 0, extents: [0; 4], strides: [0; 4] };

    /// A dense tensor.
    pub fn dense(address: u64, extents: [usize; 4]) -> StridedTensor {
        StridedTensor { address, extents, strides: dense(extents) }
    }

    /// Strides of batch elements and heads, 0 along an axis of extent 1, and of rows.
    pub fn steps(&self) -> [i64; 3] {
        [0, 1, 2].map(|axis| if axis < 2 && self.extents[axis] == 1 { 0 } else { self.strides[axis] })
    }

    pub fn elements(&self) -> usize {
        self.extents.iter().product()
    }

    /// A tensor of numbers of 8 bytes, of at most three axes, as one of their halves.
    fn halves(self) -> StridedTensor {
        let ([batch, heads, _, columns], [b, h, _, c]) = (self.extents, self.strides);
        let strides = [2 * b, 2 * h, 2 * c, 1];
        StridedTensor { address: self.address, extents: [batch, heads, columns, 2], strides }
    }

    /// True if elements lie one after the other, in the order of the shape.
    pub fn is_dense(&self) -> bool {
        let wanted = dense(self.extents);
        let axes = self.extents.iter().zip(self.strides.iter().zip(wanted));
        self.elements() == 0 || axes.into_iter().all(|(&n, (&own, wanted))| n == 1 || own == wanted)
    }

    /// True if the copy engine walks its rows, heads and batch elements of 16-bit elements.
    pub fn has_boxes(&self) -> bool {
        (0..3).all(|axis| {
            let stride = self.strides[axis];
            self.extents[axis] == 1 || (stride > 0 && stride % 8 == 0 && stride < 1 << 38)
        })
    }

    /// Bytes from one row, head and batch element to the next, of 16-bit elements. The stride of an axis of extent 1
    /// is not walked, but must be one: that of a dense tensor.
    pub fn box_strides(&self) -> [u64; 3] {
        let dense = dense(self.extents);
        [2, 1, 0].map(|axis| {
            let stride = if self.extents[axis] == 1 { dense[axis] } else { self.strides[axis] };
            2 * stride as u64
        })
    }

    /// True if the elements of a row lie side by side.
    pub fn has_whole_rows(&self) -> bool {
        self.extents[3] <= 1 || self.strides[3] == 1 || self.elements() == 0
    }
}

/// An element of `move.cu`: a number of two or four bytes.
#[derive(Debug, Clone, Copy)]
struct Word;

impl Pointee for Word {
    const NAME: &'static str = "word";
}

kernel_args! {
    /// A copy, or without a source a fill.
    struct Move as "Move" {
        from: ConstPtr<Word>,
        to: Ptr<Word>,
        /// Batch, head, row, column.
        from_strides: [i64; 4],
        to_strides: [i64; 4],
        /// Of the target.
        heads: u32,
        rows: u32,
        width: u32,
        /// Of the source.
        columns: u32,
        fill: u32,
    }
}

/// Kernel arguments that `move.cu` names.
pub(crate) const ARGUMENTS: &[Declaration] = &[declaration::<Move>()];

/// Rows of a block.
const ROWS: usize = 8;

/// Adds a copy or a fill of a tensor of elements of so many bytes.
fn launch(steps: &Draft, bytes: usize, to: StridedTensor, args: Move) -> Result<(), Error> {
    if to.elements() == 0 {
        return Ok(());
    }
    let [batch, heads, rows, width] = to.extents;
    let variant = Variant::moves(if bytes == 2 { 2 } else { 4 });
    let blocks = rows.div_ceil(ROWS) * batch * heads;
    let [heads, rows, width] = [heads, rows, width].map(|x| x as u32);
    let (to, to_strides) = (to.address.into(), to.strides);
    let args = Move { to, to_strides, heads, rows, width, ..args };
    steps.launch((&variant, "move"), (blocks, 256), &args)
}

/// Adds a copy of elements of so many bytes; columns beyond those of the source are 0.
pub(crate) fn copy(steps: &Draft, bytes: usize, from: StridedTensor, to: StridedTensor) -> Result<(), Error> {
    let (from, to) = if bytes == 8 { (from.halves(), to.halves()) } else { (from, to) };
    let columns = from.extents[3].min(to.extents[3]) as u32;
    let (from, from_strides) = (from.address.into(), from.strides);
    launch(steps, bytes, to, Move { from, from_strides, columns, ..Move::default() })
}

/// Adds a fill of a tensor of elements of so many bytes with one of this pattern. `aligned`: it begins at a multiple
/// of 4 bytes.
pub(crate) fn fill(steps: &Draft, bytes: usize, to: StridedTensor, pattern: u32, aligned: bool) -> Result<(), Error> {
    let size = bytes * to.elements();
    // Of two bytes none but 0 is asked for.
    if aligned && to.is_dense() && (bytes == 4 || pattern == 0) && size.is_multiple_of(4) {
        steps.fill(to.address, size, pattern);
        return Ok(());
    }
    launch(steps, bytes, to, Move { fill: pattern, ..Move::default() })
}
