//! The grid of linear_attention.

mod family;
mod shape;

pub use family::{Family, GateKind};
pub use shape::TokenShape;

use super::Grid;
use super::axes::{axis, point};
use crate::generate::Stream;
use etalon_problem::{Algorithm, Decay, Dtype, LinearAttention, Operand, Problem, TokenSequences};
use ndarray::ArrayD;

axis! {
    "decay",
    /// How states decay.
    DecayKind {
        /// Not at all.
        None = "none",
        /// By a constant of the head.
        PerHead = "per_head",
        /// By a gate of the token.
        PerToken = "per_token",
    }
}

axis! {
    "states",
    /// Which states go in and come out.
    StateKind {
        /// None.
        Neither = "no_state",
        /// An initial state.
        Initial = "initial",
        /// The final state is returned, and has a cotangent.
        Final = "final",
        /// Both.
        Both = "both",
        /// Both, but the final state has no cotangent.
        NoCotangent = "no_dfinal",
    }
}

axis! {
    "sequences",
    /// How tokens divide into sequences.
    TokenSequenceKind {
        /// One sequence per batch element.
        Dense = "dense",
        /// Padded on the right.
        Lengths = "lengths",
        /// Laid end to end, empty ones among them.
        Packed = "packed",
    }
}

axis! {
    "scale",
    /// The factor of o.
    ScaleKind {
        /// 1.
        One = "one",
        /// 1/√D.
        Root = "root",
        /// Something negative.
        Negative = "negative",
    }
}

point! {
    /// What a case of linear_attention is made of, beside its storage type and seed.
    Point {
        /// How states decay.
        decay: DecayKind,
        /// The log-decays.
        gates: GateKind,
        /// Which states there are.
        states: StateKind,
        /// The class of extents.
        shape: TokenShape,
        /// How tokens divide into sequences.
        sequences: TokenSequenceKind,
        /// The factor of o.
        scale: ScaleKind,
        /// The elements.
        family: Family,
    }
}

impl Grid for Point {
    const STORAGE: &'static [Dtype] = &[Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::F64];

    fn problem(&self, _: Algorithm, seed: u64) -> Problem {
        let (mut extents, value_dim) = self.shape.draw(seed);
        if self.sequences == TokenSequenceKind::Packed {
            extents.batch = 1;
        }
        let decay = match self.decay {
            DecayKind::None => Decay::None,
            DecayKind::PerHead => Decay::PerHead,
            DecayKind::PerToken => Decay::PerToken,
        };
        let scale = match self.scale {
            ScaleKind::One => 1.0,
            ScaleKind::Root => 1.0 / (extents.dim as f64).sqrt(),
            ScaleKind::Negative => -0.3,
        };
        let sequences = self.sequences.draw(extents.batch, extents.tokens, seed);
        let mut problem = LinearAttention::new(extents).value_dim(value_dim).decay(decay);
        problem.initial_state = !matches!(self.states, StateKind::Neither | StateKind::Final);
        problem.final_state = !matches!(self.states, StateKind::Neither | StateKind::Initial);
        problem.scale(scale).sequences(sequences).into()
    }

    fn values(&self, _: &Problem, operand: &Operand, dtype: Dtype, seed: u64) -> ArrayD<f64> {
        match operand.name {
            "g" | "g_gamma" => self.gates.values(operand, seed),
            _ => self.family.values(operand, dtype, seed),
        }
    }

    fn given(&self, operand: &Operand) -> bool {
        operand.name != "dfinal_state" || self.states != StateKind::NoCotangent
    }

    fn few_words(&self) -> &'static str {
        super::Axis::name(self.family)
    }

    /// Where terms do not cancel, however many they are, the bounds follow the results. (dscale is
    /// one sum over everything, and elsewhere it may come out anywhere near 0.)
    fn is_rich(&self, problem: &Problem) -> bool {
        let Problem::LinearAttention(problem) = problem else { return false };
        let lengths = problem.list_sequences().iter().map(|s| s.tokens).max();
        self.family == Family::Positive
            && !matches!(self.gates, GateKind::Strong | GateKind::Resets)
            && lengths.is_some_and(|tokens| tokens >= 4)
            && problem.extents.query_heads > 0
            && problem.scale > 0.0
    }

    fn is_smooth(&self) -> bool {
        // A gate of 0 or −∞ is not to be moved.
        let gates = matches!(self.gates, GateKind::Usual | GateKind::Weak);
        let elements = !matches!(self.family, Family::Range | Family::Zeros);
        elements && (gates || self.decay == DecayKind::None)
    }
}

impl TokenSequenceKind {
    fn draw(self, batch: usize, tokens: usize, seed: u64) -> TokenSequences {
        let stream = Stream::new(seed, "sequences");
        match self {
            TokenSequenceKind::Dense => TokenSequences::Dense,
            TokenSequenceKind::Lengths => {
                // The first element is whole, the second one token short, the others anything.
                let length = |b: usize| match b {
                    0 if batch > 1 => tokens,
                    1 => tokens.saturating_sub(1),
                    _ => stream.below(b, tokens + 1),
                };
                TokenSequences::Lengths { tokens: (0..batch).map(length).collect() }
            }
            TokenSequenceKind::Packed => {
                // Five sequences, the second of them empty, and a token left over.
                let last = tokens - usize::from(tokens > 4);
                let mut cuts: Vec<usize> = (0..4).map(|i| stream.below(i, last + 1)).collect();
                cuts.extend([0, last]);
                cuts.sort_unstable();
                cuts[2] = cuts[1];
                TokenSequences::Packed { cu_tokens: cuts }
            }
        }
    }
}
