//! Probes of problems that somebody brings: right kernels hold them, wrong ones do not, and what cannot be asked says
//! why.

mod factors;
mod kernel;
mod omits;

use etalon_conformance::capabilities::{Capabilities, Kernel};
use etalon_conformance::profile::Profile;
use etalon_conformance::questions::{Answers, Asked, Given, Question, about};
use etalon_conformance::report::Verdict;
use etalon_conformance::tensor::{Tensor, Tensors};
use etalon_conformance::tier::{Hints, Request};
use etalon_conformance::tiers::{Reference, ask};
use etalon_problem::{
    Algorithm, Attention, Dtype, Extents, LinearAttention, LinearCrossEntropy, LinearExtents, Mask,
    NamedArray, Pass, Problem, TokenOutputs,
};
use kernel::{Bug, WRONG, answer};

/// Grouped heads, and keys that are no multiple of a tile.
fn extents(dim: usize) -> Extents {
    Extents { batch: 2, query_heads: 4, key_heads: 2, queries: 72, keys: 72, dim }
}

fn given(problem: impl Into<Problem>, dtype: Dtype) -> Given {
    let (name, cotangents) = ("problem-1".to_string(), Vec::new());
    Given { name, problem: problem.into(), dtype, seed: 0, cotangents }
}

/// D = 64, whose scale is a power of two, and D = 128, whose scale is none; 32 keys of a window are a power of two.
fn problems() -> [Given; 2] {
    let causal = Attention::new(extents(64)).mask(Mask::causal());
    let window = Attention::new(extents(128)).mask(Mask::window(31, 0)).value_dim(64);
    [given(causal, Dtype::Bf16), given(window, Dtype::Bf16)]
}

/// A file has one tensor of a name: of two that differ one would be lost.
#[test]
fn tensors_of_one_name_are_equal() {
    let ids = |name: &str, length| NamedArray::new(name, &[2, length], vec![0; 2 * length]);
    let of = |query: &str, key: &str| {
        let mask = Mask::Segments { query: ids(query, 72), key: ids(key, 80) };
        let problem = Attention::new(Extents { keys: 80, ..extents(16) }).mask(mask).into();
        let inputs = Tensors::new();
        Question { problem, pass: Pass::Forward, dtype: Dtype::F32, inputs }.tensors()
    };
    assert_eq!(of("rows", "keys").unwrap().len(), 2);
    let error = of("ids", "ids").unwrap_err().to_string();
    assert!(error.contains("ids") && error.contains("two that differ"), "{error}");
}

/// Answers in memory.
struct Memory(Vec<(Question, Option<Tensors>)>);

impl Answers for Memory {
    fn question(&self, number: usize) -> Result<Question, String> {
        Ok(self.0[number].0.clone())
    }
    fn answer(&self, number: usize) -> Result<Option<Tensors>, String> {
        Ok(self.0[number].1.clone())
    }
}

/// The verdict on a probe, as one of the profile that goes with the type.
fn verdict(
    given: &Given,
    capabilities: Option<&Capabilities>,
    asked: &Asked,
    kernel: impl Fn(&Question) -> Option<Tensors>,
) -> Verdict {
    let questions = asked.questions.clone().unwrap_or_default();
    let answered = questions.into_iter().map(|question| {
        let answer = kernel(&question);
        (question, answer)
    });
    let (files, given) = (Memory(answered.collect()), std::slice::from_ref(given));
    asked.probe.judge(Profile::flash, given, capabilities, &files).unwrap()
}

/// The probes of a problem that are asked.
fn asked(given: &Given, capabilities: Option<&Capabilities>) -> Vec<Asked> {
    let mut all = about(given, &[], capabilities).unwrap();
    all.retain(|asked| asked.questions.is_ok());
    all
}

/// The names of laws, with their passes.
fn names<'a>(asked: impl IntoIterator<Item = &'a Asked>) -> Vec<String> {
    asked.into_iter().map(|x| format!("{} {}", x.probe.law, x.probe.pass)).collect()
}

