//! A pass of attention, attention_lse or lazy_attention: where its operands lie, its tables, its kernels.

use crate::gpu::Kernels;
use crate::parts::{Holds, Parts};
use crate::queue::Queue;
use crate::room::{Layout, Room};
use crate::softmax::Job;
use crate::softmax::asked::Asked;
use crate::softmax::counts::Counts;
use crate::softmax::given::{Given, GivenArray};
use crate::softmax::rows::Rows;
use crate::softmax::slots::Slots;
use crate::softmax::tables::Tables;
use crate::variant::Variant;
use crate::workspace::Held;
use etalon_problem::{Dtype, Error, Operand, Pass, Problem, Role, Scores, Sequences, Table};
use std::borrow::Cow;
use std::ops::Deref;
use std::sync::Arc;

/// A pass of a problem: what its kernels are told, for any operands of the same shapes and strides.
#[derive(Debug)]
pub(crate) struct Prepared<'a> {
    pub parts: Parts,
    pub scores: Cow<'a, Scores>,
    /// E; `None` of attention_lse.
    pub value_dim: Option<usize>,
    /// Whether the pass reads o, if it has one: for dv alone it does not.
    pub reads_o: bool,
    pub counts: Counts,
    pub tables: Tables,
    origin: Origin,
    /// δ of every row, in the backward pass of the first two, if that needs it.
    pub delta: Option<Room>,
    /// Where the gradient of q is computed in the pass by keys.
    pub slots: Option<Slots>,
    /// The kernels of the level sm80 for that.
    pub fused: Option<(Arc<Kernels>, Variant)>,
    pub portable: Option<Arc<Kernels>>,
    /// The kernels of the level sm80, which take the place of portable ones.
    pub tensor: Option<(Arc<Kernels>, Variant)>,
    /// Those of a backward pass of wide operands.
    pub wide: Option<(Arc<Kernels>, Variant)>,
    /// Those for the gradient of the bias.
    pub by_pairs: Option<(Arc<Kernels>, Variant)>,
    pub second: Option<Arc<Kernels>>,
    /// The kernels of the second order on tensor cores, which take the place of these where all is finite.
    pub tensor_second: Option<(Arc<Kernels>, Variant)>,
}

/// Where the tables come from.
#[derive(Debug)]
enum Origin {
    /// They were made here, and are copied once.
    Host(Box<Rows>),
    /// The device makes them in every call.
    Device(Box<Given>),
}

impl Deref for Prepared<'_> {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.parts
    }
}

impl AsRef<Parts> for Prepared<'_> {
    fn as_ref(&self) -> &Parts {
        &self.parts
    }
}

impl<'a> Prepared<'a> {
    /// Lays the memory of a pass out that has passed [`Table::check_call`], and makes its tables, unless calls give arrays
    /// that they are made of.
    pub fn new(
        held: Arc<Held>,
        problem: &'a Problem,
        (pass, storage): (Pass, Dtype),
        table: &Table,
        (holds, given): (Holds<'_>, &[GivenArray]),
        layout: &mut Layout,
    ) -> Result<Prepared<'a>, Error> {
        let (scores, value_dim) = scores_of(problem)?;
        let is_lazy = matches!(problem, Problem::LazyAttention(_));
        let is_backward = pass == Pass::Backward && !is_lazy;
        let needs_ds =
            ["dq", "dk", "dsinks", "dbias"].into_iter().any(|name| holds(name, true).is_some());
        let reads_o = !is_backward || needs_ds;
        // lse is written with o in any case, and what was saved is made again where it is absent and read.
        let made = |operand: &Operand| match operand.name {
            "lse" => true,
            "o" => operand.role == Role::Saved && reads_o,
            _ => operand.role == Role::Saved,
        };
        let parts = Parts::new(held, (pass, storage), table, holds, made, layout)?;
        Rows::check_extents(scores)?;
        let counts = match given {
            [] => Counts::of_scores(scores),
            _ => Counts::most(scores)?,
        };
        let tables = Tables::new(&counts, scores)?;
        let origin = match given {
            [] => Origin::Host(Box::new(Rows::new(scores)?)),
            _ => Origin::Device(Box::new(Given::new(
                &parts,
                scores,
                given,
                (&counts, &tables),
                layout,
            )?)),
        };
        let numbers = scores.row_shape().iter().product::<usize>();
        let delta = match is_backward && needs_ds {
            true => Some(layout.room(4 * numbers)?),
            false => None,
        };
        Ok(Prepared {
            parts,
            scores: Cow::Borrowed(scores),
            value_dim,
            reads_o,
            counts,
            tables,
            origin,
            delta,
            slots: None,
            fused: None,
            portable: None,
            tensor: None,
            wide: None,
            by_pairs: None,
            second: None,
            tensor_second: None,
        })
    }

