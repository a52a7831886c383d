#![doc = include_str!("../../../docs/linear_attention.md")]
#![doc = include_str!("../../../docs/assets/katex.html")]

mod backward;
mod both_ways;
mod double_backward;
mod flow;
mod forward;
mod gates;
mod gradient;
mod moving;
mod operand;
mod plan;
mod scratch;
mod spans;
mod state;
mod step;
mod tangent;

pub use backward::{backward, backward_into};
pub use double_backward::{double_backward, double_backward_into};
pub use forward::{forward, forward_into};
pub use plan::{SharedMemory, plan, shared_memory};
pub use step::{step, step_into};

use crate::tile::MAX_KEYS;
use crate::{Element, Options};
use etalon_problem::{Blocking, Error, LinearAttention, Pass, Sequence, check_operands};
use gates::{Gates, Logs};
use ndarray::{
    Array1, Array3, Array4, ArrayView1, ArrayView2, ArrayView3, ArrayView4, ArrayViewMut1,
    ArrayViewMut3, ArrayViewMut4,
};

/// The inputs of linear attention, of any strides.
#[derive(Debug, Clone)]
pub struct Inputs<'a, T> {
    /// `[B, Hq, N, D]`.
    pub q: ArrayView4<'a, T>,
    /// `[B, Hk, N, D]`.
    pub k: ArrayView4<'a, T>,
    /// `[B, Hk, N, E]`.
    pub v: ArrayView4<'a, T>,
    /// A log-decay per key head `[Hk]`, where the problem decays so.
    pub g_gamma: Option<ArrayView1<'a, f32>>,
    /// A log-decay per token `[B, Hk, N]`, where the problem decays so.
    pub g: Option<ArrayView3<'a, f32>>,
    /// H_0, `[S, Hk, D, E]`, where the problem has it.
    pub initial_state: Option<ArrayView4<'a, f32>>,
}

impl<'a, T: Element> Inputs<'a, T> {
    /// Inputs without decay and initial state.
    pub fn new(q: ArrayView4<'a, T>, k: ArrayView4<'a, T>, v: ArrayView4<'a, T>) -> Self {
        Inputs { q, k, v, g_gamma: None, g: None, initial_state: None }
    }

    /// Adds a log-decay per key head.
    pub fn g_gamma(mut self, g_gamma: ArrayView1<'a, f32>) -> Self {
        self.g_gamma = Some(g_gamma);
        self
    }

    /// Adds a log-decay per token.
    pub fn g(mut self, g: ArrayView3<'a, f32>) -> Self {
        self.g = Some(g);
        self
    }

    /// Adds the states before the first tokens.
    pub fn initial_state(mut self, initial_state: ArrayView4<'a, f32>) -> Self {
        self.initial_state = Some(initial_state);
        self
    }

    /// Fails unless the problem is sound, its inputs fit it, and no log-decay of a head is positive or
    /// NaN.
    fn check(&self, problem: &LinearAttention) -> Result<(), Error> {
        problem.check()?;
        let e = &problem.extents;
        crate::heads::check_counts(e.batch, e.query_heads)?;
        let given = [
            ("q", Some(self.q.shape())),
            ("k", Some(self.k.shape())),
            ("v", Some(self.v.shape())),
            ("g_gamma", self.g_gamma.as_ref().map(|x| x.shape())),
            ("g", self.g.as_ref().map(|x| x.shape())),
            ("initial_state", self.initial_state.as_ref().map(|x| x.shape())),
        ];
        check_operands(&problem.operands(Pass::Forward), &given)?;
        gates::check_constant(&self.g_gamma)
    }

    /// Fails if a log-decay of a token that belongs to a sequence is positive or NaN.
    fn check_tokens(&self, problem: &LinearAttention) -> Result<(), Error> {
        let Some(g) = &self.g else { return Ok(()) };
        for sequence in problem.list_sequences() {
            for head in 0..problem.extents.key_heads {
                for t in sequence.start..sequence.start + sequence.tokens {
                    gates::check_log_decay(
                        "g",
                        &[sequence.batch, head, t],
                        g[[sequence.batch, head, t]],
                    )?;
                }
            }
        }
        Ok(())
    }

    /// The log-decays.
    fn gates(&self) -> Logs<'_> {
        let (by_head, by_token) = (&self.g_gamma, &self.g);
        Logs {
            by_head: by_head.as_ref().map(|g| g.view()),
            by_token: by_token.as_ref().map(|g| g.view()),
        }
    }
}

/// What linear attention returns.
#[derive(Debug, Clone, PartialEq)]
pub struct Output<T> {
    /// o of (R2), `[B, Hq, N, E]`.
    pub o: Array4<T>,
    /// H_n of (R1), `[S, Hk, D, E]`, where the problem asks for it.
    pub final_state: Option<Array4<f32>>,
}

