//! The same numbers give the same bits, however they lie in memory.

use crate::common::{Operands, everything};
use etalon_simd::{Mode, Options, Workspace, attention};
use ndarray::{Array4, ArrayView4, Axis, Slice};

/// The same tensor in memory of another order: `[batch, length, heads, dim]`.
fn permuted(x: &Array4<f32>) -> Array4<f32> {
    let other = x.view().permuted_axes([0, 2, 1, 3]).as_standard_layout().into_owned();
    other.permuted_axes([0, 2, 1, 3])
}

/// The same tensor between elements that belong to somebody else.
fn spread(x: &Array4<f32>) -> Array4<f32> {
    let (b, h, n, d) = x.dim();
    let mut wide = Array4::from_elem((b, h, n, 2 * d + 1), f32::NAN);
    wide.slice_axis_mut(Axis(3), Slice::new(0, Some(2 * d as isize), 2)).assign(x);
    wide
}

/// The second cotangents are other tensors of the same shapes.
fn second<'a>(
    operands: &'a Operands,
    [q, k, v, dout, bias]: [ArrayView4<'a, f32>; 5],
) -> attention::SecondCotangents<'a, f32> {
    attention::SecondCotangents {
        ddq: Some(q),
        ddk: Some(k),
        ddv: Some(v),
        ddsinks: Some(operands.sinks.view()),
        ddbias: Some(bias),
        cot_o: Some(dout),
        cot_lse: Some(operands.dlse.view()),
    }
}

type Results = (attention::Output<f32>, attention::Gradients<f32>, attention::SecondGradients<f32>);

