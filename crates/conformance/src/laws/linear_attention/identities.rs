//! Identities among results.

use super::parts::linear;
use crate::bounds::Bounds;
use crate::laws::flaw::{Flaw, Judgement};
use crate::laws::trial::Trial;
use crate::tensor::Tensors;
use crate::tier::Hints;
use etalon_problem::{Pass, TokenSequence};
use ndarray::{ArrayD, ArrayViewD, Axis};

/// A sum with what the bounds of the results in it allow.
#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    value: f64,
    slack: f64,
}

/// A result with its bound.
struct Known {
    value: ArrayD<f64>,
    bound: ArrayD<f64>,
}

impl Known {
    fn new(outputs: &Tensors, bounds: &Bounds, name: &str) -> Result<Option<Self>, Flaw> {
        let Some(tensor) = outputs.get(name) else { return Ok(None) };
        Ok(Some(Known { value: tensor.to_f64(name)?, bound: bounds.outputs[name].bound.clone() }))
    }
}

impl Sum {
    /// Adds factor · ⟨result, x⟩.
    fn add(
        &mut self,
        result: &ArrayViewD<'_, f64>,
        bound: &ArrayViewD<'_, f64>,
        x: &ArrayViewD<'_, f64>,
        factor: f64,
    ) {
        for ((result, bound), x) in result.iter().zip(bound).zip(x) {
            self.value += factor * result * x;
            if *x != 0.0 {
                // The additions here cost 2⁻⁵³ of each partial sum: 2⁻⁴⁰ covers 2¹³ of them.
                self.slack += factor.abs() * x.abs() * (bound + result.abs() * 0.5f64.powi(40));
            }
        }
    }

    fn add_known(&mut self, known: &Option<Known>, x: Option<&ArrayD<f64>>) {
        if let (Some(known), Some(x)) = (known, x) {
            self.add(&known.value.view(), &known.bound.view(), &x.view(), 1.0);
        }
    }

    /// Fails unless both are one number, as far as the bounds say.
    fn meets(&self, other: &Sum, what: &str) -> Judgement {
        let (difference, slack) = ((self.value - other.value).abs(), self.slack + other.slack);
        if difference == 0.0 || slack == f64::INFINITY {
            return Ok(None);
        }
        if difference <= slack {
            return Ok(Some(difference / slack));
        }
        Err(Flaw::Fail(format!(
            "{what}: {:e} is not {:e} within {slack:e}",
            self.value, other.value
        )))
    }
}

/// The case's results of both passes, with bounds, and its inputs.
struct Scene {
    forward: Tensors,
    inputs: std::collections::BTreeMap<String, ArrayD<f64>>,
}

impl Scene {
    fn new(trial: &Trial<'_>) -> Result<Self, Flaw> {
        let case = trial.case;
        let forward =
            trial.ask_pass(&case.problem, Pass::Forward, &case.inputs, Hints::default())?;
        let inputs = case.inputs.iter().map(|(name, x)| Ok((name.clone(), x.to_f64(name)?)));
        Ok(Scene { forward, inputs: inputs.collect::<Result<_, Flaw>>()? })
    }

    fn output(&self, trial: &Trial<'_>, name: &str) -> Result<Option<Known>, Flaw> {
        Known::new(&self.forward, trial.bounds_in(Pass::Forward)?, name)
    }

    fn input(&self, name: &str) -> Option<&ArrayD<f64>> {
        self.inputs.get(name)
    }
}

fn gradient(trial: &Trial<'_>, name: &str) -> Result<Option<Known>, Flaw> {
    Known::new(trial.clean()?, trial.bounds()?, name)
}

pub(super) fn euler_of_outputs(trial: &Trial<'_>) -> Judgement {
    let scene = Scene::new(trial)?;
    let (mut of_q, mut of_o, mut of_scale) = (Sum::default(), Sum::default(), Sum::default());
    of_q.add_known(&gradient(trial, "dq")?, scene.input("q"));
    of_o.add_known(&scene.output(trial, "o")?, scene.input("dout"));
    let scale = ndarray::arr0(linear(trial.case)?.scale).into_dyn();
    of_scale.add_known(&gradient(trial, "dscale")?, Some(&scale));
    let margin = of_q.meets(&of_o, "⟨dq, q⟩ and ⟨dout, o⟩")?;
    let other = of_scale.meets(&of_o, "σ dσ and ⟨dout, o⟩")?;
    Ok(crate::laws::values::larger(margin, other))
}

pub(super) fn euler_of_states(trial: &Trial<'_>) -> Judgement {
    let scene = Scene::new(trial)?;
    let mut of_outputs = Sum::default();
    of_outputs.add_known(&scene.output(trial, "o")?, scene.input("dout"));
    of_outputs.add_known(&scene.output(trial, "final_state")?, scene.input("dfinal_state"));
    let mut worst = None;
    for (d, x) in [("dk", "k"), ("dv", "v")] {
        let mut of_inputs = Sum::default();
        of_inputs.add_known(&gradient(trial, d)?, scene.input(x));
        of_inputs.add_known(&gradient(trial, "dinitial_state")?, scene.input("initial_state"));
        let margin = of_inputs.meets(&of_outputs, &format!("⟨{d}, {x}⟩ and ⟨dout, o⟩"))?;
        worst = crate::laws::values::larger(worst, margin);
    }
    Ok(worst)
}

/// One row, or one state, of an array of rows or states.
fn at<'a>(x: &'a ArrayD<f64>, place: &[usize]) -> ArrayViewD<'a, f64> {
    place.iter().fold(x.view(), |x, &i| x.index_axis_move(Axis(0), i))
}

pub(super) fn gradient_of_gates(trial: &Trial<'_>) -> Judgement {
    let (problem, scene) = (linear(trial.case)?, Scene::new(trial)?);
    let known = |name| gradient(trial, name);
    let (dq, dk, dg) = (known("dq")?, known("dk")?, known("dg")?);
    let last = scene.output(trial, "final_state")?;
    let (Some(dq), Some(dk), Some(dg)) = (dq, dk, dg) else { return Ok(None) };
    let (Some(q), Some(k)) = (scene.input("q"), scene.input("k")) else { return Ok(None) };
    let mut worst = None;
    for s in problem.list_sequences() {
        let TokenSequence { index, batch, start, tokens } = s;
        for h in 0..problem.extents.key_heads {
            let mut sum = Sum::default();
            if let (Some(last), Some(dlast)) = (&last, scene.input("dfinal_state")) {
                let place = [index, h];
                sum.add(
                    &at(&last.value, &place),
                    &at(&last.bound, &place),
                    &at(dlast, &place),
                    1.0,
                );
            }
            for t in (start..start + tokens).rev() {
                for head in h * problem.group()..(h + 1) * problem.group() {
                    let place = [batch, head, t];
                    sum.add(&at(&dq.value, &place), &at(&dq.bound, &place), &at(q, &place), 1.0);
                }
                let place = [batch, h, t];
                sum.add(&at(&dk.value, &place), &at(&dk.bound, &place), &at(k, &place), -1.0);
                let own = Sum { value: dg.value[&place[..]], slack: dg.bound[&place[..]] };
                let margin = own.meets(&sum, &format!("dg{place:?}"))?;
                worst = crate::laws::values::larger(worst, margin);
            }
        }
    }
    Ok(worst)
}
