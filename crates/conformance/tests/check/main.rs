//! `check` on kernels with a known mistake each: it says where, and what. A right result is explained by
//! nothing.

mod bench;
mod derived;
mod noise;
mod public;
mod traces;
mod truth;

use bench::{
    Bench, EXTENTS, SHORT, attention, explained, linear, place, short_attention, short_linear,
};
use etalon_conformance::check::check;
use etalon_conformance::conventions;
use etalon_conformance::profile::Profile;
use etalon_conformance::tensor::{Tensor, Tensors};
use etalon_conformance::tiers;
use etalon_conformance::zoo::{Host, mutant};
use etalon_problem::{
    Align, Attention, AttentionLse, Dtype, LinearCrossEntropy, Mask, Pass, Problem, Reduction,
    slopes,
};
use ndarray::{ArrayD, Axis as Along};
use std::fs;
use std::path::Path;

#[test]
fn a_right_result_is_explained_by_nothing() {
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::F64] {
        for pass in [Pass::Forward, Pass::Backward] {
            for problem in [Problem::from(attention()), linear().into()] {
                let bench = Bench::new(problem, pass, dtype);
                let check = bench.check(&bench.right());
                assert!(check.passed && !check.conspicuous, "{dtype} {pass}: {check:?}");
                assert!(check.explanations.is_empty() && check.not_tried.is_none());
                for output in &check.outputs {
                    assert!(output.places.is_empty() && output.off == 0 && output.margin <= 1.0);
                    assert!(output.worst.is_some() && output.error < 0.01, "{output:?}");
                }
            }
        }
    }
}

#[test]
fn correct_kernels_of_other_styles_are_explained_by_nothing() {
    for style in etalon_conformance::zoo::CONTROLS {
        for pass in [Pass::Forward, Pass::Backward] {
            let bench = Bench::new(attention(), pass, Dtype::F32);
            let got = tiers::ask(&Host::sound(style), &bench.request()).expect("the host");
            let check = bench.check(&got);
            assert!(check.passed && check.explanations.is_empty(), "{} {check:?}", style.name);
        }
    }
}

#[test]
fn factors_have_names() {
    let bench = Bench::new(short_attention(), Pass::Backward, Dtype::Bf16);
    for (factor, words) in [
        (4.0, "1/the scale"),
        (0.25, "the scale"),
        (2.0, "the group size"),
        (0.5, "½"),
        (-1.0, "−1"),
        (std::f64::consts::LN_2, "ln 2"),
        (std::f64::consts::LOG2_E, "log₂e"),
        (1.3, "(1/0.769"),
    ] {
        let text = explained(&bench.changed("dk", |x| x * factor), "factor");
        assert!(text.starts_with("dk: ") && text.contains(words), "{factor}: {text}");
    }
    let bench = Bench::new(short_attention(), Pass::Forward, Dtype::F32);
    let check = bench.changed("lse", |x| x * std::f64::consts::LOG2_E);
    assert!(explained(&check, "factor").contains("lse-base-2"));
    explained(&check, "lse-base-2");
    explained(&check, "lse-in-base-2");
    assert_eq!(place(&check, "lse"), "Every element is off.");
}

#[test]
fn one_head_and_one_tile_are_told() {
    let bench = Bench::new(attention(), Pass::Forward, Dtype::F32);
    let check = bench.changed("o", |mut x| {
        x.index_axis_mut(Along(1), 3).mapv_inplace(|x| 2.0 * x);
        x
    });
    explained(&check, "factor");
    assert!(place(&check, "o").starts_with("Only in query head 3 of 4"), "{}", place(&check, "o"));
    let check = bench.changed("o", |mut x| {
        x.slice_axis_mut(Along(2), (32..).into()).mapv_inplace(|x| x + 1.0);
        x
    });
    let tail = "the last 5 of 37 rows, from 32 on: those after the last whole tile of 16";
    assert!(place(&check, "o").contains(tail), "{}", place(&check, "o"));
}

#[test]
fn shifted_rows_and_permuted_heads_are_told() {
    let bench = Bench::new(attention(), Pass::Backward, Dtype::Bf16);
    let shifted = bench.changed("dq", |x| {
        let from: Vec<usize> = (0..37).map(|i: usize| i.saturating_sub(1)).collect();
        x.select(Along(2), &from)
    });
    assert!(explained(&shifted, "rows-shifted").contains("the row 1 row before it"));
    let permuted = bench.changed("dq", |x| x.select(Along(1), &[0, 2, 1, 3]));
    assert!(explained(&permuted, "heads-permuted").contains("1 those of 2, 2 those of 1"));
    let swapped = bench.changed("dv", |x| x.select(Along(0), &[1, 0]));
    explained(&swapped, "batch-permuted");
    let turned = bench.changed("dk", |mut x| {
        x.invert_axis(Along(2));
        x
    });
    explained(&turned, "rows-reversed");
}

