//! Readings follow from the tables of options and of tensors: an option without a reading fails here, and so
//! does a reading that a check does not name.

use crate::bench::{Bench, EXTENTS, explained, linear, short_attention};
use etalon_conformance::conventions::{Reading, all_readings};
use etalon_conformance::tensor::{Stored, Tensor};
use etalon_problem::{
    Attention, AttentionLse, DistanceBias, Dtype, LazyAttention, LinearCrossEntropy,
    LseSquareWeight, Mask, Pass, Problem, Reduction, Sequences, SettingKind, TokenSequences,
};
use ndarray::ArrayD;

fn readings(bench: &Bench) -> Vec<Reading> {
    let Bench { problem, pass, dtype, inputs } = bench;
    all_readings(problem, *pass, *dtype, inputs, &bench.values())
}

/// Of every algorithm a problem in which every option is set.
fn problems() -> Vec<Problem> {
    let lengths = Sequences::Lengths { query: vec![30, 37], key: vec![41, 35] };
    let scores = |mut problem: Problem| {
        let scores = problem.scores_mut().expect("scores");
        scores.mask = Mask::And(vec![Mask::window(9, 2), Mask::causal()]);
        scores.sequences = lengths.clone();
        problem
    };
    let tokens = TokenSequences::Lengths { tokens: vec![37, 21] };
    let lazy = LazyAttention::new(EXTENTS).softmax_scale(0.4).bias(5);
    let lazy = LazyAttention { bias: lazy.bias.map(|x| DistanceBias { width: 5, ..x }), ..lazy };
    let loss = LinearCrossEntropy {
        bias: true,
        class_weights: true,
        token_weights: true,
        logit_scale: 0.25,
        softcap: Some(3.0),
        temperature: 1.5,
        ignore_index: 3,
        label_smoothing: 0.1,
        lse_square_scale: 0.01,
        lse_square_weight: LseSquareWeight::ClassWeight,
        reduction: Reduction::By { normaliser: 17.0 },
        ..LinearCrossEntropy::new(23, 16, 29)
    };
    vec![
        scores(Attention::new(EXTENTS).softcap(2.0).sinks().bias(1, 4).into()),
        scores(AttentionLse::new(EXTENTS).softcap(2.0).sinks().bias(1, 4).into()),
        scores(lazy.into()),
        linear().scale(0.25).initial_state().final_state().sequences(tokens).into(),
        loss.into(),
    ]
}

#[test]
fn every_option_has_readings() {
    for problem in problems() {
        let bench = Bench::new(problem, Pass::Forward, Dtype::F32);
        let readings = readings(&bench);
        for setting in bench.problem.settings() {
            let own = readings.iter().filter(|x| x.of == Some(setting.name)).count();
            // Forms change what a kernel returns, and how large it is: they have no other reading.
            let form = setting.kind == SettingKind::Form;
            let name = (bench.problem.algorithm(), setting.name);
            assert!(form || own > 0, "{name:?} has no reading");
        }
        for (at, reading) in readings.iter().enumerate() {
            let same = readings[..at].iter().find(|other| other.id == reading.id);
            assert!(same.is_none(), "two readings of {}", reading.id);
        }
    }
}

/// Every cotangent and every saved tensor has readings, in every pass that reads it.
#[test]
fn every_cotangent_and_every_saved_tensor_has_readings() {
    for problem in problems() {
        for &pass in problem.algorithm().passes() {
            let bench = Bench::new(problem.clone(), pass, Dtype::F32);
            let readings = readings(&bench);
            for operand in problem.operands(pass) {
                use etalon_problem::Role::{OptionalCotangent, Saved};
                let own = |x: &&Reading| x.of == Some(operand.name);
                // The weights of lazy attention are cut off after they were normalised, those of a second
                // order depend on lse twice: what another lse makes of them no other inputs do.
                let linear =
                    pass == Pass::Backward && !matches!(problem, Problem::LazyAttention(_));
                let needed = match operand.role {
                    OptionalCotangent => true,
                    Saved => linear,
                    _ => false,
                };
                let found = readings.iter().any(|x| own(&x));
                assert!(!needed || found, "{} {pass}: {}", problem.algorithm(), operand.name);
            }
        }
    }
}

