//! Modes and threads change no bit.

use crate::common::{Operands, everything};
use etalon_problem::{Align, Attention, Blocking, Extents, Mask, Sequences};
use etalon_simd::{Mode, Options, Workspace, attention};
use ndarray::Array4;

/// Two key heads of 300 × 331 in tiles of 32, so that many tiles take turns at every sum of dq.
fn problem(mask: Mask) -> Attention {
    let extents =
        Extents { batch: 1, query_heads: 4, key_heads: 2, queries: 300, keys: 331, dim: 24 };
    Attention::new(extents).mask(mask)
}

#[test]
fn dq_is_the_same_in_both_modes_and_for_any_threads_and_budget() {
    let window = Mask::Window { left: Some(40), right: Some(5), align: Align::TopLeft };
    let holes = Mask::And(vec![
        Mask::ChunkedCausal { chunk: 90, align: Align::BottomRight },
        Mask::Or(vec![window.clone(), Mask::causal()]),
    ]);
    let problems = [Mask::Full, Mask::causal(), window, holes].map(problem);
    // Queries that see no key: even the sign of their zeros is the same.
    let mut blind = problem(Mask::Causal { align: Align::BottomRight });
    (blind.scores.extents.keys, blind.scores.softmax_scale) = (200, Some(-0.3));
    for problem in problems.into_iter().chain([everything(), blind]) {
        let operands = Operands::new(problem);
        let Operands { problem, q, k, v, dout, sinks, bias, .. } = &operands;
        let mut inputs = attention::Inputs::new(q.view(), k.view(), v.view());
        if problem.scores.sinks {
            inputs = inputs.sinks(sinks.view()).bias(bias.view());
        }
        let cotangents = attention::Cotangents::new(dout.view());
        let blocking = Some(Blocking::new(32, 32));
        let options = Options { blocking, mode: Mode::Separate, ..Options::default() };
        let out = attention::forward(problem, &inputs, &options).unwrap();
        let backward = |options: &Options| {
            attention::backward(problem, &inputs, &out, &cotangents, options).unwrap()
        };
        let separate = backward(&options);
        for threads in [1, 2, 3, 7] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for partials_budget in [0, usize::MAX] {
                let options = Options { mode: Mode::FusedPartials, partials_budget, ..options };
                let fused = pool.install(|| backward(&options));
                let bits = |x: &Array4<f32>| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                let same = fused == separate && bits(&fused.dq) == bits(&separate.dq);
                assert!(same, "{:?}, {threads} threads", problem.scores.mask);
            }
        }
    }
}

/// A bias of its own for every head is written by the sweep of the keys; asked for alone, dbias has a
/// sweep of its own. Two packed sequences with rows between them, so that zeros have to be written.
#[test]
fn dbias_is_the_same_beside_other_gradients_and_alone() {
    let packed = Sequences::Packed { cu_query: vec![0, 120, 290], cu_key: vec![0, 180, 320] };
    let window = Mask::window(40, 5);
    for sequences in [Sequences::Dense, packed] {
        let mut problem = problem(window.clone()).bias(1, 4);
        problem.scores.sequences = sequences;
        let operands = Operands::new(problem);
        let Operands { problem, q, k, v, dout, bias, .. } = &operands;
        let inputs = attention::Inputs::new(q.view(), k.view(), v.view()).bias(bias.view());
        let cotangents = attention::Cotangents::new(dout.view());
        let blocking = Some(Blocking::new(32, 32));
        let options = Options { blocking, ..Options::default() };
        let out = attention::forward(problem, &inputs, &options).unwrap();
        let mut alone = Array4::from_elem(bias.raw_dim(), f32::NAN);
        let result =
            attention::GradientsMut { dbias: Some(alone.view_mut()), ..Default::default() };
        attention::backward_into(
            &Workspace::new(),
            problem,
            &inputs,
            &out,
            &cotangents,
            result,
            &options,
        )
        .unwrap();
        assert!(alone.iter().all(|x| x.is_finite()) && alone.iter().any(|&x| x != 0.0));
        let bits = |x: &Array4<f32>| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let mut other = [q.raw_dim(), k.raw_dim()].map(Array4::zeros);
        for fused in [false, true] {
            let mut beside = Array4::from_elem(bias.raw_dim(), f32::NAN);
            let [dq, dk] = &mut other;
            let result = attention::GradientsMut {
                dq: fused.then(|| dq.view_mut()),
                dk: Some(dk.view_mut()),
                dbias: Some(beside.view_mut()),
                ..Default::default()
            };
            attention::backward_into(
                &Workspace::new(),
                problem,
                &inputs,
                &out,
                &cotangents,
                result,
                &options,
            )
            .unwrap();
            assert_eq!(bits(&alone), bits(&beside), "{:?}", problem.scores.sequences);
        }
    }
}
