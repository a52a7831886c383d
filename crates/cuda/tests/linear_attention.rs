//! Steps of linear_attention whose states stay where they are. Without a device, or a compiler, a test says
//! that it was skipped.

use etalon_cuda::{Options, Workspace, probe, run_in};
use etalon_problem::{Decay, Error, LinearAttention, LinearExtents, Pass, Problem, Views, ViewsMut};
use ndarray::{Array2, Array3, Array4, s};

/// Six query heads of one key head: more than a step reads at once.
fn problem() -> Problem {
    let extents = LinearExtents { batch: 2, query_heads: 6, key_heads: 1, tokens: 1, dim: 20 };
    LinearAttention::new(extents).value_dim(70).decay(Decay::PerToken).into()
}

fn step(workspace: &Workspace, inputs: &Views<'_>, outputs: &mut ViewsMut<'_>) -> Result<(), Error> {
    run_in(workspace, &problem(), Pass::Step, inputs, outputs, &Options::default())
}

#[test]
fn a_step_without_an_initial_state_reads_the_place_of_the_final_one() {
    if let Err(absent) = probe() {
        println!("skipped: {absent}");
        return;
    }
    let wave = |n: usize| (n as f32).sin();
    let workspace = Workspace::new();
    let q = Array3::from_shape_fn((2, 6, 20), |(b, h, d)| wave(b + 3 * h + 5 * d));
    let k = Array3::from_shape_fn((2, 1, 20), |(b, _, d)| wave(7 * b + d));
    let v = Array3::from_shape_fn((2, 1, 70), |(b, _, e)| wave(2 * b + 9 * e));
    let g = Array2::from_shape_fn((2, 1), |(b, _)| if b == 0 { -0.5 } else { f32::NEG_INFINITY });
    let old = Array4::from_shape_fn((2, 1, 20, 70), |(b, _, d, e)| wave(b + 11 * d + 13 * e));
    let inputs = || Views::new().with("q", &q).with("k", &k).with("v", &v).with("g", &g);

    let (mut o, mut state) = (Array3::<f32>::zeros((2, 6, 70)), Array4::<f32>::zeros((2, 1, 20, 70)));
    step(
        &workspace,
        &inputs().with("initial_state", &old),
        &mut ViewsMut::new().with("o", &mut o).with("final_state", &mut state),
    )
    .unwrap();
    assert_eq!(state[[1, 0, 3, 4]], k[[1, 0, 3]] * v[[1, 0, 4]]); // a reset

    let mut room = Array4::<f32>::zeros((2, 1, 20, 140));
    room.slice_mut(s![.., .., .., ..;2]).assign(&old);
    let place = room.slice_mut(s![.., .., .., ..;2]);
    let mut own = Array3::<f32>::zeros((2, 6, 70));
    step(&workspace, &inputs(), &mut ViewsMut::new().with("o", &mut own).with("final_state", place)).unwrap();
    assert_eq!(own, o);
    assert_eq!(room.slice(s![.., .., .., ..;2]), state);

    // Without a place for the new state.
    let mut alone = Array3::<f32>::zeros((2, 6, 70));
    step(&workspace, &inputs().with("initial_state", &old), &mut ViewsMut::new().with("o", &mut alone)).unwrap();
    assert_eq!(alone, o);
}
