//! A pass of attention or attention_lse before it is enqueued: which kernels compute it, where its
//! operands lie, and what memory it needs.

use crate::gpu::{Device, Kernels};
use crate::hopper;
use crate::job::Job;
use crate::moves::{Moves, Place, dense, extents};
use crate::options::{Level, Options, Precision};
use crate::portable;
use crate::queue::Queue;
use crate::room::{Layout, Room};
use crate::rows::Rows;
use crate::second::{self, Between};
use crate::tables::Tables;
use crate::variant::Variant;
use crate::workspace::Held;
use etalon_problem::{
    Dtype, Error, Operand, Pass, Problem, Role, Scores, Sequences, Stored, Table,
};
use std::borrow::Cow;
use std::sync::Arc;

/// A pass of a problem, ready to be enqueued for any operands of the same shapes and strides.
#[derive(Debug)]
pub(crate) struct Prepared<'a> {
    pub held: Arc<Held>,
    pub scores: Cow<'a, Scores>,
    /// E; `None` of attention_lse.
    pub value_dim: Option<usize>,
    pub pass: Pass,
    pub storage: Dtype,
    pub parts: Vec<Part>,
    pub rows: Rows,
    pub tables: Tables,
    /// δ of every row, in the backward pass.
    pub delta: Room,
    pub portable: Option<Arc<Kernels>>,
    pub second: Option<Arc<Kernels>>,
    moves: Option<Moves>,
    plan: Option<hopper::Plan>,
    between: Option<Between>,
    /// The bytes that a call needs beside the tables and the operands.
    pub scratch_bytes: usize,
}

/// An operand that takes part in a call.
#[derive(Debug)]
pub(crate) struct Part {
    pub operand: Operand,
    /// The bytes of an element.
    pub bytes: usize,
    /// Whether its elements come from the caller, and whether they go there.
    pub given: bool,
    pub wanted: bool,
    extents: [usize; 4],
    strides: [i64; 4],
    /// Where kernels find it, dense: it has strides that they do not take, or is made on the way.
    pub room: Option<Room>,
}

/// How the caller holds an operand: its strides in elements, none where it is dense; and whether it begins
/// at a multiple of 16 bytes.
pub(crate) struct Layed {
    pub strides: Option<Vec<i64>>,
    pub aligned: bool,
}

impl Part {
    /// As the caller holds it, at an address.
    pub fn caller(&self, address: u64) -> Place {
        Place { address, extents: self.extents, strides: self.strides }
    }

    /// As kernels see it, at the address of its room or of the caller's memory.
    pub fn place(&self, address: u64) -> Place {
        match self.room {
            Some(_) => Place::dense(address, self.extents),
            None => self.caller(address),
        }
    }

    /// Whether kernels read or write the memory of the caller.
    pub fn is_direct(&self) -> bool {
        self.room.is_none()
    }
}

