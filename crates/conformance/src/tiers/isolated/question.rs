//! Requests as messages.

use super::message::{QUESTION, WIRE, by_number, numbered, said};
use crate::tensor::Tensors;
use crate::tier::{Cuts, Hints, Layout, Request, Wrong};
use crate::vectors::parse_problem;
use crate::wire::{ARRAY, Frame, detach};
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Blocking, Dtype, Mode, Pass, Problem};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The way in which a tier is asked.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum CallKind {
    /// One request.
    Alone,
    /// Several that share a workspace.
    InTurn,
    /// One, of a filtered backward pass.
    Filtered(Filter),
}

/// The header of requests. The tensors of each have its number before their names.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    id: u64,
    tier: String,
    calls: Vec<Called>,
    in_turn: bool,
    /// Of a filtered backward pass, the bits of its threshold, or of its two budgets.
    #[serde(default)]
    filter: Vec<u64>,
}

/// One request. Of hints nothing but what was given.
#[derive(Debug, Serialize, Deserialize)]
struct Called {
    problem: serde_json::Value,
    pass: String,
    dtype: String,
    blocking: Option<[usize; 2]>,
    mode: String,
    partials_budget: Option<usize>,
    memory_budget: Option<usize>,
    kept_states: Option<usize>,
    recompute: bool,
    threads: Option<usize>,
    layout: String,
    /// The bits of a number, which may be NaN.
    filled: Option<u64>,
    alone: bool,
    in_place: bool,
    wrong: Option<String>,
    /// The bits of a number, which may be NaN.
    stale: Option<u64>,
    shards: Option<String>,
}

/// Requests that have been read.
#[derive(Debug)]
pub struct Question {
    pub id: u64,
    pub tier: String,
    pub calls: Vec<Call>,
    pub kind: CallKind,
}

/// A request that has been read.
#[derive(Debug)]
pub struct Call {
    problem: Problem,
    pass: Pass,
    dtype: Dtype,
    inputs: Tensors,
    hints: Hints,
}

impl Call {
    /// The request.
    pub fn request(&self) -> Request<'_> {
        let Call { problem, pass, dtype, inputs, hints } = self;
        Request { problem, pass: *pass, dtype: *dtype, inputs, hints: *hints }
    }
}

