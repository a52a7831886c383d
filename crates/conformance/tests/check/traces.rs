//! Traces of a tiled kernel in f32: right ones pass, and of each mutant the first tile and step that is off is named.

use crate::bench::Bench;
use etalon_conformance::bounds::{bounds as all_bounds, trace::bounds};
use etalon_conformance::check::{Check, Part, check_trace};
use etalon_conformance::profile::Profile;
use etalon_conformance::report::Status;
use etalon_conformance::tensor::{Data, Tensor, Tensors};
use etalon_conformance::types::Types;
use etalon_problem::{
    Attention, Blocking, Decay, Dtype, Extents, LinearAttention, LinearExtents, Mask, Order, Pass,
    Walk,
};

/// Query heads, queries, keys and dim. Two query heads share a key head; row i sees the keys up to i + 8.
const H: usize = 2;
const N: usize = 40;
const M: usize = 48;
const D: usize = 8;
const TILE: usize = 16;

/// A fault of the kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Bug {
    None,
    /// Key tile 1 of query tile 1 of head 1 adds nothing.
    TileSkipped,
    /// Of head 1, acc is not rescaled when key tile 2 makes m grow.
    RescaleForgotten,
    /// dS = P dP.
    NoDelta,
    /// dq is not multiplied with the scale in key tile 1.
    NoScale,
    /// Query tile 2 reads dout of the row before for dv.
    RowBefore,
}

fn bench() -> Bench {
    let extents = Extents { batch: 1, query_heads: H, key_heads: 1, queries: N, keys: M, dim: D };
    Bench::new(Attention::new(extents).mask(Mask::causal()), Pass::Backward, Dtype::F32)
}

fn walk(keys: Order) -> Walk {
    Walk { tile: Some(Blocking::new(TILE, TILE)), keys, ..Walk::default() }
}

/// The rows of a tensor in f32, D numbers each.
fn rows(bench: &Bench, name: &str) -> Vec<f32> {
    let Data::F32(x) = &bench.inputs[name].data else { panic!("{name}") };
    x.clone()
}

fn dot(x: &[f32], y: &[f32]) -> f32 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

fn add(sum: &mut [f32], a: f32, x: &[f32]) {
    sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += a * x);
}

/// A dump: tensors that hold NaN until they are written.
struct Dump(Tensors);

impl Dump {
    fn new(bench: &Bench, walk: &Walk) -> Self {
        let tensors = walk.tensors(&bench.problem, bench.pass).expect("a walk").into_iter();
        let unwritten = |x: etalon_problem::Operand| {
            let data = Data::F32(vec![f32::NAN; x.len()]);
            (x.name.to_string(), Tensor { shape: x.shape, data })
        };
        Dump(tensors.map(unwritten).collect())
    }

    /// Writes numbers from an index on, whose other entries are 0.
    fn write(&mut self, name: &str, index: &[usize], numbers: &[f32]) {
        let tensor = self.0.get_mut(name).expect("a tensor");
        let at = tensor.shape.iter().enumerate();
        let at = at.fold(0, |at, (n, extent)| at * extent + index.get(n).copied().unwrap_or(0));
        let Data::F32(data) = &mut tensor.data else { panic!("{name}") };
        data[at..at + numbers.len()].copy_from_slice(numbers);
    }
}

