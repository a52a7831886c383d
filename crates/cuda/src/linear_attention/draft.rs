//! A pass of linear_attention, from its problem to its steps.

use super::levels::LEVELS;
use super::prepared::{Prepared, Ranges, Steps, WalkRanges};
use super::tables::Tables;
use super::{hopper, passes};
use crate::call::PassCall;
use crate::level_table::LevelSpec;
use crate::memory::{Layout, beyond_32_bits};
use crate::options::Level;
use crate::parts::Parts;
use crate::pass::{Choice, PassPlan};
use etalon_problem::{Error, LinearAttention, Pass};

pub(crate) fn draft(problem: &LinearAttention, call: &PassCall<'_, '_>) -> Result<PassPlan<'static>, Error> {
    check_states(problem)?;
    let mut layout = Layout::default();
    let (options, parts) = (call.options, parts(call, &mut layout)?);
    let spec = spec(problem, call, hopper::takes_all(&parts));
    let mut choice = Choice::of(&LEVELS, &spec, options.level)?;
    // A step has one kernel on all levels, without a product of matrices.
    if call.pass == Pass::Step {
        choice.level = Level::Portable;
    }
    let tables = Tables::new(problem, hopper::cut(options.level))?;
    let (watches, ranges, walks) = (!options.assume_finite, Ranges::default(), WalkRanges::default());
    let level = choice.level;
    let mut prepared = Prepared { parts, problem, tables, level, watches, ranges, walks };
    prepared.ranges = prepared.reserve(&mut layout)?;
    prepared.walks = hopper::reserve(&prepared, &mut layout)?;
    let steps = Steps::new(&prepared)?;
    if call.pass != Pass::Step && prepared.has_padding() {
        // Results of tokens of no sequence are 0.
        prepared.list.iter().filter(|part| !part.given).try_for_each(|part| steps.fill_part(part, 0))?;
        let Ranges { by_scale, by_gate, .. } = prepared.ranges;
        [by_scale, by_gate].into_iter().flatten().for_each(|range| steps.clear(range));
    }
    if prepared.level == Level::Sm90a {
        hopper::compute(&steps)?;
    }
    passes::compute(&steps)?;
    let steps = steps.finish()?;
    let (parts, tables) = (prepared.parts, prepared.tables);
    let tables = Box::new(move || Ok(tables.image()));
    Ok(PassPlan { parts, tables, scratch: layout, steps, choice })
}

/// The pass, as far as it decides who computes it.
fn spec(problem: &LinearAttention, call: &PassCall<'_, '_>, boxes: bool) -> LevelSpec {
    let (e, value_dim) = (&problem.extents, problem.value_dim);
    let empty = [e.batch, e.query_heads, e.tokens, e.dim, value_dim].contains(&0);
    LevelSpec { facts: call.facts(), dim: e.dim, value_dim, empty, boxes }
}

/// Fails where a state has more elements than kernels count.
fn check_states(problem: &LinearAttention) -> Result<(), Error> {
    let (dim, value_dim) = (problem.extents.dim, problem.value_dim);
    let elements = dim.checked_mul(value_dim);
    if elements.is_none_or(|elements| elements > i32::MAX as usize) {
        return Err(beyond_32_bits(format!("a state of {dim} × {value_dim}")));
    }
    Ok(())
}

fn parts(call: &PassCall<'_, '_>, layout: &mut Layout) -> Result<Parts, Error> {
    // A step reads its new state again.
    let is_step = call.pass == Pass::Step;
    let mut parts = Parts::new(call, |operand| is_step && operand.name == "final_state", layout)?;
    if is_step && !parts.has("initial_state") {
        // The place of the new state holds the old one.
        let state = parts.list.iter_mut().find(|part| part.operand.name == "final_state");
        state.into_iter().for_each(|state| state.given = true);
    }
    Ok(parts)
}
