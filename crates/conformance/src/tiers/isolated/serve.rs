//! The process that answers: it asks the tiers of this machine.

use super::answer::{Answer, answer};
use super::question::{Call, CallKind, read_question};
use crate::tier::{Refusal, Request, Tier};
use crate::tiers::{ask, ask_filtered, ask_in_turn};
use crate::wire::{Frame, Most};
use std::io::{self, Read, Write};
use std::sync::Mutex;

/// Answers requests until their stream ends, or until a tier can answer nothing any more: then that is the last
/// answer. Requests are computed in parallel, on the threads of the current pool.
pub fn serve(
    tiers: &[Box<dyn Tier>],
    mut requests: impl Read + Send,
    answers: impl Write + Send,
) -> io::Result<()> {
    let (answers, failed) = (Mutex::new(answers), Mutex::new(None));
    let lost = || failed.lock().is_ok_and(|failed| failed.is_some());
    rayon::in_place_scope(|scope| {
        while let Some(frame) = Frame::read(&mut requests, Most::ANY)? {
            let (answers, failed) = (&answers, &failed);
            scope.spawn(move |_| {
                let ended = reply(tiers, frame, answers);
                if let (Err(error), Ok(mut failed)) = (ended, failed.lock()) {
                    failed.get_or_insert(error);
                }
            });
            if lost() {
                break;
            }
        }
        Ok::<(), io::Error>(())
    })?;
    failed.into_inner().ok().flatten().map_or(Ok(()), Err)
}

/// Answers one request. Fails where nobody reads, or the tier is lost.
fn reply(tiers: &[Box<dyn Tier>], frame: Frame, answers: &Mutex<impl Write>) -> io::Result<()> {
    let question = read_question(frame).map_err(io::Error::other)?;
    let tier = tiers.iter().find(|tier| tier.name() == question.tier);
    let answered = match tier {
        None => {
            let reason = format!("the process that computes has no tier {}", question.tier);
            Answer::Refused(Refusal::Fault(reason))
        }
        Some(tier) => {
            let requests: Vec<Request<'_>> = question.calls.iter().map(Call::request).collect();
            let answered = answered(tier.as_ref(), &requests, question.kind);
            match (answered, tier.lost()) {
                (Ok(answer), _) => answer,
                (Err(_), Some(reason)) => Answer::Lost(reason),
                (Err(refusal), None) => Answer::Refused(refusal),
            }
        }
    };
    let frame = answer(question.id, &answered).map_err(io::Error::other)?;
    let bytes = frame.to_bytes().map_err(io::Error::other)?;
    let mut answers = answers.lock().map_err(|_| io::Error::other("a writer panicked"))?;
    answers.write_all(&bytes)?;
    answers.flush()?;
    match answered {
        Answer::Lost(reason) => Err(io::Error::other(reason)),
        _ => Ok(()),
    }
}

fn answered(tier: &dyn Tier, requests: &[Request<'_>], kind: CallKind) -> Result<Answer, Refusal> {
    match (kind, requests) {
        (CallKind::InTurn, requests) => ask_in_turn(tier, requests).map(Answer::InTurn),
        (CallKind::Alone, [request]) => ask(tier, request).map(Answer::Outputs),
        (CallKind::Filtered(filter), [request]) => {
            ask_filtered(tier, request, filter).map(Answer::Filtered)
        }
        _ => Err(Refusal::Fault(format!("got {} requests as one", requests.len()))),
    }
}

#[cfg(test)]
mod tests {
    use super::super::answer::read_answer;
    use super::super::question::question;
    use super::*;
    use crate::tensor::{Data, Tensor, Tensors};
    use crate::tier::Hints;
    use etalon_problem::{Algorithm, AttentionLse, Dtype, Extents, Pass, Problem};
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

    /// Returns lse = 5 for every row, until it is asked for keys of 13 elements.
    struct Mortal(AtomicBool);

    impl Tier for Mortal {
        fn name(&self) -> String {
            "mortal".to_string()
        }

        fn offers(&self, _: Algorithm, pass: Pass, _: Dtype) -> Result<(), String> {
            if pass == Pass::Forward { Ok(()) } else { Err("forward alone".to_string()) }
        }

        fn lost(&self) -> Option<String> {
            self.0.load(SeqCst).then(|| "dead".to_string())
        }

        fn run(&self, request: &Request<'_>) -> Result<Tensors, Refusal> {
            self.0.fetch_or(request.inputs["k"].shape[3] == 13, SeqCst);
            if self.lost().is_some() {
                return Err(Refusal::Fault("an address".to_string()));
            }
            Ok([("lse".to_string(), numbers(&[1, 1, 1], 5.0))].into())
        }
    }

    fn numbers(shape: &[usize], x: f32) -> Tensor {
        Tensor { shape: shape.to_vec(), data: Data::F32(vec![x; shape.iter().product()]) }
    }

    fn asked(id: u64, tier: &str, pass: Pass, dim: usize) -> Vec<u8> {
        let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 1, keys: 1, dim };
        let problem: Problem = AttentionLse::new(extents).into();
        let inputs = ["q", "k"].map(|name| (name.to_string(), numbers(&[1, 1, 1, dim], 1.0)));
        let inputs = &inputs.into();
        let (dtype, hints) = (Dtype::F32, Hints::default());
        let request = Request { problem: &problem, pass, dtype, inputs, hints };
        question(id, tier, &[request], CallKind::Alone).unwrap().to_bytes().unwrap()
    }

    #[test]
    fn a_server_answers_until_its_tier_is_lost() {
        let tiers: [Box<dyn Tier>; 1] = [Box::new(Mortal(AtomicBool::new(false)))];
        let mut requests = Vec::new();
        let mut ask = |id, tier, pass, dim| {
            requests.extend(asked(id, tier, pass, dim));
        };
        ask(1, "mortal", Pass::Forward, 2);
        ask(2, "mortal", Pass::Backward, 2);
        ask(3, "immortal", Pass::Forward, 2);
        let mut answers = Vec::new();
        serve(&tiers, &requests[..], &mut answers).unwrap();
        let mut read: Vec<(u64, Answer)> = Vec::new();
        let stream = &mut &answers[..];
        while let Some(frame) = Frame::read(stream, Most::ANY).unwrap() {
            read.push(read_answer(frame).unwrap());
        }
        read.sort_by_key(|(id, _)| *id);
        let outputs = [("lse".to_string(), numbers(&[1, 1, 1], 5.0))].into();
        assert_eq!(read[0], (1, Answer::Outputs(outputs)));
        let unsupported = Refusal::Unsupported("forward alone".to_string());
        assert_eq!(read[1], (2, Answer::Refused(unsupported)));
        assert!(matches!(read[2], (3, Answer::Refused(Refusal::Fault(_)))), "{read:?}");
        let (requests, mut answers) = (asked(4, "mortal", Pass::Forward, 13), Vec::new());
        assert_eq!(serve(&tiers, &requests[..], &mut answers).unwrap_err().to_string(), "dead");
        let frame = Frame::read(&mut &answers[..], Most::ANY).unwrap().unwrap();
        assert_eq!(read_answer(frame).unwrap(), (4, Answer::Lost("dead".to_string())));
        assert!(serve(&tiers, &requests[..9], Vec::new()).is_err(), "a message that was cut");
    }
}