impl<'a> Prepared<'a> {
    /// Compiles or loads the kernels of a pass that has passed [`Table::check_call`], and lays its memory out.
    /// `layed` tells how the caller holds an operand, if at all, as an input or as a result.
    pub fn new(
        held: Arc<Held>,
        problem: &'a Problem,
        (pass, storage): (Pass, Dtype),
        table: &Table,
        layed: impl Fn(&str, bool) -> Option<Layed>,
        options: &Options,
    ) -> Result<Prepared<'a>, Error> {
        let (scores, value_dim) = parts(problem)?;
        if value_dim.is_some_and(|extent| extent > i32::MAX as usize) {
            return Err(Error::Unsupported {
                what: "value_dim".to_string(),
                reason: "the cuda tier counts in 32 bits".to_string(),
            });
        }
        let mut layout = Layout::default();
        let mut parts = Vec::new();
        let mut aligned = true;
        for operand in &table.operands {
            let (read, written) = (layed(operand.name, false), layed(operand.name, true));
            let (given, wanted) = (read.is_some(), written.is_some());
            // lse is written with o in any case, and what was saved is made again where it is absent.
            let made = operand.role == Role::Saved || operand.name == "lse";
            if !(given || wanted || made) {
                continue;
            }
            let layed = read.or(written);
            aligned &= layed.as_ref().is_none_or(|x| x.aligned);
            parts.push(part(operand, storage, (given, wanted), layed, &mut layout)?);
        }
        let rows = Rows::new(scores)?;
        let tables = Tables::new(&rows, scores)?;
        let numbers = scores.row_shape().iter().product::<usize>();
        let delta = layout.room(if pass == Pass::Backward { 4 * numbers } else { 0 })?;
        let between = match pass {
            Pass::DoubleBackward | Pass::Jvp => Some(Between::new(scores, value_dim, &mut layout)?),
            _ => None,
        };
        let mut prepared = Prepared {
            held,
            scores: Cow::Borrowed(scores),
            value_dim,
            pass,
            storage,
            parts,
            rows,
            tables,
            delta,
            portable: None,
            second: None,
            moves: None,
            plan: None,
            between,
            scratch_bytes: 0,
        };
        let mut plan = choose(&prepared, options)?;
        if let Some(plan) = &mut plan {
            plan.reserve(&prepared, aligned, options.assume_finite, &mut layout)?;
            plan.load(&prepared)?;
        }
        prepared.plan = plan;
        prepared.load(options)?;
        prepared.scratch_bytes = layout.bytes();
        Ok(prepared)
    }

    /// The same without the problem that it was made from.
    pub fn into_owned(self) -> Prepared<'static> {
        Prepared { scores: Cow::Owned(self.scores.into_owned()), ..self }
    }

    pub fn device(&self) -> &Device {
        &self.held.device
    }

    pub fn part(&self, name: &str) -> Option<&Part> {
        self.parts.iter().find(|part| part.operand.name == name)
    }

    /// Whether the caller gave an operand, or the pass has none of this name.
    fn is_given(&self, name: &str) -> bool {
        self.part(name).is_none_or(|part| part.given)
    }

    fn has(&self, name: &str) -> bool {
        self.part(name).is_some_and(|part| part.given || part.wanted)
    }

    /// Whether o and lse are computed: as results, or since a later pass lacks them.
    pub fn computes_forward(&self) -> bool {
        self.pass == Pass::Forward || !self.is_given("lse") || !self.is_given("o")
    }

    /// Whether kernels leave elements out: rows of no sequence, which get 0, and −∞ as their lse; and those of
    /// the second order rows that see nothing. The first order of a dense batch writes every element.
    fn leaves_rows(&self) -> bool {
        let e = &self.scores.extents;
        self.between.is_some()
            || self.scores.sequences != Sequences::Dense
            || [e.batch, e.query_heads, e.key_heads, e.queries, e.keys].contains(&0)
    }

    fn load(&mut self, options: &Options) -> Result<(), Error> {
        let device = &self.held.device;
        let architecture = device.architecture();
        let dim = self.scores.extents.dim;
        let options_of_scores = portable::has_options(self);
        let makes = match &self.plan {
            None => self.computes_forward() || self.pass == Pass::Backward,
            // The tensor cores hand over what is not finite, and the gradient of the sinks.
            Some(_) => {
                self.pass == Pass::Backward && (!options.assume_finite || self.has("dsinks"))
            }
        };
        if makes || self.has("gradient") {
            let variant = Variant::portable(self.storage, dim, self.value_dim, options_of_scores);
            self.portable = Some(device.kernels(variant, &architecture)?);
        }
        if self.between.is_some() {
            let variant = Variant::second(self.storage, dim, self.value_dim, options_of_scores);
            self.second = Some(device.kernels(variant, &architecture)?);
        }
        let copies = |part: &Part| part.room.is_some() && (part.given || part.wanted);
        if self.leaves_rows() || self.plan.is_some() || self.parts.iter().any(copies) {
            let kernels = |bytes| device.kernels(Variant::moves(bytes), &architecture);
            self.moves = Some(Moves { two: kernels(2)?, four: kernels(4)? });
        }
        Ok(())
    }

    pub fn moves(&self) -> Result<&Moves, Error> {
        self.moves.as_ref().ok_or_else(|| absent("copies"))
    }

    /// Copies the tables to memory that begins there.
    pub fn upload(&self, queue: &Queue<'_>, tables: u64) -> Result<(), Error> {
        self.tables.upload(&self.rows, &self.scores, queue, tables)
    }

    /// Enqueues the pass.
    pub fn enqueue(&self, job: &Job<'_>) -> Result<(), Error> {
        for part in self.parts.iter().filter(|part| part.given && part.room.is_some()) {
            job.gather(part)?;
        }
        if self.leaves_rows() {
            for part in self.parts.iter().filter(|part| !part.given) {
                let nothing = if part.operand.name == "lse" { f32::NEG_INFINITY } else { 0.0 };
                let place = job.place_of(part);
                self.moves()?.fill(&job.queue, part.bytes, place, nothing.to_bits())?;
            }
        }
        if self.computes_forward() {
            match &self.plan {
                Some(plan) => hopper::forward(job, plan)?,
                None => portable::forward(job)?,
            }
        }
        match (self.pass, &self.plan, &self.between) {
            (Pass::Forward, ..) if job.address("gradient") != 0 => portable::gradient_of_lse(job)?,
            (Pass::Backward, Some(plan), _) => hopper::backward(job, plan)?,
            (Pass::Backward, None, _) => portable::backward(job, 0)?,
            (_, _, Some(between)) => second::run(job, between, self.pass)?,
            _ => {}
        }
        for part in self.parts.iter().filter(|part| part.wanted && part.room.is_some()) {
            job.scatter(part)?;
        }
        Ok(())
    }
}

