//! The same bits for any number of threads, any strides and whatever lies beside.

use super::cases::{Case, PASSES, cases};
use super::tensors::{assert_same, operands, run};
use etalon_problem::Pass;
use etalon_reference::attention::{Cotangents, Inputs, backward, forward};
use ndarray::Ix4;

#[test]
fn results_have_the_same_bits_for_any_number_of_threads() {
    let pool = |threads| {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool of threads")
    };
    // More threads than cores, and a number that divides nothing.
    let pools = [pool(1), pool(2), pool(7)];
    for Case { name, problem } in cases() {
        for pass in PASSES {
            let x = operands(&problem, pass, 7);
            let [one, others @ ..] =
                pools.each_ref().map(|pool| pool.install(|| run(&problem, pass, &x)).expect(&name));
            for other in others {
                for (result, found) in &other {
                    let (found, expected) = (found.iter(), one[result].iter());
                    let same = found.zip(expected).all(|(x, y)| x.to_bits() == y.to_bits());
                    assert!(same, "{name}: {result}");
                }
            }
        }
    }
}

/// Permuted axes and broadcasts are read where they lie or copied, without a trace in the result.
#[test]
fn strides_do_not_matter() {
    for (name, problem) in super::cases::attention_problems() {
        let case = problem.clone().into();
        let mut x = operands(&case, Pass::Backward, 8);
        // Every query head reads the first one's rows: legal as a broadcast too.
        for name in ["q", "dout"] {
            let first = x[name].clone();
            for mut head in x.get_mut(name).expect(name).axis_iter_mut(ndarray::Axis(1)) {
                head.assign(&first.index_axis(ndarray::Axis(1), 0));
            }
        }
        let typed = |name: &str| x[name].clone().into_dimensionality::<Ix4>().expect("four axes");
        let [q, k, v, dout] = ["q", "k", "v", "dout"].map(typed);
        // [batch, rows, heads, width] in memory.
        let turned = [&k, &v]
            .map(|x| x.view().permuted_axes([0, 2, 1, 3]).as_standard_layout().into_owned());
        let [k_turned, v_turned] = turned.each_ref().map(|x| x.view().permuted_axes([0, 2, 1, 3]));
        let sinks = x.get("sinks").map(|x| x.view().into_dimensionality().expect("one axis"));
        let bias = x.get("bias").map(|x| x.view().into_dimensionality().expect("four axes"));
        let inputs = Inputs { q: q.view(), k: k.view(), v: v.view(), sinks, bias };
        let heads = problem.scores.extents.query_heads.min(1);
        let spread =
            |x: &ndarray::Array4<f64>| x.slice_axis(ndarray::Axis(1), (0..heads).into()).to_owned();
        let [q_one, dout_one] = [&q, &dout].map(spread);
        let strided = Inputs {
            q: q_one.broadcast(q.dim()).expect("one head stands for all"),
            k: k_turned,
            v: v_turned,
            ..inputs
        };
        let whole = Cotangents { dout: dout.view(), dlse: None };
        let spread = Cotangents { dout: dout_one.broadcast(dout.dim()).expect("as q"), dlse: None };
        let (a, b) =
            (forward(&problem, &inputs).expect(&name), forward(&problem, &strided).expect(&name));
        assert_same(&b.o.into_dyn(), &a.o.into_dyn(), &name);
        let a = backward(&problem, &inputs, &whole).expect(&name);
        let b = backward(&problem, &strided, &spread).expect(&name);
        assert_eq!(
            (a.dq, a.dk, a.dv, a.dsinks, a.dbias),
            (b.dq, b.dk, b.dv, b.dsinks, b.dbias),
            "{name}"
        );
    }
}
