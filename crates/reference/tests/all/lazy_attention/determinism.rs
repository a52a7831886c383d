//! The same bits for any number of threads and any strides.

use super::cases::cases;
use super::tensors::{PASSES, Tensors, assert_all_close, gradients, inputs, operands, run};
use etalon_problem::{Blocking, Pass};
use etalon_reference::lazy_attention::{Cotangents, Inputs, backward, stats};
use ndarray::{ArrayD, Axis, Dimension};

fn bits(tensors: &Tensors<f64>) -> Vec<u64> {
    tensors.values().flatten().map(|x| x.to_bits()).collect()
}

#[test]
fn results_have_the_same_bits_for_any_number_of_threads() {
    let pool = |threads| {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool of threads")
    };
    // More threads than cores, and a number that divides nothing.
    let pools = [pool(1), pool(2), pool(7)];
    for (name, problem) in cases() {
        for pass in PASSES {
            let x = operands(&problem, pass, 51);
            let [one, others @ ..] = pools
                .each_ref()
                .map(|pool| bits(&pool.install(|| run(&problem, pass, &x)).expect(name)));
            assert!(others.iter().all(|other| *other == one), "{name}: {pass}");
        }
        let x = operands(&problem, Pass::Forward, 51);
        let ask = || stats(&problem, &inputs(&x), Blocking::new(2, 3)).expect(name);
        let [one, others @ ..] = pools.each_ref().map(|pool| pool.install(ask));
        assert!(others.iter().all(|other| *other == one), "{name}: stats");
    }
}

/// Reversed axes and broadcasts are read where they lie or copied, without a trace in the result.
#[test]
fn strides_do_not_matter() {
    /// The same tensor with its last axis laid out first.
    fn turned(x: &ArrayD<f64>) -> ArrayD<f64> {
        x.view().reversed_axes().as_standard_layout().into_owned().reversed_axes()
    }
    fn view<D: Dimension>(x: &ArrayD<f64>) -> ndarray::ArrayView<'_, f64, D> {
        x.view().into_dimensionality().expect("as many axes")
    }
    for (name, problem) in cases() {
        let mut x = operands(&problem, Pass::Backward, 52);
        // Every head reads the first one's rows: legal as a broadcast too.
        if problem.scores.extents.query_heads == 0 {
            continue;
        }
        let first = x["dout"].slice_axis(Axis(1), (0..1).into()).to_owned();
        let spread = first.broadcast(problem.o_shape().to_vec()).expect("a broadcast");
        x.insert("dout".to_string(), spread.to_owned());
        let expected = run(&problem, Pass::Backward, &x).expect(name);
        let strange: Tensors<f64> = x.iter().map(|(n, x)| (n.clone(), turned(x))).collect();
        let inputs = Inputs {
            q: view(&strange["q"]),
            k: view(&strange["k"]),
            v: view(&strange["v"]),
            bias: strange.get("bias").map(view),
            tau: view(&strange["tau"]),
        };
        let dout = spread.view().into_dimensionality().expect("four axes");
        let cotangents = Cotangents { dout, dlse: Some(view(&strange["dlse"])) };
        let found = gradients(backward(&problem, &inputs, &cotangents).expect(name));
        assert_all_close(&found, &expected, 0.0, name);
    }
}