/// The kernel: a streaming softmax, and a backward pass that reads its lse and o.
fn kernel(bench: &Bench, keys: Order, bug: Bug) -> Tensors {
    let [q, k, v, dout, dlse] = ["q", "k", "v", "dout", "dlse"].map(|name| rows(bench, name));
    let mut dump = Dump::new(bench, &walk(keys));
    let at = |x: usize| x * D..(x + 1) * D;
    let scale = (D as f32).sqrt().recip();
    let sees = |i: usize, j: usize| j < M && j <= i + (M - N);
    let tiles: Vec<usize> = match keys {
        Order::Ascending => vec![0, 1, 2],
        Order::Descending => vec![2, 1, 0],
    };
    for h in 0..H {
        let (mut dk, mut dv) = (vec![0.0; M * D], vec![0.0; M * D]);
        for (r, i) in (0..N).map(|i| (i / TILE, i)) {
            let row = at(h * N + i);
            let score = |j: usize| scale * dot(&q[row.clone()], &k[at(j)]);
            let (mut m, mut l, mut acc) = (f32::NEG_INFINITY, 0.0, [0.0; D]);
            let visible = |t: usize| (t * TILE..(t + 1) * TILE).filter(move |&j| sees(i, j));
            for &t in &tiles {
                let skipped = bug == Bug::TileSkipped && (h, r, t) == (1, 1, 1);
                let new = visible(t).filter(|_| !skipped).map(score).fold(m, f32::max);
                let a = if new > m { (m - new).exp() } else { 1.0 };
                let kept = bug == Bug::RescaleForgotten && (h, t) == (1, 2);
                (m, l) = (new, l * a);
                acc.iter_mut().for_each(|x| *x *= if kept { 1.0 } else { a });
                for j in visible(t).filter(|_| !skipped) {
                    let p = (score(j) - m).exp();
                    l += p;
                    add(&mut acc, p, &v[at(j)]);
                }
                dump.write("lse", &[t, 0, h, i], &[m + l.ln()]);
                dump.write("o", &[t, 0, h, i], &acc.map(|x| x / l));
            }
            let (lse, o) = (m + l.ln(), acc.map(|x| x / l));
            let delta = dot(&dout[row.clone()], &o) - dlse[h * N + i];
            let delta = if bug == Bug::NoDelta { 0.0 } else { delta };
            let mut dq = [0.0; D];
            for &t in &tiles {
                for j in t * TILE..(t + 1) * TILE {
                    let p = if sees(i, j) { (score(j) - lse).exp() } else { 0.0 };
                    let ds = p * (dot(&dout[row.clone()], &v[at(j)]) - delta);
                    let factor = if bug == Bug::NoScale && t == 1 { 1.0 } else { scale };
                    dump.write("p", &[0, h, i, j], &[p]);
                    dump.write("dS", &[0, h, i, j], &[ds]);
                    add(&mut dq, factor * ds, &k[at(j)]);
                    add(&mut dk[at(j)], scale * ds, &q[row.clone()]);
                    let other =
                        if bug == Bug::RowBefore && r == 2 { row.start - D } else { row.start };
                    add(&mut dv[at(j)], p, &dout[other..other + D]);
                }
                dump.write("dq", &[t, 0, h, i], &dq);
            }
            if (i + 1) % TILE == 0 || i + 1 == N {
                dump.write("dk", &[r, 0, h], &dk);
                dump.write("dv", &[r, 0, h], &dv);
            }
        }
    }
    dump.0
}

fn check(bench: &Bench, walk: &Walk, dump: &Tensors) -> Check {
    let profile = Profile::strict(Dtype::F32);
    check_trace(&bench.request(), &profile, walk, dump).expect("a check")
}

#[test]
fn a_right_kernel_passes_in_both_orders_and_in_part() {
    let bench = bench();
    for keys in [Order::Ascending, Order::Descending] {
        let mut dump = kernel(&bench, keys, Bug::None);
        let found = check(&bench, &walk(keys), &dump);
        assert!(found.passed && found.trace.is_some(), "{keys}: {found:?}");
        assert_eq!(found.outputs.len(), 7);
        for output in &found.outputs {
            assert!(
                output.elements > 100 && output.uninformative * 4 < output.elements,
                "{output:?}"
            );
            assert!(output.margin > 0.0 && output.spread.free > 0, "{output:?}");
        }
        dump.retain(|name, _| name == "dS");
        assert!(check(&bench, &walk(keys), &dump).passed);
        // The other order has other sums so far.
        let other = kernel(
            &bench,
            if keys == Order::Ascending { Order::Descending } else { Order::Ascending },
            Bug::None,
        );
        assert_eq!(check(&bench, &walk(keys), &other).status, Status::Failed);
    }
}

