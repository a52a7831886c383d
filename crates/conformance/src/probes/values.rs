//! Every number of a storage type, as the only value of a row.
//!
//! Row i sees key i alone, and token i of linear attention is a sequence of its own: o is v, to the last bit, and dv
//! is dout. So each number is read and written once, subnormal ones and the largest among them.

use super::inputs::fill;
use crate::cases::Case;
use crate::laws::flaw::{Flaw, Judgement};
use crate::laws::tensors::returned;
use crate::laws::trial::Trial;
use etalon_problem::{
    Align, Attention, Dtype, Extents, LazyAttention, LinearAttention, LinearExtents, Mask, Pass,
    Problem, Scores, TokenSequences,
};
use half::{bf16, f16};

/// Elements of a row.
const WIDTH: usize = 64;

/// Mantissas of f32 of which every exponent has each: the first and the last, and what lies between.
const MANTISSAS: [u32; 6] = [0, 1, 0x2a_aaaa, 0x40_0000, 0x7f_fffe, 0x7f_ffff];

/// Every finite number of a type with 16 bits, without −0; of f32 some of every exponent.
fn numbers(dtype: Dtype) -> Vec<f64> {
    let of_bits = |bits: u16| match dtype {
        Dtype::F16 => f16::from_bits(bits).to_f64(),
        _ => bf16::from_bits(bits).to_f64(),
    };
    let single = |exponent: u32| MANTISSAS.map(|x| f64::from(f32::from_bits(exponent << 23 | x)));
    let all: Vec<f64> = match dtype {
        Dtype::F16 | Dtype::Bf16 => (0..=u16::MAX).map(of_bits).collect(),
        _ => (0..255).flat_map(single).flat_map(|x| [x, -x]).collect(),
    };
    all.into_iter().filter(|x| x.is_finite() && (*x != 0.0 || x.is_sign_positive())).collect()
}

pub(crate) fn value_probe(trial: &Trial<'_>) -> Judgement {
    let dtype = trial.case.dtype;
    if dtype == Dtype::F32 && trial.profile().factor > 0.0 {
        return Ok(None); // products read fewer bits
    }
    let numbers = numbers(dtype);
    let problem = problem(trial.case, numbers.len().div_ceil(WIDTH));
    let number = |at: &[usize]| numbers.get(at[2] * WIDTH + at[3]).copied().unwrap_or(0.0);
    let (given, result) = match trial.pass {
        Pass::Forward => ("v", "o"),
        _ => ("dout", "dv"),
    };
    let inputs = fill(trial.case, &problem, trial.pass, |x, at| match x.name {
        name if name == given => number(at),
        // Scores of 0; a weight of 1 in linear attention.
        "q" | "k" if matches!(problem, Problem::LinearAttention(_)) => 1.0,
        _ => 0.0,
    });
    let outputs = trial.ask(&problem, &inputs)?;
    let outputs = returned(&outputs, result)?;
    let flushes = !trial.tier.keeps_subnormals() && dtype != Dtype::F16;
    for (&got, &exact) in outputs.to_f64(result)?.iter().zip(&numbers) {
        let lost = flushes && exact.abs() < f64::from(f32::MIN_POSITIVE) && got == 0.0;
        if got != exact && !lost {
            let text = format!("{result} of a row whose only value is {exact:e} is {got:e}");
            return Err(Flaw::Fail(text));
        }
    }
    Ok(None)
}

/// So many rows of one head, each of which sees itself alone.
fn problem(case: &Case, rows: usize) -> Problem {
    if let Problem::LinearAttention(_) = case.problem {
        let extents =
            LinearExtents { batch: 1, query_heads: 1, key_heads: 1, tokens: rows, dim: 1 };
        let mut problem = LinearAttention::new(extents);
        problem.value_dim = WIDTH;
        problem.sequences = TokenSequences::Packed { cu_tokens: (0..=rows).collect() };
        return problem.into();
    }
    let extents =
        Extents { batch: 1, query_heads: 1, key_heads: 1, queries: rows, keys: rows, dim: 1 };
    let mut scores = Scores::new(extents);
    scores.mask = Mask::Window { left: Some(0), right: Some(0), align: Align::TopLeft };
    match case.problem {
        Problem::LazyAttention(_) => LazyAttention { scores, bias: None, value_dim: WIDTH }.into(),
        _ => Attention { scores, value_dim: WIDTH }.into(),
    }
}
