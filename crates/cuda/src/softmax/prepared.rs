//! A pass of attention, attention_lse or lazy_attention: where its operands lie, its tables, its modules.

use crate::call::PassCall;
use crate::device_tensor::GivenArray;
use crate::level_table::LevelRow;
use crate::memory::{Layout, MemoryRange};
use crate::options::Level;
use crate::parts::Parts;
use crate::pass::{Choice, PassPlan, TableImage, draft_steps};
use crate::softmax::Steps;
use crate::softmax::counts::Counts;
use crate::softmax::dq_partials::DqPartials;
use crate::softmax::given::Given;
use crate::softmax::modules::Modules;
use crate::softmax::rows::{Rows, Tables};
use crate::softmax::spec::Spec;
use crate::step::Step;
use etalon_problem::{Error, Operand, Pass, Problem, Role, Scores, Sequences};
use std::ops::Deref;

/// A pass of a problem, for any operands of the same shapes and strides.
#[derive(Debug)]
pub(crate) struct Prepared<'a> {
    pub parts: Parts,
    pub scores: &'a Scores,
    /// E; `None` of attention_lse.
    pub value_dim: Option<usize>,
    /// True if the pass reads o, if it has one: for dv alone it does not.
    pub reads_o: bool,
    pub counts: Counts,
    pub spec: Spec,
    /// The level that computes the pass, and its modules.
    pub level: Level,
    pub choice: Choice,
    pub modules: Modules,
    pub tables: Tables,
    /// Arrays of calls that the tables are made of: how, and what the pass keeps for that.
    given: Option<Made>,
    /// δ of every row, in the backward pass of the first two, if that needs it.
    pub delta: Option<MemoryRange>,
    /// Counters and flags, as `fallback::reserve` says.
    pub flags: Option<MemoryRange>,
    /// Partial sums of the gradient of q, if it is computed in the pass by keys.
    pub partials: Option<DqPartials>,
}

impl Deref for Prepared<'_> {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.parts
    }
}

impl<'a> Prepared<'a> {
    /// Lays the memory of a pass out. Fails where the level that is asked for cannot compute the pass.
    pub fn new(
        problem: &'a Problem,
        call: &PassCall<'_, '_>,
        levels: &'static [LevelRow<Spec>],
        layout: &mut Layout,
    ) -> Result<Prepared<'a>, Error> {
        let (scores, value_dim) = scores_of(problem)?;
        let is_backward = call.pass == Pass::Backward && !is_lazy(problem);
        let needs_ds = ["dq", "dk", "dsinks", "dbias"].iter().any(|name| (call.holds)(name, true).is_some());
        let reads_o = !is_backward || needs_ds;
        let parts = parts(call, reads_o, layout)?;
        let (counts, tables, given) = tables(scores, call.arrays, layout)?;
        let rows = scores.row_shape().iter().product::<usize>();
        let delta = (is_backward && needs_ds).then(|| layout.named("delta of rows", 4 * rows));
        let flags = [has_whole_rows(&parts), has_both(&parts)];
        let (of, pass) = ((scores, value_dim), (call.pass, call.storage));
        let spec = Spec::new(of, pass, counts, flags, call.target, call.options);
        let choice = Choice::of(levels, &spec, call.options.level)?;
        let level = choice.level;
        let modules = match problem {
            Problem::LazyAttention(lazy) => Modules::lazy(&spec, level, lazy.bias.is_some()),
            _ => Modules::new(&spec, level),
        };
        Ok(Prepared {
            parts,
            scores,
            value_dim,
            reads_o,
            counts,
            spec,
            level,
            choice,
            modules,
            tables,
            given,
            delta: delta.transpose()?,
            flags: None,
            partials: None,
        })
    }

    /// The steps of the pass: copies of what the caller holds elsewhere than kernels find it, tables that the device
    /// makes, what a function adds, and copies of results.
    pub fn draft(&self, compute: impl FnOnce(&Steps<'_>) -> Result<(), Error>) -> Result<Vec<Step>, Error> {
        draft_steps(self, |steps| match &self.given {
            Some((given, _)) => compute(&given.make(steps)?),
            None => compute(&steps),
        })
    }

    /// The plan of the pass.
    pub fn plan(self, scratch: Layout, steps: Vec<Step>) -> PassPlan<'a> {
        let (given, tables, scores) = (self.given, self.tables, self.scores);
        let tables = move || match given {
            Some((_, image)) => Ok(image),
            None => Ok(tables.image(Rows::new(scores)?, scores)),
        };
        PassPlan { parts: self.parts, tables: Box::new(tables), scratch, steps, choice: self.choice }
    }

    /// True if the backward pass of attention_lse is given ∂lse/∂q, of which dq is a multiple.
    pub fn has_gradient(&self) -> bool {
        has_gradient(&self.parts)
    }

    /// True if kernels leave elements out: rows of no sequence, which get 0, and −∞ as their lse. In a dense
    /// batch they write every element.
    pub fn leaves_rows(&self) -> bool {
        let e = &self.scores.extents;
        self.scores.sequences != Sequences::Dense
            || [e.batch, e.query_heads, e.key_heads, e.queries, e.keys].contains(&0)
    }

    /// True if o and lse are computed: as results, or since a later pass lacks them.
    pub fn computes_forward(&self) -> bool {
        self.pass == Pass::Forward || !self.is_given("lse") || (self.reads_o && !self.is_given("o"))
    }
}

