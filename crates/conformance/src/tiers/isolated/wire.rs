//! Messages between a suite and a process that answers its requests: the length of a header, the header as JSON, the
//! length of tensors, the tensors as a safetensors file. Lengths are little-endian, 8 bytes each.

use crate::tensor::{Data, Tensor, Tensors};
use crate::tier::{Cuts, Filtered, Hints, Layout, Refusal, Request};
use crate::vectors::{from_bytes, parse_problem, to_bytes};
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Blocking, Dtype, Mask, Mode, Pass, Problem};
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::path::Path;

/// The name of what is read or written, in errors.
const WIRE: &str = "a message";

/// What stands before the names of a mask's arrays, so that none is that of an operand.
const ARRAY: &str = "mask/";

/// A message.
#[derive(Debug, Default)]
pub struct Message {
    pub header: Vec<u8>,
    pub tensors: Vec<u8>,
}

impl Message {
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        for part in [&self.header, &self.tensors] {
            to.write_all(&(part.len() as u64).to_le_bytes())?;
            to.write_all(part)?;
        }
        to.flush()
    }

    /// The next message; `None` at the end of the stream.
    pub fn read(from: &mut impl Read) -> io::Result<Option<Message>> {
        let mut first = [0; 8];
        let mut have = 0;
        while have < first.len() {
            match from.read(&mut first[have..])? {
                0 if have == 0 => return Ok(None),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                more => have += more,
            }
        }
        let header = part(from, first)?;
        let mut second = [0; 8];
        from.read_exact(&mut second)?;
        Ok(Some(Message { header, tensors: part(from, second)? }))
    }
}

/// As many bytes as were announced: memory is taken as they come.
fn part(from: &mut impl Read, length: [u8; 8]) -> io::Result<Vec<u8>> {
    let (length, mut bytes) = (u64::from_le_bytes(length), Vec::new());
    let read = from.take(length).read_to_end(&mut bytes)? as u64;
    if read < length { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(bytes) }
}

/// The header of a request. Of hints nothing but what was given.
#[derive(Debug, Serialize, Deserialize)]
struct Asked {
    id: u64,
    tier: String,
    problem: serde_json::Value,
    pass: String,
    dtype: String,
    blocking: Option<[usize; 2]>,
    mode: String,
    partials_budget: Option<usize>,
    recompute: bool,
    threads: Option<usize>,
    layout: String,
    /// The bits of a number, which may be NaN.
    filled: Option<u64>,
    alone: bool,
    shards: Option<String>,
    /// Of a filtered backward pass, the bits of its threshold, or of its two budgets.
    #[serde(default)]
    filter: Vec<u64>,
}

/// A request that has been read.
#[derive(Debug)]
pub struct Question {
    pub id: u64,
    pub tier: String,
    pub problem: Problem,
    pub pass: Pass,
    pub dtype: Dtype,
    pub inputs: Tensors,
    pub hints: Hints,
    pub filter: Option<Filter>,
}

/// A request to a tier as a message.
pub fn question(
    id: u64,
    tier: &str,
    request: &Request<'_>,
    filter: Option<Filter>,
) -> Result<Message, String> {
    let &Request { problem, pass, dtype, inputs, hints } = request;
    let (mut problem, mut tensors) = (problem.clone(), inputs.clone());
    detach(&mut problem, &mut tensors);
    let asked = Asked {
        id,
        tier: tier.to_string(),
        problem: serde_json::to_value(&problem).map_err(said)?,
        pass: pass.to_string(),
        dtype: dtype.to_string(),
        blocking: hints.blocking.map(|x| [x.queries, x.keys]),
        mode: hints.mode.to_string(),
        partials_budget: hints.partials_budget,
        recompute: hints.recompute,
        threads: hints.threads,
        layout: hints.layout.to_string(),
        filled: hints.filled.map(f64::to_bits),
        alone: hints.alone,
        shards: hints.shards.map(|cuts| cuts.to_string()),
        filter: match filter {
            None => Vec::new(),
            Some(Filter::Below { eps }) => vec![eps.to_bits()],
            Some(Filter::Within { dh, dw }) => vec![dh.to_bits(), dw.to_bits()],
        },
    };
    let header = serde_json::to_vec(&asked).map_err(said)?;
    Ok(Message { header, tensors: to_bytes(Path::new(WIRE), &tensors).map_err(said)? })
}

