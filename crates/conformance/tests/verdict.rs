//! The verdict never passes what it did not judge: where bounds are wide or missing, only errors that correct
//! kernels make are right.

mod question;

use etalon_conformance::cases::Spec;
use etalon_conformance::check::{Check, check, strictest};
use etalon_conformance::gates::Status;
use etalon_conformance::laws::{Exact, Trial, find};
use etalon_conformance::profile::Profile;
use etalon_conformance::tensor::{Tensor, Tensors};
use etalon_conformance::tier::Tier;
use etalon_conformance::tiers::{Simd, ask};
use etalon_conformance::zoo::{CONTROLS, Host};
use etalon_problem::{Attention, Dtype, Extents, LinearCrossEntropy, Mask, Pass};
use ndarray::{Array2, ArrayD, Axis, Ix2};
use question::{FAMILIES, Question, SMALL, massive, questions};

impl Question {
    fn check(&self, profile: &str, got: &Tensors, only: &[&str]) -> Check {
        let only: Vec<String> = only.iter().map(|name| name.to_string()).collect();
        let profile = Profile::by_name(profile).expect("a profile");
        check(&self.request(), &profile, got, &only).expect("a check")
    }

    /// Right results of which one output is changed.
    fn changed(&self, name: &str, change: impl FnOnce(&mut ArrayD<f64>)) -> Tensors {
        let mut got = self.right();
        let stored = got[name].stored().expect("a type");
        let mut x = got[name].numbers(name).expect("numbers");
        change(&mut x);
        got.insert(name.to_string(), Tensor::store(&x, stored));
        got
    }
}

/// The row of zeros that a mask value of −50,000 leaves of such scores.
#[test]
fn a_zero_row_of_massive_activations_fails() {
    let question = Question::new(Attention::new(SMALL), (Pass::Forward, Dtype::Bf16), 1, massive);
    assert_eq!(question.check("bf16-flash", &question.right(), &["o"]).status, Status::Passed);
    let zeros = question.changed("o", |o| o.index_axis_mut(Axis(2), 5).fill(0.0));
    let found = question.check("bf16-flash", &zeros, &["o"]);
    assert_eq!(found.status, Status::Failed);
    assert!(found.outputs[0].places.iter().any(|place| place.contains("row 5")), "{found:?}");
}

/// TF32 leaves ten bits of scores of a deviation of 16.
#[test]
fn a_constant_is_no_average_of_values() {
    let wide = |name: &str, _: usize, x: f64| if name == "q" { 16.0 * x } else { x };
    let question = Question::new(Attention::new(SMALL), (Pass::Forward, Dtype::F32), 2, wide);
    assert_eq!(question.check("f32-tf32", &question.right(), &[]).status, Status::Passed);
    let constant = question.changed("o", |o| o.fill(1000.0));
    let found = question.check("f32-tf32", &constant, &["o"]);
    assert_eq!((found.status, found.outputs[0].off), (Status::Failed, found.outputs[0].elements));
}

/// Logits deviate by 4, of which TF32 leaves 0.01 or less: gradients of 0 may lie within the bounds, but no
/// correct kernel returns them.
#[test]
fn gradients_of_zero_do_not_pass() {
    let problem = LinearCrossEntropy::new(24, 256, 40).logit_scale(0.25);
    let ones = |name: &str, _: usize, x: f64| if name == "dloss" { 1.0 } else { x };
    let question = Question::new(problem, (Pass::ForwardBackward, Dtype::F32), 3, ones);
    assert_eq!(question.check("f32-tf32", &question.right(), &[]).status, Status::Passed);
    for name in ["dh", "dw"] {
        let zeros = question.changed(name, |x| x.fill(0.0));
        assert_ne!(question.check("f32-tf32", &zeros, &[]).status, Status::Passed, "{name}");
    }
}

/// 2100 terms, of which f16 can count 2048: no element has a bound. Those of a right result err less than those of
/// simulated kernels, others could be anything.
#[test]
fn without_a_bound_nothing_passes_by_itself() {
    let extents =
        Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 2, keys: 2100, dim: 8 };
    let question =
        Question::new(Attention::new(extents), (Pass::Forward, Dtype::F16), 4, |_, _, x| x);
    let profile = Profile { accumulator: Dtype::F16, ..Profile::by_name("f32-strict").unwrap() };
    let judge = |got: &Tensors| check(&question.request(), &profile, got, &[]).expect("a check");
    let right = judge(&question.right());
    assert_eq!(right.status, Status::Passed, "{right:?}");
    let wrong = judge(&question.changed("o", |o| o.fill(9.0)));
    let o = wrong.outputs.iter().find(|x| x.name == "o").unwrap();
    assert_eq!((o.off, o.undecided, o.no_bound.get("sum")), (0, o.elements, Some(&o.elements)));
    assert_eq!(wrong.clone().on_inputs(true).status, Status::Failed);
    assert_eq!(wrong.clone().on_inputs(false).status, Status::Undecided);
    let doubt = o.doubt.as_ref().unwrap();
    assert!(
        doubt.contains("16 of 16 elements of o are undecided") && doubt.contains("too many terms"),
        "{doubt}"
    );
}

