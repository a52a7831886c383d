//! Neighbours change nothing, also where heads are worked on in the memory of others.

use crate::common::{Operands, wave};
use etalon_problem::{Align, Attention, Extents, Mask, Pass, Sequences};
use etalon_simd::{Options, attention};
use ndarray::{Array, ArrayView, Axis, Dimension, RemoveAxis, Slice};

/// Large enough for several waves of one thread; some queries see no key at all.
fn problem(batch: usize) -> Attention {
    let extents =
        Extents { batch, query_heads: 6, key_heads: 3, queries: 1340, keys: 1300, dim: 40 };
    let mask = Mask::Window { left: Some(100), right: Some(0), align: Align::BottomRight };
    Attention::new(extents).mask(mask).softcap(4.0).value_dim(56)
}

/// The queries and keys of each batch element: the second lies in what the first packed.
const LENGTHS: ([usize; 3], [usize; 3]) = ([1340, 350, 0], [1300, 300, 100]);

fn results(operands: &Operands) -> Vec<ndarray::ArrayD<f32>> {
    let Operands { problem, q, k, v, dout, dlse, .. } = operands;
    let options = Options::default();
    let inputs = attention::Inputs::new(q.view(), k.view(), v.view());
    let out = attention::forward(problem, &inputs, &options).unwrap();
    let cotangents = attention::Cotangents::new(dout.view()).dlse(dlse.view());
    let first = attention::backward(problem, &inputs, &out, &cotangents, &options).unwrap();
    let further = attention::SecondCotangents {
        ddq: Some(q.view()),
        ddk: Some(k.view()),
        ddv: Some(v.view()),
        cot_o: Some(dout.view()),
        cot_lse: Some(dlse.view()),
        ..Default::default()
    };
    let second =
        attention::double_backward(problem, &inputs, &out, &cotangents, &further, &options);
    let second = second.unwrap();
    let gradients = [first.dq, first.dk, first.dv, second.gq, second.gk, second.gv, second.gdout];
    let rows = [out.lse, second.gdlse].map(|x| x.into_dyn());
    gradients.into_iter().chain([out.o]).map(|x| x.into_dyn()).chain(rows).collect()
}

/// One batch element, and of its rows the first.
fn part<D: Dimension>(x: ArrayView<'_, f32, D>, batch: usize) -> Array<f32, D> {
    x.slice_axis(Axis(0), Slice::from(batch..batch + 1)).to_owned()
}

fn alone<D: Dimension + RemoveAxis>(all: &Array<f32, D>, batch: usize) -> Array<f32, D> {
    part(all.view(), batch)
}

#[test]
fn a_batch_beside_changes_no_bit() {
    let (query, key) = LENGTHS;
    let mut all = problem(3);
    all.scores.sequences = Sequences::Lengths { query: query.to_vec(), key: key.to_vec() };
    let mut all = Operands::new(all);
    // A read of memory that the first element left behind gives infinities.
    all.q.index_axis_mut(Axis(0), 0).fill(f32::INFINITY);
    all.dout.index_axis_mut(Axis(0), 0).fill(f32::NEG_INFINITY);
    all.v = wave(all.problem.v_shape(), 1.3);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    pool.install(|| {
        for pass in [Pass::Forward, Pass::Backward, Pass::DoubleBackward] {
            let plan = attention::plan::<f32>(&all.problem, pass, &Options::default()).unwrap();
            assert!(plan.together < 9, "{pass} needs several waves to be tested: {plan:?}");
        }
        let together = results(&all);
        for batch in 1..3 {
            let mut one = problem(1);
            one.scores.sequences =
                Sequences::Lengths { query: vec![query[batch]], key: vec![key[batch]] };
            let mut one = Operands::new(one);
            one.q = alone(&all.q, batch);
            one.k = alone(&all.k, batch);
            one.v = alone(&all.v, batch);
            one.dout = alone(&all.dout, batch);
            one.dlse = alone(&all.dlse, batch);
            for (number, (one, all)) in results(&one).iter().zip(&together).enumerate() {
                let all = part(all.view(), batch);
                let same = one.iter().zip(&all).all(|(x, y)| x.to_bits() == y.to_bits());
                assert!(same && one.iter().all(|x| !x.is_nan()), "result {number} of {batch}");
            }
        }
    });
}
