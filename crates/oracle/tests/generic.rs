//! Inputs that count as generic: independent draws do, whatever their distribution; structured ones do not.

use etalon_oracle::gates::generic;
use etalon_oracle::generate::Stream;
use etalon_oracle::tensor::{Tensor, Tensors};
use etalon_problem::{Attention, Dtype, Extents, Pass, Problem, Role};
use ndarray::ArrayD;

const EXTENTS: Extents =
    Extents { batch: 1, query_heads: 2, key_heads: 1, queries: 24, keys: 32, dim: 16 };

/// The operands of a backward pass; `draw` makes an element of its name, place and a stream.
fn inputs(seed: u64, draw: impl Fn(&str, usize, &Stream) -> f64) -> (Problem, Tensors) {
    let problem: Problem = Attention::new(EXTENTS).into();
    let given = problem.operands(Pass::Backward);
    let tensor = |name: &str, shape: &[usize]| {
        let (stream, mut at) = (Stream::new(seed, name), 0..);
        let x = ArrayD::from_shape_simple_fn(shape, || draw(name, at.next().unwrap_or(0), &stream));
        (name.to_string(), Tensor::round(&x, Dtype::Bf16))
    };
    let tensors = given.iter().filter(|x| x.role.is_given() && x.role != Role::OptionalCotangent);
    let tensors = tensors.map(|x| tensor(x.name, &x.shape)).collect();
    (problem, tensors)
}

fn judged(seed: u64, draw: impl Fn(&str, usize, &Stream) -> f64) -> Result<(), String> {
    let (problem, tensors) = inputs(seed, draw);
    generic(&problem, Pass::Backward, &tensors)
}

fn uniform(stream: &Stream, at: usize) -> f64 {
    2.0 * stream.uniform(at) - 1.0
}

/// Of Laplace's distribution: a logarithm of a uniform number with a random sign.
fn laplace(stream: &Stream, at: usize) -> f64 {
    let x = uniform(stream, at);
    -x.signum() * (1.0 - x.abs()).max(1e-9).ln() / 2f64.sqrt()
}

/// Three distributions over 700 seeds each: the docs state this count.
#[test]
fn independent_draws_are_generic() {
    for seed in 0..700 {
        for draw in [|s: &Stream, at: usize| s.normal(at), uniform, laplace] {
            let found = judged(seed, |_, at, stream| draw(stream, at));
            assert_eq!(found, Ok(()), "seed {seed}");
        }
    }
}

#[test]
fn structured_inputs_are_not_generic() {
    let (width, rows) = (EXTENTS.dim, EXTENTS.keys);
    type Draw = fn(usize, usize, f64) -> f64;
    let families: [(&str, &str, Draw); 9] = [
        ("massive channel", "q", |_, c, x| if c == 3 { 40.0 + x } else { x }),
        ("massive token", "k", |i, _, x| if i == 0 { 12.0 * x } else { x }),
        ("offset", "k", |_, _, x| x + 1.0),
        ("ties", "k", |_, _, x| x.round()),
        ("ones", "dout", |_, _, _| 1.0),
        ("ramp", "v", |i, _, x| 0.2 * i as f64 - 3.0 + x),
        ("one-hot", "q", |i, c, _| f64::from(u8::from(i % 16 == c))),
        ("large scores", "q", |_, _, x| 16.0 * x),
        ("not a number", "v", |i, c, x| if (i, c) == (5, 5) { f64::NAN } else { x }),
    ];
    for seed in 0..20 {
        for (family, of, draw) in families {
            let found = judged(seed, |name, at, stream| {
                let x = stream.normal(at);
                if name == of { draw(at / width % rows, at % width, x) } else { x }
            });
            let reason = found.expect_err(family);
            assert!(
                family == "large scores" || reason.starts_with(&format!("{of}: ")),
                "{family}: {reason}"
            );
        }
    }
}

/// A sum over all elements has a cotangent of 1 everywhere: nothing about such inputs is random.
#[test]
fn the_reason_names_the_operand() {
    let reason = judged(1, |name, at, stream| if name == "dout" { 1.0 } else { stream.normal(at) });
    assert_eq!(reason, Err("dout: more than one element in 16 has the same value".to_string()));
}