/// Where the outputs of linear attention are written; of any strides.
#[derive(Debug)]
pub struct OutputMut<'a, T> {
    /// `[B, Hq, N, E]`.
    pub o: ArrayViewMut4<'a, T>,
    /// `[S, Hk, D, E]`, where the problem asks for it.
    pub final_state: Option<ArrayViewMut4<'a, f32>>,
}

/// Gradients of a loss by the outputs, of any strides.
#[derive(Debug, Clone)]
pub struct Cotangents<'a, T> {
    /// `[B, Hq, N, E]`.
    pub dout: ArrayView4<'a, T>,
    /// `[S, Hk, D, E]`; absent: zero.
    pub dfinal_state: Option<ArrayView4<'a, f32>>,
}

impl<'a, T> Cotangents<'a, T> {
    /// The cotangent of o alone.
    pub fn new(dout: ArrayView4<'a, T>) -> Self {
        Cotangents { dout, dfinal_state: None }
    }

    /// Adds that of the final state.
    pub fn dfinal_state(mut self, dfinal_state: ArrayView4<'a, f32>) -> Self {
        self.dfinal_state = Some(dfinal_state);
        self
    }

    fn check(&self, problem: &LinearAttention) -> Result<(), Error> {
        let given = [
            ("dout", Some(self.dout.shape())),
            ("dfinal_state", self.dfinal_state.as_ref().map(|x| x.shape())),
        ];
        check_operands(&problem.operands(Pass::Backward), &given)
    }
}

/// Gradients of a loss by the inputs.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients<T> {
    /// (R4), `[B, Hq, N, D]`.
    pub dq: Array4<T>,
    /// (R5), `[B, Hk, N, D]`.
    pub dk: Array4<T>,
    /// (R6), `[B, Hk, N, E]`.
    pub dv: Array4<T>,
    /// (R7) summed over tokens and sequences, `[Hk]`, where the problem decays per head.
    pub dg_gamma: Option<Array1<f32>>,
    /// (R7), `[B, Hk, N]`, where the problem decays per token.
    pub dg: Option<Array3<f32>>,
    /// (R8), `[S, Hk, D, E]`, where the problem has an initial state.
    pub dinitial_state: Option<Array4<f32>>,
    /// (R9).
    pub dscale: f32,
}

/// Where gradients are written; of any strides. A gradient that is not asked for is not paid for.
#[derive(Debug)]
pub struct GradientsMut<'a, T> {
    /// `[B, Hq, N, D]`.
    pub dq: Option<ArrayViewMut4<'a, T>>,
    /// `[B, Hk, N, D]`.
    pub dk: Option<ArrayViewMut4<'a, T>>,
    /// `[B, Hk, N, E]`.
    pub dv: Option<ArrayViewMut4<'a, T>>,
    /// `[Hk]`.
    pub dg_gamma: Option<ArrayViewMut1<'a, f32>>,
    /// `[B, Hk, N]`.
    pub dg: Option<ArrayViewMut3<'a, f32>>,
    /// `[S, Hk, D, E]`.
    pub dinitial_state: Option<ArrayViewMut4<'a, f32>>,
    /// The gradient by the scale.
    pub dscale: Option<&'a mut f32>,
}

impl<T> Default for GradientsMut<'_, T> {
    fn default() -> Self {
        GradientsMut {
            dq: None,
            dk: None,
            dv: None,
            dg_gamma: None,
            dg: None,
            dinitial_state: None,
            dscale: None,
        }
    }
}

impl<T> GradientsMut<'_, T> {
    fn check(&self, problem: &LinearAttention) -> Result<(), Error> {
        let given = [
            ("dq", self.dq.as_ref().map(|x| x.shape())),
            ("dk", self.dk.as_ref().map(|x| x.shape())),
            ("dv", self.dv.as_ref().map(|x| x.shape())),
            ("dg_gamma", self.dg_gamma.as_ref().map(|x| x.shape())),
            ("dg", self.dg.as_ref().map(|x| x.shape())),
            ("dinitial_state", self.dinitial_state.as_ref().map(|x| x.shape())),
        ];
        check_operands(&problem.operands(Pass::Backward), &given)
    }
}