#[test]
fn the_first_tile_and_step_of_every_mutant_is_named() {
    let bench = bench();
    for (bug, step, head, queries, keys) in [
        (Bug::TileSkipped, "lse", 1, 1, 1),
        (Bug::RescaleForgotten, "o", 1, 1, 2),
        (Bug::NoDelta, "dS", 0, 0, 0),
        (Bug::NoScale, "dq", 0, 0, 1),
        (Bug::RowBefore, "dv", 0, 2, 0),
    ] {
        let found = check(&bench, &walk(Order::Ascending), &kernel(&bench, Order::Ascending, bug));
        let first = found.trace.expect("a trace").first.unwrap_or_else(|| panic!("{bug:?}"));
        let number = |part: Option<Part>| part.map(|part| part.number);
        let place = (first.step, first.head, number(first.query_tile), number(first.key_tile));
        assert_eq!(place, (step, head, Some(queries), Some(keys)), "{bug:?}: {}", first.text);
        assert!(
            first.margin > 1.0 && first.text.contains(&format!("step {step}: error ")),
            "{}",
            first.text
        );
    }
}

#[test]
fn nan_that_nobody_wrote_is_off_where_a_pair_is_visible() {
    let bench = bench();
    let mut dump = kernel(&bench, Order::Ascending, Bug::None);
    let Some(Data::F32(o)) = dump.get_mut("o").map(|x| &mut x.data) else { panic!("o") };
    // Tile 2 of row 0 is not visible; tile 1 of row 39 is.
    o[2 * H * N * D] = f32::NAN;
    assert!(check(&bench, &walk(Order::Ascending), &dump).passed);
    let Some(Data::F32(o)) = dump.get_mut("o").map(|x| &mut x.data) else { panic!("o") };
    o[(H * N + 39) * D] = f32::NAN;
    let found = check(&bench, &walk(Order::Ascending), &dump);
    let first = found.trace.expect("a trace").first.expect("a place");
    let words = "head 0, query tile 2 (rows 32..40), key tile 1 (keys 16..32), step o: wrong at row 39, column 0";
    assert!(first.text.starts_with(words), "{}", first.text);
}

/// (N115): the bounds of the whole trace, at its end, are those of the results.
#[test]
fn the_bounds_of_the_end_are_those_of_the_results() {
    let bench = bench();
    let (profile, types) = (Profile::strict(Dtype::F32), Types::from(Dtype::F32));
    let names = [("lse", Dtype::F32), ("o", Dtype::F32), ("dq", Dtype::F32)];
    let walk = walk(Order::Ascending);
    let traced = bounds(&bench.problem, bench.pass, &types, &profile, &bench.inputs, &walk, &names)
        .expect("bounds");
    let of = |pass| {
        let all = all_bounds(&bench.problem, pass, Dtype::F32, &profile, &bench.inputs);
        all.expect("bounds").outputs
    };
    let mut results = of(Pass::Forward);
    results.extend(of(Pass::Backward));
    for own in traced {
        let whole = &results[own.operand.name];
        // The last tile of rows that see all keys: the last eight are no part of another tile.
        let (n, stride) =
            (own.bound.bound.len() / 3, own.operand.shape.iter().skip(4).product::<usize>());
        let at = (N - 1) * stride.max(1);
        let [last, result] = [(&own.bound, 2 * n + at), (whole, at)].map(|(x, at)| {
            (x.value.as_slice().expect("order")[at], x.bound.as_slice().expect("order")[at])
        });
        assert_eq!(last, result, "{}", own.operand.name);
    }
}

fn linear() -> (Bench, Walk) {
    let extents = LinearExtents { batch: 2, query_heads: 4, key_heads: 2, tokens: 50, dim: 8 };
    let problem = LinearAttention::new(extents).scale(0.25).decay(Decay::PerHead).final_state();
    let walk = Walk { chunk: Some(16), ..Walk::default() };
    (Bench::new(problem, Pass::Backward, Dtype::F32), walk)
}

