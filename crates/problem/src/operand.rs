//! The tensors of a pass, and the table that they follow from.
//!
//! Every algorithm has one table: a [`Row`] for each tensor of its forward pass, with the names of
//! the tensors that belong to it in the other passes, as `docs/notation.md` lists them. Which
//! tensors a pass reads and writes, their shapes, types and options follow from it.

use crate::{Error, Pass};

/// One axis of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Axis {
    /// B: batch elements.
    Batch,
    /// 1 or B.
    BatchOr1,
    /// Hq: query heads.
    QueryHeads,
    /// 1 or Hq.
    QueryHeadsOr1,
    /// Hk: key and value heads.
    KeyHeads,
    /// N: queries.
    Queries,
    /// M: keys.
    Keys,
    /// N: tokens of linear attention.
    Tokens,
    /// D: elements of a query and of a key, or of a hidden state.
    Dim,
    /// E: elements of a value.
    ValueDim,
    /// W: distances that have a bias.
    Distances,
    /// S: sequences, each with states of its own.
    Sequences,
    /// T: tokens that have a loss.
    Targets,
    /// V: classes.
    Classes,
    /// C: tiles of keys or of queries, or chunks of tokens, of a trace.
    Tiles,
}

/// The symbol of an axis in `docs/notation.md`, as a literal.
macro_rules! symbol {
    (Batch) => { "B" };
    (BatchOr1) => { "B|1" };
    (QueryHeads) => { "Hq" };
    (QueryHeadsOr1) => { "Hq|1" };
    (KeyHeads) => { "Hk" };
    (Queries) => { "N" };
    (Tokens) => { "N" };
    (Keys) => { "M" };
    (Dim) => { "D" };
    (ValueDim) => { "E" };
    (Distances) => { "W" };
    (Sequences) => { "S" };
    (Targets) => { "T" };
    (Classes) => { "V" };
    (Tiles) => { "C" };
    ($self:ident: $($axis:ident)*) => {
        match $self { $(Axis::$axis => crate::operand::symbol!($axis),)* }
    };
}
pub(crate) use symbol;

/// The shapes of tensors of a problem: so many extents, those of these axes.
macro_rules! shapes {
    ($Problem:ident {
        $($(#[$doc:meta])* $name:ident: $count:literal [$($Axis:ident)*];)*
    }) => {
        impl $Problem {
            $(
                $(#[$doc])*
                pub fn $name(&self) -> [usize; $count] {
                    [$($crate::Axis::$Axis),*].map(|axis| self.extent(axis))
                }
            )*
        }
    };
}
pub(crate) use shapes;

impl Axis {
    /// Its symbol in `docs/notation.md`.
    pub fn symbol(self) -> &'static str {
        symbol!(self: Batch BatchOr1 QueryHeads QueryHeadsOr1 KeyHeads Queries Keys Tokens Dim
            ValueDim Distances Sequences Targets Classes Tiles)
    }
}

/// The part of a tensor in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// An input of the forward pass.
    Input,
    /// An output of the forward pass that a later pass reads again. A tier computes it anew only
    /// where its options say so.
    Saved,
    /// As [`Role::Saved`], but the pass does not need it: it is only faster with it.
    OptionalSaved,
    /// A gradient or tangent that the caller hands in.
    Cotangent,
    /// As [`Role::Cotangent`]; an absent one counts as zero.
    OptionalCotangent,
    /// A result.
    Output,
    /// A result that a tier computes where it has a place for it, and may not offer.
    OptionalOutput,
}

impl Role {
    /// True where the caller chooses its elements: an input or a cotangent.
    pub fn is_given(self) -> bool {
        self == Role::Input || self.is_cotangent()
    }

    /// True for a cotangent, whether it may be absent or not.
    pub fn is_cotangent(self) -> bool {
        matches!(self, Role::Cotangent | Role::OptionalCotangent)
    }
}

/// The type in which a tensor is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// The storage type of the problem's main tensors (f32, bf16, f16).
    Storage,
    /// The type of the accumulation (f32, or f64 in the reference), whatever the storage type.
    Wide,
    /// Whole numbers (i64).
    Integer,
}

/// One tensor of a pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operand {
    /// Its name: in Rust fields, files and reports alike.
    pub name: &'static str,
    /// The tensor of the forward pass that it belongs to: `q` of q, dq, ddq, gq and tq.
    pub primal: &'static str,
    /// Its axes, outermost first.
    pub axes: Vec<Axis>,
    /// Its shape: the extents of its axes.
    pub shape: Vec<usize>,
    /// Its part in the pass.
    pub role: Role,
    /// The type in which it is stored.
    pub precision: Precision,
    /// The option of the problem without which it does not exist.
    pub option: Option<&'static str>,
    /// Of an input that a pass may replace by an output: that output. Where the input is absent, the
    /// place of the output holds it before the pass.
    pub becomes: Option<&'static str>,
}

