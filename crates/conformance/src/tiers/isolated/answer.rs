//! Answers as messages.

use super::message::{ANSWER, by_number, numbered, said};
use crate::tensor::{Data, Tensor, Tensors};
use crate::tier::{Filtered, Refusal};
use crate::wire::Frame;
use serde::{Deserialize, Serialize};

/// The answer to a request.
#[derive(Debug, PartialEq)]
pub enum Answer {
    Outputs(Tensors),
    /// Of each of several requests; nothing where the tier keeps no workspace.
    InTurn(Option<Vec<Tensors>>),
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
    /// Of several requests, how many there were.
    #[serde(default)]
    count: usize,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Outputs,
    InTurn,
    Unkept,
    Filtered,
    Unfiltered,
    Unsupported,
    Fault,
    Lost,
}

/// An answer as a frame.
pub fn answer(id: u64, answer: &Answer) -> Result<Frame, String> {
    let none = Tensors::new;
    let (outcome, reason, tensors) = match answer {
        Answer::Outputs(tensors) => (Outcome::Outputs, String::new(), tensors.clone()),
        Answer::InTurn(None) => (Outcome::Unkept, String::new(), none()),
        Answer::InTurn(Some(lists)) => (Outcome::InTurn, String::new(), numbered(lists.clone())),
        Answer::Filtered(None) => (Outcome::Unfiltered, String::new(), none()),
        Answer::Filtered(Some(found)) => (Outcome::Filtered, String::new(), attach(found)),
        Answer::Refused(Refusal::Unsupported(reason)) => {
            (Outcome::Unsupported, reason.clone(), none())
        }
        Answer::Refused(Refusal::Fault(reason)) => (Outcome::Fault, reason.clone(), none()),
        Answer::Lost(reason) => (Outcome::Lost, reason.clone(), none()),
    };
    let count = if let Answer::InTurn(Some(lists)) = answer { lists.len() } else { 0 };
    let json = serde_json::to_vec(&Answered { id, outcome, reason, count }).map_err(said)?;
    Ok(Frame { kind: ANSWER, id, json, tensors, ..Frame::default() })
}

/// Prefixes of the names of a certificate's parts, so that none is that of an output.
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
pub fn read_answer(frame: Frame) -> Result<(u64, Answer), String> {
    let header = serde_json::from_slice(&frame.json).map_err(said)?;
    let Answered { id, outcome, reason, count } = header;
    let tensors = frame.tensors;
    let answer = match outcome {
        Outcome::Outputs => Answer::Outputs(tensors),
        Outcome::InTurn => Answer::InTurn(Some(by_number(tensors, count)?)),
        Outcome::Unkept => Answer::InTurn(None),
        Outcome::Filtered => Answer::Filtered(Some(certified(tensors)?)),
        Outcome::Unfiltered => Answer::Filtered(None),
        Outcome::Unsupported => Answer::Refused(Refusal::Unsupported(reason)),
        Outcome::Fault => Answer::Refused(Refusal::Fault(reason)),
        Outcome::Lost => Answer::Lost(reason),
    };
    Ok((id, answer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_read_as_it_was_written() {
        let tensor = Tensor { shape: vec![1], data: Data::I64(vec![3]) };
        let answers = [
            Answer::Outputs([("n".to_string(), tensor.clone())].into()),
            Answer::InTurn(None),
            Answer::InTurn(Some(vec![
                Tensors::new(),
                [("n".to_string(), tensor.clone())].into(),
                Tensors::new(),
            ])),
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
            let found = read_answer(answer(id, &expected).unwrap()).unwrap();
            assert_eq!(found, (id, expected));
        }
    }
}
