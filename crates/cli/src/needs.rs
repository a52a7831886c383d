//! Memory that a pass needs, from the table of its tensors and the plan of its tier. Not counted is the memory that a
//! thread keeps for good, once the reference has multiplied matrices on it: as much as its L2 cache, from the crate
//! `gemm`.

use crate::memory::afford;
use crate::outcome::Failure;
use crate::plans::plan;
use etalon_conformance::check;
use etalon_conformance::profile::Profile;
use etalon_conformance::typical::{KERNELS, STORED_SCORES};
use etalon_problem::{Dtype, Error, Operand, Pass, Precision, Problem, Sequences, TokenSequences};
use etalon_simd::Options;

/// Bytes of a sequence in lists of them.
const SEQUENCE: u128 = 128;

/// Bytes of a head of a sequence in the lists of the reference and of the bounds.
const HEAD: u128 = 1024;

/// Bytes of what a token of linear cross-entropy has of the tiles of classes.
const TOKEN: u128 = 2048;

/// Fails where there is no memory for the list of sequences of a problem.
pub(crate) fn afford_lists(problem: &Problem) -> Result<(), Failure> {
    afford("the list of sequences", sequences(problem) * SEQUENCE)
}

/// Fails where there is no memory to time a pass: for its tensors, what they are made from, and the
/// workspace of the simd tier, if that computes it with some options.
pub(crate) fn afford_run(
    problem: &Problem,
    pass: Pass,
    dtype: Dtype,
    simd: Option<&Options>,
) -> Result<(), Failure> {
    let name = name(problem, pass);
    let operands = problem.operands(pass);
    let largest = operands.iter().map(elements).max().unwrap_or(0);
    let tensors = sum(&operands, |x| elements(x) * stored(x, dtype)) + largest * DOUBLE;
    let lists = sequences(problem) * SEQUENCE;
    afford(&name, tensors + lists)?; // before the plan, which lists sequences
    let plan = simd.map(|options| plan(problem, pass, dtype, options)).transpose()?.flatten();
    let workspace = plan.map_or(0, |plan| plan.workspace_bytes());
    afford(&name, tensors + lists + workspace as u128)
}

/// Fails where there is no memory to evaluate a pass, by a tier and perhaps with bounds, beside the
/// tensors that are already there.
pub(crate) fn afford_evaluation(
    problem: &Problem,
    pass: Pass,
    dtype: Dtype,
    tier: &str,
    bounds: bool,
) -> Result<(), Failure> {
    let (name, mut needed) = (name(problem, pass), evaluation(problem, pass, dtype, tier, bounds));
    afford(&name, needed)?; // before the plan, which lists sequences
    if tier.starts_with("simd") {
        needed += workspace(problem, pass, dtype)?;
    }
    afford(&name, needed)
}

/// Fails where there is no memory to judge the outputs of a pass, beside the tensors that are already
/// there.
pub(crate) fn afford_check(problem: &Problem, pass: Pass, dtype: Dtype) -> Result<(), Failure> {
    afford(&format!("a check of {}", name(problem, pass)), judgement(problem, pass, dtype))
}

/// Fails where there is no memory for what a profile makes of the bounds and of simulated kernels besides: an
/// error for each score that it stores, in every kernel that is simulated at once, and sums of dw over chunks.
pub(crate) fn afford_stores(problem: &Problem, profile: &Profile) -> Result<(), Failure> {
    let narrow = |dtype: Dtype| dtype.unit_roundoff() > profile.accumulator.unit_roundoff();
    let scores = match problem {
        Problem::LinearCrossEntropy(x) => x.tokens.saturating_mul(x.vocab),
        _ => problem.scores().map_or(0, |x| {
            let e = &x.extents;
            [e.query_heads, e.queries, e.keys].into_iter().fold(e.batch, usize::saturating_mul)
        }),
    };
    let mut needed = 0;
    if narrow(profile.score_store) && scores <= STORED_SCORES {
        // The standard deviations, and of each kernel a draw and the operand that it becomes a part of.
        let kernels = rayon::current_num_threads() as u128 + 1;
        needed += DOUBLE * scores as u128 * (1 + 4 * kernels);
    }
    if let Problem::LinearCrossEntropy(x) = problem
        && narrow(profile.chunk_store)
    {
        needed += DOUBLE * (4 * x.vocab as u128 * (x.dim as u128 + 1) + (x.tokens * x.dim) as u128);
    }
    let name = problem.algorithm();
    afford(&format!("a check of {name} by {profile}, beside the rest,"), needed)
}

