//! The problems that every law is run over: each option alone, and combinations in which they
//! meet.

use super::tensors::{Random, Tensors};
use etalon_problem::{Decay, LinearAttention, LinearExtents, Operand, Pass, TokenSequences};
use ndarray::{ArrayD, IxDyn};

/// Log-decays of a problem.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gates {
    /// Between −1.5 and 0.
    Usual,
    /// One in three forgets everything.
    Resets,
    /// From 0, which forgets nothing, to −800, where e^g underflows to 0.
    Extreme,
}

/// A problem with a name.
#[derive(Debug)]
pub struct Case {
    pub name: String,
    pub problem: LinearAttention,
    pub gates: Gates,
}

/// B, Hq, Hk, N, D, and E.
pub fn problem([batch, query_heads, key_heads, tokens, dim, width]: [usize; 6]) -> LinearAttention {
    let extents = LinearExtents { batch, query_heads, key_heads, tokens, dim };
    LinearAttention::new(extents).value_dim(width)
}

/// Every option at once.
pub fn with_all(problem: LinearAttention, decay: Decay) -> LinearAttention {
    problem.decay(decay).initial_state().final_state().scale(-0.75)
}

pub fn lengths(tokens: &[usize]) -> TokenSequences {
    TokenSequences::Lengths { tokens: tokens.to_vec() }
}

pub fn packed(cu_tokens: &[usize]) -> TokenSequences {
    TokenSequences::Packed { cu_tokens: cu_tokens.to_vec() }
}

pub fn cases() -> Vec<Case> {
    use Decay::{PerHead, PerToken};
    use Gates::{Extreme, Resets, Usual};
    // Extents of unlike size, so that no axis can stand in for another.
    let plain = || problem([2, 3, 3, 5, 4, 2]);
    let grouped = || problem([2, 6, 2, 5, 3, 4]);
    let padded = || problem([4, 2, 1, 6, 2, 3]).sequences(lengths(&[4, 0, 6, 1]));
    // An empty sequence first, one amid, and tokens after the last.
    let joined = || problem([1, 4, 2, 11, 3, 2]).sequences(packed(&[0, 0, 4, 5, 5, 9]));
    // 23 tokens are four stretches of stored states and a rest; 11 and 17 elements are more than the eight
    // partial sums of a dot product, and a rest.
    let long = || problem([1, 1, 1, 23, 11, 17]);
    let list = vec![
        ("plain", plain(), Usual),
        ("scale", plain().scale(-0.3), Usual),
        ("decay per head", plain().decay(PerHead), Usual),
        ("decay per token", plain().decay(PerToken), Usual),
        ("initial state", plain().initial_state(), Usual),
        ("final state", plain().final_state(), Usual),
        ("decay and states", plain().decay(PerHead).initial_state().final_state(), Usual),
        ("all options, per head", with_all(plain(), PerHead), Usual),
        ("all options, per token", with_all(plain(), PerToken), Usual),
        ("resets per head", with_all(plain(), PerHead), Resets),
        ("resets per token", with_all(plain(), PerToken), Resets),
        ("resets without states", plain().decay(PerToken), Resets),
        ("extreme per head", with_all(plain(), PerHead), Extreme),
        ("extreme per token", with_all(plain(), PerToken), Extreme),
        ("grouped", grouped(), Usual),
        ("grouped, per head", with_all(grouped(), PerHead), Usual),
        ("grouped, resets", with_all(grouped(), PerToken), Resets),
        ("one key head", with_all(problem([1, 3, 1, 4, 2, 5]), PerToken), Usual),
        ("lengths", padded(), Usual),
        ("lengths, all options", with_all(padded(), PerToken), Resets),
        ("packed", joined().decay(PerHead), Usual),
        ("packed, all options", with_all(joined(), PerToken), Usual),
        ("packed, resets", with_all(joined(), PerToken), Resets),
        ("long", with_all(long(), PerToken), Usual),
        ("long, resets", with_all(long(), PerToken), Resets),
        ("one of each", with_all(problem([1, 1, 1, 1, 1, 1]), PerToken), Usual),
        ("no tokens", with_all(problem([2, 2, 1, 0, 3, 2]), PerToken), Usual),
        ("no batch", with_all(problem([0, 2, 1, 2, 3, 2]), PerToken), Usual),
        ("no query heads", with_all(problem([1, 0, 2, 3, 3, 2]), PerHead), Usual),
    ];
    let case =
        |(name, problem, gates): (&str, _, _)| Case { name: name.to_string(), problem, gates };
    list.into_iter().map(case).collect()
}

impl Case {
    /// Every operand that the pass reads, the optional ones too. A tensor depends on its name and
    /// on the seed, not on the pass.
    pub fn operands(&self, pass: Pass, seed: u64) -> Tensors<f64> {
        let operands = self.problem.operands(pass);
        let read = operands.into_iter().filter(|operand| operand.role.is_given());
        read.map(|Operand { name, shape, .. }| {
            let hash =
                name.bytes().fold(seed, |hash, byte| hash.wrapping_mul(257) + u64::from(byte));
            let mut random = Random(hash);
            let decay = name == "g" || name == "g_gamma";
            let element = || if decay { self.gates.draw(&mut random) } else { random.number() };
            (name.to_string(), ArrayD::from_shape_simple_fn(IxDyn(&shape), element))
        })
        .collect()
    }

    /// A direction in which everything that `pass` reads moves, named as the operands are.
    pub fn direction(&self, pass: Pass, seed: u64) -> Tensors<f64> {
        let usual =
            Case { name: String::new(), problem: self.problem.clone(), gates: Gates::Usual };
        usual.operands(pass, seed ^ 0xd1ec)
    }
}

impl Gates {
    fn draw(self, random: &mut Random) -> f64 {
        let usual = -random.number().abs();
        match (self, random.below(3)) {
            (Gates::Resets, 0) => f64::NEG_INFINITY,
            (Gates::Extreme, 0) => 0.0,
            (Gates::Extreme, 1) => -800.0,
            _ => usual,
        }
    }
}