/// Puts the arrays of a problem's mask among tensors, by names that no others have.
fn detach(problem: &mut Problem, tensors: &mut Tensors) {
    let Some(scores) = problem.scores_mut() else { return };
    let mut count = 0;
    let mut rename = |name: &mut String, shape: &[usize], data: Data| {
        *name = format!("{ARRAY}{count}");
        count += 1;
        tensors.insert(name.clone(), Tensor { shape: shape.to_vec(), data });
    };
    scores.mask.visit_mut(&mut |mask| match mask {
        Mask::Segments { query, key } => {
            for ids in [query, key] {
                rename(&mut ids.name, &ids.shape, Data::I64(ids.data.to_vec()));
            }
        }
        Mask::Array(flags) => {
            rename(&mut flags.name, &flags.shape, Data::Bool(flags.data.to_vec()));
        }
        _ => {}
    });
}

/// Reads a request.
pub fn read_question(message: &Message) -> Result<Question, String> {
    let asked: Asked = serde_json::from_slice(&message.header).map_err(said)?;
    let path = Path::new(WIRE);
    let mut inputs = from_bytes(path, &message.tensors).map_err(said)?;
    let problem = asked.problem.to_string();
    let problem = parse_problem(path, &problem, path, &inputs).map_err(said)?;
    inputs.retain(|name, _| !name.starts_with(ARRAY));
    let hints = Hints {
        blocking: asked.blocking.map(|[queries, keys]| Blocking::new(queries, keys)),
        mode: asked.mode.parse::<Mode>().map_err(said)?,
        partials_budget: asked.partials_budget,
        recompute: asked.recompute,
        threads: asked.threads,
        layout: asked.layout.parse::<Layout>().map_err(said)?,
        filled: asked.filled.map(f64::from_bits),
        alone: asked.alone,
        shards: asked.shards.map(|cuts| cuts.parse::<Cuts>()).transpose().map_err(said)?,
    };
    Ok(Question {
        id: asked.id,
        tier: asked.tier,
        problem,
        pass: asked.pass.parse().map_err(said)?,
        dtype: asked.dtype.parse().map_err(said)?,
        inputs,
        hints,
        filter: match asked.filter[..] {
            [] => None,
            [eps] => Some(Filter::Below { eps: f64::from_bits(eps) }),
            [dh, dw] => Some(Filter::Within { dh: f64::from_bits(dh), dw: f64::from_bits(dw) }),
            _ => return Err(format!("{} numbers of a filter", asked.filter.len())),
        },
    })
}

/// What a request got.
#[derive(Debug, PartialEq)]
pub enum Answer {
    Outputs(Tensors),
    /// Of a filtered pass; nothing where the tier has none.
    Filtered(Option<Filtered>),
    Refused(Refusal),
    /// The tier can answer nothing any more, and the process ends.
    Lost(String),
}

/// The header of an answer.
#[derive(Debug, Serialize, Deserialize)]
struct Answered {
    id: u64,
    outcome: Outcome,
    reason: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Outputs,
    Filtered,
    Unfiltered,
    Unsupported,
    Fault,
    Lost,
}

/// An answer as a message.
pub fn answer(id: u64, answer: &Answer) -> Result<Message, String> {
    let (outcome, reason, tensors) = match answer {
        Answer::Outputs(tensors) => {
            let tensors = to_bytes(Path::new(WIRE), tensors).map_err(said)?;
            (Outcome::Outputs, String::new(), tensors)
        }
        Answer::Filtered(None) => (Outcome::Unfiltered, String::new(), Vec::new()),
        Answer::Filtered(Some(found)) => {
            let tensors = to_bytes(Path::new(WIRE), &attach(found)).map_err(said)?;
            (Outcome::Filtered, String::new(), tensors)
        }
        Answer::Refused(Refusal::Unsupported(reason)) => {
            (Outcome::Unsupported, reason.clone(), Vec::new())
        }
        Answer::Refused(Refusal::Fault(reason)) => (Outcome::Fault, reason.clone(), Vec::new()),
        Answer::Lost(reason) => (Outcome::Lost, reason.clone(), Vec::new()),
    };
    let header = serde_json::to_vec(&Answered { id, outcome, reason }).map_err(said)?;
    Ok(Message { header, tensors })
}