/// Bytes that a check of the outputs of a pass allocates beside its inputs and them: an estimate from
/// above. Beside the bounds there are the errors of simulated kernels, each number of an output as often as
/// there are kernels, and once more while statistics are made of it; then what explanations are judged by,
/// and another evaluation: of a small problem on every thread.
pub fn judgement(problem: &Problem, pass: Pass, dtype: Dtype) -> u128 {
    let operands = problem.operands(pass);
    let of = |given| sum(&operands, |x| if x.role.is_given() == given { elements(x) } else { 0 });
    let (given, out) = (of(true), of(false));
    let kernels = u128::from(KERNELS);
    let simulated = DOUBLE * (2 * given + (2 * kernels + 8) * out);
    let bounds = evaluation(problem, pass, dtype, "reference", true);
    let threads = if check::explains(problem) { rayon::current_num_threads() as u128 } else { 1 };
    let tensors = 6 * DOUBLE * (given + out);
    let other = threads * (evaluation(problem, pass, dtype, "reference", false) + tensors);
    // Each output as a list and once more as the judges of a part hold it, and every input in f64.
    let judged = DOUBLE * (given + 12 * out);
    bounds + simulated + judged + other
}

/// Bytes that the evaluation of a pass allocates beside its inputs and the workspace of the simd tier: an
/// estimate from above, within a few times of what it is.
pub fn evaluation(problem: &Problem, pass: Pass, dtype: Dtype, tier: &str, bounds: bool) -> u128 {
    let mut needed = lists(problem);
    if bounds || tier == "reference" {
        needed += reference(problem, pass, bounds);
    }
    if tier != "reference" {
        needed += tensors(problem, pass, dtype);
    }
    needed
}

/// Bytes that the simd tier allocates for a pass, or for the forward pass before it.
pub fn workspace(problem: &Problem, pass: Pass, dtype: Dtype) -> Result<u128, Error> {
    [Pass::Forward, pass].into_iter().try_fold(0, |most, pass| {
        let plan = plan(problem, pass, dtype, &Options::default())?;
        Ok(most.max(plan.map_or(0, |plan| plan.workspace_bytes()) as u128))
    })
}

/// Bytes of the lists of sequences and heads.
fn lists(problem: &Problem) -> u128 {
    sequences(problem) * SEQUENCE + heads(problem) * HEAD
}

/// Bytes of an f64.
const DOUBLE: u128 = 8;

fn name(problem: &Problem, pass: Pass) -> String {
    format!("{} {pass}", problem.algorithm())
}

fn elements(operand: &Operand) -> u128 {
    operand.len() as u128
}

fn sum(operands: &[Operand], bytes: impl Fn(&Operand) -> u128) -> u128 {
    operands.iter().map(bytes).sum()
}

/// Bytes of an element of an operand beside main tensors of this type.
fn stored(operand: &Operand, dtype: Dtype) -> u128 {
    match operand.precision {
        Precision::Storage => dtype.bytes() as u128,
        Precision::Wide => dtype.bytes().max(Dtype::F32.bytes()) as u128,
        Precision::Integer => size_of::<i64>() as u128,
    }
}

/// Sequences of a problem that has rows to compute.
fn sequences(problem: &Problem) -> u128 {
    match problem {
        Problem::LinearAttention(x) => match &x.sequences {
            _ if x.extents.tokens == 0 && !x.initial_state && !x.final_state => 0,
            TokenSequences::Packed { cu_tokens } => cu_tokens.len() as u128,
            _ => x.extents.batch as u128,
        },
        _ => problem.scores().map_or(0, |x| match &x.sequences {
            _ if x.row_shape().contains(&0) => 0,
            Sequences::Packed { cu_query, .. } => cu_query.len() as u128,
            _ => x.extents.batch as u128,
        }),
    }
}

