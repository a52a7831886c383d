//! Time that the oracle takes for a usual size: `cargo bench -p etalon-reference --bench oracle_speed`.

use etalon_problem::{Attention, Extents, Mask};
use etalon_reference::attention::{Cotangents, Inputs, backward, forward};
use ndarray::Array4;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let extents =
        Extents { batch: 1, query_heads: 8, key_heads: 8, queries: 1024, keys: 1024, dim: 64 };
    for mask in [Mask::Full, Mask::causal()] {
        let problem = Attention::new(extents).mask(mask);
        // Any numbers of the usual size will do: the time does not depend on them.
        let tensor = |shape: [usize; 4], step: f64| {
            let elements = shape.iter().product();
            let values = (0..elements).map(|n| (n as f64 * step).sin()).collect();
            Array4::from_shape_vec(shape, values)
        };
        let q = tensor(problem.scores.q_shape(), 0.7)?;
        let k = tensor(problem.scores.k_shape(), 1.1)?;
        let v = tensor(problem.v_shape(), 1.3)?;
        let dout = tensor(problem.o_shape(), 1.7)?;
        let inputs = Inputs { q: q.view(), k: k.view(), v: v.view(), sinks: None, bias: None };

        let start = Instant::now();
        forward(&problem, &inputs)?;
        let there = start.elapsed();
        backward(&problem, &inputs, &Cotangents { dout: dout.view(), dlse: None })?;
        let back = start.elapsed() - there;
        println!("{:?}: forward {there:.2?}, backward {back:.2?}", problem.scores.mask);
    }
    Ok(())
}
