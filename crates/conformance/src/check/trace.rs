//! A verdict on the intermediate results of a kernel: the first tile and step that is off.

use super::answer::Judged;
use super::{Check, Element, Output, Products, SCHEMA, budget, of_margins};
use crate::bounds::trace::{TraceBound, bounds};
use crate::gates::{HALF, Status, in_order, margins, rms, scale_of_row};
use crate::laws::tensors::index;
use crate::profile::Profile;
use crate::tensor::Tensors;
use crate::tier::Request;
use crate::types::Types;
use etalon_problem::{Axis, Error, Operand, Order, Problem, Scores, Sequence, TokenSequence, Walk};
use etalon_reference::trace::wanted;
use ndarray::ArrayD;
use serde::Serialize;
use std::borrow::Cow;

/// Findings about a trace.
#[derive(Debug, Clone, Serialize)]
pub struct Steps {
    /// The walk of the kernel.
    pub walk: Walk,
    /// The first step that is off, if one is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first: Option<First>,
}

/// The first tile and step of a walk that is off. Steps of the forward pass stand before those of the backward pass,
/// which read its results; dv and dk stand last.
#[derive(Debug, Clone, Serialize)]
pub struct First {
    /// The tensor of the trace.
    pub step: &'static str,
    /// The sequence; of dense and padded tensors the batch element.
    pub sequence: usize,
    /// The head.
    pub head: usize,
    /// The tile of queries.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub query_tile: Option<Part>,
    /// The tile of keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_tile: Option<Part>,
    /// The chunk of tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunk: Option<Part>,
    /// The worst element of the tile, by its index in the tensor.
    pub worst: Element,
    /// Its error divided by its bound; null in JSON where it is infinite.
    pub margin: f64,
    /// All of that in a sentence.
    pub text: String,
    #[serde(skip)]
    order: Place,
}

/// A tile or chunk of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Part {
    /// Its number in the sequence.
    pub number: usize,
    /// Its first row in the arrays.
    pub start: usize,
    /// The row behind its last one.
    pub end: usize,
}

/// Judges those tensors of the trace of a pass that a kernel has written down.
///
/// Fails where the walk does not fit the problem, where a tensor is none of the trace or has another shape, and where
/// there is nothing to compare.
pub fn check_trace(
    request: &Request<'_>,
    profile: &Profile,
    walk: &Walk,
    dump: &Tensors,
) -> Result<Check, Error> {
    let &Request { problem, pass, dtype, inputs, .. } = request;
    let names: Vec<&str> = dump.keys().map(String::as_str).collect();
    let mut stored = Vec::new();
    for operand in wanted(problem, pass, walk, &names)? {
        let tensor = &dump[operand.name];
        Error::expect_shape(operand.name, &operand.shape, &tensor.shape)?;
        tensor.to_f64(operand.name)?;
        stored.extend(tensor.dtype().map(|own| (operand.name, own)));
    }
    let nothing = |reason: String| Error::Missing { operand: "trace".to_string(), reason };
    if stored.is_empty() {
        let known = walk.tensors(problem, pass)?;
        let known = known.iter().map(|x| x.name).collect::<Vec<_>>().join(", ");
        return Err(nothing(format!("the file holds none of {known}")));
    }
    let types = Types::reading(problem, dtype, inputs);
    let traced = bounds(problem, pass, &types, profile, inputs, walk, &stored)?;
    if traced.iter().all(|x| !x.compared.contains(&true)) {
        return Err(nothing("no pair of its heads and rows is visible".to_string()));
    }
    let finder = Finder::new(problem, walk);
    let (mut outputs, mut firsts) = (Vec::new(), Vec::new());
    for own in traced {
        let (judged, compared) = judged(own, dump)?;
        let first = finder.first(&judged);
        outputs.push(describe(&judged, &compared, first.as_ref()));
        firsts.extend(first);
    }
    let first = firsts.into_iter().min_by_key(|first| first.order);
    Ok(verdict(request, profile, outputs, Steps { walk: walk.clone(), first }))
}

