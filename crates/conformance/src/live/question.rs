//! A request as a program gets it, and its answer.

use super::process::{Process, words};
use super::shared::Shared;
use super::{ERROR, OUTPUTS, REFUSES, REQUEST, TENSORS, TEXT, UNSUPPORTED};
use crate::tensor::{Stored, Tensor, Tensors};
use crate::tier::{Refusal, Request};
use crate::vectors::{bytes_of, data_of};
use crate::wire::{ALIGN, File, Frame, Most, Placed, Wanted, detach, in_lines, type_name};
use etalon_problem::{Role, shortened};
use serde_json::json;
use std::io;
use std::time::{Duration, Instant};

/// Bytes that an answer may have beyond twice what was asked for: so that a wrong shape is named as such.
const SLACK: usize = 1 << 20;

/// The beginning of the reason why a program was not asked.
pub const UNASKED: &str = "cannot be asked by shared files: ";

/// A request, and what must be known of it when its answer comes.
pub struct Question {
    id: u64,
    bytes: Vec<u8>,
    most: Most,
    /// Of shared files: the tensors that are given, with the elements, and the places of results, with their bytes.
    inputs: Vec<Placed>,
    elements: Vec<u8>,
    outputs: Vec<Placed>,
    places: usize,
}

/// Outcome of a request: results with their time or a refusal, or else a fault after which the process must end.
type Outcome = Result<Result<(Tensors, Duration), Refusal>, String>;

impl Question {
    /// A request of a number, in a frame, or with its tensors in files. Fails where it has no place in a frame.
    pub fn new(id: u64, request: &Request<'_>, shared: Option<&Shared>) -> Result<Self, String> {
        let &Request { problem, pass, dtype, inputs, .. } = request;
        let operands = problem.operands(pass).into_iter().filter(|x| x.role == Role::Output);
        let wanted: Vec<Wanted> = operands
            .map(|x| Wanted {
                name: x.name.to_string(),
                dtype: match Stored::of(x.precision, dtype) {
                    Stored::Float(dtype) => dtype.name(),
                    Stored::Integer => "i64",
                },
                shape: x.shape,
            })
            .collect();
        let data = 2 * wanted.iter().map(Wanted::bytes).sum::<usize>() + SLACK;
        let most = Most { tensors: TENSORS, text: TEXT, data: data as u64 };
        let (mut problem, mut tensors) = (problem.clone(), inputs.clone());
        detach(&mut problem, &mut tensors);
        let mut said = json!({ "pass": pass.name(), "dtype": dtype.name(), "problem": problem });
        let mut frame = Frame { kind: REQUEST, id, tensors, wanted, ..Frame::default() };
        let (mut inputs, mut elements) = (Vec::new(), Vec::new());
        let (mut outputs, mut places) = (Vec::new(), 0);
        if let Some(shared) = shared {
            said["shared"] = json!({
                "inputs": shared.path(File::Inputs),
                "outputs": shared.path(File::Outputs)
            });
            inputs = given(std::mem::take(&mut frame.tensors), &mut elements);
            outputs = placed(std::mem::take(&mut frame.wanted), &mut places);
            frame.placed = [&inputs[..], &outputs].concat();
        }
        (frame.json, frame.text) = (said.to_string().into(), in_lines(&said).into());
        let bytes = frame.to_bytes()?;
        Ok(Question { id, bytes, most, inputs, elements, outputs, places })
    }

    /// Asks a process. The time is that from before the first element is sent, or written to a file, until the last
    /// one is here.
    pub fn ask(mut self, process: &Process, limit: Duration) -> Outcome {
        let unasked =
            |why: io::Error| Ok(Err(Refusal::Unsupported(format!("{UNASKED}{why}; see --frames"))));
        let (bytes, shared) = (std::mem::take(&mut self.bytes), process.shared());
        if let Some(Err(why)) = shared.map(|shared| shared.poison(self.places)) {
            return unasked(why);
        }
        let start = Instant::now();
        if let Some(Err(why)) = shared.map(|shared| shared.give(&self.elements)) {
            return unasked(why);
        }
        let (answer, mut end) = process.ask(bytes, self.most, limit)?;
        let mut results = Vec::new();
        if let Some(shared) = shared {
            let taken = shared.take(self.places);
            end = Instant::now();
            results = taken.map_err(|why| format!("left a file of results that ends: {why}"))?;
            self.see_inputs(shared)?;
        }
        let outputs = self.understood(answer, &results)?;
        Ok(outputs.map(|outputs| (outputs, end.saturating_duration_since(start))))
    }

