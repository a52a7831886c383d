//! Mutants whose kernel is sound: they misread the request, or spoil the results.

use super::job::{Job, Results, Rows, through_bf16};
use super::mutant::Mutant;
use etalon_problem::{
    Align, LazyAttention, LinearCrossEntropy, Mask, NothingLeft, Pass, Problem, Reduction, Scores,
    Sequences,
};

/// Turns a request into the one that the mutant answers.
pub(super) fn before(job: &mut Job) {
    let Some(mutant) = job.mutant else { return };
    let value_dim = job.input("v").shape[3];
    let (counted, pass) = (counted(job), job.pass);
    if let Some(found) = job.problem.scores_mut() {
        scores(found, value_dim, mutant, pass);
    }
    match &mut job.problem {
        Problem::LazyAttention(problem) => lazy_attention(problem, mutant),
        Problem::LinearAttention(problem) if mutant == Mutant::ScaleByWidth => {
            problem.scale /= (problem.extents.dim as f64).sqrt();
        }
        Problem::LinearCrossEntropy(problem) => {
            linear_cross_entropy(problem, counted, mutant, pass);
        }
        _ => {}
    }
    inputs(job, mutant);
}

fn scores(scores: &mut Scores, value_dim: usize, mutant: Mutant, pass: Pass) {
    let dim = scores.extents.dim;
    let backward = pass == Pass::Backward;
    match mutant {
        Mutant::TopLeft
        | Mutant::WindowLeftPlusOne
        | Mutant::WindowLeftMinusOne
        | Mutant::WindowRightPlusOne => scores.mask.visit_mut(&mut |mask| misread(mask, mutant)),
        Mutant::BackwardWithoutWindow if backward => {
            if matches!(scores.mask, Mask::Window { .. }) {
                scores.mask = Mask::Full;
            }
        }
        Mutant::PaddingRead if backward => {
            if matches!(scores.sequences, Sequences::Lengths { .. }) {
                scores.sequences = Sequences::Dense;
            }
        }
        Mutant::SoftcapIgnored => scores.softcap = None,
        Mutant::ScaleOfValues if value_dim > 0 => scale_by(scores, value_dim),
        Mutant::ScaleOffByOne => scale_by(scores, dim + 1),
        _ => {}
    }
}

/// The scale that follows from a width, where the problem leaves it to the kernel.
fn scale_by(scores: &mut Scores, width: usize) {
    scores.softmax_scale.get_or_insert(1.0 / (width as f64).sqrt());
}

fn misread(mask: &mut Mask, mutant: Mutant) {
    match (mutant, mask) {
        (
            Mutant::TopLeft,
            Mask::Causal { align } | Mask::Window { align, .. } | Mask::ChunkedCausal { align, .. },
        ) => *align = Align::TopLeft,
        (Mutant::WindowLeftPlusOne, Mask::Window { left: Some(left), .. }) => *left += 1,
        (Mutant::WindowLeftMinusOne, Mask::Window { left: Some(left), .. }) => {
            *left = left.saturating_sub(1);
        }
        (Mutant::WindowRightPlusOne, Mask::Window { right: Some(right), .. }) => *right += 1,
        _ => {}
    }
}

fn lazy_attention(problem: &mut LazyAttention, mutant: Mutant) {
    let Some(reach) = &mut problem.bias else { return };
    match mutant {
        Mutant::DistanceFromTopLeft => reach.align = Align::TopLeft,
        Mutant::ReachIsAMask => {
            let (left, right) = (Some(reach.width - 1), Some(0));
            let within = Mask::Window { left, right, align: reach.align };
            problem.scores.mask = Mask::And(vec![problem.scores.mask.clone(), within]);
        }
        _ => {}
    }
}

fn linear_cross_entropy(
    problem: &mut LinearCrossEntropy,
    counted: usize,
    mutant: Mutant,
    pass: Pass,
) {
    let mean = problem.reduction == Reduction::Mean;
    let by = |n: usize| Reduction::By { normaliser: n as f64 };
    match mutant {
        Mutant::MeanOverIgnored if mean => problem.reduction = by(problem.tokens),
        Mutant::MeanWithoutWeights if mean => problem.reduction = by(counted),
        Mutant::NothingOverNothing => problem.nothing_left = NothingLeft::Nan,
        Mutant::LseSquareWithoutGradient if pass == Pass::Backward => {
            problem.lse_square_scale = 0.0;
        }
        _ => {}
    }
}

