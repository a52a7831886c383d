//! A pass as a list of steps: what its algorithm drafts, the kernels of which are then loaded, and what a call
//! enqueues.
//!
//! ```text
//! Draft      the algorithm pushes launches and fills, at symbolic addresses
//!   → steps  plain data: a plan prints them, without a device
//!   → Loaded each step with its function
//!   → enqueue: symbols become the addresses of a call, in the order of the list
//! ```

use crate::args::{Arguments, KernelArgs};
use crate::gpu::Device;
use crate::queue::Queue;
use crate::shared::shared_bytes;
use crate::target::Target;
use crate::unit::Unit;
use crate::variant::Variant;
use cudarc::driver::CudaFunction;
use etalon_problem::Error;
use std::cell::RefCell;

/// Something that a pass enqueues.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Step {
    /// A kernel over so many blocks.
    Launch {
        /// The kernel.
        kernel: Kernel,
        /// Blocks.
        blocks: u32,
        /// The bytes of its arguments.
        arguments: Arguments,
        /// Its work, for predictions.
        work: Work,
    },
    /// A 32-bit word everywhere, up to the next whole word.
    Fill {
        /// The symbol where it begins.
        to: u64,
        /// Bytes.
        bytes: usize,
        /// The word.
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
    /// The shared memory of a block that the source does not declare, in bytes.
    pub fn shared_bytes(&self) -> u32 {
        self.own_shared + shared_bytes(&self.variant, self.name)
    }
}

/// Work of a launch, for the prediction of its time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Work {
    /// Multiplications and additions of products for each visible pair.
    pub terms: usize,
    /// The arithmetic that computes them.
    pub unit: Unit,
    /// Bytes of partial sums that are written or read for each visible pair.
    pub partials: f64,
    /// Bytes of sums that are read and written beside.
    pub sums: usize,
    /// The blocks that have something to do, about; 0: all.
    pub working: usize,
}

impl Work {
    /// Nothing that a prediction counts.
    pub const NONE: Work = Work { terms: 0, unit: Unit::Ffma, partials: 0.0, sums: 0, working: 0 };

    /// So many terms, by a kernel of a variant.
    pub fn of(variant: &Variant, terms: usize) -> Work {
        Work { terms, unit: variant.unit(), ..Work::NONE }
    }
}

/// The steps of a pass, as its algorithm pushes them.
#[derive(Debug)]
pub(crate) struct Draft {
    pub target: Target,
    steps: RefCell<Vec<Step>>,
}

/// The memory that a symbolic address lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Region {
    /// The scratch memory of a call.
    Scratch,
    /// The tables of the pass.
    Tables,
    /// An operand of the caller, by its number.
    Operand(usize),
}

/// Bits of the offset in a symbol; those above are one more than the number of its region.
const OFFSET: u32 = 44;

impl Region {
    /// The address at which the region begins, as a symbol. Symbols are never 0, which stands for nothing.
    pub fn symbol(self) -> u64 {
        let number = match self {
            Region::Scratch => 1,
            Region::Tables => 2,
            Region::Operand(number) => 3 + number as u64,
        };
        number << OFFSET
    }
}

/// The addresses of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bases<'a> {
    pub scratch: u64,
    pub tables: u64,
    pub operands: &'a [u64],
}

impl Bases<'_> {
    /// The address that a symbol stands for.
    fn resolve(&self, symbol: u64) -> u64 {
        let offset = symbol & ((1 << OFFSET) - 1);
        let base = match symbol >> OFFSET {
            1 => self.scratch,
            2 => self.tables,
            // The list of operands is as long as when the symbols were made.
            number => {
                let operand = (number as usize).checked_sub(3);
                operand.and_then(|at| self.operands.get(at)).copied().unwrap_or(0)
            }
        };
        base + offset
    }
}

impl Draft {
    /// Nothing so far, for a device like this.
    pub fn new(target: Target) -> Draft {
        Draft { target, steps: RefCell::default() }
    }

    /// The multiprocessors of the device.
    pub fn multiprocessors(&self) -> usize {
        self.target.multiprocessors
    }

