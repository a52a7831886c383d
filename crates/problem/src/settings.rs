//! The table of options of any problem ([`Problem::settings`]), with those that act at another place of their
//! chain.

use crate::alternatives::{Other, other};
use crate::{Alternative, LinearCrossEntropy, Problem, Scores, Setting};

impl Problem {
    /// The table of its options, set or not, each with what a kernel may take it for.
    pub fn settings(&self) -> Vec<Setting> {
        let mut table = Vec::new();
        match self {
            Problem::Attention(x) => x.options_of_table(&mut table, &Problem::from),
            Problem::AttentionLse(x) => x.options_of_table(&mut table, &Problem::from),
            Problem::LinearAttention(x) => x.options_of_table(&mut table, &Problem::from),
            Problem::LazyAttention(x) => x.options_of_table(&mut table, &Problem::from),
            Problem::LinearCrossEntropy(x) => x.options_of_table(&mut table, &Problem::from),
        }
        for (option, other) in self.chain() {
            let setting = table.iter_mut().find(|setting| setting.name == option);
            let Other { change, text, value: problem } = other;
            if problem != *self && problem.check().is_ok() {
                setting.into_iter().for_each(|setting| {
                    let (change, text, problem) = (change.clone(), text.clone(), problem.clone());
                    setting.others.push(Alternative { option, change, text, problem });
                });
            }
        }
        table
    }

    /// Problems in which an option acts at another place of its chain.
    fn chain(&self) -> Vec<(&'static str, Other<Problem>)> {
        let with = |(option, other): (_, Other<Scores>)| {
            let mut problem = self.clone();
            problem.scores_mut().into_iter().for_each(|own| own.clone_from(&other.value));
            (option, Other { change: other.change, text: other.text, value: problem })
        };
        match self {
            Problem::LinearCrossEntropy(loss) => {
                let into = |(option, x): (_, Other<LinearCrossEntropy>)| {
                    (option, Other { change: x.change, text: x.text, value: x.value.into() })
                };
                chain_of_logits(loss).into_iter().map(into).collect()
            }
            _ => self
                .scores()
                .map_or(Vec::new(), |x| chain_of_scores(x).into_iter().map(with).collect()),
        }
    }
}

/// A problem whose options act at other places of the chain of a score: q·k, the scale, the cap.
fn chain_of_scores(scores: &Scores) -> Vec<(&'static str, Other<Scores>)> {
    let Some(cap) = scores.softcap else { return Vec::new() };
    let scale = scores.scale();
    if scale <= 0.0 {
        return Vec::new();
    }
    // σ c tanh(q·k/c) = c' tanh(σ q·k/c') with c' = cσ
    let before = Scores { softcap: Some(cap * scale), ..scores.clone() };
    vec![("softcap", other("before-scale", "is applied before the scale", before))]
}

/// A problem whose options act at other places of the chain of a logit: h·w + bias, the scale, the cap,
/// the temperature.
fn chain_of_logits(loss: &LinearCrossEntropy) -> Vec<(&'static str, Other<LinearCrossEntropy>)> {
    let Some(cap) = loss.softcap else { return Vec::new() };
    let (scale, temperature) = (loss.logit_scale, loss.temperature);
    let mut list = Vec::new();
    if temperature != 1.0 {
        let before = LinearCrossEntropy {
            logit_scale: scale / temperature,
            temperature: 1.0,
            ..loss.clone()
        };
        list.push(("temperature", other("before-softcap", "divides before the softcap", before)));
        let capped = LinearCrossEntropy { softcap: Some(cap * temperature), ..loss.clone() };
        list.push((
            "softcap",
            other("after-temperature", "caps what the temperature divided", capped),
        ));
    }
    if scale != 1.0 && scale > 0.0 {
        let after = LinearCrossEntropy {
            logit_scale: 1.0,
            temperature: temperature / scale,
            ..loss.clone()
        };
        list.push(("logit_scale", other("after-softcap", "multiplies after the softcap", after)));
    }
    list
}