/// States of linear attention, chunk by chunk; `twice` is a chunk, of key head 1 of batch element 1, before which
/// the state decays twice as much, in the walk of `tensor`.
fn states(bench: &Bench, walk: &Walk, tensor: &str, twice: usize) -> Tensors {
    let [q, k, v, dout, g] = ["q", "k", "v", "dout", "g_gamma"].map(|name| rows(bench, name));
    let mut dump = Dump::new(bench, walk);
    for (b, h) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let decay = |name: &str, c: usize, tokens: usize| {
            let twice = (b, h) == (1, 1) && c == twice && name == tensor;
            (g[h] * (if twice { 2.0 } else { 1.0 }) * tokens as f32).exp()
        };
        let [mut state, mut dstate] = [vec![0.0f32; 64], vec![0.0f32; 64]];
        if let Data::F32(last) = &bench.inputs["dfinal_state"].data {
            dstate.copy_from_slice(&last[(b * 2 + h) * 64..][..64]);
        }
        for (c, start) in (0..50).step_by(16).enumerate() {
            let tokens = start..50.min(start + 16);
            let factor = decay("state", c, tokens.len());
            state.iter_mut().for_each(|x| *x *= factor);
            for t in tokens.clone() {
                let row = ((b * 2 + h) * 50 + t) * 8;
                let left = (g[h] * (tokens.end - 1 - t) as f32).exp();
                (0..8).for_each(|d| {
                    add(&mut state[d * 8..][..8], left * k[row + d], &v[row..row + 8])
                });
            }
            dump.write("state", &[c, b, h], &state);
        }
        for (c, start) in (0..50).step_by(16).enumerate().collect::<Vec<_>>().into_iter().rev() {
            let tokens = start..50.min(start + 16);
            let factor = decay("dstate", c, tokens.len());
            dstate.iter_mut().for_each(|x| *x *= factor);
            for (t, member) in tokens.clone().flat_map(|t| [(t, 0), (t, 1)]) {
                let row = ((b * 4 + 2 * h + member) * 50 + t) * 8;
                let left = 0.25 * (g[h] * (t + 1 - tokens.start) as f32).exp();
                (0..8).for_each(|d| {
                    add(&mut dstate[d * 8..][..8], left * q[row + d], &dout[row..row + 8])
                });
            }
            dump.write("dstate", &[c, b, h], &dstate);
        }
    }
    dump.0
}

#[test]
fn a_state_that_decays_twice_is_named() {
    let (bench, walk) = linear();
    let found = check(&bench, &walk, &states(&bench, &walk, "", 0));
    assert!(found.passed && found.outputs.len() == 2, "{found:?}");
    for (tensor, chunk, words) in [
        ("state", 2, "batch element 1, head 1, chunk 2 (tokens 32..48), step state: error "),
        ("dstate", 1, "batch element 1, head 1, chunk 1 (tokens 16..32), step dstate: error "),
    ] {
        let found = check(&bench, &walk, &states(&bench, &walk, tensor, chunk));
        let first = found.trace.expect("a trace").first.expect("a place");
        assert!(first.text.starts_with(words), "{}", first.text);
        assert_eq!((first.step, first.sequence, first.head), (tensor, 1, 1));
        assert_eq!(first.chunk.map(|chunk| chunk.number), Some(chunk));
    }
}

#[test]
fn what_is_no_trace_is_refused() {
    let bench = bench();
    let refusal = |walk: &Walk, dump: &Tensors| {
        let profile = Profile::strict(Dtype::F32);
        check_trace(&bench.request(), &profile, walk, dump).expect_err("a refusal").to_string()
    };
    let dump = kernel(&bench, Order::Ascending, Bug::None);
    let usual = walk(Order::Ascending);
    assert!(refusal(&usual, &Tensors::new()).contains("holds none of lse, o, p, dS, dq, dk, dv"));
    let misspelt: Tensors = dump.iter().map(|(name, x)| (name.to_lowercase(), x.clone())).collect();
    assert!(
        refusal(&usual, &misspelt)
            .contains("`ds` was given, but a trace of attention backward holds lse, o")
    );
    let rows = Walk { rows: Some([0, 16]), ..usual.clone() };
    assert!(refusal(&rows, &dump).contains("`dk` and `dv` are sums over all rows"));
    let wide = Walk { tile: Some(Blocking::new(16, 24)), ..usual };
    assert!(
        refusal(&wide, &dump).contains("`lse` must have shape [2, 1, 2, 40], found [3, 1, 2, 40]")
    );
}