fn verdict(request: &Request<'_>, profile: &Profile, outputs: Vec<Output>, steps: Steps) -> Check {
    let judged = budget::products_of_a_trace(request.problem, request.pass);
    let check = Check {
        schema: SCHEMA,
        etalon: env!("CARGO_PKG_VERSION"),
        algorithm: request.problem.algorithm(),
        pass: request.pass,
        dtype: request.dtype,
        profile: *profile,
        status: Status::Passed,
        passed: true,
        conspicuous: false,
        generic: false,
        structured: None,
        too_wide: false,
        next: steps.first.as_ref().map(|first| suspects(first.step).to_string()),
        outputs,
        explanations: Vec::new(),
        parts: Vec::new(),
        not_tried: None,
        products: Products { judged, explained: 0.0 },
        trace: Some(steps),
    };
    check.on_inputs(false) // what is in doubt is undecided: no kernels are simulated
}

/// The usual causes of a step that is the first to be off.
fn suspects(step: &str) -> &'static str {
    match step {
        "lse" => {
            "m + ln l is made of scores alone: look at the mask, scale and bias of this tile, whether it was skipped \
             or counted twice, and whether l was rescaled when m grew."
        }
        "o" => {
            "Where lse is right, so are m and l: look at the rescale of acc when m grew, and at which rows of v this \
             tile reads."
        }
        "p" => {
            "Look at the scores of this tile as the backward pass makes them again, and at the lse that it reads."
        }
        "dS" => {
            "Where p is right, dP and δ are left: look at dout·v of this tile, at δ = dout·o − dlse, and at its sign."
        }
        "dq" => {
            "Where dS is right, look at the softcap's slope, at σ, at which rows of k multiply it, and at what the tiles \
             before have left in dq."
        }
        "dk" | "dv" => {
            "Where p and dS are right, look at which rows of q or dout multiply them, at σ, and at what the tiles \
             before have left."
        }
        _ => {
            "Look at the decay between the chunks, which counts once for each token, and at the decays of the tokens \
             within the chunk."
        }
    }
}

/// A tensor beside its exact values. Elements that are not compared require nothing.
fn judged(traced: TraceBound, dump: &Tensors) -> Result<(Judged<'static>, Vec<bool>), Error> {
    let TraceBound { operand, mut bound, compared } = traced;
    let tensor = dump.get(operand.name).ok_or_else(|| Error::missing(operand.name, None))?;
    let mut got: ArrayD<f64> = tensor.to_f64(operand.name)?;
    let own = got.iter_mut().zip(bound.bound.iter_mut()).zip(&compared);
    for ((got, bound), _) in own.filter(|(_, compared)| !**compared) {
        (*got, *bound) = (f64::NAN, f64::INFINITY);
    }
    let margins = margins(&bound, &got);
    let (operand, bound) = (Cow::Owned(operand), Cow::Owned(bound));
    Ok((Judged { operand, bound, got, margins }, compared))
}

fn describe(judged: &Judged<'_>, compared: &[bool], first: Option<&First>) -> Output {
    let elements = compared.iter().filter(|own| **own).count();
    let uninformative = uninformative(judged, compared);
    let undecided = if 2 * uninformative > elements { uninformative } else { 0 };
    let doubt = format!(
        "{uninformative} of {elements} elements of {} have bounds wider than half of the scale of their rows, or none",
        judged.operand.name
    );
    Output {
        elements,
        uninformative,
        undecided,
        no_bound: judged.bound.no_bound.iter().map(|(reason, n)| (reason.name(), *n)).collect(),
        doubt: (undecided > 0).then_some(doubt),
        places: first.into_iter().map(|first| first.text.clone()).collect(),
        ..of_margins(judged)
    }
}

/// The number of elements that are compared and whose bounds exceed half of the scale of their row: of nearly nothing,
/// or of a single number, that of the whole tensor.
fn uninformative(judged: &Judged<'_>, compared: &[bool]) -> usize {
    let [exact, bounds] = [&judged.bound.value, &judged.bound.bound].map(in_order);
    let (whole, width) = (rms(&exact), judged.width());
    let rows = exact.chunks(width).zip(bounds.chunks(width)).zip(compared.chunks(width));
    let of_row = |((exact, bounds), compared): ((&[f64], &[f64]), &[bool])| {
        let widest = HALF * if width == 1 { whole } else { scale_of_row(exact, whole) };
        bounds.iter().zip(compared).filter(|(bound, own)| **own && **bound > widest).count()
    };
    rows.map(of_row).sum()
}

