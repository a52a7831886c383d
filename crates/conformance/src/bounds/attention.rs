//! The bounds of attention and attention_lse: equations (N5) to (N20).

mod backward;
mod forward;
pub(super) mod row;

use super::{Asked, Errors};
use etalon_problem::{Algorithm, Error, Pass, Scores};
use forward::Values;
use row::Operands;
use std::collections::BTreeMap;

/// The errors of either algorithm: attention has values, of that width.
pub(super) fn errors(
    scores: &Scores,
    value_dim: Option<usize>,
    asked: &Asked<'_>,
) -> Result<Errors, Error> {
    let values = match value_dim {
        Some(dim) => Some(Values { v: asked.input("v")?, o: asked.output("o")?, dim }),
        None => None,
    };
    let operands = Operands {
        scores,
        q: asked.input("q")?,
        k: asked.input("k")?,
        sinks: if scores.sinks { asked.optional("sinks")? } else { None },
        bias: if scores.bias.is_some() { asked.optional("bias")? } else { None },
    };
    let lse = asked.output("lse")?;
    match asked.pass {
        Pass::Forward => {
            let errors = forward::errors(&operands, asked.model, lse, values);
            let told: Vec<f64> = errors.power.into_iter().filter(|power| !power.is_nan()).collect();
            let strong = told.iter().filter(|&&power| power >= 4.0).count();
            let power = (!told.is_empty()).then(|| strong as f64 / told.len() as f64);
            Ok(Errors { lists: BTreeMap::from([("o", errors.o), ("lse", errors.lse)]), power })
        }
        Pass::Backward => {
            let values = match values {
                Some(values) => Some((values, asked.input("dout")?)),
                None => None,
            };
            let dlse = asked.optional("dlse")?;
            let asked = backward::Asked { operands, model: asked.model, lse, dlse, values };
            let errors = backward::errors(&asked);
            let lists = BTreeMap::from([
                ("dq", errors.dq),
                ("dk", errors.dk),
                ("dv", errors.dv),
                ("dsinks", errors.dsinks),
                ("dbias", errors.dbias),
            ]);
            Ok(Errors { lists, power: None })
        }
        _ if values.is_some() => Err(asked.underived(Algorithm::Attention)),
        _ => Err(asked.underived(Algorithm::AttentionLse)),
    }
}
