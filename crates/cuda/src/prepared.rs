//! A pass of attention or attention_lse: where its operands lie, its tables, its kernels.

use crate::gpu::{Device, Kernels};
use crate::moves::{Moves, Place, dense, extents};
use crate::queue::Queue;
use crate::room::{Layout, Room};
use crate::rows::Rows;
use crate::tables::Tables;
use crate::variant::Variant;
use crate::workspace::Held;
use etalon_problem::{Dtype, Error, Operand, Pass, Problem, Role, Scores, Stored, Table};
use std::borrow::Cow;
use std::sync::Arc;

/// A pass of a problem: what its kernels are told, for any operands of the same shapes and strides.
#[derive(Debug)]
pub(crate) struct Prepared<'a> {
    pub held: Arc<Held>,
    pub scores: Cow<'a, Scores>,
    /// E; `None` of attention_lse.
    pub value_dim: Option<usize>,
    pub pass: Pass,
    pub storage: Dtype,
    pub parts: Vec<Part>,
    /// Whether all operands of the caller begin at multiples of 16 bytes.
    pub aligned: bool,
    pub rows: Rows,
    pub tables: Tables,
    /// δ of every row, in the backward pass.
    pub delta: Room,
    pub portable: Option<Arc<Kernels>>,
    /// The kernels of the level sm80, which take the place of portable ones.
    pub tensor: Option<(Arc<Kernels>, Variant)>,
    pub second: Option<Arc<Kernels>>,
    pub moves: Option<Moves>,
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
pub(crate) struct Laid {
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
    /// Lays the memory of a pass out that has passed [`Table::check_call`], and makes its tables. `laid`
    /// tells how the caller holds an operand, if at all, as an input or as a result.
    pub fn new(
        held: Arc<Held>,
        problem: &'a Problem,
        (pass, storage): (Pass, Dtype),
        table: &Table,
        laid: impl Fn(&str, bool) -> Option<Laid>,
        layout: &mut Layout,
    ) -> Result<Prepared<'a>, Error> {
        let (scores, value_dim) = parts(problem)?;
        let (mut parts, mut aligned) = (Vec::new(), true);
        for operand in &table.operands {
            let (read, written) = (laid(operand.name, false), laid(operand.name, true));
            let (given, wanted) = (read.is_some(), written.is_some());
            // lse is written with o in any case, and what was saved is made again where it is absent.
            let made = operand.role == Role::Saved || operand.name == "lse";
            if !(given || wanted || made) {
                continue;
            }
            let laid = read.or(written);
            aligned &= laid.as_ref().is_none_or(|x| x.aligned);
            parts.push(part(operand, storage, (given, wanted), laid, layout)?);
        }
        let rows = Rows::new(scores)?;
        let tables = Tables::new(&rows, scores)?;
        let numbers = scores.row_shape().iter().product::<usize>();
        let delta = layout.room(if pass == Pass::Backward { 4 * numbers } else { 0 })?;
        Ok(Prepared {
            held,
            scores: Cow::Borrowed(scores),
            value_dim,
            pass,
            storage,
            parts,
            aligned,
            rows,
            tables,
            delta,
            portable: None,
            tensor: None,
            second: None,
            moves: None,
        })
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
    pub fn is_given(&self, name: &str) -> bool {
        self.part(name).is_none_or(|part| part.given)
    }

    pub fn has(&self, name: &str) -> bool {
        self.part(name).is_some_and(|part| part.given || part.wanted)
    }

    /// Whether o and lse are computed: as results, or since a later pass lacks them.
    pub fn computes_forward(&self) -> bool {
        self.pass == Pass::Forward || !self.is_given("lse") || !self.is_given("o")
    }

    pub fn moves(&self) -> Result<&Moves, Error> {
        self.moves.as_ref().ok_or_else(|| absent("copies"))
    }

    /// Copies the tables to memory that begins there.
    pub fn upload(&self, queue: &Queue<'_>, tables: u64) -> Result<(), Error> {
        self.tables.upload(&self.rows, &self.scores, queue, tables)
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
    laid: Option<Laid>,
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
    if let Some(own) = laid.as_ref().and_then(|laid| laid.strides.as_ref()) {
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
    let room = match laid.is_some() && taken {
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