/// The cotangents of the gradients and of the outputs, of any strides. What is absent is zero.
#[derive(Debug, Clone)]
pub struct SecondCotangents<'a, T> {
    /// By dq: `[B, Hq, N, D]`.
    pub ddq: Option<ArrayView4<'a, T>>,
    /// By dk: `[B, Hk, N, D]`.
    pub ddk: Option<ArrayView4<'a, T>>,
    /// By dv: `[B, Hk, N, E]`.
    pub ddv: Option<ArrayView4<'a, T>>,
    /// By dg_gamma: `[Hk]`.
    pub ddg_gamma: Option<ArrayView1<'a, f32>>,
    /// By dg: `[B, Hk, N]`. At a reset it is not read.
    pub ddg: Option<ArrayView3<'a, f32>>,
    /// By dinitial_state: `[S, Hk, D, E]`.
    pub ddinitial_state: Option<ArrayView4<'a, f32>>,
    /// By dscale.
    pub ddscale: Option<f32>,
    /// By o: `[B, Hq, N, E]`.
    pub cot_o: Option<ArrayView4<'a, T>>,
    /// By the final state: `[S, Hk, D, E]`.
    pub cot_final_state: Option<ArrayView4<'a, f32>>,
}

impl<T> Default for SecondCotangents<'_, T> {
    fn default() -> Self {
        SecondCotangents {
            ddq: None,
            ddk: None,
            ddv: None,
            ddg_gamma: None,
            ddg: None,
            ddinitial_state: None,
            ddscale: None,
            cot_o: None,
            cot_final_state: None,
        }
    }
}

impl<T> SecondCotangents<'_, T> {
    fn check(&self, problem: &LinearAttention) -> Result<(), Error> {
        let given = [
            ("ddq", self.ddq.as_ref().map(|x| x.shape())),
            ("ddk", self.ddk.as_ref().map(|x| x.shape())),
            ("ddv", self.ddv.as_ref().map(|x| x.shape())),
            ("ddg_gamma", self.ddg_gamma.as_ref().map(|x| x.shape())),
            ("ddg", self.ddg.as_ref().map(|x| x.shape())),
            ("ddinitial_state", self.ddinitial_state.as_ref().map(|x| x.shape())),
            ("cot_o", self.cot_o.as_ref().map(|x| x.shape())),
            ("cot_final_state", self.cot_final_state.as_ref().map(|x| x.shape())),
        ];
        check_operands(&problem.operands(Pass::DoubleBackward), &given)
    }

    /// How the log-decays move.
    fn drifts(&self) -> Logs<'_> {
        let (by_head, by_token) = (&self.ddg_gamma, &self.ddg);
        Logs {
            by_head: by_head.as_ref().map(|g| g.view()),
            by_token: by_token.as_ref().map(|g| g.view()),
        }
    }
}

/// The gradients by everything that the backward pass reads.
#[derive(Debug, Clone, PartialEq)]
pub struct SecondGradients<T> {
    /// By q, (R14): `[B, Hq, N, D]`.
    pub gq: Array4<T>,
    /// By k, (R15): `[B, Hk, N, D]`.
    pub gk: Array4<T>,
    /// By v, (R16): `[B, Hk, N, E]`.
    pub gv: Array4<T>,
    /// By g_gamma, (R17) summed: `[Hk]`, where the problem decays per head.
    pub gg_gamma: Option<Array1<f32>>,
    /// By g, (R17): `[B, Hk, N]`, where the problem decays per token.
    pub gg: Option<Array3<f32>>,
    /// By the initial state, (R18): `[S, Hk, D, E]`, where the problem has one.
    pub ginitial_state: Option<Array4<f32>>,
    /// By the scale, (R19).
    pub gscale: f32,
    /// By dout, (R12): `[B, Hq, N, E]`.
    pub gdout: Array4<T>,
    /// By dfinal_state, (R11): `[S, Hk, D, E]`, where the problem returns the final state.
    pub gdfinal_state: Option<Array4<f32>>,
}

/// Where second gradients are written; of any strides. Products that none of them needs are left out.
#[derive(Debug)]
pub struct SecondGradientsMut<'a, T> {
    /// `[B, Hq, N, D]`.
    pub gq: Option<ArrayViewMut4<'a, T>>,
    /// `[B, Hk, N, D]`.
    pub gk: Option<ArrayViewMut4<'a, T>>,
    /// `[B, Hk, N, E]`.
    pub gv: Option<ArrayViewMut4<'a, T>>,
    /// `[Hk]`.
    pub gg_gamma: Option<ArrayViewMut1<'a, f32>>,
    /// `[B, Hk, N]`.
    pub gg: Option<ArrayViewMut3<'a, f32>>,
    /// `[S, Hk, D, E]`.
    pub ginitial_state: Option<ArrayViewMut4<'a, f32>>,
    /// The gradient by the scale.
    pub gscale: Option<&'a mut f32>,
    /// `[B, Hq, N, E]`.
    pub gdout: Option<ArrayViewMut4<'a, T>>,
    /// `[S, Hk, D, E]`.
    pub gdfinal_state: Option<ArrayViewMut4<'a, f32>>,
}

