//! The figures of `docs/errata.md` on lazy attention: what each mistake costs on a stated problem. Each
//! is computed here and must stand on the page as it comes out.

use etalon_conformance::generate::Stream;
use etalon_conformance::tensor::{Tensor, Tensors};
use etalon_conformance::tier::{Hints, Request, Tier};
use etalon_conformance::tiers::{Reference, oracle};
use etalon_conformance::zoo::{Host, Mutant, mutant};
use etalon_problem::{Blocking, Dtype, Extents, LazyAttention, Operand, Pass, Problem};
use etalon_reference::lazy_attention;
use ndarray::{ArrayD, ArrayView, Dimension, IxDyn};

const ERRATA: &str = include_str!("../../../../docs/errata.md");

/// Fails unless the section holds this sentence, whatever its line breaks.
#[track_caller]
fn stands(sentence: &str) {
    let section = ERRATA
        .split("\n## ")
        .find(|section| section.starts_with("Lazy attention"))
        .expect("section");
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words(section).contains(&words(sentence)), "docs/errata.md lacks: {sentence}");
}

/// 2 heads, 256 rows, D = E = 16, causal; q, k, v, dout normal, no dlse.
fn problem(keys: usize) -> LazyAttention {
    let extents = Extents { batch: 1, query_heads: 2, key_heads: 2, queries: 256, keys, dim: 16 };
    LazyAttention::new(extents)
}

fn tensors(problem: &LazyAttention, tau: f64, bias: impl Fn(usize) -> f64) -> Tensors {
    let problem: Problem = problem.clone().into();
    let read = problem.operands(Pass::Backward).into_iter();
    let read = read.filter(|operand| operand.role.is_given() && operand.name != "dlse");
    let tensor = |Operand { name, shape, .. }: Operand| {
        let stream = Stream::new(2, name);
        let mut at = 0;
        let values = ArrayD::from_shape_fn(IxDyn(&shape), |index| {
            at += 1;
            match name {
                "tau" => tau,
                "bias" => bias(index[1]),
                _ => stream.normal(at),
            }
        });
        (name.to_string(), Tensor::round(&values, Dtype::F32))
    };
    read.map(tensor).collect()
}

/// A bias of a normal number for each distance.
fn learned(d: usize) -> f64 {
    Stream::new(3, "bias").normal(d)
}

fn run(tier: &dyn Tier, problem: &LazyAttention, pass: Pass, inputs: &Tensors) -> Tensors {
    let problem: Problem = problem.clone().into();
    let operands = problem.operands(pass);
    let of_pass = operands.iter().filter_map(|operand| inputs.get_key_value(operand.name));
    let inputs: Tensors = of_pass.map(|(name, x)| (name.clone(), x.clone())).collect();
    let hints = Hints::default();
    let request = Request { problem: &problem, pass, dtype: Dtype::F32, inputs: &inputs, hints };
    tier.run(&request).unwrap_or_else(|refusal| panic!("{}: {refusal:?}", tier.name()))
}

fn numbers(tensors: &Tensors, name: &str) -> ArrayD<f64> {
    tensors[name].to_f64(name).expect("numbers")
}

fn rms(x: &ArrayD<f64>) -> f64 {
    (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64).sqrt()
}

/// The root mean square of the difference over that of the exact result.
fn cost(mutant: Mutant, problem: &LazyAttention, inputs: &Tensors, result: &str) -> f64 {
    let pass = if result == "o" { Pass::Forward } else { Pass::Backward };
    let exact = numbers(&run(&Reference, problem, pass, inputs), result);
    let wrong = numbers(&run(&Host::mutant(mutant), problem, pass, inputs), result);
    rms(&(wrong - &exact)) / rms(&exact)
}

fn percent(x: f64) -> String {
    if x >= 0.095 { format!("{:.0} %", 100.0 * x) } else { format!("{:.1} %", 100.0 * x) }
}

fn typed<D: Dimension>(x: &ArrayD<f64>) -> ArrayView<'_, f64, D> {
    x.view().into_dimensionality().expect("as many axes")
}