/// A place in the order of a kernel: phase, sequence, head, the tile of the outer loop, that of the inner one in the
/// order of its walk, step.
type Place = [usize; 6];

/// Places of the elements of the tensors of a trace.
struct Finder<'a> {
    problem: &'a Problem,
    walk: &'a Walk,
    heads: Vec<usize>,
    sequences: Sequences,
}

enum Sequences {
    OfPairs(Vec<Sequence>),
    OfTokens(Vec<TokenSequence>),
}

/// The tile to which an element belongs.
struct Block {
    order: Place,
    sequence: usize,
    head: usize,
    query_tile: Option<Part>,
    key_tile: Option<Part>,
    chunk: Option<Part>,
}

/// An entry of the index of an element.
fn on(operand: &Operand, index: &[usize], axis: Axis) -> Option<usize> {
    operand.position(axis).map(|at| index[at])
}

impl<'a> Finder<'a> {
    fn new(problem: &'a Problem, walk: &'a Walk) -> Self {
        let sequences = match problem {
            Problem::LinearAttention(own) => Sequences::OfTokens(own.list_sequences()),
            _ => Sequences::OfPairs(problem.scores().map(Scores::sequences).unwrap_or_default()),
        };
        Finder { problem, walk, heads: walk.heads(problem), sequences }
    }

    /// The first tile that is off, with its worst element.
    fn first(&self, judged: &Judged<'_>) -> Option<First> {
        let operand = judged.operand.as_ref();
        let mut first: Option<(Block, f64, usize)> = None;
        for (at, &margin) in judged.margins.iter().enumerate().filter(|(_, margin)| **margin > 1.0)
        {
            let Some(block) = self.block(operand, &index(&operand.shape, at)) else { continue };
            let is_first = first.as_ref().is_none_or(|(own, worst, _)| {
                block.order < own.order || block.order == own.order && margin > *worst
            });
            if is_first {
                first = Some((block, margin, at));
            }
        }
        let (block, margin, at) = first?;
        let worst = judged.element(at)?;
        let text = self.text(operand, &block, &worst, margin);
        let Block { order, sequence, head, query_tile, key_tile, chunk } = block;
        let step = operand.name;
        Some(First {
            step,
            sequence,
            head,
            query_tile,
            key_tile,
            chunk,
            worst,
            margin,
            text,
            order,
        })
    }

    fn block(&self, operand: &Operand, index: &[usize]) -> Option<Block> {
        let on = |axis: Axis| on(operand, index, axis);
        match &self.sequences {
            Sequences::OfTokens(all) => self.of_tokens(all, operand.name, on),
            Sequences::OfPairs(all) => self.of_pairs(all, operand.name, on),
        }
    }

    fn of_tokens(
        &self,
        sequences: &[TokenSequence],
        name: &str,
        on: impl Fn(Axis) -> Option<usize>,
    ) -> Option<Block> {
        let (number, sequence) = (on(Axis::Tiles)?, on(Axis::Sequences)?);
        let head = self.heads[on(Axis::KeyHeads)?];
        let tokens = sequences.iter().find(|own| own.index == sequence)?;
        let chunk = Some(part(number, self.walk.chunk?, tokens.start, tokens.tokens));
        let backward = name == "dstate";
        let turn = if backward { usize::MAX - number } else { number };
        let order = [usize::from(backward), sequence, head, 0, turn, 0];
        Some(Block { order, sequence, head, query_tile: None, key_tile: None, chunk })
    }