/// Requests to a tier as a frame.
pub fn question(
    id: u64,
    tier: &str,
    requests: &[Request<'_>],
    kind: CallKind,
) -> Result<Frame, String> {
    let (calls, tensors): (Vec<_>, Vec<_>) =
        requests.iter().map(called).collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
    let header = Header {
        id,
        tier: tier.to_string(),
        calls,
        in_turn: kind == CallKind::InTurn,
        filter: match kind {
            CallKind::Alone | CallKind::InTurn => Vec::new(),
            CallKind::Filtered(Filter::Below { eps }) => vec![eps.to_bits()],
            CallKind::Filtered(Filter::Within { dh, dw }) => vec![dh.to_bits(), dw.to_bits()],
        },
    };
    let (json, tensors) = (serde_json::to_vec(&header).map_err(said)?, numbered(tensors));
    Ok(Frame { kind: QUESTION, id, json, tensors, ..Frame::default() })
}

/// A request, with its tensors.
fn called(request: &Request<'_>) -> Result<(Called, Tensors), String> {
    let &Request { problem, pass, dtype, inputs, hints } = request;
    let (mut problem, mut tensors) = (problem.clone(), inputs.clone());
    detach(&mut problem, &mut tensors);
    let called = Called {
        problem: serde_json::to_value(&problem).map_err(said)?,
        pass: pass.to_string(),
        dtype: dtype.to_string(),
        blocking: hints.blocking.map(|x| [x.queries, x.keys]),
        mode: hints.mode.to_string(),
        partials_budget: hints.partials_budget,
        memory_budget: hints.memory_budget,
        kept_states: hints.kept_states,
        recompute: hints.recompute,
        threads: hints.threads,
        layout: hints.layout.to_string(),
        filled: hints.filled.map(f64::to_bits),
        alone: hints.alone,
        in_place: hints.in_place,
        wrong: hints.wrong.map(|wrong| wrong.to_string()),
        stale: hints.stale.map(f64::to_bits),
        shards: hints.shards.map(|cuts| cuts.to_string()),
    };
    Ok((called, tensors))
}

/// Reads requests.
pub fn read_question(frame: Frame) -> Result<Question, String> {
    let header: Header = serde_json::from_slice(&frame.json).map_err(said)?;
    let lists = by_number(frame.tensors, header.calls.len())?;
    let calls = header.calls.into_iter().zip(lists).map(|(called, inputs)| called.read(inputs));
    Ok(Question {
        id: header.id,
        tier: header.tier,
        calls: calls.collect::<Result<_, _>>()?,
        kind: match header.filter[..] {
            [] if header.in_turn => CallKind::InTurn,
            [] => CallKind::Alone,
            [eps] => CallKind::Filtered(Filter::Below { eps: f64::from_bits(eps) }),
            [dh, dw] => {
                let [dh, dw] = [dh, dw].map(f64::from_bits);
                CallKind::Filtered(Filter::Within { dh, dw })
            }
            _ => return Err(format!("{} numbers of a filter", header.filter.len())),
        },
    })
}

impl Called {
    fn read(self, mut inputs: Tensors) -> Result<Call, String> {
        let (path, problem) = (Path::new(WIRE), self.problem.to_string());
        let problem = parse_problem(path, &problem, path, &inputs).map_err(said)?;
        inputs.retain(|name, _| !name.starts_with(ARRAY));
        let hints = Hints {
            blocking: self.blocking.map(|[queries, keys]| Blocking::new(queries, keys)),
            mode: self.mode.parse::<Mode>().map_err(said)?,
            partials_budget: self.partials_budget,
            memory_budget: self.memory_budget,
            kept_states: self.kept_states,
            recompute: self.recompute,
            threads: self.threads,
            layout: self.layout.parse::<Layout>().map_err(said)?,
            filled: self.filled.map(f64::from_bits),
            alone: self.alone,
            in_place: self.in_place,
            wrong: self.wrong.map(|wrong| wrong.parse::<Wrong>()).transpose().map_err(said)?,
            stale: self.stale.map(f64::from_bits),
            shards: self.shards.map(|cuts| cuts.parse::<Cuts>()).transpose().map_err(said)?,
        };
        let (pass, dtype) = (self.pass.parse().map_err(said)?, self.dtype.parse().map_err(said)?);
        Ok(Call { problem, pass, dtype, inputs, hints })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{Data, Tensor};
    use crate::wire::Most;
    use etalon_problem::{Attention, Extents, Mask, NamedArray};

    /// Two arrays of one name, hints of every kind, NaN: all come back.
    #[test]
    fn a_request_is_read_as_it_was_written() {
        let extents =
            Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 2, keys: 2, dim: 1 };
        let flags = |data: [bool; 4]| Mask::Array(NamedArray::new("x", &[1, 1, 2, 2], data));
        let masks = [[true, true, false, true], [false, true, true, true]].map(flags);
        let problem: Problem = Attention::new(extents).mask(Mask::And(masks.to_vec())).into();
        let tensor = |x: f32| Tensor { shape: vec![1, 1, 2, 1], data: Data::F32(vec![x, 1.0]) };
        let inputs: Tensors = [("q", 0.1), ("k", f32::NAN), ("v", 3.0)]
            .map(|(name, x)| (name.to_string(), tensor(x)))
            .into();
        let hints = Hints {
            blocking: Some(Blocking::new(3, 4)),
            mode: Mode::FusedPartials,
            partials_budget: Some(5),
            memory_budget: Some(6),
            kept_states: Some(7),
            in_place: true,
            wrong: Some(Wrong::ResultTwice),
            stale: Some(f64::NAN),
            threads: Some(2),
            layout: Layout::Reversed,
            filled: Some(f64::NAN),
            alone: true,
            shards: Some(Cuts::Anywhere),
            ..Hints::default()
        };
        let request = Request {
            problem: &problem,
            pass: Pass::Forward,
            dtype: Dtype::F32,
            inputs: &inputs,
            hints,
        };
        let other = Request { pass: Pass::Backward, hints: Hints::default(), ..request };
        let filtered = CallKind::Filtered(Filter::Within { dh: 0.1, dw: 3.0 });
        let mut bytes = Vec::new();
        for (requests, kind) in [
            (&[request][..], filtered),
            (&[request], CallKind::Alone),
            (&[request, other], CallKind::InTurn),
        ] {
            let frame = question(7, "simd/x", requests, kind).unwrap();
            bytes = frame.to_bytes().unwrap();
            let stream = &mut &bytes[..];
            let read = Frame::read(stream, Most::ANY).unwrap().unwrap();
            let read = read_question(read).unwrap();
            assert!(Frame::read(stream, Most::ANY).unwrap().is_none());
            assert_eq!((read.id, read.tier.as_str(), read.kind), (7, "simd/x", kind));
            let again: Vec<_> = read.calls.iter().map(Call::request).collect();
            let again = question(7, "simd/x", &again, kind).unwrap();
            assert_eq!(again.to_bytes().unwrap(), bytes);
        }
        for end in 1..bytes.len() {
            assert!(Frame::read(&mut &bytes[..end], Most::ANY).is_err(), "{end}");
        }
        assert!(read_question(Frame::default()).is_err());
    }
}
