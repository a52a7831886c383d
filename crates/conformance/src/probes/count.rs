//! The count probe. With q = 0 every score is 0 and every weight 1/n. Column c of the values marks the keys whose
//! tile of 16 has number c (modulo the columns), so that n·o counts the visible keys tile by tile: a dropped,
//! doubled or foreign key is off by a whole one. The sinks and the bias of a problem that somebody brings add to
//! the keys of a row, and take from them.

use super::equal::{Equal, Row, beside};
use super::inputs::{fill_beside, skeleton, value_columns};
use crate::laws::flaw::{Flaw, Judgement};
use crate::laws::tensors::{each_element, exceeds};
use crate::laws::trial::Trial;
use crate::laws::visible::Visible;
use etalon_problem::{Dtype, Pass};

const TILE: usize = 16;

pub(super) fn count_probe(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    let (problem, scores) = skeleton(case)?;
    let columns = value_columns(&problem);
    let inputs = fill_beside(case, &problem, Pass::Forward, &beside, &|x, at| match x.name {
        "q" => 0.0,
        // Not 0: a query read from the wrong place would then go unnoticed.
        "k" => 1.0 + (at[2] % 5) as f64,
        _ => f64::from(u8::from(at[2] / TILE % columns.max(1) == at[3])),
    });
    let visible = Visible::new(&scores, &inputs);
    let outputs = trial.ask(&problem, &inputs)?;
    let equal = Equal::of(&inputs)?;
    let row = |at: [usize; 3]| equal.row(&visible, at);
    if let Some(lse) = outputs.get("lse") {
        each_element("lse", &lse.to_f64("lse")?, |at, got| {
            let Row { n, score, .. } = row([at[0], at[1], at[2]]);
            let exact = score + (n as f64).ln();
            // 2⁻²⁰ of max(1, |lse|): some ulps of f32, and far below ln(n + 1) − ln n.
            let slack = 0.5f64.powi(20) * exact.abs().max(1.0);
            let wrong = got != exact && exceeds((got - exact).abs(), slack);
            wrong.then(|| format!(" counts {} keys, not {n}", (got - score).exp()))
        })?;
    }
    let Some(o) = outputs.get("o") else { return Ok(None) };
    // Eight roundings of the storage type or of f32, and what factors lose.
    let stored = 8.0 * o.dtype().unwrap_or(Dtype::F32).unit_roundoff();
    let relative = stored + 2.0 * trial.profile().factor;
    let o = o.to_f64("o")?;
    for ((b, h, i), _) in visible.counts().indexed_iter() {
        let Row { keys, n, .. } = row([b, h, i]);
        let mut tiles = vec![0; columns];
        keys.into_iter().for_each(|j| tiles[j / TILE % columns] += 1);
        for (c, &count) in tiles.iter().enumerate() {
            let got = o[[b, h, i, c]] * n as f64;
            if exceeds((got - f64::from(count)).abs(), relative * f64::from(count)) {
                let text = format!("o[{b}, {h}, {i}, {c}] · n counts {got} keys, not {count}");
                return Err(Flaw::Fail(text));
            }
        }
    }
    Ok(None)
}