/// The operands: lse is written with o in any case, and what was saved is made again where it is absent and read.
fn parts(call: &PassCall<'_, '_>, reads_o: bool, layout: &mut Layout) -> Result<Parts, Error> {
    let made = |operand: &Operand| match operand.name {
        "lse" => true,
        "o" => operand.role == Role::Saved && reads_o,
        _ => operand.role == Role::Saved,
    };
    Parts::new(call, made, layout)
}

/// Tables that calls make: how, and what the pass keeps for that.
type Made = (Given, TableImage);

/// The tables of the rows, how many tiles there are at most, and how a call makes them of arrays that it gives.
fn tables(
    scores: &Scores,
    arrays: &[GivenArray],
    layout: &mut Layout,
) -> Result<(Counts, Tables, Option<Made>), Error> {
    Rows::check_extents(scores)?;
    if arrays.is_empty() {
        let counts = Counts::of_scores(scores);
        return Ok((counts, Tables::new(&counts, scores)?, None));
    }
    let counts = Counts::most(scores)?;
    let tables = Tables::new(&counts, scores)?;
    let given = Given::new(scores, arrays, (&counts, &tables), layout)?;
    Ok((counts, tables, Some(given)))
}

/// True if the gradient of q is wanted beside another that is computed by keys.
fn has_both(parts: &Parts) -> bool {
    let (own, others) = match parts.pass {
        Pass::DoubleBackward => ("gq", ["gk", "gv"]),
        _ => ("dq", ["dk", "dv"]),
    };
    parts.has(own) && others.into_iter().any(|name| parts.has(name)) && !has_gradient(parts)
}

fn has_gradient(parts: &Parts) -> bool {
    parts.pass == Pass::Backward && parts.part("gradient").is_some_and(|part| part.given)
}

/// True if rows of what kernels multiply begin and end at multiples of 16 bytes.
fn has_whole_rows(parts: &Parts) -> bool {
    let operands = ["q", "k", "v", "dout", "cot_o", "ddq", "ddk", "ddv", "tq", "tk", "tv"];
    parts.have_whole_rows(&operands)
}

fn is_lazy(problem: &Problem) -> bool {
    matches!(problem, Problem::LazyAttention(_))
}

/// The scores of a problem, and E where there are values.
pub(crate) fn scores_of(problem: &Problem) -> Result<(&Scores, Option<usize>), Error> {
    match problem {
        Problem::Attention(problem) => Ok((&problem.scores, Some(problem.value_dim))),
        Problem::AttentionLse(problem) => Ok((&problem.scores, None)),
        Problem::LazyAttention(problem) => Ok((&problem.scores, Some(problem.value_dim))),
        other => Err(Error::value("algorithm", "one with scores", other.algorithm())),
    }
}
