//! Results of other decays than the problem's.
//!
//! Two libraries call different log-decays "the slopes of lightning attention", and kernels that make
//! them themselves, from the number of heads, never read `g_gamma`. What such a kernel returns is not
//! wrong but of other decays, and a report should say of which.

use super::{Edit, Reading};
use crate::gates;
use crate::laws::trial::Trial;
use crate::report::Verdict;
use crate::tensor::{Stored, Tensor, Tensors};
use etalon_problem::{Decay, Problem, slopes};
use ndarray::{Array1, ArrayD};
use std::sync::OnceLock;

/// The most layers of a model whose factors are recognised.
const LAYERS: usize = 128;

/// Distance up to which two lists of log-decays count as one: some roundings to f32.
const NEAR: f64 = 1e-6;

/// Distance that tells a convention from a kernel that is not quite within its bounds.
const APART: f64 = 0.02;

/// Log-decays with a name.
struct Named {
    id: &'static str,
    name: String,
    log_decays: Vec<f64>,
}

/// Findings about the outputs of a trial that are within the bounds of other decays than the problem's.
#[derive(Debug)]
pub enum Finding {
    /// They are those of a convention: a sentence for a report.
    Convention(String),
    /// They are those of no decay, which is a convention of one head, or a mistake: the same.
    Undecided(String),
}

/// The verdict of a report on a broken law. A tier that answers under another convention than the
/// problem's has broken many laws: the convention stands before what each law noticed. `finding` keeps
/// it for the next law of the same trial.
pub fn broken(trial: &Trial<'_>, finding: &OnceLock<Option<Finding>>, text: String) -> Verdict {
    match finding.get_or_init(|| found(trial)) {
        Some(Finding::Convention(name)) => Verdict::Convention(format!("{name}; {text}")),
        Some(Finding::Undecided(hint)) => Verdict::Fail(format!("{text}; {hint}")),
        None => Verdict::Fail(text),
    }
}

/// The problem as kernels read it that make their slopes themselves.
pub(super) fn readings(problem: &Problem, inputs: &Tensors) -> Vec<Reading> {
    let Some(given) = given(problem, inputs) else { return Vec::new() };
    let others = candidates(&given).into_iter().filter(|x| is_apart(x, &given));
    let reading = |named: Named| {
        let text = format!("{}. The kernel decays by {}", named.id, named.name);
        let log_decays = Array1::from(named.log_decays).into_dyn();
        Reading::plain(named.id, text, problem).edit("g_gamma", Edit::Replace(log_decays.into()))
    };
    others.map(reading).collect()
}

/// The log-decays that were given for each head, if there are any.
fn given(problem: &Problem, inputs: &Tensors) -> Option<Vec<f64>> {
    let Problem::LinearAttention(problem) = problem else { return None };
    if problem.decay != Decay::PerHead {
        return None;
    }
    let given = inputs.get("g_gamma")?.to_f64("g_gamma").ok()?;
    Some(given.iter().copied().collect())
}

/// The inputs with other log-decays.
fn with(inputs: &Tensors, log_decays: Vec<f64>) -> Option<Tensors> {
    let stored = inputs.get("g_gamma")?.dtype()?;
    let values: ArrayD<f64> = Array1::from(log_decays).into_dyn();
    let mut inputs = inputs.clone();
    inputs.insert("g_gamma".to_string(), Tensor::store(&values, Stored::Float(stored)));
    Some(inputs)
}

fn is_apart(named: &Named, given: &[f64]) -> bool {
    !within(&named.log_decays, given, APART)
}

/// The convention under which the outputs of a trial are within their bounds, if they are not under
/// that of the problem.
fn found(trial: &Trial<'_>) -> Option<Finding> {
    let given = given(&trial.case.problem, trial.inputs())?;
    let outputs = trial.clean().ok()?;
    if gates::g1(trial.bounds().ok()?, outputs).verdict == Verdict::Pass {
        return None;
    }
    for named in candidates(&given).into_iter().filter(|x| is_apart(x, &given)) {
        let Named { id, name, log_decays } = named;
        let decays = log_decays.iter().any(|&g| g != 0.0);
        let inputs = with(trial.inputs(), log_decays)?;
        let bounds = trial.bounds_of(&trial.case.problem, &inputs).ok()?;
        if gates::g1(&bounds, outputs).verdict != Verdict::Pass {
            continue;
        }
        let asked = names(&given).into_iter().next();
        let asked = asked.map_or(String::new(), |named| format!(", which is {}", named.name));
        return Some(match decays {
            true => Finding::Convention(format!(
                "another convention: these are the results of {name}, not of the g_gamma that was \
                 given{asked} ({id})"
            )),
            false => Finding::Undecided(format!(
                "these are the results of no decay: it is ignored, or taken to be {name}"
            )),
        });
    }
    None
}

