//! A pass whose steps are drafted, and the same with its kernels loaded.
//!
//! ```text
//! Steps        the algorithm pushes launches and fills, at symbolic addresses
//!   → PassPlan plain data: a plan prints it, without a device
//!   → load     each step with its function
//!   → enqueue: symbols become the addresses of a call, in the order of the list
//! ```

use crate::args::Arguments;
use crate::gpu::Device;
use crate::level_table::{self, LevelRow};
use crate::memory::{Layout, MemoryRange};
use crate::options::Level;
use crate::parts::Parts;
use crate::queue::Queue;
use crate::step::{Bases, Step};
use cudarc::driver::CudaFunction;
use etalon_problem::{Blocking, Mode, Result};

/// Tables: bytes that depend on the problem alone, and where they lie.
#[derive(Debug, Default)]
pub(crate) struct TableImage {
    pieces: Vec<(MemoryRange, Vec<u8>)>,
    pub bytes: usize,
}

impl TableImage {
    pub fn new(bytes: usize) -> Self {
        TableImage { pieces: Vec::new(), bytes }
    }

    pub fn put(&mut self, range: MemoryRange, bytes: impl Into<Vec<u8>>) {
        self.pieces.push((range, bytes.into()));
    }
}

pub(crate) struct PassPlan<'a> {
    pub parts: Parts,
    /// Makes the tables, which may be large: a pass that is only planned has none.
    pub tables: Box<dyn FnOnce() -> Result<TableImage> + 'a>,
    pub scratch: Layout,
    pub steps: Vec<Step>,
    pub choice: Choice,
}

#[derive(Debug)]
pub(crate) struct Choice {
    pub level: Level,
    /// Levels that cannot compute it, with the reason.
    pub refusals: Vec<(Level, &'static str)>,
    /// The form of a backward pass that has several.
    pub mode: Option<Mode>,
    /// Tiles of the level, of passes that have a choice.
    pub blockings: Vec<Blocking>,
}

impl Choice {
    pub fn of<S>(table: &'static [LevelRow<S>], spec: &S, level: Level) -> Result<Choice> {
        let level = level_table::choose(table, spec, level).map_err(|reason| level.refusal(reason))?;
        let refusals = level_table::refusals(table, spec);
        Ok(Choice { level, refusals, mode: None, blockings: Vec::new() })
    }
}

impl PassPlan<'_> {
    pub fn load(self, device: &Device) -> Result<PreparedPass> {
        let load = |step| match step {
            Step::Launch { kernel, blocks, arguments, .. } => {
                let block = (kernel.threads, kernel.shared_bytes());
                let function = device.function(&kernel.variant, kernel.name)?;
                Ok(LoadedStep::Launch { function, blocks, block, arguments })
            }
            Step::Fill { to, bytes, word } => Ok(LoadedStep::Fill { to, bytes, word }),
        };
        let kernels = self.steps.iter().filter_map(|step| match step {
            Step::Launch { kernel, .. } => Some((&kernel.variant, kernel.name)),
            Step::Fill { .. } => None,
        });
        device.compile_ahead(&kernels.collect());
        let tables = (self.tables)()?;
        let steps = self.steps.into_iter().map(load).collect::<Result<_, _>>()?;
        Ok(PreparedPass { parts: self.parts, tables, scratch_bytes: self.scratch.bytes(), steps })
    }
}

#[derive(Debug)]
enum LoadedStep {
    Launch { function: CudaFunction, blocks: u32, block: (u32, u32), arguments: Arguments },
    Fill { to: u64, bytes: usize, word: u32 },
}

const MOST_ARGUMENTS: usize = 4096;

#[derive(Debug)]
pub(crate) struct PreparedPass {
    pub parts: Parts,
    tables: TableImage,
    /// Bytes that a call needs beside tables and operands.
    pub scratch_bytes: usize,
    steps: Vec<LoadedStep>,
}

impl PreparedPass {
    pub fn table_bytes(&self) -> usize {
        self.tables.bytes
    }

    /// The kernels that a call launches, and the fills that it enqueues beside them.
    pub fn counts(&self) -> [usize; 2] {
        let launches = self.steps.iter().filter(|step| matches!(step, LoadedStep::Launch { .. })).count();
        [launches, self.steps.len() - launches]
    }

    /// Copies the tables to memory that begins there.
    pub fn upload(&self, queue: &Queue<'_>, base: u64) -> Result<()> {
        let mut pieces = self.tables.pieces.iter();
        pieces.try_for_each(|(range, bytes)| queue.upload(range.address(base), bytes))
    }

    /// Enqueues the steps on operands at these addresses, of each of its parts and then of each array beside them.
    pub fn enqueue(&self, queue: Queue<'_>, operands: &[u64], (tables, scratch): (u64, u64)) -> Result<()> {
        let bases = Bases { scratch, tables, operands };
        let mut bytes = [0; MOST_ARGUMENTS];
        for step in &self.steps {
            match step {
                LoadedStep::Fill { to, bytes, word } => queue.fill(bases.resolve(*to), *bytes, *word)?,
                LoadedStep::Launch { function, blocks, block, arguments } => {
                    let bytes = &mut bytes[..arguments.bytes.len()];
                    bind(queue.device, arguments, &bases, bytes)?;
                    queue.launch(function, *blocks, *block, bytes)?;
                }
            }
        }
        Ok(())
    }
}

/// The bytes of a launch at the addresses of a call.
fn bind(device: &Device, arguments: &Arguments, bases: &Bases<'_>, bytes: &mut [u8]) -> Result<()> {
    bytes.copy_from_slice(&arguments.bytes);
    for &at in &arguments.symbols {
        let place = &mut bytes[at..at + 8];
        let symbol = u64::from_ne_bytes(std::array::from_fn(|i| place[i]));
        place.copy_from_slice(&bases.resolve(symbol).to_ne_bytes());
    }
    for &(at, map) in &arguments.maps {
        let descriptor = map.at(bases.resolve(map.address)).encode(device)?;
        bytes[at..at + 128].copy_from_slice(descriptor.bytes());
    }
    Ok(())
}