/// The tokens of linear_cross_entropy with a target.
fn counted(job: &Job) -> usize {
    let Problem::LinearCrossEntropy(problem) = &job.problem else { return 0 };
    let counts = |target: &&f32| **target as i64 != problem.ignore_index;
    job.input("targets").data.iter().filter(counts).count()
}

fn inputs(job: &mut Job, mutant: Mutant) {
    let absent = match mutant {
        Mutant::DlseIgnored | Mutant::LseCotangentDropped => &["dlse"][..],
        Mutant::DlogprobDropped => &["dlogprob"],
        Mutant::FinalCotangentIgnored => &["dfinal_state"],
        Mutant::DecayIgnored => &["g", "g_gamma"],
        _ => &[],
    };
    absent.iter().for_each(|name| drop(job.inputs.remove(*name)));
    let mut change = |name: &str, f: &dyn Fn(&mut Rows)| job.inputs.get_mut(name).map(f);
    match mutant {
        Mutant::BiasOfFirstBatch => change("bias", &|x| x.take(|[_, h, i, j]| [0, h, i, j])),
        Mutant::First64OfHead => change("q", &|x| x.clear(|[.., c]| c >= 64)),
        Mutant::LseOfNextHead => change("lse", &|x| {
            let heads = x.shape[1];
            x.take(|[b, h, i, c]| [b, (h + 1) % heads, i, c]);
        }),
        // Without o, δ is 0.
        Mutant::DeltaOmitted => change("o", &|x| x.clear(|_| true)),
        Mutant::TauOfFirstHead => change("tau", &|x| x.take(|_| [0; 4])),
        Mutant::DoutOfFirstHead => change("dout", &|x| x.take(|[b, _, i, c]| [b, 0, i, c])),
        Mutant::LastColumnIgnored => change("bias", &|x| {
            let width = x.shape[1];
            x.clear(|[_, far, ..]| far + 1 == width);
        }),
        Mutant::UpstreamOfFirst => change("dloss", &|x| x.take(|_| [0; 4])),
        _ => None,
    };
}

/// Turns the results of a sound kernel into those of the mutant.
pub(super) fn after(job: &Job, results: &mut Results) {
    let Some(mutant) = job.mutant else { return };
    let scale = job.problem.scores().map_or(1.0, |scores| scores.scale() as f32);
    let lse = results.get("lse").cloned();
    let mut change = |name: &str, f: &dyn Fn(&mut Rows)| results.get_mut(name).map(f);
    match mutant {
        Mutant::EmptyRowIsNan => change("o", &|x| {
            let lse = lse.as_ref();
            let empty = |at| lse.is_some_and(|lse| lse.row(at)[0] == f32::NEG_INFINITY);
            x.each(|[b, h, i, _], x| if empty([b, h, i]) { f32::NAN } else { x });
        }),
        Mutant::LseInBase2 => change("lse", &|x| x.each(|_, x| x * std::f32::consts::LOG2_E)),
        Mutant::LseInBf16 => change("lse", &|x| x.each(|_, x| through_bf16(x))),
        Mutant::NoGradientOfSinks => change("dsinks", &|x| x.clear(|_| true)),
        Mutant::NoGradientOfBias => change("dbias", &|x| x.clear(|_| true)),
        Mutant::NoGateGradient => change("dg_gamma", &|x| x.clear(|_| true)),
        Mutant::ValueTailDropped => change("dv", &|x| {
            let whole = x.shape[3] / 8 * 8;
            x.clear(|[.., c]| c >= whole);
        }),
        Mutant::GradientsUnscaled => {
            change("dq", &|x| x.each(|_, x| x / scale));
            change("dk", &|x| x.each(|_, x| x / scale))
        }
        Mutant::DbiasScaled => change("dbias", &|x| x.each(|_, x| scale * x)),
        Mutant::LastColumnIgnored => change("dbias", &|x| {
            let width = x.shape[1];
            x.clear(|[_, far, ..]| far + 1 == width);
        }),
        Mutant::LastSliceOfState => change("final_state", &|x| {
            let sliced = x.shape[2] > 32;
            x.clear(|[_, _, d, _]| sliced && d < 32);
        }),
        _ => None,
    };
}