/// The sum of dS over keys is 0, so that an offset of all keys changes nothing but the bounds.
#[test]
fn a_negative_dq_on_keys_with_an_offset_does_not_pass() {
    let offset = |name: &str, _: usize, x: f64| if name == "k" { x + 30.0 } else { x };
    let extents = Extents { queries: 40, ..SMALL };
    let question = Question::new(Attention::new(extents), (Pass::Backward, Dtype::Bf16), 5, offset);
    let right = question.check("bf16-flash", &question.right(), &[]);
    assert_eq!(right.status, Status::Passed, "{right:?}");
    assert!(right.structured.as_ref().unwrap().starts_with("k: "), "{right:?}");
    let negative = question.changed("dq", |dq| dq.mapv_inplace(|x| -x));
    let found = question.check("bf16-flash", &negative, &[]);
    assert_ne!(found.status, Status::Passed, "{found:?}");
    let dq = found.outputs.iter().find(|x| x.name == "dq").unwrap();
    assert!(dq.uninformative > 0 && dq.off + dq.undecided > 0, "{found:?}");
}

/// Keys in bf16 lose nothing where a product reads ten bits of them, and a wrong sign is no rounding where they do.
#[test]
fn a_negative_dq_holds_no_profile() {
    let offset = |name: &str, _: usize, x: f64| if name == "k" { x + 30.0 } else { x };
    let extents = Extents { queries: 40, ..SMALL };
    for dtype in [Dtype::Bf16, Dtype::F32] {
        let question = Question::new(Attention::new(extents), (Pass::Backward, dtype), 5, offset);
        let request = question.request();
        let negative = question.changed("dq", |dq| dq.mapv_inplace(|x| -x));
        for profile in ["f32-tf32", "f32-bf16x3", "bf16-flash"] {
            let right = question.check(profile, &question.right(), &[]);
            assert_eq!(right.status, Status::Passed, "{dtype} {profile}: {right:?}");
            let found = question.check(profile, &negative, &[]);
            assert_ne!(found.status, Status::Passed, "{dtype} {profile}: {found:?}");
        }
        let found = strictest(&request, &negative, &[]).expect("a profile");
        let passes =
            |x| check(&request, &x, &negative, &[]).expect("a check").as_strictest().passed;
        assert!(!found.is_some_and(passes), "{dtype}: {found:?}");
    }
}

/// A long row of keys is as random for one query as for many.
#[test]
fn a_wrong_result_of_one_query_fails_on_random_inputs() {
    let extents =
        Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 1, keys: 3000, dim: 64 };
    let profile = Profile { accumulator: Dtype::F16, ..Profile::by_name("f32-strict").unwrap() };
    let question =
        Question::new(Attention::new(extents), (Pass::Forward, Dtype::F16), 8, |_, _, x| x);
    let judge = |got: &Tensors| check(&question.request(), &profile, got, &[]).expect("a check");
    let right = judge(&question.right());
    assert_eq!((right.status, &right.structured), (Status::Passed, &None), "{right:?}");
    let wrong = judge(&question.changed("o", |o| o.fill(9.0)));
    assert_eq!(wrong.status, Status::Failed, "{wrong:?}");
}

#[test]
fn a_conspicuous_error_on_random_inputs_fails() {
    let problem = Attention::new(Extents { queries: 48, ..SMALL }).mask(Mask::causal());
    let question = Question::new(problem, (Pass::Backward, Dtype::Bf16), 6, |_, _, x| x);
    let right = question.check("bf16-flash", &question.right(), &[]);
    assert_eq!((right.status, right.structured), (Status::Passed, None));
    let found = question.check("bf16-flash", &question.changed("dk", |dk| *dk *= 1.01), &[]);
    assert!(found.outputs.iter().all(|x| x.off == 0) && found.conspicuous, "{found:?}");
    assert_eq!(found.status, Status::Failed);
    assert_eq!(found.on_inputs(false).status, Status::Undecided);
}

/// dh and dw of weights p e^(lse − lse′), where lse′ is that of logits in bf16.
fn rounded_forward_only(question: &Question) -> Tensors {
    let numbers = |name: &str| question.inputs[name].numbers(name).expect("numbers");
    let matrix = |name: &str| numbers(name).into_dimensionality::<Ix2>().expect("a matrix");
    let (h, w, targets) = (matrix("h"), matrix("w"), numbers("targets"));
    let mut dz = h.dot(&w.t());
    let tokens = dz.nrows() as f64;
    for (mut z, &target) in dz.rows_mut().into_iter().zip(&targets) {
        let lse = z.iter().map(|&z| Dtype::Bf16.round(z).exp()).sum::<f64>().ln();
        z.mapv_inplace(|z| (z - lse).exp());
        z[target as usize] -= 1.0;
        z /= tokens;
    }
    let results = [("dh", dz.dot(&w)), ("dw", dz.t().dot(&h))];
    let stored = |(name, x): (&str, Array2<f64>)| {
        (name.to_string(), Tensor::round(&x.into_dyn(), Dtype::Bf16))
    };
    results.map(stored).into()
}