/// Costs of several mutants, as a sentence has them.
fn costs(mutant: Mutant, problem: &LazyAttention, x: &Tensors, results: &[&str]) -> String {
    let one =
        |result: &&str| format!("{} for `{result}`", percent(cost(mutant, problem, x, result)));
    results.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// The problem of most figures: a learned bias of 32 distances, τ = −0.93.
fn usual() -> (LazyAttention, Tensors) {
    let problem = problem(256).bias(32);
    let x = tensors(&problem, -0.93, learned);
    (problem, x)
}

#[test]
fn the_gradient_of_softmax() {
    let (problem, x) = usual();
    stands(&costs(mutant("gradient-of-idle").unwrap(), &problem, &x, &["dq", "dk", "dbias"]));
}

#[test]
fn skipping_blocks_in_the_backward_pass() {
    // A bias that falls by 0.1 with each distance, for all of them; τ = −1.
    let problem = problem(256).bias(256);
    let x = tensors(&problem, -1.0, |d| -0.1 * d as f64);
    let skipped = mutant("inactive-tile-skipped").unwrap();
    let exact = run(&Reference, &problem, Pass::Backward, &x);
    let wrong = run(&Host::mutant(skipped), &problem, Pass::Backward, &x);
    let relative = |name: &str| {
        let (exact, wrong) = (numbers(&exact, name), numbers(&wrong, name));
        rms(&(wrong - &exact)) / rms(&exact)
    };
    stands(&format!("{:.0e} of `dq` and {:.0e} of `dbias`", relative("dq"), relative("dbias")));
    let gone = numbers(&wrong, "dbias").iter().filter(|x| **x == 0.0).count();
    let all = numbers(&exact, "dbias");
    assert!(all.iter().all(|x| *x != 0.0));
    stands(&format!("{gone} of its {} elements", all.len()));
    let (dq, found) = (numbers(&exact, "dq"), numbers(&wrong, "dq"));
    let near = dq.iter().zip(&found).filter(|(x, y)| (*x - *y).abs() <= 1e-2 + 1e-2 * x.abs());
    stands(&format!(
        "{:.0} % of the elements of such a `dq`",
        100.0 * near.count() as f64 / dq.len() as f64
    ));
    // Claim of the page about the sparse part alone.
    let (problem, x) = usual();
    stands(&costs(mutant("inactive-pair-skipped").unwrap(), &problem, &x, &["dq", "dk", "dbias"]));
}

#[test]
fn the_bias_belongs_to_the_scores() {
    let (problem, x) = usual();
    stands(&costs(mutant("dbias-of-active-alone").unwrap(), &problem, &x, &["dbias"]));
}

#[test]
fn the_number_of_the_row() {
    let problem = problem(512).bias(32);
    let x = tensors(&problem, -0.93, learned);
    stands(&costs(mutant("row-number-as-count").unwrap(), &problem, &x, &["o", "dtau"]));
}

#[test]
fn two_widths_of_the_bias() {
    let (problem, x) = usual();
    stands(&costs(mutant("reach-plus-one").unwrap(), &problem, &x, &["o", "dbias"]));
    stands(&costs(mutant("last-column-ignored").unwrap(), &problem, &x, &["o", "dbias"]));
}

/// Σ dout · o in f64 with this τ in every head.
fn loss(problem: &LazyAttention, x: &Tensors, tau: f64) -> f64 {
    let mut x = x.clone();
    let tau = ArrayD::from_elem(IxDyn(&[problem.scores.extents.query_heads]), tau);
    x.insert("tau".to_string(), Tensor::round(&tau, Dtype::F64));
    let any: Problem = problem.clone().into();
    let hints = Hints::default();
    let request =
        Request { problem: &any, pass: Pass::Forward, dtype: Dtype::F64, inputs: &x, hints };
    let o = oracle(&request).expect("the forward pass")["o"].to_f64("o").expect("o");
    (&o * &numbers(&x, "dout")).sum()
}

#[test]
fn a_finite_difference_on_the_kink() {
    let problem = problem(256).bias(32);
    let x = tensors(&problem, -1.0, learned);
    // So small that no other pair crosses its kink.
    let step = 2f64.powi(-26);
    let slope = (loss(&problem, &x, -1.0 + step) - loss(&problem, &x, -1.0 - step)) / (2.0 * step);
    let dtau = numbers(&run(&Reference, &problem, Pass::Backward, &x), "dtau").sum();
    let (dout, v) = (numbers(&x, "dout"), numbers(&x, "v"));
    let half: f64 = (0..2)
        .flat_map(|h| (0..16).map(move |c| (h, c)))
        .map(|(h, c)| 0.5 * dout[[0, h, 0, c]] * v[[0, h, 0, c]])
        .sum();
    assert!((slope - dtau - half).abs() < 1e-3, "{slope} {dtau} {half}");
    stands(&format!("by {half:.3}"));
}

/// The seed's test: 4 heads, 128 rows, D = 64, blocks of 64, a bias of 33 normal numbers.
#[test]
fn the_density_of_blocks() {
    let extents =
        Extents { batch: 2, query_heads: 4, key_heads: 4, queries: 128, keys: 128, dim: 64 };
    let problem = LazyAttention::new(extents).bias(33);
    let x = tensors(&problem, -10.0, learned);
    let values: Vec<ArrayD<f64>> =
        ["q", "k", "v", "bias", "tau"].iter().map(|name| numbers(&x, name)).collect();
    let inputs = lazy_attention::Inputs {
        q: typed(&values[0]),
        k: typed(&values[1]),
        v: typed(&values[2]),
        bias: Some(typed(&values[3])),
        tau: typed(&values[4]),
    };
    let tile = Blocking::new(64, 64);
    let active = lazy_attention::activity(&problem, &inputs, tile).expect("activity");
    let density = active.iter().filter(|x| **x).count() as f64 / active.len() as f64;
    stands(&format!("the mean is {density}"));
    let stats = lazy_attention::stats(&problem, &inputs, tile).expect("stats");
    assert_eq!(stats.tile_density, 1.0);
    stands(&format!("{:.0} % of the rows", 100.0 * stats.dead_rows));
    stands(&format!("{:.1} % of the pairs", 100.0 * stats.element_density));
}

/// (E45) against 1/density.
#[test]
fn the_speed_that_density_promises() {
    let both = |density: f64| 9.0 / (4.0 + 5.0 * density);
    stands(&format!("{:.2} times, not 2", both(0.5)));
    stands(&format!("{:.2}, not 100", both(0.01)));
}