    fn of_pairs(
        &self,
        sequences: &[Sequence],
        name: &str,
        on: impl Fn(Axis) -> Option<usize>,
    ) -> Option<Block> {
        let (batch, head, tile) =
            (on(Axis::Batch)?, self.heads[on(Axis::QueryHeads)?], self.walk.tile?);
        let (row, key) = (self.row(&on), on(Axis::Keys));
        let has = |start: usize, n: usize, at: Option<usize>| {
            at.is_none_or(|at| (start..start + n).contains(&at))
        };
        let holds = |s: &Sequence| {
            let queries = has(s.query_start, s.queries, row);
            s.batch == batch && queries && has(s.key_start, s.keys, key)
        };
        let sequence = sequences.iter().position(holds)?;
        let own = &sequences[sequence];
        let keyed = key.map(|key| (key - own.key_start) / tile.keys);
        let queried = row.map(|row| (row - own.query_start) / tile.queries);
        let (r, t) = (queried.or(on(Axis::Tiles))?, keyed.or(on(Axis::Tiles))?);
        let turn = |order: Order, tile: usize| match order {
            Order::Ascending => tile,
            Order::Descending => usize::MAX - tile,
        };
        let by_query = [r, turn(self.walk.keys, t)];
        let by_key = [t, turn(self.walk.queries, r)];
        let (phase, [outer, inner], step) = match name {
            "lse" => (0, by_query, 0),
            "o" => (0, by_query, 1),
            "p" => (1, by_query, 0),
            "dS" => (1, by_query, 1),
            "dq" => (1, by_query, 2),
            "dv" => (2, by_key, 0),
            _ => (2, by_key, 1),
        };
        Some(Block {
            order: [phase, sequence, head, outer, inner, step],
            sequence,
            head,
            query_tile: Some(part(r, tile.queries, own.query_start, own.queries)),
            key_tile: Some(part(t, tile.keys, own.key_start, own.keys)),
            chunk: None,
        })
    }

    /// The row of q of an element, in the arrays.
    fn row(&self, on: impl Fn(Axis) -> Option<usize>) -> Option<usize> {
        on(Axis::Queries).map(|i| i + self.walk.rows(self.problem).start)
    }

    /// The element within its tile, in words.
    fn at(&self, operand: &Operand, index: &[usize]) -> String {
        let on = |axis: Axis| on(operand, index, axis);
        if let (Sequences::OfTokens(_), Some(d), Some(e)) =
            (&self.sequences, on(Axis::Dim), on(Axis::ValueDim))
        {
            return format!("element [{d}, {e}]");
        }
        let column =
            on(Axis::ValueDim).or(on(Axis::Dim)).map_or(String::new(), |c| format!(", column {c}"));
        match (self.row(on), on(Axis::Keys)) {
            (Some(row), Some(key)) => format!("row {row}, key {key}"),
            (Some(row), None) => format!("row {row}{column}"),
            (None, key) => format!("key {}{column}", key.unwrap_or(0)),
        }
    }

    fn text(&self, operand: &Operand, block: &Block, worst: &Element, margin: f64) -> String {
        let mut places = Vec::new();
        let sequences = match &self.sequences {
            Sequences::OfPairs(all) => all.len(),
            Sequences::OfTokens(all) => all.len(),
        };
        if sequences > 1 {
            let dense = self.problem.extent(Axis::Batch) > 1;
            let name = if dense { "batch element" } else { "sequence" };
            places.push(format!("{name} {}", block.sequence));
        }
        places.push(format!("head {}", block.head));
        let parts = [
            (block.query_tile, "query tile", "rows"),
            (block.key_tile, "key tile", "keys"),
            (block.chunk, "chunk", "tokens"),
        ];
        for (part, name, rows) in parts {
            places.extend(
                part.map(|x| format!("{name} {} ({rows} {}..{})", x.number, x.start, x.end)),
            );
        }
        let Element { got, exact, bound, .. } = worst;
        let error = match margin {
            margin if margin >= 100.0 && margin.is_finite() => format!("error {margin:.0} × bound"),
            margin if margin.is_finite() => format!("error {margin:.2} × bound"),
            _ => "wrong".to_string(),
        };
        format!(
            "{}, step {}: {error} at {} (got {got:.6e}, exact {exact:.6e} ± {bound:.1e}).",
            places.join(", "),
            operand.name,
            self.at(operand, &worst.index)
        )
    }
}

fn part(number: usize, size: usize, start: usize, rows: usize) -> Part {
    let first = number * size;
    Part { number, start: start + first, end: start + rows.min(first + size) }
}