    /// A call of the pass, once its tables are there.
    pub fn begin<'j>(job: Job<'j>) -> Result<Job<'j>, Error> {
        match &job.prepared.origin {
            Origin::Host(_) => Ok(job),
            Origin::Device(given) => given.make(job),
        }
    }

    /// What decides how the pass is computed.
    pub fn asked(&self) -> Asked<'_> {
        let (own, others) = match self.pass {
            Pass::DoubleBackward => ("gq", ["gk", "gv"]),
            _ => ("dq", ["dk", "dv"]),
        };
        let both = self.has(own) && others.into_iter().any(|name| self.has(name));
        Asked {
            scores: &self.scores,
            value_dim: self.value_dim,
            pass: self.pass,
            storage: self.storage,
            counts: self.counts,
            whole: self.has_whole_rows(),
            both: both && !self.has_gradient(),
            target: self.device().target(),
        }
    }

    /// Whether the backward pass of attention_lse is given ∂lse/∂q, of which dq is a multiple.
    pub fn has_gradient(&self) -> bool {
        self.pass == Pass::Backward && self.part("gradient").is_some_and(|part| part.given)
    }

    /// The same without the problem that it was made from.
    pub fn into_owned(self) -> Prepared<'static> {
        Prepared { scores: Cow::Owned(self.scores.into_owned()), ..self }
    }

    /// Whether kernels leave elements out: rows of no sequence, which get 0, and −∞ as their lse. In a dense
    /// batch they write every element.
    pub fn leaves_rows(&self) -> bool {
        let e = &self.scores.extents;
        self.scores.sequences != Sequences::Dense
            || [e.batch, e.query_heads, e.key_heads, e.queries, e.keys].contains(&0)
    }

    /// The bytes that the pass keeps: its tables, or what they are made of.
    pub fn table_bytes(&self) -> usize {
        match &self.origin {
            Origin::Host(_) => self.tables.bytes,
            Origin::Device(given) => given.bytes,
        }
    }

    /// Copies them to memory that begins there.
    pub fn upload(&self, queue: &Queue<'_>, tables: u64) -> Result<(), Error> {
        match &self.origin {
            Origin::Host(rows) => self.tables.upload(rows, &self.scores, queue, tables),
            Origin::Device(given) => given.upload(queue, tables),
        }
    }

    /// Whether rows of what kernels multiply begin and end at multiples of 16 bytes.
    pub fn has_whole_rows(&self) -> bool {
        let operands = ["q", "k", "v", "dout", "cot_o", "ddq", "ddk", "ddv", "tq", "tk", "tv"];
        self.parts.have_whole_rows(&operands)
    }

    /// A module for the device, and which one it is.
    pub fn load(&self, variant: Variant) -> Result<(Arc<Kernels>, Variant), Error> {
        let device = self.device();
        Ok((device.kernels(variant.clone(), &device.architecture())?, variant))
    }

    /// Whether o and lse are computed: as results, or since a later pass lacks them.
    pub fn computes_forward(&self) -> bool {
        self.pass == Pass::Forward || !self.is_given("lse") || (self.reads_o && !self.is_given("o"))
    }
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
