//! A pass: the steps that its algorithm drafts, and what is enqueued of it.

use crate::gpu::Device;
use crate::level_table::{self, LevelRow};
use crate::memory::{Layout, MemoryRange};
use crate::moves::{self, StridedTensor};
use crate::options::Level;
use crate::parts::{Part, Parts};
use crate::queue::Queue;
use crate::step::{Bases, Draft, Loaded, Region, Step};
use crate::tensor_args::TensorArgs;
use etalon_problem::{Blocking, Error, Mode};
use std::ops::Deref;

/// The steps of a pass that was prepared as P, while they are drafted. Addresses are symbols.
pub(crate) struct Steps<'a, P> {
    pub prepared: &'a P,
    draft: &'a Draft,
    /// The address of the tables.
    tables: u64,
}

impl<'a, P> Steps<'a, P> {
    /// None so far.
    fn new(prepared: &'a P, draft: &'a Draft) -> Self {
        Steps { prepared, draft, tables: Region::Tables.symbol() }
    }

    /// The same steps, with tables that the pass itself makes in its scratch memory.
    pub fn with_tables(self, range: MemoryRange) -> Self {
        Steps { tables: self.at(range), ..self }
    }

    /// The address of a range in scratch memory.
    pub fn at(&self, range: MemoryRange) -> u64 {
        range.address(Region::Scratch.symbol())
    }

    /// The same of a range that may not be there: 0 then.
    pub fn range(&self, range: Option<MemoryRange>) -> u64 {
        range.map_or(0, |range| self.at(range))
    }

    /// Adds a fill of a range with 0.
    pub fn clear(&self, range: MemoryRange) {
        self.fill(self.at(range), range.bytes, 0);
    }

    /// The address of a table.
    pub fn table(&self, range: MemoryRange) -> u64 {
        range.address(self.tables)
    }

    /// The address of what the pass keeps on the device.
    pub fn kept(&self, range: MemoryRange) -> u64 {
        range.address(Region::Tables.symbol())
    }
}

/// Launches and fills are those of the draft.
impl<P> Deref for Steps<'_, P> {
    type Target = Draft;

    fn deref(&self) -> &Draft {
        self.draft
    }
}

impl<P: Deref<Target = Parts>> Steps<'_, P> {
    fn parts(&self) -> &Parts {
        self.prepared
    }

    /// The address of an array that the caller gives beside the parts.
    pub fn beside(&self, number: usize) -> u64 {
        Region::Operand(self.parts().list.len() + number).symbol()
    }

    /// The address at which the caller holds a part; 0 if it does not.
    fn of_caller(&self, number: usize) -> u64 {
        let part = &self.parts().list[number];
        if part.given || part.wanted { Region::Operand(number).symbol() } else { 0 }
    }

    /// The place of a part, as kernels find it.
    fn placed(&self, number: usize) -> StridedTensor {
        let part = &self.parts().list[number];
        part.range.map_or_else(|| part.caller(self.of_caller(number)), |range| part.place(self.at(range)))
    }

    /// The place of an operand, as kernels find it; nowhere, without elements, if it is not there.
    pub fn place(&self, name: &str) -> StridedTensor {
        let found = self.parts().list.iter().position(|part| part.operand.name == name);
        found.map_or(StridedTensor::NOWHERE, |number| self.placed(number))
    }

    /// The same as an argument of kernels.
    pub fn tensor(&self, name: &str) -> TensorArgs {
        self.place(name).into()
    }

    /// The address of an operand; 0 if it is not there.
    pub fn address(&self, name: &str) -> u64 {
        self.place(name).address
    }

    /// True if an operand is there.
    pub fn is_there(&self, name: &str) -> bool {
        self.address(name) != 0
    }

    /// Adds a copy of elements of so many bytes; columns beyond those of the source are 0.
    pub fn copy(&self, bytes: usize, from: StridedTensor, to: StridedTensor) -> Result<(), Error> {
        moves::copy(self.draft, bytes, from, to)
    }

    /// Adds a fill of a part with elements of this pattern.
    pub fn fill_part(&self, part: &Part, pattern: u32) -> Result<(), Error> {
        let aligned = self.parts().aligned || !part.is_direct();
        moves::fill(self.draft, part.bytes, self.place(part.operand.name), pattern, aligned)
    }

    /// Adds copies of what the caller holds elsewhere than kernels find it.
    pub fn gather(&self) -> Result<(), Error> {
        self.apart(|part| part.given).try_for_each(|(number, part)| {
            let from = part.caller(self.of_caller(number));
            self.copy(part.bytes, from, self.placed(number))
        })
    }

    /// Adds copies of what kernels wrote elsewhere than the caller wants it.
    pub fn scatter(&self) -> Result<(), Error> {
        self.apart(|part| part.wanted).try_for_each(|(number, part)| {
            let to = part.caller(self.of_caller(number));
            self.copy(part.bytes, self.placed(number), to)
        })
    }

    /// The parts that the caller holds elsewhere than kernels find them.
    fn apart(&self, which: impl Fn(&Part) -> bool) -> impl Iterator<Item = (usize, &Part)> {
        let parts = self.parts().list.iter().enumerate();
        parts.filter(move |(_, part)| which(part) && !part.is_direct())
    }
}