/// lse of logits that are rounded to bf16, p of logits that are not: the bounds of TF32 hold both, being wider.
#[test]
fn auto_names_no_profile_that_does_not_judge() {
    let problem = LinearCrossEntropy::new(32, 64, 300);
    let ones = |name: &str, _: usize, x: f64| if name == "dloss" { 1.0 } else { x };
    let question = Question::new(problem, (Pass::Backward, Dtype::Bf16), 7, ones);
    let got = rounded_forward_only(&question);
    let found = strictest(&question.request(), &got, &[])
        .expect("a profile")
        .expect("one that does not fail");
    let found = check(&question.request(), &found, &got, &[]).expect("a check");
    assert_eq!(found.status, Status::Undecided, "{found:?}");
    assert_eq!(
        strictest(&question.request(), &question.right(), &[]).unwrap().unwrap().name,
        "f32-strict"
    );
}

/// Controls of the zoo, which compute in f32 in several orders, on generic, massive and peaked inputs: the example
/// `alarms` counts as much over many more seeds.
#[test]
fn correct_kernels_are_not_undecided() {
    for (name, family) in FAMILIES {
        for question in questions(family, 0) {
            for style in CONTROLS {
                let got = ask(&Host::sound(style), &question.request()).expect("the host");
                let found = question.check("f32-strict", &got, &[]);
                let (problem, pass) = (&question.problem, question.pass);
                let of = format!("{name} {problem:?} {pass} {}", style.name);
                assert_eq!(found.status, Status::Passed, "{of}: {found:?}");
            }
        }
    }
}

/// At full depth `class_order` failed every tier in this case.
#[test]
fn equal_logits_have_another_argmax_in_another_order() {
    let law = find("class_order").expect("the law");
    let spec: Spec =
        "linear_cross_entropy/f16/small/plain/plain/sum/some/all/dyadic/1".parse().expect("a case");
    for style in CONTROLS {
        let tier = Host::sound(style);
        let exact = Exact::new(spec.build(), tier.profile(spec.dtype));
        let judged = (law.check)(&Trial::new(&tier, &exact, Pass::Forward));
        assert!(judged.is_ok(), "{}: {judged:?}", tier.name());
    }
}

/// Cases of other seeds in which correct kernels were wrong or in doubt: an argmax of equal logits, overflow, a sink
/// of ∞ in rows that see nothing, lost subnormal numbers, last tiles, an entropy to base 2, weights of lazy attention
/// that jump.
#[test]
fn what_once_raised_an_alarm_passes() {
    let bound = find("bound").expect("the law");
    for (case, pass) in [
        ("linear_cross_entropy/f32/wide/scales/weights/none/class/all/uniform/97", Pass::Forward),
        (
            "linear_cross_entropy/f16/wide/scales/unweighted/none/none/others/raised/5b",
            Pass::Backward,
        ),
        ("attention/f32/segments/everything/tiny/packed/holes/no_dlse/2c", Pass::Backward),
        ("attention_lse/f32/causal/sinks/groups/dense/holes/dlse/f1", Pass::Backward),
        ("attention/bf16/causal_top_left/sinks/square/lengths/large/no_dlse/39", Pass::Backward),
        (
            "linear_cross_entropy/f16/long/softcap/plain/none/some/loss-cotangent/uniform/f7",
            Pass::Backward,
        ),
        ("linear_cross_entropy/f16/ones/bias/lse-square/mean/none/others/raised/e6", Pass::Forward),
        (
            "linear_cross_entropy/f32/long/plain/unweighted/by/some/loss-cotangent/distant/91",
            Pass::Forward,
        ),
        (
            "lazy_attention/f32/full/tiny/dense/reach_whole/mixed/large/no_dlse/scale/a6",
            Pass::Forward,
        ),
    ] {
        let spec: Spec = case.parse().expect("a case");
        let controls = CONTROLS.map(|style| Box::new(Host::sound(style)) as Box<dyn Tier>);
        let simd = Simd::levels().0.into_iter().map(|level| Box::new(level) as Box<dyn Tier>);
        for tier in controls.into_iter().chain(simd) {
            let exact = Exact::new(spec.build(), tier.profile(spec.dtype));
            let judged = (bound.check)(&Trial::new(&*tier, &exact, pass));
            assert!(judged.is_ok(), "{} {case}: {judged:?}", tier.name());
        }
    }
}
