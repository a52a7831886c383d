//! A pass of linear_attention, from its problem to its steps.

use super::args::{LinearArgs, WalkArgs};
use super::prepared::{Needs, Prepared, Steps};
use super::tables::Tables;
use super::{hopper, passes};
use crate::call::PassCall;
use crate::level_table::{LINEAR_ATTENTION, LevelSpec};
use crate::memory::{Layout, beyond_32_bits};
use crate::options::Level;
use crate::parts::Parts;
use crate::pass::{Choice, PassPlan};
use etalon_problem::{LinearAttention, Pass, Result, TokenSequences};

pub(crate) fn draft(problem: &LinearAttention, call: &PassCall<'_, '_>) -> Result<PassPlan<'static>> {
    let (e, value_dim) = (&problem.extents, problem.value_dim);
    if e.dim.checked_mul(value_dim).is_none_or(|elements| elements > i32::MAX as usize) {
        return Err(beyond_32_bits(format!("a state of {} × {value_dim}", e.dim)));
    }
    let mut layout = Layout::default();
    let (options, parts) = (call.options, parts(call, &mut layout)?);
    let empty = [e.batch, e.query_heads, e.tokens, e.dim, value_dim].contains(&0);
    let boxes = hopper::takes_all(&parts);
    let spec = LevelSpec { facts: call.facts(), dim: e.dim, value_dim, empty, boxes };
    let mut choice = Choice::of(&LINEAR_ATTENTION, &spec, options.level)?;
    // A step has one kernel on all levels, without a product of matrices.
    if call.pass == Pass::Step {
        choice.level = Level::Portable;
    }
    let mut prepared = Prepared {
        problem,
        tables: Tables::new(problem, hopper::cut(options.level))?,
        level: choice.level,
        watches: !options.assume_finite,
        needs: Needs::of(&parts),
        memory: LinearArgs::default(),
        walks: WalkArgs::default(),
        parts,
    };
    prepared.memory = prepared.reserve(&mut layout)?;
    prepared.walks = hopper::reserve(&prepared, &mut layout)?;
    let steps = Steps::new(&prepared)?;
    if call.pass != Pass::Step && problem.sequences != TokenSequences::Dense {
        // Results of tokens of no sequence are 0.
        prepared.list.iter().filter(|part| !part.given).try_for_each(|part| steps.fill_part(part, 0))?;
        let LinearArgs { dots, dg, .. } = prepared.memory;
        for (numbers, heads) in [(dots, e.query_heads), (dg, e.key_heads)].into_iter().filter(|(x, _)| x.0 != 0) {
            steps.fill(numbers.0, 4 * e.batch * heads * e.tokens, 0);
        }
    }
    if prepared.level == Level::Sm90a {
        hopper::compute(&steps)?;
    }
    passes::compute(&steps)?;
    let steps = steps.finish()?;
    let (parts, image) = (prepared.parts, prepared.tables.image);
    Ok(PassPlan { parts, tables: Box::new(move || Ok(image)), scratch: layout, steps, choice })
}

fn parts(call: &PassCall<'_, '_>, layout: &mut Layout) -> Result<Parts> {
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