/// Drafts a pass: copies of what the caller holds elsewhere than kernels find it, the steps that a function adds, and
/// copies of results.
pub(crate) fn draft_steps<P: Deref<Target = Parts>>(
    prepared: &P,
    compute: impl FnOnce(Steps<'_, P>) -> Result<(), Error>,
) -> Result<Vec<Step>, Error> {
    let draft = Draft::new(prepared.target);
    Steps::new(prepared, &draft).gather()?;
    compute(Steps::new(prepared, &draft))?;
    Steps::new(prepared, &draft).scatter()?;
    Ok(draft.into_steps())
}

/// The tables of a pass: bytes that depend on the problem alone, and where they lie.
#[derive(Debug, Default)]
pub(crate) struct TableImage {
    pieces: Vec<(MemoryRange, Vec<u8>)>,
    /// The bytes of all.
    pub bytes: usize,
}

impl TableImage {
    /// None so far, in a memory of so many bytes.
    pub fn new(bytes: usize) -> Self {
        TableImage { pieces: Vec::new(), bytes }
    }

    /// Puts a table into its range.
    pub fn put(&mut self, range: MemoryRange, bytes: impl Into<Vec<u8>>) {
        self.pieces.push((range, bytes.into()));
    }
}

/// A pass before its kernels are loaded, for a device or a hypothetical one.
pub(crate) struct PassPlan<'a> {
    pub parts: Parts,
    /// Makes the tables, which may be large: a pass that is only planned has none.
    pub tables: Box<dyn FnOnce() -> Result<TableImage, Error> + 'a>,
    /// The scratch memory of a call.
    pub scratch: Layout,
    pub steps: Vec<Step>,
    pub choice: Choice,
}

/// The level of a pass, and what else was chosen.
#[derive(Debug)]
pub(crate) struct Choice {
    pub level: Level,
    /// Levels that cannot compute it, with the reason.
    pub refusals: Vec<(Level, &'static str)>,
    /// The form of a backward pass that has several.
    pub mode: Option<Mode>,
    /// Tiles that the level has kernels for, of passes that have a choice.
    pub blockings: Vec<Blocking>,
}

impl Choice {
    /// Of a table of levels, for a pass that its rules see so.
    pub fn of<S>(table: &'static [LevelRow<S>], spec: &S, level: Level) -> Result<Choice, Error> {
        let level = level_table::choose(table, spec, level)?.level;
        let refusals = level_table::refusals(table, spec);
        Ok(Choice { level, refusals, mode: None, blockings: Vec::new() })
    }
}

impl PassPlan<'_> {
    /// Makes the tables, and compiles or loads the kernels of the steps.
    pub fn load(self, device: &Device) -> Result<PreparedPass, Error> {
        let PassPlan { parts, tables, scratch, steps, .. } = self;
        let (tables, steps) = (tables()?, Loaded::new(device, steps)?);
        Ok(PreparedPass { parts, tables, scratch_bytes: scratch.bytes(), steps })
    }
}

/// A pass whose kernels are loaded.
#[derive(Debug)]
pub(crate) struct PreparedPass {
    pub parts: Parts,
    tables: TableImage,
    /// Bytes that a call needs beside tables and operands.
    pub scratch_bytes: usize,
    steps: Loaded,
}

impl PreparedPass {
    /// The bytes of its tables, which depend on the problem alone.
    pub fn table_bytes(&self) -> usize {
        self.tables.bytes
    }

    /// Copies the tables to memory that begins there.
    pub fn upload(&self, queue: &Queue<'_>, base: u64) -> Result<(), Error> {
        let mut pieces = self.tables.pieces.iter();
        pieces.try_for_each(|(range, bytes)| queue.upload(range.address(base), bytes))
    }

    /// Enqueues the steps on operands at these addresses, one for each of its parts, and then for each array that the
    /// caller gives beside them.
    pub fn enqueue(&self, queue: Queue<'_>, operands: &[u64], (tables, scratch): (u64, u64)) -> Result<(), Error> {
        self.steps.enqueue(&queue, &Bases { scratch, tables, operands })
    }
}