/// What stands before the names of a certificate's parts, so that none is that of an output.
const CERTIFICATE: [&str; 3] = ["certificate/dh", "certificate/dw", "certificate/tiles"];

/// The certificate among the outputs.
fn attach(found: &Filtered) -> Tensors {
    let Filtered { outputs, dh, dw, tiles: (kept, all), classes } = found;
    let counts = [kept, all, classes].map(|&x| x as i64).to_vec();
    let lengths = [dh.len(), dw.len(), counts.len()];
    let parts = [Data::F64(dh.clone()), Data::F64(dw.clone()), Data::I64(counts)];
    let mut tensors = outputs.clone();
    for ((name, data), length) in CERTIFICATE.into_iter().zip(parts).zip(lengths) {
        tensors.insert(name.to_string(), Tensor { shape: vec![length], data });
    }
    tensors
}

/// The reverse.
fn certified(mut outputs: Tensors) -> Result<Filtered, String> {
    let [dh, dw, counts] = CERTIFICATE.map(|name| outputs.remove(name).map(|x| x.data));
    match (dh, dw, counts) {
        (Some(Data::F64(dh)), Some(Data::F64(dw)), Some(Data::I64(counts))) => match counts[..] {
            [kept, all, classes] => {
                let (tiles, classes) = ((kept as usize, all as usize), classes as usize);
                Ok(Filtered { outputs, dh, dw, tiles, classes })
            }
            _ => Err("a certificate without its counts".to_string()),
        },
        _ => Err("a certificate that is not whole".to_string()),
    }
}

/// Reads an answer, with the number of its request.
pub fn read_answer(message: &Message) -> Result<(u64, Answer), String> {
    let Answered { id, outcome, reason } = serde_json::from_slice(&message.header).map_err(said)?;
    let answer = match outcome {
        Outcome::Outputs => {
            Answer::Outputs(from_bytes(Path::new(WIRE), &message.tensors).map_err(said)?)
        }
        Outcome::Filtered => {
            let tensors = from_bytes(Path::new(WIRE), &message.tensors).map_err(said)?;
            Answer::Filtered(Some(certified(tensors)?))
        }
        Outcome::Unfiltered => Answer::Filtered(None),
        Outcome::Unsupported => Answer::Refused(Refusal::Unsupported(reason)),
        Outcome::Fault => Answer::Refused(Refusal::Fault(reason)),
        Outcome::Lost => Answer::Lost(reason),
    };
    Ok((id, answer))
}

fn said(error: impl ToString) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use etalon_problem::{Attention, Extents, NamedArray};

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
        let filter = Some(Filter::Within { dh: 0.1, dw: 3.0 });
        let (mut bytes, message) = (Vec::new(), question(7, "simd/x", &request, filter).unwrap());
        message.write(&mut bytes).unwrap();
        let stream = &mut &bytes[..];
        let read = read_question(&Message::read(stream).unwrap().unwrap()).unwrap();
        assert!(Message::read(stream).unwrap().is_none());
        let again =
            Request { problem: &read.problem, inputs: &read.inputs, hints: read.hints, ..request };
        assert_eq!((read.id, read.tier.as_str(), read.filter), (7, "simd/x", filter));
        let again = question(7, "simd/x", &again, filter).unwrap();
        assert_eq!((again.header, again.tensors), (message.header, message.tensors));
        for end in 1..bytes.len() {
            assert!(Message::read(&mut &bytes[..end]).is_err(), "{end}");
        }
        assert!(read_question(&Message::default()).is_err());
    }

    #[test]
    fn an_answer_is_read_as_it_was_written() {
        let tensor = Tensor { shape: vec![1], data: Data::I64(vec![3]) };
        let answers = [
            Answer::Outputs([("n".to_string(), tensor.clone())].into()),
            Answer::Filtered(None),
            Answer::Filtered(Some(Filtered {
                outputs: [("n".to_string(), tensor)].into(),
                dh: vec![0.1],
                dw: vec![2.0, f64::INFINITY],
                tiles: (1, 2),
                classes: 256,
            })),
            Answer::Refused(Refusal::Unsupported("a".to_string())),
            Answer::Refused(Refusal::Fault("b".to_string())),
            Answer::Lost("c".to_string()),
        ];
        for (id, expected) in (1..).zip(answers) {
            let found = read_answer(&answer(id, &expected).unwrap()).unwrap();
            assert_eq!(found, (id, expected));
        }
    }
}