impl Operand {
    /// Its number of elements. The problem must have passed its check.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// True where it has no elements.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Index of an axis in its shape, if it has that axis.
    pub fn position(&self, axis: Axis) -> Option<usize> {
        self.axes.iter().position(|&other| other == axis)
    }

    /// True where it has this axis.
    pub fn has(&self, axis: Axis) -> bool {
        self.axes.contains(&axis)
    }
}

/// Finds an operand by name.
pub fn find<'a>(operands: &'a [Operand], name: &str) -> Option<&'a Operand> {
    operands.iter().find(|operand| operand.name == name)
}

/// Fails unless every operand that the pass needs is given, every given operand belongs to the
/// problem, and every shape fits. Only the operands that are listed in `given` are looked at;
/// saved ones may be absent.
pub fn check_operands(table: &Table, given: &[(&str, Option<&[usize]>)]) -> Result<(), Error> {
    for &(name, shape) in given {
        match (find(&table.operands, name), shape) {
            (Some(operand), Some(shape)) => Error::expect_shape(name, &operand.shape, shape)?,
            (Some(Operand { role: Role::Input | Role::Cotangent, option, .. }), None) => {
                return Err(Error::missing(name, *option));
            }
            (None, Some(_)) => return Err(Error::unexpected(name, table.option(name))),
            _ => {}
        }
    }
    Ok(())
}

/// A tensor of the forward pass with the tensors that belong to it in other passes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Family {
    /// Its name.
    pub name: &'static str,
    /// True where the forward pass reads it; otherwise that pass returns it.
    pub input: bool,
    /// Of an input x the names of dx, ddx, gx and tx; of an output y those of dy, cot_y, gdy and ty.
    /// None of a tensor without derivatives.
    pub companions: Option<[&'static str; 4]>,
    /// Of a number in the problem, which has derivatives but is no tensor: its value.
    pub value: Option<f64>,
}

