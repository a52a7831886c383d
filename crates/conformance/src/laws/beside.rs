//! Numbers that are not finite reach no result that does not depend on them.

use super::flaw::Judgement;
use super::law::{DEAREST, laws, many_ways};
use super::tensors::{Equality, map, same};
use super::trial::Trial;
use crate::cases::Case;
use crate::generate::Stream;
use crate::tensor::Tensors;
use etalon_problem::{Axis, Dtype, Operand, Problem, Sequence, TokenSequence};
use std::ops::Range;

laws! {
    EVERY;
    /// An infinity or a NaN in a key head of one sequence, or in one token of linear_cross_entropy, changes no
    /// bit of the others.
    Contract beside on Any if |case, _| is_stored(case) && elements(&case.problem).len() > 1,
        favour many_ways, core DEAREST;
}

/// True if kernels store the case's type; at smoke depth the law sees few cases.
fn is_stored(case: &Case) -> bool {
    case.spec.dtype != Dtype::F64
}

/// An independent part of a result: a key head of a sequence, a token of linear_cross_entropy.
#[derive(Debug, Clone)]
struct Element {
    what: String,
    /// The entries of each axis that are its own. Of an axis that is not named all are.
    own: Vec<(Axis, Range<usize>)>,
}

/// The independent parts of a problem.
fn elements(problem: &Problem) -> Vec<Element> {
    let by_head = |heads: usize, group: usize, what: String, own: Vec<(Axis, Range<usize>)>| {
        (0..heads).map(move |h| {
            let of_head = [
                (Axis::KeyHeads, h..h + 1),
                (Axis::QueryHeads, h * group..(h + 1) * group),
                (Axis::QueryHeadsOr1, h * group..(h + 1) * group),
            ];
            let own = own.iter().cloned().chain(of_head).collect();
            Element { what: format!("{what}, key head {h}"), own }
        })
    };
    match problem {
        Problem::LinearAttention(x) => {
            let of = |s: &TokenSequence| {
                let own = vec![
                    (Axis::Batch, s.batch..s.batch + 1),
                    (Axis::Tokens, s.start..s.start + s.tokens),
                    (Axis::Sequences, s.index..s.index + 1),
                ];
                by_head(x.extents.key_heads, x.group(), format!("sequence {}", s.index), own)
            };
            x.list_sequences().iter().flat_map(of).collect()
        }
        Problem::LinearCrossEntropy(_) => {
            let of =
                |t| Element { what: format!("token {t}"), own: vec![(Axis::Targets, t..t + 1)] };
            (0..problem.extent(Axis::Targets)).map(of).collect()
        }
        _ => {
            let Some(scores) = problem.scores() else { return Vec::new() };
            let list = scores.sequences();
            let of = |(number, s): (usize, &Sequence)| {
                let own = vec![
                    (Axis::Batch, s.batch..s.batch + 1),
                    (Axis::BatchOr1, s.batch..s.batch + 1),
                    (Axis::Queries, s.query_start..s.query_start + s.queries),
                    (Axis::Keys, s.key_start..s.key_start + s.keys),
                ];
                by_head(scores.extents.key_heads, scores.group(), format!("sequence {number}"), own)
            };
            list.iter().enumerate().flat_map(of).collect()
        }
    }
}

impl Element {
    /// The entries of an axis that are its own: all of one that is shared or not cut.
    fn entries(&self, problem: &Problem, operand: &Operand, axis: usize) -> Range<usize> {
        let own = self.own.iter().find(|(own, _)| *own == operand.axes[axis]);
        let own = own.filter(|_| !is_shared(problem, operand, axis));
        own.map_or(0..operand.shape[axis], |(_, own)| own.clone())
    }

    /// True if an element of an operand belongs to it, or to it and others.
    fn has(&self, problem: &Problem, operand: &Operand, at: &[usize]) -> bool {
        at.iter().enumerate().all(|(axis, at)| self.entries(problem, operand, axis).contains(at))
    }

    /// True if an operand has elements that belong to it alone and may be any number.
    fn owns(&self, problem: &Problem, operand: &Operand) -> bool {
        // Weights of tokens are in the normaliser of all; a log-decay that grows is refused.
        if matches!(operand.name, "token_weights" | "targets" | "g") {
            return false;
        }
        let of_one = |axis: &Axis| {
            matches!(axis, Axis::Batch | Axis::BatchOr1 | Axis::Targets | Axis::Sequences)
        };
        operand.axes.iter().any(of_one)
            && (0..operand.axes.len()).all(|axis| {
                !is_shared(problem, operand, axis)
                    && !self.entries(problem, operand, axis).is_empty()
            })
    }
}

/// True if all batch elements, or all heads, share the one entry of an axis.
fn is_shared(problem: &Problem, operand: &Operand, axis: usize) -> bool {
    let all = match operand.axes[axis] {
        Axis::BatchOr1 => Axis::Batch,
        Axis::QueryHeadsOr1 => Axis::QueryHeads,
        _ => return false,
    };
    operand.shape[axis] != problem.extent(all)
}

/// Places that are tried of one case, and what is put there.
const BAD: [f64; 3] = [f64::INFINITY, f64::NAN, f64::NEG_INFINITY];

fn beside(trial: &Trial<'_>) -> Judgement {
    let problem = &trial.case.problem;
    let (elements, operands) = (elements(problem), problem.operands(trial.pass));
    let stream = Stream::new(trial.case.spec.seed, "beside");
    for (number, bad) in BAD.into_iter().enumerate() {
        let element = &elements[stream.below(8 * number, elements.len())];
        let given = |x: &&Operand| {
            x.role.is_given() && trial.inputs().contains_key(x.name) && element.owns(problem, x)
        };
        let given: Vec<&Operand> = operands.iter().filter(given).collect();
        if given.is_empty() {
            continue; // a sequence without tokens
        }
        let struck = given[stream.below(8 * number + 1, given.len())];
        let at: Vec<usize> = (0..struck.axes.len())
            .map(|axis| {
                let own = element.entries(problem, struck, axis);
                own.start + stream.below(8 * number + 2 + axis, own.len())
            })
            .collect();
        let mut inputs: Tensors = trial.inputs().clone();
        if let Some(x) = inputs.get_mut(struck.name) {
            *x = map(x, |other, x| if other == at { bad } else { x })?;
        }
        let outputs = trial.ask(problem, &inputs)?;
        let counts = |name: &str, at: &[usize]| {
            operands.iter().find(|x| x.name == name).is_some_and(|x| !element.has(problem, x, at))
        };
        same(&outputs, trial.clean()?, Equality::Bits, counts).map_err(|flaw| {
            flaw.of(&format!("{}{at:?} = {bad} of {}", struck.name, element.what))
        })?;
    }
    Ok(None)
}
