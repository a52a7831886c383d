//! The steps of a pass, as plain data: a plan prints them without a device, and [`pass`](crate::pass) loads them.

use crate::args::{Arguments, ConstPtr, Declaration, Field, Pointee, Ptr, declarations, kernel_args, pointees};
use crate::family::Unit;
use crate::memory::MemoryRange;
use crate::parts::{Part, Parts};
use crate::shared::shared_bytes;
use crate::strided::{StridedTensor, TensorArgs};
use crate::variant::{KernelOf, Variant};
use etalon_problem::{Error, Result};
use std::cell::RefCell;
use std::ops::Deref;

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Step {
    /// A kernel over so many blocks.
    Launch { kernel: Kernel, blocks: u32, arguments: Arguments, work: Work },
    /// A 32-bit word everywhere, up to the next whole word.
    Fill {
        /// The symbol where it begins.
        to: u64,
        bytes: usize,
        word: u32,
    },
}

/// An entry point of a module, and the block that it is launched with.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Kernel {
    pub variant: Variant,
    pub name: &'static str,
    pub threads: u32,
    /// Bytes of shared memory that the launch decides.
    pub own_shared: u32,
}

impl Kernel {
    /// All that the source does not declare.
    pub fn shared_bytes(&self) -> u32 {
        self.own_shared + shared_bytes(&self.variant, self.name)
    }
}

/// Work of a launch, for predictions, as [`plan::Step`](crate::plan::Step) has it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Work {
    pub terms: usize,
    pub unit: Unit,
    pub partials: f64,
    pub sums: usize,
    /// 0: all blocks.
    pub working: usize,
}

impl Work {
    pub const NONE: Work = Work { terms: 0, unit: Unit::Ffma, partials: 0.0, sums: 0, working: 0 };

    /// So many terms, by a kernel of a variant.
    pub fn of(variant: &Variant, terms: usize) -> Work {
        Work { terms, unit: variant.unit(), ..Work::NONE }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Region {
    Scratch,
    Tables,
    /// An operand of the caller, by its number.
    Operand(usize),
}

/// Bits of the offset in a symbol, below the number of its region.
const OFFSET: u32 = 44;

impl Region {
    /// The symbol of its first address: never 0, which stands for nothing.
    pub fn symbol(self) -> u64 {
        let number = match self {
            Region::Scratch => 1,
            Region::Tables => 2,
            Region::Operand(number) => 3 + number as u64,
        };
        number << OFFSET
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Bases<'a> {
    pub scratch: u64,
    pub tables: u64,
    pub operands: &'a [u64],
}

impl Bases<'_> {
    pub fn resolve(&self, symbol: u64) -> u64 {
        let offset = symbol & ((1 << OFFSET) - 1);
        let base = match symbol >> OFFSET {
            1 => self.scratch,
            2 => self.tables,
            // The list of operands is as long as when the symbols were made.
            number => (number as usize).checked_sub(3).and_then(|at| self.operands.get(at)).copied().unwrap_or(0),
        };
        base + offset
    }
}

pointees! {
    /// An element of `move.cu`: a number of two or four bytes.
    Word = "word",
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
        heads, rows, width: u32,
        /// Of the source.
        columns: u32,
        fill: u32,
    }
}

pub(crate) const ARGUMENTS: &[Declaration] = declarations![Move];

/// Rows of a block.
const ROWS: usize = 8;

/// Blocks of a launch, and the threads of each.
pub(crate) type Grid = (usize, u32);

/// The most steps of a pass: of a few KB each.
const MOST_STEPS: usize = 100_000;

pub(crate) struct Steps<'a, P> {
    pub prepared: &'a P,
    list: RefCell<Vec<Step>>,
    tables: u64,
}

impl<'a, P> Steps<'a, P> {
    /// The same, with tables that the pass makes in its scratch memory.
    pub fn with_tables(self, range: MemoryRange) -> Self {
        Steps { tables: self.at(range), ..self }
    }

    pub fn at(&self, range: MemoryRange) -> u64 {
        range.address(Region::Scratch.symbol())
    }

    pub fn range(&self, range: Option<MemoryRange>) -> u64 {
        range.map_or(0, |range| self.at(range))
    }

    pub fn clear(&self, range: MemoryRange) {
        self.fill(self.at(range), range.bytes, 0);
    }

    pub fn table(&self, range: MemoryRange) -> u64 {
        range.address(self.tables)
    }

    /// The address of what the pass keeps on the device.
    pub fn kept(&self, range: MemoryRange) -> u64 {
        range.address(Region::Tables.symbol())
    }

    /// Adds a launch over so many blocks of so many threads, if there is a block. Fails where there are [`MOST_STEPS`]
    /// already.
    pub fn launch(&self, of: KernelOf<'_>, grid: Grid, args: &impl Field) -> Result<()> {
        self.launch_work(of, grid, args, Work::NONE)
    }

    /// The same, with what it computes.
    pub fn launch_work(&self, of: KernelOf<'_>, grid: Grid, args: &impl Field, work: Work) -> Result<()> {
        self.push(of, grid, 0, args, work)
    }