    /// Fails where the elements that were given are others now.
    fn see_inputs(&self, shared: &Shared) -> Result<(), String> {
        let damage = shared.damage(&self.elements);
        let Some(byte) = damage.map_err(|why| format!("left a file of inputs: {why}"))? else {
            return Ok(());
        };
        let own = self.inputs.iter().rev().find(|x| x.at <= byte);
        let name = own.map_or("", |x| &x.tensor.name);
        Err(format!("changed the shared elements of `{name}`, which it may only read"))
    }

    /// Reads an answer; a fault where it is none to this request.
    fn understood(
        &self,
        answer: Frame,
        results: &[u8],
    ) -> Result<Result<Tensors, Refusal>, String> {
        let Frame { kind, id: found, mut tensors, wanted, placed, text, .. } = answer;
        let id = self.id;
        if found != id {
            return Err(format!("answered request {found}, was asked request {id}"));
        }
        match kind {
            OUTPUTS => {
                if let Some(Wanted { name, .. }) = wanted.first() {
                    return Err(format!("returned `{name}` without elements: role 1, expected 0"));
                }
                for placed in placed {
                    let (name, tensor) = self.taken(placed, results)?;
                    if tensors.contains_key(&name) {
                        return Err(format!("returned `{name}` twice"));
                    }
                    tensors.insert(name, tensor);
                }
                Ok(Ok(tensors))
            }
            UNSUPPORTED => Ok(Err(Refusal::Unsupported(format!("{REFUSES}{}", words(&text))))),
            ERROR => Ok(Err(Refusal::Fault(format!("reported an error: {}", words(&text))))),
            kind => Err(format!(
                "answered with a frame of kind {kind}, expected {OUTPUTS} (outputs), {UNSUPPORTED} \
                 (unsupported) or {ERROR} (error)"
            )),
        }
    }

    /// A result in its place.
    fn taken(&self, placed: Placed, results: &[u8]) -> Result<(String, Tensor), String> {
        let Placed { tensor: Wanted { name, dtype, shape }, .. } = &placed;
        let shown = shortened(name, 60);
        if !self.outputs.contains(&placed) {
            let file = if placed.file == File::Inputs { "inputs" } else { "results" };
            return Err(format!(
                "returned `{shown}` as {dtype} {shape:?} at byte {} of the shared {file}: no place \
                 that it was given",
                placed.at
            ));
        }
        let own = results.get(placed.at..placed.at + placed.tensor.bytes());
        let data = own.and_then(|own| data_of(dtype, own));
        let data = data.ok_or_else(|| format!("left no {dtype} in the place of `{shown}`"))?;
        Ok((name.clone(), Tensor { shape: shape.clone(), data }))
    }
}

/// Places of tensors that are given, in the order of their names, and their elements.
fn given(tensors: Tensors, elements: &mut Vec<u8>) -> Vec<Placed> {
    let mut place = |(name, Tensor { shape, data }): (String, Tensor)| {
        let at = elements.len();
        elements.extend(bytes_of(&data));
        elements.resize(elements.len().next_multiple_of(ALIGN), 0);
        let tensor = Wanted { name, dtype: type_name(&data), shape };
        Placed { tensor, file: File::Inputs, at }
    };
    tensors.into_iter().map(&mut place).collect()
}

/// Places of results, one behind the other.
fn placed(wanted: Vec<Wanted>, places: &mut usize) -> Vec<Placed> {
    let mut place = |tensor: Wanted| {
        let at = *places;
        *places += tensor.bytes().next_multiple_of(ALIGN);
        Placed { tensor, file: File::Outputs, at }
    };
    wanted.into_iter().map(&mut place).collect()
}
