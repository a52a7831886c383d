//! The same problem said in another way: sequences alone, heads repeated, a wider or narrower
//! bias, masks as arrays.

use super::cases::{TOLERANCE, cases, extents};
use super::naive;
use super::tensors::{PASSES, Tensors, assert_all_close, assert_same, operands, run};
use etalon_problem::{Align, DistanceBias, LazyAttention, Mask, NamedArray, Pass, Sequences};
use ndarray::{ArrayD, Axis, concatenate};

/// Layout of an operand or result: as q, as k, or by head alone.
#[derive(PartialEq)]
enum Layout {
    Query,
    Key,
    Head,
}

fn layout(name: &str) -> Layout {
    match name {
        _ if name.ends_with("bias") || name.ends_with("tau") => Layout::Head,
        _ if name.ends_with(['k', 'v']) => Layout::Key,
        _ => Layout::Query,
    }
}

/// One problem of several sequences is several problems of one: positions, distances and n start
/// anew. Gradients that the sequences share are summed.
#[test]
fn sequences_are_problems_of_their_own() {
    let mut checked = 0;
    for (name, problem) in cases() {
        let arrays = matches!(problem.scores.mask, Mask::Array(_) | Mask::Segments { .. });
        if arrays || problem.scores.sequences == Sequences::Dense {
            continue;
        }
        checked += 1;
        for pass in PASSES {
            let x = operands(&problem, pass, 31);
            let found = run(&problem, pass, &x).expect(name);
            let mut shared: Tensors<f64> = found.clone();
            shared.retain(|result, _| layout(result) == Layout::Head);
            shared.values_mut().for_each(|sum| sum.fill(0.0));
            for s in problem.scores.sequences() {
                let rows =
                    (s.query_start..s.query_start + s.queries, s.key_start..s.key_start + s.keys);
                let part = |name: &str, tensor: &ArrayD<f64>| -> ArrayD<f64> {
                    let rows = match layout(name) {
                        Layout::Head => return tensor.clone(),
                        Layout::Query => rows.0.clone(),
                        Layout::Key => rows.1.clone(),
                    };
                    let element = tensor.slice_axis(Axis(0), (s.batch..s.batch + 1).into());
                    element.slice_axis(Axis(2), rows.into()).to_owned()
                };
                let mut alone = problem.clone().sequences(Sequences::Dense);
                alone.scores.extents.batch = 1;
                (alone.scores.extents.queries, alone.scores.extents.keys) = (s.queries, s.keys);
                let x = x.iter().map(|(name, tensor)| (name.clone(), part(name, tensor))).collect();
                for (result, expected) in run(&alone, pass, &x).expect(name) {
                    match shared.get_mut(&result) {
                        Some(sum) => *sum += &expected,
                        None => assert_same(&part(&result, &found[&result]), &expected, name),
                    }
                }
            }
            shared.iter().for_each(|(result, sum)| assert_same(&found[result], sum, name));
        }
    }
    assert!(checked >= 3, "{checked} cases have more than one sequence");
}

/// A key head that is shared is a key head for each query head, whose gradients are summed.
#[test]
fn shared_heads_are_repeated_heads() {
    for (name, problem) in cases() {
        let group = problem.scores.group();
        let mut apart = problem.clone();
        apart.scores.extents.key_heads = problem.scores.extents.query_heads.max(1);
        let heads: Vec<usize> =
            (0..problem.scores.extents.query_heads).map(|h| h / group.max(1)).collect();
        if heads.is_empty() {
            continue;
        }
        for pass in PASSES {
            let x = operands(&problem, pass, 32);
            let repeated = |(name, tensor): (&String, &ArrayD<f64>)| {
                let own = layout(name) != Layout::Key;
                (name.clone(), if own { tensor.clone() } else { tensor.select(Axis(1), &heads) })
            };
            let mut expected = run(&apart, pass, &x.iter().map(repeated).collect()).expect(name);
            for (result, tensor) in &mut expected {
                if layout(result) == Layout::Key {
                    let chunks = tensor.axis_chunks_iter(Axis(1), group);
                    let sums: Vec<_> =
                        chunks.map(|heads| heads.sum_axis(Axis(1)).insert_axis(Axis(1))).collect();
                    let views: Vec<_> = sums.iter().map(|sum| sum.view()).collect();
                    *tensor = concatenate(Axis(1), &views).expect("one per key head");
                }
            }
            assert_all_close(&run(&problem, pass, &x).expect(name), &expected, TOLERANCE, name);
        }
    }
}