/// Candidates of what a kernel may have used: the log-decays with a name for so many heads, of the layers that the
/// given ones are of or else of a first layer.
fn candidates(given: &[f64]) -> Vec<Named> {
    let heads = given.len();
    let mut layers: Vec<(usize, usize)> = named_layers(given).map(|(_, at)| at).collect();
    layers.push((0, 1));
    let mut list: Vec<Named> = Vec::new();
    let of_layers = layers.into_iter().flat_map(|at| of_layer(heads, at));
    for named in of_layers.chain(retention(heads)) {
        if !list.iter().any(|known| near(&known.log_decays, &named.log_decays)) {
            list.push(named);
        }
    }
    list
}

/// The names of log-decays.
fn names(given: &[f64]) -> Vec<Named> {
    let mut list: Vec<Named> = named_layers(given).map(|(named, _)| named).collect();
    list.extend(retention(given.len()).filter(|x| near(&x.log_decays, given)));
    list
}

/// The names of log-decays that depend on a layer, and the layer and the number of layers; the fewest
/// layers first.
fn named_layers(given: &[f64]) -> impl Iterator<Item = (Named, (usize, usize))> {
    let layers = (1..=LAYERS).flat_map(|layers| (0..layers).map(move |layer| (layer, layers)));
    let named = layers.flat_map(|at| of_layer(given.len(), at).map(move |named| (named, at)));
    named.filter(|(named, _)| near(&named.log_decays, given))
}

fn near(a: &[f64], b: &[f64]) -> bool {
    within(a, b, NEAR)
}

fn within(a: &[f64], b: &[f64], share: f64) -> bool {
    a.iter().zip(b).all(|(a, b)| (a - b).abs() <= share * a.abs().max(b.abs()))
}

/// The log-decays with a name for so many heads of a layer, of so many: geometric ones, then linear.
fn of_layer(heads: usize, (layer, layers): (usize, usize)) -> impl Iterator<Item = Named> {
    let [geometric, linear] =
        [slopes::geometric, slopes::linear].map(|of| of(heads, layer, layers));
    let list = [
        ("slopes-geometric", "geometric", geometric, "the original lightning attention"),
        ("slopes-linear", "linear", linear, "flash-linear-attention's lightning_attn"),
    ];
    list.into_iter().filter_map(move |(id, name, log_decays, of)| {
        let name = format!("slopes::{name}({heads}, {layer}, {layers}), those of {of}");
        Some(Named { id, name, log_decays: log_decays.ok()? })
    })
}

fn retention(heads: usize) -> Option<Named> {
    let name = format!("slopes::retention({heads}), those of retention");
    Some(Named { id: "slopes-retention", name, log_decays: slopes::retention(heads).ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounded(list: Vec<f64>) -> Vec<f64> {
        list.into_iter().map(|x| f64::from(x as f32)).collect()
    }

    #[test]
    fn a_name_is_found_again_and_leads_to_the_others() {
        for heads in [2, 6, 8, 16] {
            // Of a layer of a model, and of a first layer.
            for at in [(3, 12), (0, 1), (11, 24)] {
                let mut both = of_layer(heads, at);
                let [geometric, linear] = [(); 2].map(|()| both.next().unwrap());
                for (given, other) in [(&geometric, &linear), (&linear, &geometric)] {
                    let given = rounded(given.log_decays.clone());
                    let found = names(&given).swap_remove(0);
                    assert!(near(&found.log_decays, &given), "{}", found.name);
                    let other = &other.log_decays;
                    let candidates = candidates(&given);
                    assert!(
                        candidates.iter().any(|x| near(&x.log_decays, other)),
                        "{heads} {at:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn numbers_without_a_name_have_none() {
        assert!(names(&[-0.3, -0.2, -0.7]).is_empty());
        assert_eq!(candidates(&[-0.3, -0.2, -0.7]).len(), 3, "geometric, linear, retention");
    }
}
