//! Cost of mixed-up conventions, as `docs/conventions.md` has it: of each the rms error of the first output that it
//! changes, on random inputs.

use etalon_conformance::conventions;
use etalon_conformance::generate::Stream;
use etalon_conformance::tensor::{Stored, Tensor, Tensors, values};
use etalon_conformance::tier::{Hints, Request};
use etalon_conformance::tiers::oracle;
use etalon_problem::{
    Align, Attention, Decay, Dtype, Error, Extents, LinearAttention, LinearCrossEntropy,
    LinearExtents, Mask, Operand, Pass, Precision, Problem, Reduction, slopes,
};
use ndarray::{Array1, ArrayD};
use std::collections::BTreeMap;

/// Two batch elements, 4 query heads on 2 key heads, 96 queries on 128 keys.
const EXTENTS: Extents =
    Extents { batch: 2, query_heads: 4, key_heads: 2, queries: 96, keys: 128, dim: 64 };

fn main() -> Result<(), Error> {
    let attention = || Attention::new(EXTENTS).mask(Mask::causal());
    let linear = LinearExtents { batch: 2, query_heads: 4, key_heads: 2, tokens: 128, dim: 64 };
    let mut loss = LinearCrossEntropy::new(128, 64, 200);
    loss.label_smoothing = 0.1;
    let summed = LinearCrossEntropy { reduction: Reduction::Sum, ..loss.clone() };
    let problems: [Problem; 7] = [
        attention().into(),
        Attention { value_dim: 128, ..attention().softcap(2.0).sinks() }.into(),
        attention().bias(1, 4).into(),
        Attention::new(EXTENTS).mask(Mask::window(15, 0)).into(),
        Attention::new(EXTENTS).mask(Mask::Causal { align: Align::TopLeft }).into(),
        LinearAttention::new(linear).decay(Decay::PerHead).into(),
        loss.into(),
    ];
    let mut costs = BTreeMap::new();
    for problem in problems.into_iter().chain([summed.into()]) {
        let inputs = inputs(&problem);
        let exact = results(&problem, &inputs)?;
        for reading in conventions::readings(&problem, &inputs) {
            let id = reading.id.clone();
            let other =
                reading.results(Pass::Forward, &values(&problem, Pass::Forward, &inputs)?)?;
            let errors = exact.iter().map(|(name, x)| (name.clone(), error(x, &other[name])));
            let worst = errors.filter(|(_, error)| *error > 0.0).max_by(|x, y| x.1.total_cmp(&y.1));
            costs.entry(id).or_insert(worst);
        }
    }
    for convention in conventions::ALL {
        let cost = costs.get(convention.id).cloned().flatten();
        let cost = cost.map_or("–".to_string(), |(name, x)| format!("{name} {:.1} %", 100.0 * x));
        println!("{}: {cost}", convention.id);
    }
    Ok(())
}

fn results(problem: &Problem, inputs: &Tensors) -> Result<BTreeMap<String, ArrayD<f64>>, Error> {
    let hints = Hints::default();
    let request = Request { problem, pass: Pass::Forward, dtype: Dtype::F64, inputs, hints };
    let results = oracle(&request)?.into_iter();
    results.map(|(name, x)| Ok((name.clone(), x.numbers(&name)?))).collect()
}

/// Normal numbers; decays are the geometric slopes.
fn inputs(problem: &Problem) -> Tensors {
    let operands = problem.operands(Pass::Forward);
    let tensor = |operand: &Operand| {
        let stream = Stream::new(0, operand.name);
        let mut at = 0;
        let values = ArrayD::from_shape_simple_fn(operand.shape.as_slice(), || {
            at += 1;
            if operand.precision == Precision::Integer {
                (at % 200) as f64
            } else {
                stream.normal(at)
            }
        });
        let values = match operand.name {
            "g_gamma" => slopes::geometric(operand.len(), 0, 1)
                .map_or(values, |slopes| Array1::from(slopes).into_dyn()),
            _ => values,
        };
        (
            operand.name.to_string(),
            Tensor::store(&values, Stored::of(operand.precision, Dtype::F64)),
        )
    };
    operands.iter().filter(|x| x.role.is_given()).map(tensor).collect()
}

/// rms(other − exact) / rms(exact) over finite elements.
fn error(exact: &ArrayD<f64>, other: &ArrayD<f64>) -> f64 {
    let finite = exact.iter().zip(other).filter(|(x, y)| x.is_finite() && y.is_finite());
    let (errors, squares) = finite.fold((0.0, 0.0), |(errors, squares), (x, y)| {
        (errors + (x - y) * (x - y), squares + x * x)
    });
    f64::sqrt(errors / squares)
}