fn run(
    operands: &Operands,
    [q, k, v, dout, bias]: [ArrayView4<'_, f32>; 5],
    options: &Options,
) -> Results {
    let further =
        second(operands, [q, k, v, dout, bias].map(|x| x.slice_move(ndarray::s![.., .., .., ..])));
    let inputs = attention::Inputs::new(q, k, v).sinks(operands.sinks.view()).bias(bias);
    let out = attention::forward(&operands.problem, &inputs, options).unwrap();
    let cotangents = attention::Cotangents::new(dout).dlse(operands.dlse.view());
    let gradients =
        attention::backward(&operands.problem, &inputs, &out, &cotangents, options).unwrap();
    let problem = &operands.problem;
    let seconds =
        attention::double_backward(problem, &inputs, &out, &cotangents, &further, options).unwrap();
    let tangents = attention::Tangents {
        tq: further.ddq,
        tk: further.ddk,
        tv: further.ddv,
        tsinks: further.ddsinks,
        tbias: further.ddbias,
    };
    let moved = attention::jvp(problem, &inputs, &out, &tangents, options).unwrap();
    assert!(moved.to == seconds.gdout && moved.tlse == seconds.gdlse, "(J1) is (D5), (J2) is (D4)");
    (out, gradients, seconds)
}

#[test]
fn any_strides_give_the_same_bits() {
    let operands = Operands::new(everything());
    let Operands { q, k, v, dout, bias, .. } = &operands;
    for mode in [Mode::Separate, Mode::FusedPartials] {
        let options = Options { mode, ..Options::default() };
        let plain = run(&operands, [q, k, v, dout, bias].map(|x| x.view()), &options);
        let other = [q, k, v, dout, bias].map(permuted);
        assert!(plain == run(&operands, other.each_ref().map(|x| x.view()), &options), "{mode:?}");
        let other = [q, k, v, dout, bias].map(spread);
        let views = other.each_ref().map(|x| {
            let columns = x.len_of(Axis(3)) as isize - 1;
            x.slice_axis(Axis(3), Slice::new(0, Some(columns), 2))
        });
        assert!(plain == run(&operands, views, &options), "{mode:?}: every second element");
    }
}

#[test]
fn reversed_and_broadcast_operands_are_legal() {
    let operands = Operands::new(everything());
    let Operands { q, k, v, dout, bias, .. } = &operands;
    let mut backwards = k.clone();
    backwards.invert_axis(Axis(2));
    let mut reversed = backwards.as_standard_layout().into_owned();
    reversed.invert_axis(Axis(2)); // k again, read from its end
    let one = v.slice_axis(Axis(1), Slice::from(0..1)).into_owned();
    let broadcast = one.broadcast(v.dim()).unwrap(); // stride 0 over the heads
    let copied = broadcast.to_owned();
    let options = Options::default();
    let plain = [q.view(), k.view(), copied.view(), dout.view(), bias.view()];
    let strange = [q.view(), reversed.view(), broadcast, dout.view(), bias.view()];
    assert!(run(&operands, plain, &options) == run(&operands, strange, &options));
}

#[test]
fn results_go_where_the_caller_wants_them() {
    let operands = Operands::new(everything());
    let Operands { problem, q, k, v, dout, bias, .. } = &operands;
    let options = Options::default();
    let (out, gradients, seconds) =
        run(&operands, [q, k, v, dout, bias].map(|x| x.view()), &options);
    let inputs = attention::Inputs::new(q.view(), k.view(), v.view())
        .sinks(operands.sinks.view())
        .bias(bias.view());

    let mut o = spread(&out.o);
    o.fill(f32::NAN);
    let columns = o.len_of(Axis(3)) as isize - 1;
    let mut o = o.slice_axis_mut(Axis(3), Slice::new(0, Some(columns), 2));
    let mut lse = ndarray::Array3::from_elem(problem.scores.row_shape(), f32::NAN);
    let place = attention::OutputMut { o: Some(o.view_mut()), lse: Some(lse.view_mut()) };
    attention::forward_into(&Workspace::new(), problem, &inputs, place, &options).unwrap();
    assert!(o == out.o && lse == out.lse);

    let mut dk = permuted(&gradients.dk);
    dk.fill(f32::NAN);
    let cotangents = attention::Cotangents::new(dout.view()).dlse(operands.dlse.view());
    let place = attention::GradientsMut { dk: Some(dk.view_mut()), ..Default::default() };
    attention::backward_into(
        &Workspace::new(),
        problem,
        &inputs,
        &out,
        &cotangents,
        place,
        &options,
    )
    .unwrap();
    assert_eq!(dk, gradients.dk, "dk alone");

    let mut dv = Array4::from_elem(problem.v_shape(), f32::NAN);
    let place = attention::GradientsMut { dv: Some(dv.view_mut()), ..Default::default() };
    attention::backward_into(
        &Workspace::new(),
        problem,
        &inputs,
        &out,
        &cotangents,
        place,
        &options,
    )
    .unwrap();
    assert_eq!(dv, gradients.dv, "dv alone, which needs no dP");

    let mut gk = permuted(&seconds.gk);
    gk.fill(f32::NAN);
    let further = second(&operands, [q, k, v, dout, bias].map(|x| x.view()));
    let place = attention::SecondGradientsMut { gk: Some(gk.view_mut()), ..Default::default() };
    attention::double_backward_into(
        &Workspace::new(),
        problem,
        &inputs,
        &out,
        &cotangents,
        &further,
        place,
        &options,
    )
    .unwrap();
    assert_eq!(gk, seconds.gk, "gk alone");
}

/// Later passes read what a forward pass wrote where the caller wanted it.
#[test]
fn saved_outputs_are_read_where_they_lie() {
    let operands = Operands::new(everything());
    let Operands { problem, q, k, v, dout, sinks, bias, .. } = &operands;
    let inputs = attention::Inputs::new(q.view(), k.view(), v.view());
    let inputs = inputs.sinks(sinks.view()).bias(bias.view());
    let cotangents = attention::Cotangents::new(dout.view());
    let options = Options::default();
    let out = attention::forward(problem, &inputs, &options).unwrap();
    let (mut o, mut lse) = (permuted(&out.o), out.lse.clone().reversed_axes());
    o.fill(f32::NAN);
    lse.fill(f32::NAN);
    let place =
        attention::OutputMut { o: Some(o.view_mut()), lse: Some(lse.view_mut().reversed_axes()) };
    attention::forward_into(&Workspace::new(), problem, &inputs, place, &options).unwrap();
    let saved = attention::OutputRef { o: o.view(), lse: lse.view().reversed_axes() };
    let found = attention::backward(problem, &inputs, saved, &cotangents, &options).unwrap();
    let wanted = attention::backward(problem, &inputs, &out, &cotangents, &options).unwrap();
    assert_eq!(found, wanted);
}