impl<T> Default for SecondGradientsMut<'_, T> {
    fn default() -> Self {
        SecondGradientsMut {
            gq: None,
            gk: None,
            gv: None,
            gg_gamma: None,
            gg: None,
            ginitial_state: None,
            gscale: None,
            gdout: None,
            gdfinal_state: None,
        }
    }
}

impl<T> SecondGradientsMut<'_, T> {
    fn check(&self, problem: &LinearAttention) -> Result<(), Error> {
        let given = [
            ("gq", self.gq.as_ref().map(|x| x.shape())),
            ("gk", self.gk.as_ref().map(|x| x.shape())),
            ("gv", self.gv.as_ref().map(|x| x.shape())),
            ("gg_gamma", self.gg_gamma.as_ref().map(|x| x.shape())),
            ("gg", self.gg.as_ref().map(|x| x.shape())),
            ("ginitial_state", self.ginitial_state.as_ref().map(|x| x.shape())),
            ("gdout", self.gdout.as_ref().map(|x| x.shape())),
            ("gdfinal_state", self.gdfinal_state.as_ref().map(|x| x.shape())),
        ];
        check_operands(&problem.operands(Pass::DoubleBackward), &given)
    }
}

/// What the next token of every batch element is computed from; of any strides.
#[derive(Debug, Clone)]
pub struct StepInputs<'a, T> {
    /// `[B, Hq, D]`.
    pub q: ArrayView3<'a, T>,
    /// `[B, Hk, D]`.
    pub k: ArrayView3<'a, T>,
    /// `[B, Hk, E]`.
    pub v: ArrayView3<'a, T>,
    /// A log-decay per key head `[Hk]`, where the problem decays so.
    pub g_gamma: Option<ArrayView1<'a, f32>>,
    /// The token's log-decay `[B, Hk]`, where the problem decays per token.
    pub g: Option<ArrayView2<'a, f32>>,
}

/// What the next token returns.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutput<T> {
    /// o of (R2), `[B, Hq, E]`.
    pub o: Array3<T>,
    /// H_t of (R1), `[B, Hk, D, E]`.
    pub final_state: Array4<f32>,
}

/// How sequences are cut.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cut {
    /// Rows of a register block.
    pub rows: usize,
    /// Columns of a register block.
    pub cols: usize,
    /// Tokens of a chunk.
    pub chunk: usize,
    /// Tokens of a micro-chunk.
    pub micro: usize,
    /// Bytes of a state.
    pub state: usize,
}

/// The chunk and micro-chunk that were measured to be best.
const DEFAULT: Blocking = Blocking { queries: 96, keys: 48 };

/// Bytes of states that a backward pass may keep of a sequence where keeping fewer would save memory
/// and cost time: half of an L2 cache of today. A double backward pass keeps as many, each with how it
/// moves.
const KEPT: usize = 1 << 20;

impl Cut {
    /// Chunks of `blocking.queries` tokens and micro-chunks of `blocking.keys`, clamped to the tokens.
    fn new(problem: &LinearAttention, options: &Options) -> Result<Self, Error> {
        let blocking = options.blocking.unwrap_or(DEFAULT);
        blocking.check()?;
        let (rows, cols) = options.level.block();
        let longest = problem.list_sequences().iter().map(|s| s.tokens).max().unwrap_or(0);
        let chunk = blocking.queries.min(MAX_KEYS).min(longest.max(1));
        let micro = blocking.keys.min(chunk).next_multiple_of(rows).min(chunk);
        let state = problem.extents.dim.saturating_mul(problem.value_dim);
        Ok(Cut { rows, cols, chunk, micro, state: state.saturating_mul(size_of::<f32>()) })
    }

    /// Tokens of a span of a sequence: whole chunks. What a sequence is cut into is the same whatever
    /// runs beside it, and so are results.
    fn span(&self, tokens: usize) -> usize {
        self.chunk * self.interval(tokens.div_ceil(self.chunk))
    }

    /// Chunks of a span, of so many chunks. The states before spans are kept and those within one
    /// computed again: c/m + m states for spans of m chunks, least for √c. The fewer chunks, the less
    /// is computed again, and the more threads find work: as few as keep no more than [`KEPT`].
    fn interval(&self, chunks: usize) -> usize {
        let least = chunks.isqrt().max(1);
        let kept = |m: usize| (chunks.div_ceil(m) + m).saturating_mul(self.state);
        (1..least).find(|&m| kept(m) <= KEPT).unwrap_or(least)
    }
}

/// The sequences of a problem, as rows of queries and of keys.
fn sequences(problem: &LinearAttention) -> Vec<Sequence> {
    let all = problem.list_sequences().into_iter();
    all.map(|s| Sequence {
        batch: s.batch,
        query_start: s.start,
        queries: s.tokens,
        key_start: s.start,
        keys: s.tokens,
    })
    .collect()
}