#[test]
fn questions_have_the_shape_of_the_problem_and_no_other_tensors() {
    for given in problems() {
        let asked = asked(&given, None);
        assert_eq!(
            names(&asked),
            [
                "edge_probe forward",
                "edge_probe backward",
                "count_probe forward",
                "dyadic_probe backward",
                "log_of_rows forward",
                "random_probe forward",
                "random_probe backward"
            ]
        );
        for question in asked.iter().flat_map(|asked| asked.questions.clone().unwrap()) {
            assert_eq!((&question.problem, question.dtype), (&given.problem, Dtype::Bf16));
            assert!(!question.inputs.contains_key("dlse"));
        }
        let with = Given { cotangents: vec!["dlse".to_string()], ..given };
        let probes = about(&with, &[], None).unwrap();
        let backward = probes.iter().filter(|asked| asked.probe.pass == "backward");
        let questions = backward.flat_map(|asked| asked.questions.clone().unwrap_or_default());
        assert!(questions.into_iter().all(|question| question.inputs.contains_key("dlse")));
    }
}

#[test]
fn right_kernels_hold_and_wrong_ones_fail() {
    for given in problems() {
        let asked = asked(&given, None);
        for asked in &asked {
            let found = verdict(&given, None, asked, |question| Some(answer(question, Bug::None)));
            assert_eq!(found, Verdict::Pass, "{:?}", asked.probe);
        }
        for bug in WRONG {
            let fails = |asked: &Asked| {
                verdict(&given, None, asked, |x| Some(answer(x, bug))).is_negative()
            };
            assert!(asked.iter().any(fails), "{bug:?} holds every probe of {:?}", given.problem);
        }
    }
}

#[test]
fn what_is_not_answered_is_undecided_and_a_failure_comes_first() {
    let [given, _] = problems();
    let asked = asked(&given, None);
    let edge = &asked[0];
    assert_eq!(edge.questions.as_ref().unwrap().len(), 2);
    let none = verdict(&given, None, edge, |_| None);
    assert_eq!(none, Verdict::Undecided("questions 1 and 2 have no answer".to_string()));
    let first = &edge.questions.as_ref().unwrap()[0];
    let half = |bug| verdict(&given, None, edge, |x| (x != first).then(|| answer(x, bug)));
    assert_eq!(half(Bug::None), Verdict::Undecided("question 1 has no answer".to_string()));
    assert!(half(Bug::KeyAhead).is_negative());
}

#[test]
fn a_kernel_without_lse_is_judged_by_o() {
    let [given, _] = problems();
    let kernel = Kernel { omits: vec!["lse".to_string()], ..Kernel::of(Algorithm::Attention) };
    let capabilities = Capabilities { kernels: vec![kernel] };
    let without = |question: &Question, bug| {
        let mut outputs = answer(question, bug);
        outputs.remove("lse");
        Some(outputs)
    };
    let asked = asked(&given, Some(&capabilities));
    assert!(!names(&asked).contains(&"log_of_rows forward".to_string()));
    for asked in &asked {
        let found = verdict(&given, Some(&capabilities), asked, |x| without(x, Bug::None));
        assert_eq!(found, Verdict::Pass, "{:?}", asked.probe);
    }
    for bug in [Bug::KeyAhead, Bug::Tail, Bug::Interleaved] {
        let edge = verdict(&given, Some(&capabilities), &asked[0], |x| without(x, bug));
        assert!(edge.is_negative(), "{bug:?}");
    }
}

/// Of every algorithm a problem with options, in each type in turn: etalon's own kernel answers, so that each probe is
/// asked or says why not; and the reference holds what is asked.
#[test]
fn every_algorithm_has_probes_and_reasons() {
    let options = Attention::new(extents(96)).mask(Mask::window(7, 3)).sinks().bias(1, 4);
    let capped = Attention::new(extents(64)).mask(Mask::causal()).softcap(30.0);
    let lengths = etalon_problem::Sequences::Lengths { query: vec![72, 0], key: vec![40, 72] };
    let padded =
        Attention::new(extents(40)).mask(Mask::causal()).sequences(lengths).softmax_scale(-0.3);
    let e = LinearExtents { batch: 1, query_heads: 4, key_heads: 2, tokens: 40, dim: 64 };
    let linear = LinearAttention::new(e).decay(etalon_problem::Decay::PerToken).initial_state();
    let outputs = TokenOutputs { lse: true, logprob: true, entropy: true, argmax: true };
    let loss = LinearCrossEntropy::new(24, 64, 300).softcap(30.0).bias().outputs(outputs);
    let lazy = etalon_problem::LazyAttention::new(extents(64)).bias(16);
    let plain = LinearCrossEntropy::new(24, 64, 300).label_smoothing(0.1);
    let problems: [Problem; 8] = [
        plain.into(),
        options.into(),
        capped.into(),
        padded.into(),
        linear.clone().scale(0.125).into(),
        linear.scale(0.3).into(),
        loss.into(),
        lazy.into(),
    ];
    let types = [Dtype::F32, Dtype::F16, Dtype::F64].into_iter().cycle();
    for (problem, dtype) in problems.into_iter().zip(types) {
        let given = given(problem.clone(), dtype);
        let all = about(&given, &[], None).unwrap();
        let is_asked = all.iter().any(|asked| asked.questions.is_ok());
        assert!(is_asked, "nothing is asked of {problem:?} in {dtype}");
        for asked in &all {
            let what = format!("{:?} in {dtype} of {problem:?}", asked.probe);
            match &asked.questions {
                Err(reason) => {
                    assert!(!reason.contains("a kernel of etalon"), "{what}: {reason}")
                }
                Ok(_) => {
                    let found = verdict(&given, None, asked, |question| {
                        let Question { problem, pass, dtype, inputs } = question;
                        let (pass, dtype, hints) = (*pass, *dtype, Hints::default());
                        let request = Request { problem, pass, dtype, inputs, hints };
                        Some(ask(&Reference, &request).unwrap())
                    });
                    assert_eq!(found, Verdict::Pass, "{what}");
                }
            }
        }
    }
}