    /// The same, with so many bytes of shared memory besides.
    pub fn push(
        &self,
        (variant, name): KernelOf<'_>,
        (blocks, threads): Grid,
        own_shared: u32,
        args: &impl Field,
        work: Work,
    ) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        if self.list.borrow().len() >= MOST_STEPS {
            let reason = "its chunks are small: a larger memory_budget or partials_budget takes fewer";
            return Err(Error::unsupported(format!("a pass of more than {MOST_STEPS} steps"), reason));
        }
        if blocks > i32::MAX as usize {
            return Err(Error::unsupported("a problem of this size", "a launch has at most 2³¹ − 1 blocks"));
        }
        let kernel = Kernel { variant: variant.clone(), name, threads, own_shared };
        let (blocks, arguments) = (blocks as u32, Arguments::of(std::slice::from_ref(args)));
        self.list.borrow_mut().push(Step::Launch { kernel, blocks, arguments, work });
        Ok(())
    }

    /// Adds a fill, if there is a byte.
    pub fn fill(&self, to: u64, bytes: usize, word: u32) {
        if bytes > 0 {
            self.list.borrow_mut().push(Step::Fill { to, bytes, word });
        }
    }

    /// Adds a copy of elements of so many bytes; columns beyond the source's are 0.
    pub fn copy(&self, bytes: usize, from: StridedTensor, to: StridedTensor) -> Result<()> {
        let (from, to) = if bytes == 8 { (from.halves(), to.halves()) } else { (from, to) };
        let columns = from.extents[3].min(to.extents[3]) as u32;
        let (from, from_strides) = (from.address.into(), from.strides);
        self.move_to(bytes, to, Move { from, from_strides, columns, ..Move::default() })
    }

    /// Adds a copy to a tensor of so many bytes an element, or its fill.
    fn move_to(&self, bytes: usize, to: StridedTensor, args: Move) -> Result<()> {
        if to.elements() == 0 {
            return Ok(());
        }
        let [batch, heads, rows, width] = to.extents;
        let variant = Variant::moves(if bytes == 2 { 2 } else { 4 });
        let blocks = rows.div_ceil(ROWS) * batch * heads;
        let [heads, rows, width] = [heads, rows, width].map(|x| x as u32);
        let (to, to_strides) = (to.address.into(), to.strides);
        self.launch((&variant, "move"), (blocks, 256), &Move { to, to_strides, heads, rows, width, ..args })
    }
}

impl<'a, P: Deref<Target = Parts>> Steps<'a, P> {
    /// Begins with copies of what the caller holds elsewhere than kernels find it.
    pub fn new(prepared: &'a P) -> Result<Self> {
        let steps = Steps { prepared, list: RefCell::default(), tables: Region::Tables.symbol() };
        steps.apart(|part| part.given).try_for_each(|(number, part)| {
            steps.copy(part.bytes, part.caller(steps.of_caller(number)), steps.placed(number))
        })?;
        Ok(steps)
    }

    /// The steps, and at last copies of what kernels wrote elsewhere than the caller wants it.
    pub fn finish(self) -> Result<Vec<Step>> {
        self.apart(|part| part.wanted).try_for_each(|(number, part)| {
            self.copy(part.bytes, self.placed(number), part.caller(self.of_caller(number)))
        })?;
        Ok(self.list.into_inner())
    }

    pub fn multiprocessors(&self) -> usize {
        self.prepared.target.multiprocessors
    }

    /// Parts that the caller holds elsewhere than kernels find them.
    fn apart(&self, which: impl Fn(&Part) -> bool) -> impl Iterator<Item = (usize, &Part)> {
        let parts = self.prepared.list.iter().enumerate();
        parts.filter(move |(_, part)| which(part) && !part.is_direct())
    }

    /// The address of an array beside the parts.
    pub fn beside(&self, number: usize) -> u64 {
        Region::Operand(self.prepared.list.len() + number).symbol()
    }

    fn of_caller(&self, number: usize) -> u64 {
        let part = &self.prepared.list[number];
        if part.given || part.wanted { Region::Operand(number).symbol() } else { 0 }
    }

    fn placed(&self, number: usize) -> StridedTensor {
        let part = &self.prepared.list[number];
        part.place(part.range.map_or_else(|| self.of_caller(number), |range| self.at(range)))
    }

    /// The place of an operand, as kernels find it; nowhere if it is not there.
    pub fn place(&self, name: &str) -> StridedTensor {
        let found = self.prepared.list.iter().position(|part| part.operand.name == name);
        found.map_or(StridedTensor::NOWHERE, |number| self.placed(number))
    }

    pub fn tensor(&self, name: &str) -> TensorArgs {
        self.place(name).into()
    }

    /// The address of an operand; 0 if it is not there.
    pub fn address(&self, name: &str) -> u64 {
        self.place(name).address
    }

    pub fn is_there(&self, name: &str) -> bool {
        self.address(name) != 0
    }

    pub fn fill_part(&self, part: &Part, pattern: u32) -> Result<()> {
        let to = self.place(part.operand.name);
        let size = part.bytes * to.elements();
        let aligned = self.prepared.aligned || !part.is_direct();
        // Of two bytes none but 0 is asked for.
        if aligned && to.is_dense() && (part.bytes == 4 || pattern == 0) && size.is_multiple_of(4) {
            self.fill(to.address, size, pattern);
            return Ok(());
        }
        self.move_to(part.bytes, to, Move { fill: pattern, ..Move::default() })
    }
}