#[test]
fn another_layout_is_told() {
    let bench = Bench::new(attention(), Pass::Forward, Dtype::F32);
    let check = bench.changed("o", |x| {
        let shape = x.shape().to_vec();
        let data: Vec<f64> = x.permuted_axes(vec![0, 2, 1, 3]).iter().copied().collect();
        ArrayD::from_shape_vec(shape, data).unwrap()
    });
    assert!(explained(&check, "layout").contains("[B, N, Hq, E]"));
}

#[test]
fn rows_that_are_not_normalised_are_told() {
    let bench = Bench::new(attention(), Pass::Forward, Dtype::F32);
    let check = bench.changed("o", |mut x| {
        for (i, mut row) in x.axis_iter_mut(Along(2)).enumerate() {
            row *= 1.0 + 0.3 * (i % 5) as f64;
        }
        x
    });
    assert!(explained(&check, "factor-of-each-row").contains("1.3"));
    let nan = bench.changed("o", |mut x| {
        x.index_axis_mut(Along(2), 7).fill(f64::NAN);
        x
    });
    assert!(explained(&nan, "nan").contains("NaN"));
    assert!(nan.outputs.iter().any(|x| x.worst.as_ref().is_some_and(|x| x.got.is_nan())));
}

/// Every convention that is another reading of a problem is explained by its name, and no other is.
#[test]
fn conventions_are_explained() {
    let soft = Attention { value_dim: 24, ..short_attention().softcap(2.0).sinks() };
    let biased = short_attention().bias(1, 4);
    let windowed = Attention::new(SHORT).mask(Mask::window(5, 2));
    let top_left = Attention::new(SHORT).mask(Mask::Causal { align: Align::TopLeft });
    let mut loss = LinearCrossEntropy::new(23, 16, 29);
    loss.label_smoothing = 0.1;
    let summed = LinearCrossEntropy { reduction: Reduction::Sum, ..loss.clone() };
    let problems: [Problem; 8] = [
        soft.into(),
        biased.into(),
        windowed.into(),
        top_left.into(),
        short_attention().into(),
        short_linear().into(),
        loss.into(),
        summed.into(),
    ];
    let mut explained_ids = Vec::new();
    for problem in problems {
        // Every one shows in a forward pass; those of states and plain scores also in gradients.
        let of_loss = matches!(problem, Problem::LinearCrossEntropy(_));
        let gradients =
            of_loss || problem == short_attention().into() || problem == short_linear().into();
        // A loss alone is one number: its gradients decide.
        let passes = [Pass::Forward, Pass::Backward].into_iter().skip(usize::from(of_loss));
        let passes = passes.take(1 + usize::from(gradients));
        for pass in passes {
            let bench = Bench::new(problem.clone(), pass, Dtype::F32);
            for reading in conventions::readings(&bench.problem, &bench.inputs) {
                let results = reading.results(pass, &bench.values()).expect("the reference");
                let check = bench.check(&bench.stored(&results));
                if check.passed {
                    continue; // as the sum of no tokens, it makes no difference
                }
                explained(&check, &reading.id);
                explained_ids.push(reading.id);
            }
        }
    }
    for convention in conventions::ALL {
        let id = convention.id;
        assert!(
            explained_ids.iter().any(|explained| explained == id) || convention.mutant.is_some(),
            "nothing shows {id}"
        );
    }
}

#[test]
fn interleaved_heads_are_told() {
    for (problem, bug) in
        [(Problem::from(attention()), "head-modulo"), (linear().into(), "state-of-head-modulo")]
    {
        let bench = Bench::new(problem, Pass::Forward, Dtype::F32);
        let host = Host::mutant(mutant(bug).expect("a mutant"));
        let check = bench.check(&tiers::ask(&host, &bench.request()).expect("the host"));
        explained(&check, "heads-interleaved");
        explained(&check, bug);
    }
}

