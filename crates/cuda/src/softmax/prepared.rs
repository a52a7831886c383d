//! A pass of attention, attention_lse or lazy_attention: where its operands lie, its tables.

use super::counts::Counts;
use super::dq_partials::DqPartials;
use super::given::Given;
use super::rows::Tables;
use super::spec::Spec;
use crate::call::PassCall;
use crate::level_table::LevelRow;
use crate::memory::{Layout, MemoryRange};
use crate::parts::Parts;
use crate::pass::{Choice, TableImage};
use etalon_problem::{DistanceBias, Error, Operand, Pass, Problem, Result, Role, Scores, Sequence, Sequences};

#[derive(Debug)]
pub(crate) struct Prepared<'a> {
    pub parts: Parts,
    pub scores: &'a Scores,
    /// True if the pass reads o, if it has one: for dv alone it does not.
    pub reads_o: bool,
    pub distance_bias: Option<DistanceBias>,
    pub spec: Spec,
    pub choice: Choice,
    pub tables: Tables,
    /// Tables of arrays that calls give, and what the pass keeps for them.
    pub given: Option<(Given, TableImage)>,
    /// δ of every row, in a backward pass that needs it.
    pub delta: Option<MemoryRange>,
    /// As `fallback::reserve` says.
    pub flags: Option<MemoryRange>,
    /// Partial sums, where the gradient of q is computed in the pass by keys.
    pub partials: Option<DqPartials>,
}

crate::read_as::read_as!(Prepared<'_>, parts: Parts);

impl<'a> Prepared<'a> {
    /// Fails where the level that is asked for cannot compute the pass.
    pub fn new(
        problem: &'a Problem,
        call: &PassCall<'_, '_>,
        levels: &'static [LevelRow<Spec>],
        layout: &mut Layout,
    ) -> Result<Prepared<'a>> {
        let (scores, value_dim) = scores_of(problem)?;
        let is_backward = call.pass == Pass::Backward && !matches!(problem, Problem::LazyAttention(_));
        let needs_ds = ["dq", "dk", "dsinks", "dbias"].iter().any(|name| call.held(name, true).is_some());
        let reads_o = !is_backward || needs_ds;
        // lse is written with o in any case; what was saved is made again where it is absent and read.
        let made = |operand: &Operand| match operand.name {
            "lse" => true,
            "o" => operand.role == Role::Saved && reads_o,
            _ => operand.role == Role::Saved,
        };
        let parts = Parts::new(call, made, layout)?;
        let is_given = !call.arrays.is_empty();
        let counts = if is_given { Counts::most(scores)? } else { Counts::of_scores(scores) };
        let tables = Tables::new(&counts, scores)?;
        let given = is_given.then(|| Given::new(scores, call.arrays, (&counts, &tables), layout)).transpose()?;
        let rows = scores.row_shape().iter().product::<usize>();
        let delta = (is_backward && needs_ds).then(|| layout.named("delta of rows", 4 * rows));
        let flags = [parts.have_whole_rows(&MULTIPLIED), has_both(&parts), parts.has("dbias")];
        let spec = Spec::new((scores, value_dim), call.facts(), counts, flags, &call.options);
        let choice = Choice::of(levels, &spec, call.options.level)?;
        let distance_bias = if let Problem::LazyAttention(lazy) = problem { lazy.bias } else { None };
        Ok(Prepared {
            parts,
            scores,
            reads_o,
            distance_bias,
            spec,
            choice,
            tables,
            given,
            delta: delta.transpose()?,
            flags: None,
            partials: None,
        })
    }

    /// True if kernels leave elements out: rows of no sequence, and of one without queries or keys, which get
    /// 0, and −∞ as their lse; the gradient of a bias that no sequence reads.
    pub fn leaves_rows(&self) -> bool {
        let e = &self.scores.extents;
        if self.scores.sequences == Sequences::Dense {
            return [e.batch, e.query_heads, e.key_heads, e.queries, e.keys].contains(&0);
        }
        let sequences = self.scores.sequences();
        let own = |rows: fn(&Sequence) -> usize| sequences.iter().map(rows).sum::<usize>();
        let is_whole = own(|s| s.queries) == e.batch * e.queries && own(|s| s.keys) == e.batch * e.keys;
        // Only a call knows sequences whose offsets lie on the device.
        let leaves_some = sequences.is_empty() || sequences.iter().any(|s| s.queries == 0 || s.keys == 0);
        self.given.is_some() || !is_whole || leaves_some
    }

    /// True if the backward pass of sm90a reads an operand: for dv alone neither o nor v, of attention_lse no values.
    pub fn reads(&self, name: &str) -> bool {
        let has_values = self.spec.value_dim.is_some();
        match name {
            "dout" => has_values,
            "o" | "v" => has_values && self.reads_o,
            _ => true,
        }
    }

    /// True if o and lse are computed: as results, or since a later pass lacks them.
    pub fn computes_forward(&self) -> bool {
        self.pass == Pass::Forward || !self.is_given("lse") || (self.reads_o && !self.is_given("o"))
    }
}

impl Parts {
    /// True if the backward pass of attention_lse is given ∂lse/∂q, of which dq is a multiple.
    pub(super) fn has_gradient(&self) -> bool {
        self.pass == Pass::Backward && self.part("gradient").is_some_and(|part| part.given)
    }
}

fn has_both(parts: &Parts) -> bool {
    let (own, others) = match parts.pass {
        Pass::DoubleBackward => ("gq", ["gk", "gv"]),
        _ => ("dq", ["dk", "dv"]),
    };
    parts.has(own) && others.into_iter().any(|name| parts.has(name)) && !parts.has_gradient()
}

const MULTIPLIED: [&str; 11] = ["q", "k", "v", "dout", "cot_o", "ddq", "ddk", "ddv", "tq", "tk", "tv"];

fn scores_of(problem: &Problem) -> Result<(&Scores, Option<usize>)> {
    match problem {
        Problem::Attention(own) => Ok((&own.scores, Some(own.value_dim))),
        Problem::AttentionLse(own) => Ok((&own.scores, None)),
        Problem::LazyAttention(own) => Ok((&own.scores, Some(own.value_dim))),
        other => Err(Error::value("algorithm", "one with scores", other.algorithm())),
    }
}