    /// Adds a launch of a kernel of a variant, over so many blocks of so many threads; none at all where there is no
    /// block. Fails where there are [`MOST_STEPS`] already.
    pub fn launch<A: KernelArgs>(
        &self,
        kernel: (&Variant, &'static str),
        grid: (usize, u32),
        arguments: &A,
    ) -> Result<(), Error> {
        self.launch_work(kernel, grid, arguments, Work::NONE)
    }

    /// The same, with what it computes.
    pub fn launch_work<A: KernelArgs>(
        &self,
        kernel: (&Variant, &'static str),
        grid: (usize, u32),
        arguments: &A,
        work: Work,
    ) -> Result<(), Error> {
        self.push(kernel, (grid.0, grid.1, 0), arguments, work)
    }

    /// The same, with so many bytes of shared memory besides.
    pub fn push<A: KernelArgs>(
        &self,
        (variant, name): (&Variant, &'static str),
        (blocks, threads, own_shared): (usize, u32, u32),
        arguments: &A,
        work: Work,
    ) -> Result<(), Error> {
        if blocks == 0 {
            return Ok(());
        }
        if self.steps.borrow().len() >= MOST_STEPS {
            return Err(Error::unsupported(
                format!("a pass of more than {MOST_STEPS} steps"),
                "its chunks are small: a larger memory_budget or partials_budget takes fewer",
            ));
        }
        let blocks = u32::try_from(blocks).ok().filter(|&n| n <= i32::MAX as u32);
        let reason = "a launch has at most 2³¹ − 1 blocks";
        let blocks = blocks.ok_or_else(|| Error::unsupported("a problem of this size", reason))?;
        let kernel = Kernel { variant: variant.clone(), name, threads, own_shared };
        let arguments = arguments.arguments();
        self.steps.borrow_mut().push(Step::Launch { kernel, blocks, arguments, work });
        Ok(())
    }

    /// Adds a fill with a 32-bit word, up to the next whole word.
    pub fn fill(&self, to: u64, bytes: usize, word: u32) {
        if bytes > 0 {
            self.steps.borrow_mut().push(Step::Fill { to, bytes, word });
        }
    }

    /// The steps, in the order in which they were pushed.
    pub fn into_steps(self) -> Vec<Step> {
        self.steps.into_inner()
    }
}

/// The most steps of a pass: of a few KB each.
const MOST_STEPS: usize = 100_000;

/// Steps whose kernels are loaded.
#[derive(Debug)]
pub(crate) struct Loaded(Vec<LoadedStep>);

#[derive(Debug)]
enum LoadedStep {
    Launch { function: CudaFunction, blocks: u32, block: (u32, u32), arguments: Arguments },
    Fill { to: u64, bytes: usize, word: u32 },
}

/// The most bytes of a kernel's arguments.
const MOST_ARGUMENTS: usize = 4096;

impl Loaded {
    /// Compiles or loads the kernels of these steps for a device.
    pub fn new(device: &Device, steps: Vec<Step>) -> Result<Loaded, Error> {
        let load = |step| match step {
            Step::Launch { kernel, blocks, arguments, .. } => {
                let block = (kernel.threads, kernel.shared_bytes());
                let function = device.function(&kernel.variant, kernel.name)?;
                Ok(LoadedStep::Launch { function, blocks, block, arguments })
            }
            Step::Fill { to, bytes, word } => Ok(LoadedStep::Fill { to, bytes, word }),
        };
        steps.into_iter().map(load).collect::<Result<_, _>>().map(Loaded)
    }

    /// Enqueues the steps, at the addresses of a call.
    pub fn enqueue(&self, queue: &Queue<'_>, bases: &Bases<'_>) -> Result<(), Error> {
        // Kernels take multiples of 128 bytes where they take a descriptor.
        let mut bytes = [0; MOST_ARGUMENTS];
        for step in &self.0 {
            match step {
                LoadedStep::Fill { to, bytes, word } => {
                    queue.fill(bases.resolve(*to), *bytes, *word)?;
                }
                LoadedStep::Launch { function, blocks, block, arguments } => {
                    let bytes = &mut bytes[..arguments.bytes.len()];
                    bind(queue.device, arguments, bases, bytes)?;
                    queue.launch(function, *blocks, *block, bytes)?;
                }
            }
        }
        Ok(())
    }
}

/// The bytes of a launch at the addresses of a call.
fn bind(device: &Device, arguments: &Arguments, bases: &Bases<'_>, bytes: &mut [u8]) -> Result<(), Error> {
    bytes.copy_from_slice(&arguments.bytes);
    for &at in &arguments.symbols {
        let place = &mut bytes[at..at + 8];
        let mut symbol = [0; 8];
        symbol.copy_from_slice(place);
        place.copy_from_slice(&bases.resolve(u64::from_ne_bytes(symbol)).to_ne_bytes());
    }
    for &(at, map) in &arguments.maps {
        let descriptor = map.at(bases.resolve(map.address)).encode(device)?;
        bytes[at..at + 128].copy_from_slice(descriptor.bytes());
    }
    Ok(())
}

#[cfg(test)]
#[path = "../tests/units/step.rs"]
mod tests;
