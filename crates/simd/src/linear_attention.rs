#![doc = include_str!("../../../docs/linear_attention.md")]
#![doc = include_str!("../../../docs/assets/katex.html")]

mod backward;
mod forward;
mod gates;
mod gradient;
mod operand;
mod plan;
mod scratch;
mod spans;
mod state;
mod step;

pub use backward::{backward, backward_into};
pub use forward::{forward, forward_into};
pub use plan::{SharedMemory, plan, shared_memory};
pub use step::{step, step_into};

use crate::tile::{MAX_KEYS, block};
use crate::{Element, Options};
use etalon_problem::{Blocking, Decay, Error, LinearAttention, Pass, Sequence, check_operands};
use gates::Gates;
use ndarray::{
    Array1, Array3, Array4, ArrayView1, ArrayView2, ArrayView3, ArrayView4, ArrayViewMut1,
    ArrayViewMut3, ArrayViewMut4, s,
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

    /// The gates of a key head in a sequence.
    fn gates(&self, problem: &LinearAttention, sequence: &Sequence, head: usize) -> Gates<'_> {
        let tokens = crate::heads::key_rows(sequence);
        match (problem.decay, &self.g_gamma, &self.g) {
            (Decay::PerHead, Some(g_gamma), _) => Gates::Constant(g_gamma[head]),
            (Decay::PerToken, _, Some(g)) => {
                Gates::PerToken(g.slice(s![sequence.batch, head, tokens]).reborrow())
            }
            _ => Gates::None,
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
    /// Tokens of a span: whole chunks.
    pub span: usize,
}

/// The chunk and micro-chunk that were measured to be best.
const DEFAULT: Blocking = Blocking { queries: 96, keys: 48 };

/// Chunks of a span. What a sequence is cut into is the same whatever runs beside it, so results are.
const CHUNKS: usize = 4;

impl Cut {
    /// Chunks of `blocking.queries` tokens and micro-chunks of `blocking.keys`, clamped to the tokens.
    fn new(problem: &LinearAttention, options: &Options) -> Result<Self, Error> {
        let blocking = options.blocking.unwrap_or(DEFAULT);
        blocking.check()?;
        let (rows, cols) = block(options.level);
        let longest = problem.list_sequences().iter().map(|s| s.tokens).max().unwrap_or(0);
        let chunk = blocking.queries.min(MAX_KEYS).min(longest.max(1));
        let micro = blocking.keys.next_multiple_of(rows).min(chunk);
        Ok(Cut { rows, cols, chunk, micro, span: chunk * CHUNKS })
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