/// Checks that results of a kernel of a reading are explained by the reading, or by one with the same results.
fn each_is_explained(bench: &Bench, ids: &[&str]) {
    let readings = readings(bench);
    for id in ids {
        let reading = readings.iter().find(|x| x.id == *id);
        let known: Vec<&str> = readings.iter().map(|x| x.id.as_str()).collect();
        let reading = reading.unwrap_or_else(|| panic!("no {id} in {known:?}"));
        let results = reading.results(bench.pass, &bench.values()).expect("the reference");
        explained(&bench.check(&bench.stored(&results)), id);
    }
}

#[test]
fn readings_of_attention_are_explained() {
    let rich = short_attention().softcap(3.0).sinks().bias(2, 4);
    let bench = Bench::new(rich.clone(), Pass::Forward, Dtype::F32);
    let ids = [
        "softcap-before-scale",
        "sinks-negated",
        "sinks-scaled",
        "bias-doubled",
        "bias-of-next-head",
        "mask-strict",
        "softmax-scale-inverted",
        "inputs-in-tf32",
        "keys-whole-tiles-of-16",
        "k-as-bmhkd",
        "inputs-as-bnhqd-in-memory",
    ];
    each_is_explained(&bench, &ids);
    let bench = Bench::new(rich, Pass::Backward, Dtype::F32);
    let ids = [
        "dlse-dropped",
        "saved-lse-base-2",
        "saved-lse-without-sink",
        "delta-omitted",
        "sinks-of-next-head",
    ];
    each_is_explained(&bench, &ids);
}

#[test]
fn readings_of_masks_and_sequences_are_explained() {
    let both = Mask::And(vec![Mask::window(9, 2), Mask::causal()]);
    let bench = Bench::new(Attention::new(EXTENTS).mask(both), Pass::Forward, Dtype::F32);
    each_is_explained(
        &bench,
        &["mask-part-1-alone", "mask-part-2-alone", "mask-part-1-left-dropped"],
    );
    let lengths = Sequences::Lengths { query: vec![30, 37], key: vec![41, 35] };
    let problem = Attention::new(EXTENTS).sequences(lengths);
    let bench = Bench::new(problem, Pass::Backward, Dtype::F32);
    each_is_explained(&bench, &["sequences-keys-ignored", "sequences-of-next"]);
}

#[test]
fn readings_of_linear_attention_are_explained() {
    let bench =
        Bench::new(linear().scale(0.3).initial_state().final_state(), Pass::Backward, Dtype::F32);
    each_is_explained(
        &bench,
        &["dfinal-state-dropped", "initial-state-absent", "decay-doubled", "scale-root"],
    );
}

#[test]
fn readings_of_cross_entropy_are_explained() {
    let loss = LinearCrossEntropy {
        token_weights: true,
        softcap: Some(3.0),
        temperature: 1.5,
        label_smoothing: 0.1,
        ignore_index: 3,
        ..LinearCrossEntropy::new(23, 16, 29)
    };
    let mut bench = Bench::new(loss, Pass::ForwardBackward, Dtype::F32);
    let weights = ArrayD::from_shape_fn(vec![23], |at| 0.5 + at[0] as f64 / 23.0);
    bench.inputs.insert("token_weights".into(), Tensor::store(&weights, Stored::Float(Dtype::F32)));
    let ids = [
        "temperature-before-softcap",
        "label-smoothing-over-others",
        "reduction-by-all-tokens",
        "reduction-by-counted",
        "token-weights-absent",
        "ignore-index-absent",
        "classes-filled-up-to-16",
    ];
    each_is_explained(&bench, &ids);
}