/// A row of the table of an algorithm: a tensor of the forward pass, and what belongs to it.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub name: &'static str,
    /// True where the forward pass reads it; otherwise that pass returns it.
    pub input: bool,
    pub axes: Vec<Axis>,
    pub precision: Precision,
    /// Of an input: whether gradients by it have the type of the accumulation.
    pub wide_gradients: bool,
    /// The option that it belongs to, and whether that is set.
    pub option: Option<(&'static str, bool)>,
    /// The names of the tensors that belong to it. Of an input x: dx, ddx, gx, tx; of an output y: dy,
    /// cot_y, gdy, ty. None of a tensor without derivatives.
    pub companions: Option<[&'static str; 4]>,
    /// Of an output: whether the backward pass needs its cotangent; an absent one is zero otherwise.
    pub needs_cotangent: bool,
    /// Of an output: whether later passes read it.
    pub saved: bool,
    /// Of an output: whether a tier may do without it.
    pub optional: bool,
    /// Of an input: the output that it becomes in a step.
    pub becomes: Option<&'static str>,
    /// Of an input that is a number in the problem, and only whose companions are tensors: its value.
    pub number: Option<f64>,
}

impl Row {
    /// A tensor that is always there, without axes and derivatives so far.
    pub fn new(name: &'static str, input: bool, precision: Precision) -> Self {
        Row {
            name,
            input,
            axes: Vec::new(),
            precision,
            wide_gradients: false,
            option: None,
            companions: None,
            needs_cotangent: false,
            saved: false,
            optional: false,
            becomes: None,
            number: None,
        }
    }

    /// The row as callers see it, where the problem has it.
    pub fn family(&self) -> Option<Family> {
        let &Row { name, input, companions, number: value, .. } = self;
        self.is_set().then_some(Family { name, input, companions, value })
    }

    /// The type of the tensor of the row that has this part in a pass.
    fn precision_of(&self, role: Role) -> Precision {
        let is_gradient = self.input && role == Role::Output;
        if self.wide_gradients && is_gradient { Precision::Wide } else { self.precision }
    }

    fn is_set(&self) -> bool {
        self.option.is_none_or(|(_, set)| set)
    }

    /// The names and roles that the row has in a pass.
    fn parts(&self, pass: Pass) -> Vec<(&'static str, Role)> {
        use Role::{
            Cotangent, Input, OptionalCotangent, OptionalOutput, OptionalSaved, Output, Saved,
        };
        let mut parts = Vec::new();
        let forward = matches!(pass, Pass::Forward | Pass::Step | Pass::ForwardBackward);
        match (self.input, forward) {
            (true, _) if self.number.is_none() => parts.push((self.name, Input)),
            (false, true) if self.optional => parts.push((self.name, OptionalOutput)),
            (false, true) => parts.push((self.name, Output)),
            (false, false) if self.saved && self.optional => {
                parts.push((self.name, OptionalSaved));
            }
            (false, false) if self.saved => parts.push((self.name, Saved)),
            _ => {}
        }
        let Some([first, second, gradient, tangent]) = self.companions else { return parts };
        let cotangent = if self.needs_cotangent { Cotangent } else { OptionalCotangent };
        match (pass, self.input) {
            (Pass::Forward | Pass::Step, _) => {}
            (Pass::Backward | Pass::ForwardBackward, true) => parts.push((first, Output)),
            (Pass::Backward | Pass::ForwardBackward, false) => parts.push((first, cotangent)),
            (Pass::DoubleBackward, true) => {
                parts.extend([(second, OptionalCotangent), (gradient, Output)]);
            }
            (Pass::DoubleBackward, false) => {
                parts.extend([(first, cotangent), (second, OptionalCotangent), (gradient, Output)]);
            }
            (Pass::Jvp, true) => parts.push((tangent, OptionalCotangent)),
            (Pass::Jvp, false) => parts.push((tangent, Output)),
        }
        parts
    }
}

/// The tensors of one pass of one problem, and the options of those that it does not have.
#[derive(Debug, Clone)]
pub struct Table {
    /// Inputs, what is saved, cotangents and outputs, in this order; none where the algorithm does not
    /// have the pass.
    pub operands: Vec<Operand>,
    absent: Vec<(&'static str, &'static str)>,
}

impl Table {
    /// The tensors of a pass. One token of a step has no axis of tokens, and a state for each batch
    /// element that is always there.
    pub(crate) fn new(rows: &[Row], pass: Pass, extent: impl Fn(Axis) -> usize) -> Table {
        let mut table = Table { operands: Vec::new(), absent: Vec::new() };
        for row in rows {
            let state = pass == Pass::Step && row.axes.contains(&Axis::Sequences);
            for (name, role) in row.parts(pass) {
                if !row.is_set() && !state {
                    table.absent.extend(row.option.map(|(option, _)| (name, option)));
                    continue;
                }
                let axes = row.axes.iter().filter_map(|&axis| match (pass, axis) {
                    (Pass::Step, Axis::Tokens) => None,
                    (Pass::Step, Axis::Sequences) => Some(Axis::Batch),
                    _ => Some(axis),
                });
                let axes: Vec<Axis> = axes.collect();
                table.operands.push(Operand {
                    name,
                    primal: row.name,
                    shape: axes.iter().map(|&axis| extent(axis)).collect(),
                    axes,
                    role,
                    precision: row.precision_of(role),
                    option: row.option.map(|(option, _)| option).filter(|_| !state),
                    becomes: row.becomes.filter(|_| pass == Pass::Step),
                });
            }
        }
        // Of each kind in the order of the rows: dy, then ddx, then cot_y; gx, then gdy.
        let input = |primal| rows.iter().any(|row| row.name == primal && row.input);
        let is_first = |operand: &Operand| {
            let row = rows.iter().find(|row| row.name == operand.primal);
            row.and_then(|row| row.companions).is_some_and(|names| names[0] == operand.name)
        };
        table.operands.sort_by_key(|operand| match operand.role {
            Role::Input => 0,
            Role::Saved | Role::OptionalSaved => 1,
            Role::Cotangent | Role::OptionalCotangent if is_first(operand) => 2,
            Role::Cotangent | Role::OptionalCotangent if input(operand.primal) => 3,
            Role::Cotangent | Role::OptionalCotangent => 4,
            Role::Output if input(operand.primal) => 5,
            Role::Output | Role::OptionalOutput => 6,
        });
        table
    }

    /// Fails unless these are all the operands that the pass needs, each in its shape, and no others.
    /// Saved ones may be absent.
    pub fn check_all(&self, given: &[(&str, Option<&[usize]>)]) -> Result<(), Error> {
        check_operands(self, given)?;
        let absent = |operand: &&Operand| !given.iter().any(|(name, _)| *name == operand.name);
        let needed = |operand: &&Operand| matches!(operand.role, Role::Input | Role::Cotangent);
        match self.operands.iter().filter(needed).find(absent) {
            Some(operand) => Err(Error::missing(operand.name, operand.option)),
            None => Ok(()),
        }
    }

    /// The option that a tensor belongs to, set or not.
    pub fn option(&self, name: &str) -> Option<&'static str> {
        let absent = self.absent.iter().find(|(other, _)| *other == name);
        let own = || find(&self.operands, name).and_then(|operand| operand.option);
        absent.map(|(_, option)| *option).or_else(own)
    }
}

/// Fails where a tensor of the forward pass that exists, or a state, could not be addressed in f64.
pub(crate) fn check_sizes(rows: &[Row], extent: impl Fn(Axis) -> usize) -> Result<(), Error> {
    for row in rows.iter().filter(|row| row.is_set() || row.axes.contains(&Axis::Sequences)) {
        let shape: Vec<usize> = row.axes.iter().map(|&axis| extent(axis)).collect();
        let elements = shape.iter().filter(|&&e| e > 0).try_fold(8usize, |n, &e| n.checked_mul(e));
        if elements.is_none_or(|bytes| bytes > isize::MAX as usize) {
            let name = format!("shape of {}", row.name);
            return Err(Error::value(name, "addressable", format!("{shape:?}")));
        }
    }
    Ok(())
}