/// Kernels that a pass was not prepared with.
pub(crate) fn absent(what: &str) -> Error {
    Error::Device { what: format!("kernels of {what}"), reason: "they were not loaded".to_string() }
}

fn part(
    operand: &Operand,
    storage: Dtype,
    (given, wanted): (bool, bool),
    layed: Option<Layed>,
    layout: &mut Layout,
) -> Result<Part, Error> {
    let bytes = match Stored::of(operand.precision, storage) {
        Stored::Float(dtype) => dtype.bytes(),
        Stored::Integer => 8,
    };
    let extents = extents(&operand.shape).ok_or_else(|| {
        Error::value(
            format!("number of axes of `{}`", operand.name),
            "at most 4",
            operand.shape.len(),
        )
    })?;
    if let Some(extent) = extents.into_iter().find(|&extent| extent > i32::MAX as usize) {
        return Err(Error::Unsupported {
            what: format!("an extent of {extent}"),
            reason: "the cuda tier counts in 32 bits".to_string(),
        });
    }
    let mut strides = dense(extents);
    if let Some(own) = layed.as_ref().and_then(|layed| layed.strides.as_ref()) {
        // The axes that a tensor of fewer has are the last, and before them heads and batch elements.
        let axes: &[usize] = match own.len() {
            1 => &[3],
            2 => &[1, 3],
            3 => &[0, 1, 3],
            _ => &[0, 1, 2, 3],
        };
        axes.iter().zip(own).for_each(|(&axis, &stride)| strides[axis] = stride);
    }
    let own = Place { address: 0, extents, strides };
    // Rows of numbers are read as they lie, side by side; of four axes those before may lie anywhere.
    let taken = if operand.shape.len() == 4 { own.has_whole_rows() } else { own.is_dense() };
    let room = match layed.is_some() && taken {
        true => None,
        false => {
            let all = operand.shape.iter().try_fold(bytes, |n, &extent| n.checked_mul(extent));
            let all = all.ok_or_else(|| Error::Memory {
                what: operand.name.to_string(),
                bytes: usize::MAX,
            })?;
            Some(layout.room(all)?)
        }
    };
    Ok(Part { operand: operand.clone(), bytes, given, wanted, extents, strides, room })
}

/// The scores of a problem, and E of attention.
fn parts(problem: &Problem) -> Result<(&Scores, Option<usize>), Error> {
    match problem {
        Problem::Attention(problem) => Ok((&problem.scores, Some(problem.value_dim))),
        Problem::AttentionLse(problem) => Ok((&problem.scores, None)),
        other => Err(Error::value("algorithm", "attention", other.algorithm())),
    }
}

/// The plan of the tensor cores; `None`: the portable kernels. Fails where the level that is asked for
/// cannot compute the pass.
fn choose(prepared: &Prepared<'_>, options: &Options) -> Result<Option<hopper::Plan>, Error> {
    let plan = || match options.precision {
        Precision::Flash => hopper::Plan::new(prepared),
        Precision::Strict => Err(
            "tensor cores take P and dS in the storage type, which the precision `flash` permits",
        ),
    };
    match options.level {
        Level::Portable => Ok(None),
        Level::Auto => Ok(plan().ok()),
        Level::Sm90a => plan().map(Some).map_err(|reason| Error::Unsupported {
            what: format!("level {}", Level::Sm90a),
            reason: reason.to_string(),
        }),
    }
}