/// Heads of all sequences.
fn heads(problem: &Problem) -> u128 {
    use etalon_problem::Axis::{KeyHeads, QueryHeads};
    let heads = problem.extent(QueryHeads) as u128 + problem.extent(KeyHeads) as u128;
    sequences(problem).saturating_mul(heads)
}

/// Bytes of what the reference holds, and with `bounds` the oracle: every operand and result, those of
/// the first order as dual numbers where the second order is their derivative, and for bounds as numbers
/// that carry their error.
fn reference(problem: &Problem, pass: Pass, bounds: bool) -> u128 {
    let of = |pass, given| {
        sum(&problem.operands(pass), |x| if x.role.is_given() == given { elements(x) } else { 0 })
    };
    let (given, out, forward) = (of(pass, true), of(pass, false), of(Pass::Forward, false));
    let second = matches!(pass, Pass::DoubleBackward | Pass::Jvp);
    let own_formulas = matches!(problem, Problem::Attention(_) | Problem::AttentionLse(_));
    let first = match second && !own_formulas {
        true => of(Pass::Backward, true) + of(Pass::Backward, false) + forward,
        false => 0,
    };
    // Each result is there once more as bytes of the file.
    let mut bytes = DOUBLE * (given + 2 * out) + 2 * DOUBLE * first;
    if bounds {
        let number = match problem {
            Problem::LinearAttention(_) => 2 * DOUBLE,
            _ if second => 5 * DOUBLE,
            _ => 0,
        };
        bytes += DOUBLE * (forward + 3 * out) + number * (given + out) + 2 * number * first;
    }
    if let Problem::LinearCrossEntropy(x) = problem {
        let [tokens, dim, vocab] = [x.tokens, x.dim, x.vocab].map(|extent| extent as u128);
        // The rows of h that count, what each has of every tile, and for bounds of gradients the terms
        // of every class.
        let terms = if bounds && !matches!(pass, Pass::Forward) { 3 * tokens * vocab } else { 0 };
        bytes += DOUBLE * (tokens * dim + terms) + TOKEN * tokens;
    }
    bytes + scratch(problem, pass, bounds)
}

/// Bytes of the tensors that a tier reads and writes beside those of the file: for a later pass the inputs
/// of the forward pass once more; what that saves, and the results, of which one at a time is made of f64
/// and which are there once more as bytes of the file.
fn tensors(problem: &Problem, pass: Pass, dtype: Dtype) -> u128 {
    let bytes = |x: &Operand| elements(x) * stored(x, dtype);
    let forward = problem.operands(Pass::Forward);
    let again = if pass == Pass::Forward { 0 } else { sum(&forward, bytes) };
    let made: Vec<Operand> =
        problem.operands(pass).into_iter().filter(|x| !x.role.is_given()).collect();
    again + 2 * sum(&made, bytes) + made.iter().map(elements).max().unwrap_or(0) * DOUBLE
}

/// Bytes of what the threads of the reference work on: of scores a row of keys, and for the bounds of a
/// bias' gradient the pairs of the heads that share a key head; of linear attention the states that are
/// kept; of linear cross-entropy a tile of classes.
fn scratch(problem: &Problem, pass: Pass, bounds: bool) -> u128 {
    let threads = rayon::current_num_threads() as u128;
    let number = if bounds { 12 * DOUBLE } else { 2 * DOUBLE };
    let own = match problem {
        Problem::LinearAttention(x) => {
            let kept = match pass {
                Pass::Forward | Pass::Step => 2,
                _ => 2 * (x.extents.tokens as u128).isqrt() + 4,
            };
            kept * x.extents.dim as u128 * x.value_dim as u128 * number
        }
        Problem::LinearCrossEntropy(x) => 256 * (x.dim as u128 + 64) * 2 * DOUBLE,
        _ => problem.scores().map_or(0, |x| {
            let pairs = x.extents.queries as u128 * x.extents.keys as u128;
            let shared = if bounds && x.bias.is_some() { pairs * x.group() as u128 } else { 0 };
            x.extents.keys as u128 * 8 * number + shared * 2 * DOUBLE
        }),
    };
    threads * own
}