#[test]
fn slopes_of_another_library_are_told() {
    let own: [(&str, Vec<f64>); 3] = [
        ("slopes-geometric", slopes::geometric(4, 0, 1).unwrap()),
        ("slopes-linear", slopes::linear(4, 0, 1).unwrap()),
        ("slopes-retention", slopes::retention(4).unwrap()),
    ];
    for (id, list) in own {
        let bench = Bench::new(linear(), Pass::Forward, Dtype::Bf16);
        let mut inputs = bench.inputs.clone();
        let list = ndarray::Array1::from(list).into_dyn();
        inputs.insert("g_gamma".to_string(), Tensor::round(&list, Dtype::F32));
        explained(&bench.check(&bench.exact(&bench.problem, &inputs)), id);
    }
}

/// Of the zoo's bugs that show on a case, each is named by itself or by one with the same results.
#[test]
fn known_bugs_are_named() {
    let mask = Mask::window(5, 2);
    let rich = Attention::new(EXTENTS).mask(mask).softcap(2.0).sinks();
    let mut named = 0;
    for (problem, bugs) in [
        (
            Problem::from(rich),
            &["one-row-shifted", "top-left", "sink-not-in-lse", "no-rescale-of-o"][..],
        ),
        (linear().into(), &["state-before-use", "one-decay-per-chunk", "scale-by-width"][..]),
        (
            AttentionLse::new(EXTENTS).into(),
            &["key-tail-dropped", "lse-in-base-2", "first-64-of-head"][..],
        ),
    ] {
        let bench = Bench::new(problem, Pass::Forward, Dtype::F32);
        for bug in bugs {
            let host = Host::mutant(mutant(bug).expect("a mutant"));
            let check = bench.check(&tiers::ask(&host, &bench.request()).expect("the host"));
            if !check.passed {
                explained(&check, bug);
                named += 1;
            }
        }
    }
    // `first-64-of-head` does not show: there are 16.
    assert_eq!(named, 9);
}

#[test]
fn a_uniform_error_within_the_bounds_is_conspicuous() {
    let bench = Bench::new(attention(), Pass::Backward, Dtype::Bf16);
    let check = bench.changed("dk", |x| x * 1.01);
    assert!(check.conspicuous && check.outputs.iter().all(|x| x.off == 0), "{check:?}");
    let dk = check.outputs.iter().find(|x| x.name == "dk").unwrap();
    assert!((dk.slope.unwrap().value - 0.01).abs() < 0.003, "{dk:?}");
    assert!(dk.conspicuous[0].contains("too large"), "{dk:?}");
}

#[test]
fn what_is_no_output_is_refused() {
    let bench = Bench::new(attention(), Pass::Forward, Dtype::Bf16);
    let refused = |got: &Tensors, only: &[String]| {
        check(&bench.request(), &Profile::flash(Dtype::Bf16), got, only).unwrap_err().to_string()
    };
    let mut got = bench.right();
    let lse = got.remove("lse").unwrap();
    assert_eq!(refused(&got, &[]), "`lse` is missing: attention forward returns it");
    let alone = check(&bench.request(), &Profile::flash(Dtype::Bf16), &got, &["o".to_string()]);
    assert_eq!(alone.unwrap().outputs.len(), 1);
    let absent = refused(&got, &["dq".to_string()]);
    let reason = "attention forward has no such output; backward returns it";
    assert_eq!(absent, format!("`dq` was given, but {reason}"));
    got.insert("lse".to_string(), Tensor { shape: vec![2, 37, 4], ..lse });
    assert_eq!(refused(&got, &[]), "`lse` must have shape [2, 4, 37], found [2, 37, 4]");
}

/// `docs/conventions.md` and the registry have the same names, and the page the statements.
#[test]
fn the_page_of_conventions_agrees_with_the_registry() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/conventions.md");
    let page = fs::read_to_string(page).expect("the page");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    let rows: Vec<(&str, &str)> = rows.collect();
    let ids: Vec<&str> = conventions::ALL.iter().map(|convention| convention.id).collect();
    assert_eq!(rows.iter().map(|row| row.0).collect::<Vec<_>>(), ids);
    for (convention, (id, row)) in conventions::ALL.iter().zip(rows) {
        assert!(row.contains(convention.statement), "{id} of the page does not say what it does");
        assert!(conventions::find(id).is_some());
        if let Some(name) = convention.mutant {
            assert!(mutant(name).is_some(), "{id} names {name}, which is no mutant");
            assert!(row.contains(&format!("`{name}`")), "{id} of the page lacks {name}");
        }
    }
}