/// A kernel that leaves out an option, in exact arithmetic; what it returns as the gradient of it is 0.
fn without(question: &Question, option: &str) -> Tensors {
    let exact = |Question { problem, pass, dtype, inputs }: &Question| {
        let (pass, dtype, hints) = (*pass, *dtype, Hints::default());
        ask(&Reference, &Request { problem, pass, dtype, inputs, hints }).unwrap()
    };
    let mut own = question.clone();
    let Problem::Attention(problem) = &mut own.problem else { panic!("attention") };
    match option {
        "sinks" => problem.scores.sinks = false,
        "bias" => problem.scores.bias = None,
        _ => return exact(question),
    }
    own.inputs.remove(option);
    let (gradient, mut outputs) = (format!("d{option}"), exact(&own));
    if let Some(x) = exact(question).get(&gradient) {
        let zeros = x.numbers(&gradient).unwrap() * 0.0;
        outputs.insert(gradient, Tensor::store(&zeros, x.stored().unwrap()));
    }
    outputs
}

/// Sinks and a bias that are there are asked about in both passes, beside padding and rows that see nothing.
#[test]
fn a_kernel_that_leaves_out_sinks_or_a_bias_fails() {
    let lengths = etalon_problem::Sequences::Lengths { query: vec![72, 50], key: vec![40, 61] };
    let problem = Attention::new(extents(64)).mask(Mask::causal()).sequences(lengths);
    let given = given(problem.sinks().bias(1, 4), Dtype::Bf16);
    let asked = asked(&given, None);
    for (option, passes) in
        [("none", &[][..]), ("sinks", &["backward", "forward"]), ("bias", &["backward", "forward"])]
    {
        let fails =
            |x: &&Asked| verdict(&given, None, x, |x| Some(without(x, option))).is_negative();
        let mut failed: Vec<&str> =
            asked.iter().filter(fails).map(|x| x.probe.pass.as_str()).collect();
        failed.sort_unstable();
        failed.dedup();
        assert_eq!(failed, passes, "{option}");
    }
}

/// A softcap leaves no keys apart: only a file can say that the kernel takes the problem without.
#[test]
fn a_probe_that_changes_an_option_needs_leave() {
    let capped = given(Attention::new(extents(64)).softcap(30.0), Dtype::F32);
    let all = about(&capped, &[Pass::Forward], None).unwrap();
    let reason = all[0].questions.clone().unwrap_err();
    assert!(reason.starts_with("its question has softcap absent in place of 30.0"), "{reason}");
    let capabilities = Capabilities { kernels: vec![Kernel::of(Algorithm::Attention)] };
    let all = about(&capped, &[Pass::Forward], Some(&capabilities)).unwrap();
    assert!(all[0].questions.is_ok());
    assert!(
        names(all.iter().filter(|x| x.questions.is_ok()))
            .contains(&"tanh_of_rows forward".to_string())
    );
}

#[test]
fn a_problem_too_large_is_refused() {
    let extents =
        Extents { batch: 8, query_heads: 32, key_heads: 8, queries: 4096, keys: 4096, dim: 128 };
    let error = about(&given(Attention::new(extents), Dtype::Bf16), &[], None).unwrap_err();
    assert!(error.to_string().contains("fewer rows will do"), "{error}");
}