#[test]
fn a_mask_is_the_array_of_what_it_allows() {
    for (name, problem) in cases() {
        let e = problem.scores.extents;
        let shape = [e.batch, e.query_heads, e.queries, e.keys];
        let mut allowed = ArrayD::from_elem(shape.to_vec(), false);
        let x = operands(&problem, Pass::DoubleBackward, 33);
        for pair in naive::rows(&problem, &x).into_iter().flat_map(|(_, row)| row) {
            allowed[[pair.b, pair.h, pair.i, pair.j]] = true;
        }
        let flags: Vec<bool> = allowed.iter().copied().collect();
        let mask = Mask::Array(NamedArray::new("allowed", &shape, flags));
        let other = problem.clone().mask(mask);
        for pass in PASSES {
            let expected = run(&problem, pass, &x).expect(name);
            assert_all_close(&run(&other, pass, &x).expect(name), &expected, 0.0, name);
        }
    }
}

/// A bias of 0 for further distances is none: its gradient there is that of the wider one.
#[test]
fn a_bias_is_zero_beyond_its_width() {
    for (name, problem) in cases() {
        let Some(reach) = problem.bias else { continue };
        let x = operands(&problem, Pass::DoubleBackward, 34);
        let mut wider = problem.clone();
        wider.bias = Some(DistanceBias { width: reach.width + 2, ..reach });
        let mut extended = x.clone();
        for bias in ["bias", "ddbias"] {
            let more = ArrayD::zeros(vec![x[bias].shape()[0], 2]);
            let longer =
                concatenate(Axis(1), &[x[bias].view(), more.view()]).expect("as many heads");
            extended.insert(bias.to_string(), longer);
        }
        for pass in PASSES {
            let mut found = run(&wider, pass, &extended).expect(name);
            for bias in ["dbias", "gbias"] {
                if let Some(tensor) = found.get_mut(bias) {
                    *tensor = tensor.slice_axis(Axis(1), (..reach.width).into()).to_owned();
                }
            }
            assert_all_close(&found, &run(&problem, pass, &x).expect(name), 0.0, name);
        }
    }
}

/// A width beyond every distance changes nothing, and its gradient there is 0.
#[test]
fn distances_that_do_not_occur_have_no_gradient() {
    let problem = LazyAttention::new(extents([2, 2, 1, 5, 6, 3])).bias(9);
    let x = operands(&problem, Pass::DoubleBackward, 35);
    for (pass, bias) in [(Pass::Backward, "dbias"), (Pass::DoubleBackward, "gbias")] {
        let y = run(&problem, pass, &x).expect(bias);
        for (place, &d) in y[bias].indexed_iter() {
            assert_eq!(d == 0.0, place[1] >= 6, "{bias} at {place:?} is {d}");
        }
    }
    // At the top left, query i is i away from the first key and no query is farther than 4.
    let mut problem = problem.mask(Mask::Full);
    problem.bias = Some(DistanceBias { width: 9, align: Align::TopLeft });
    let y = run(&problem, Pass::Backward, &x).expect("dbias");
    for (place, &d) in y["dbias"].indexed_iter() {
        assert_eq!(d == 0.0, place[1] >= 5, "dbias at {place:?} is {d}");
    }
}

/// A batch element, and a query head with its key head, do not know of the others.
#[test]
fn heads_and_batch_elements_stand_alone() {
    let problem = LazyAttention::new(extents([3, 4, 2, 5, 5, 3])).bias(3);
    let x = operands(&problem, Pass::Backward, 36);
    let found = run(&problem, Pass::Backward, &x).expect("all");
    let mut one = problem.clone();
    one.scores.extents.batch = 1;
    let mut shared = Tensors::new();
    for b in 0..3 {
        let part = |name: &str, tensor: &ArrayD<f64>| match layout(name) {
            Layout::Head => tensor.clone(),
            _ => tensor.slice_axis(Axis(0), (b..b + 1).into()).to_owned(),
        };
        let x = x.iter().map(|(name, tensor)| (name.clone(), part(name, tensor))).collect();
        for (result, y) in run(&one, Pass::Backward, &x).expect("one") {
            if layout(&result) == Layout::Head {
                *shared.entry(result).or_insert(&y * 0.0) += &y;
            } else {
                assert_same(&part(&result, &found[&result]), &y, &result);
            }
        }
    }
    shared.iter().for_each(|(result, sum)| assert_same(&found[result], sum, result));
}
