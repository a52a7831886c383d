//! The filtered backward pass: nothing is left out below 0, and the same whatever the chunks are.

use super::tensor::Tensor;
use super::{operands, problem, workspace};
use etalon_cuda::linear_cross_entropy::{Certificate, Filter, filtered_backward};
use etalon_cuda::{Level, Options, Workspace, run_in};
use etalon_problem::{Dtype, Error, Pass, Problem, Views, ViewsMut};

const CALL: (Pass, Dtype) = (Pass::Backward, Dtype::F32);

/// The bytes of dh, dw and dbias; with a filter also its certificate.
fn gradients(
    workspace: &Workspace,
    filter: Option<Filter>,
    options: &Options,
) -> Result<(Vec<Vec<u8>>, Certificate), Error> {
    let own = problem();
    let all: Problem = own.clone().into();
    let (inputs, mut outputs) = operands(&all, CALL);
    let given = inputs.iter().fold(Views::new(), |all, (name, x)| x.read(all, name));
    let mut places = outputs.iter_mut().fold(ViewsMut::new(), |all, (name, x)| x.write(all, name));
    let certificate = match filter {
        Some(filter) => filtered_backward(workspace, &own, &given, &mut places, filter, options)?,
        None => {
            run_in(workspace, &all, CALL.0, &given, &mut places, options)?;
            Certificate::default()
        }
    };
    drop(places);
    Ok((outputs.iter().map(|(_, x): &(_, Tensor)| x.bytes()).collect(), certificate))
}

#[test]
fn a_threshold_of_0_gives_the_bits_of_the_backward_pass() {
    let Some(workspace) = workspace() else { return };
    let options = Options::default();
    let nothing = Some(Filter::Below { eps: 0.0 });
    let (found, certificate) = gradients(&workspace, nothing, &options).unwrap();
    let (wanted, _) = gradients(&workspace, None, &options).unwrap();
    assert!(found == wanted);
    assert_eq!(certificate.tiles, (18, 18)); // 3 of tokens that count, 6 of classes
    assert!(certificate.dh.iter().chain(&certificate.dw).all(|&x| x == 0.0));
}

#[test]
fn chunks_leave_out_the_same_tiles() {
    let Some(workspace) = workspace() else { return };
    let of = |filter, memory_budget| {
        let options = Options { memory_budget, ..Options::default() };
        gradients(&workspace, Some(filter), &options).unwrap()
    };
    let whole = 64 << 20;
    let (_, all) = of(Filter::Below { eps: 1e30 }, whole);
    assert_eq!(all.tiles, (0, 18));
    let most = |list: &ndarray::Array1<f32>| f64::from(list.iter().copied().fold(0.0, f32::max));
    let (dh, dw) = (most(&all.dh), most(&all.dw));
    for filter in
        [Filter::Below { eps: 1e30 }, Filter::Within { dh: 0.5 * dh, dw }, Filter::Within { dh, dw: 0.5 * dw }]
    {
        let (wanted, certificate) = of(filter, whole);
        if let Filter::Within { dh, dw } = filter {
            assert!(certificate.tiles.0 > 0 && certificate.tiles.0 < 18, "{certificate:?}");
            assert!(most(&certificate.dh) <= dh && most(&certificate.dw) <= dw);
        }
        for budget in [0, 900 << 10] {
            let (found, other) = of(filter, budget);
            assert_eq!(other, certificate, "{filter:?}");
            assert!(found[..2] == wanted[..2], "dh and dw, {filter:?}"); // dbias has other terms
        }
    }
}

#[test]
fn what_no_filter_may_be_is_refused() {
    let Some(workspace) = workspace() else { return };
    let options = Options::default();
    for filter in
        [Filter::Below { eps: -1.0 }, Filter::Below { eps: f64::NAN }, Filter::Within { dh: f64::INFINITY, dw: 1.0 }]
    {
        let error = gradients(&workspace, Some(filter), &options).unwrap_err().to_string();
        assert!(error.contains("filter."), "{error}");
    }
    let options = Options { level: Level::Sm90a, ..options };
    let refused = gradients(&workspace, Some(Filter::Below { eps: 0.0 }), &options);
    assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
}
