//! Passes of tensor cores where numbers are not finite: groups with a flag are computed again, and all others
//! have the bits that they have alone. Without a device of compute capability 9.0 a test says that it was skipped.

#[path = "gpu/arrays.rs"]
mod arrays;
#[path = "fallback/five_products.rs"]
mod five_products;
#[path = "gpu/held.rs"]
mod held;
#[path = "lazy/fallback.rs"]
mod lazy;
#[path = "gpu/numbers.rs"]
mod numbers;
#[path = "gpu/tensors.rs"]
mod tensors;

use cudarc::driver::CudaContext;
use etalon_cuda::{DevicePass, Level, Options, Precision, Settings, Workspace, probe, run_in};
use etalon_problem::{
    Align, Attention, BiasExtents, Extents, LazyAttention, Mask, Mode, NamedArray, Pass, Problem, Role, Sequences,
    Views, ViewsMut,
};
use half::bf16;
use held::Held;
use ndarray::{ArrayD, Axis, Dimension, IxDyn};
use numbers::numbers;
use std::collections::BTreeMap;
use tensors::Tensor;

type Tensors = BTreeMap<&'static str, ArrayD<bf16>>;

const ALL: [&str; 3] = ["dq", "dk", "dv"];

/// Kernels without any flag.
const NONE: i32 = -1;

/// Kernels without a part, by its number in `pairs/tiles.cuh`; 0: with all.
fn without(part: i32) -> Option<Workspace> {
    if let Err(absent) = probe() {
        println!("skipped: {absent}");
        return None;
    }
    let defines = (part != 0).then(|| format!("DROP={part}")).into_iter().collect();
    let workspace = Workspace::with(Settings { defines, ..Settings::default() });
    if workspace.capability(0) != Ok((9, 0)) {
        println!("skipped: no device of compute capability 9.0");
        return None;
    }
    Some(workspace)
}

const LEVELS: [Level; 2] = [Level::Sm90a, Level::Sm80];

fn flash(level: Level) -> Options {
    Options { level, precision: Precision::Flash, ..Options::default() }
}

/// D and E: narrow, and of both kinds of wide kernels of sm90a.
const COLUMNS: [[usize; 2]; 3] = [[64, 64], [192, 128], [256, 256]];

/// Two blocks of queries and of 200 keys, which end within a block, with D and E.
fn problem_of([dim, value_dim]: [usize; 2], batch: usize, queries: usize, sequences: Sequences) -> Problem {
    let keys = 200;
    let extents = Extents { batch, query_heads: 4, key_heads: 2, queries, keys, dim };
    let mut attention = Attention::new(extents).mask(Mask::causal());
    attention.value_dim = value_dim;
    attention.scores.sequences = sequences;
    attention.into()
}

/// Inputs of a backward pass, NaN where `hit` holds, with o and lse of the portable level.
fn inputs(workspace: &Workspace, problem: &Problem, hit: impl Fn(&str, &[usize]) -> bool) -> (Tensors, ArrayD<f32>) {
    let operands = problem.operands(Pass::Backward);
    let mut all = Tensors::new();
    for (seed, x) in operands.iter().enumerate() {
        if matches!(x.role, Role::Input | Role::Cotangent) {
            let mut values = numbers(&x.shape, seed + 1);
            let set = |(at, value): (IxDyn, &mut bf16)| {
                if hit(x.name, at.slice()) {
                    *value = bf16::NAN;
                }
            };
            values.indexed_iter_mut().for_each(set);
            all.insert(x.name, values);
        }
    }
    let portable = Options { level: Level::Portable, ..Options::default() };
    let (o, lse) = outputs(workspace, problem, &all, &portable);
    all.insert("o", o);
    (all, lse)
}

/// o and lse, as a level computes them.
fn outputs(workspace: &Workspace, problem: &Problem, all: &Tensors, options: &Options) -> (ArrayD<bf16>, ArrayD<f32>) {
    let (mut o, mut lse) = (all["dout"].clone(), ArrayD::<f32>::zeros(all["dout"].shape()[..3].to_vec()));
    let given = ["q", "k", "v", "bias"].iter().filter_map(|name| all.get_key_value(name));
    let forward = given.fold(Views::new(), |views, (name, x)| views.with(name, x));
    let mut results = ViewsMut::new().with("o", &mut o).with("lse", &mut lse);
    run_in(workspace, problem, Pass::Forward, &forward, &mut results, options).unwrap();
    drop((results, forward));
    (o, lse)
}

/// Some gradients, as a level computes them.
fn gradients(
    workspace: &Workspace,
    problem: &Problem,
    (inputs, lse): &(Tensors, ArrayD<f32>),
    names: &[&'static str],
    options: &Options,
) -> Tensors {
    let mut results: Tensors = names.iter().map(|name| (*name, inputs[&name[1..]].clone())).collect();
    let mut places = ViewsMut::new();
    for (name, x) in &mut results {
        places = places.with(name, x);
    }
    let given = inputs.iter().fold(Views::new(), |views, (name, x)| views.with(name, x));
    let given = given.with("lse", lse);
    run_in(workspace, problem, Pass::Backward, &given, &mut places, options).unwrap();
    drop(places);
    results
}

/// True of gradients like those of the portable level: NaN where these are, and elsewhere near them.
fn agree(found: &Tensors, wanted: &Tensors) -> bool {
    wanted.iter().all(|(name, wanted)| {
        found[name].iter().zip(wanted).all(|(x, y)| {
            let (x, y) = (x.to_f32(), y.to_f32());
            // P and dS of bf16 have 8 digits; gradients are below 8.
            if y.is_nan() { x.is_nan() } else { (x - y).abs() <= 0.05 + 0.03 * y.abs() }
        })
    })
}

/// The level and the mode of a pass, its gradients, a flag that they need, and where a NaN lies that masks keep from
/// most of them: the name of an operand, and a row.
type Case = (Level, Mode, &'static [&'static str], i32, &'static str, usize);
const CASES: [Case; 8] = [
    (Level::Sm90a, Mode::Separate, &["dk", "dv"], 1, "q", 0),
    (Level::Sm90a, Mode::Separate, &["dk"], 1, "q", 0),
    (Level::Sm90a, Mode::Separate, &["dq"], 2, "k", 190),
    (Level::Sm90a, Mode::Separate, &["dv"], 3, "dout", 0),
    (Level::Sm80, Mode::Separate, &["dk", "dv"], 1, "q", 0),
    (Level::Sm80, Mode::Separate, &["dv"], 1, "dout", 0),
    (Level::Sm80, Mode::Separate, &["dq"], 2, "k", 190),
    // A row of q or of keys that makes a gradient of others NaN makes its own NaN, so that each flag of the fused pass
    // stands for the others.
    (Level::Sm80, Mode::FusedPartials, &ALL, NONE, "k", 190),
];

fn words(x: &ArrayD<bf16>) -> Vec<u16> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn each_flag_is_needed() {
    let Some(whole) = without(0) else { return };
    let portable = Options { level: Level::Portable, ..Options::default() };
    let mut wrong = Vec::new();
    for (columns, (level, mode, names, part, struck, row)) in COLUMNS.into_iter().flat_map(|x| CASES.map(|y| (x, y))) {
        // Of wide operands there is no fused pass, and on sm90a each gradient has a kernel and a flag of its own.
        let is_together = mode == Mode::FusedPartials || (level == Level::Sm90a && names.len() > 1);
        if columns != COLUMNS[0] && is_together {
            continue;
        }
        let problem = problem_of(columns, 1, 190, Sequences::Dense);
        let options = Options { mode, ..flash(level) };
        let inputs = inputs(&whole, &problem, |name, at| name == struck && at[1..3] == [0, row]);
        let wanted = gradients(&whole, &problem, &inputs, names, &portable);
        let found = gradients(&whole, &problem, &inputs, names, &options);
        if !agree(&found, &wanted) {
            wrong.push(format!("{level} {mode:?} {names:?} {columns:?} with all flags"));
        }
        let Some(mutant) = without(part) else { return };
        let found = gradients(&mutant, &problem, &inputs, names, &options);
        if agree(&found, &wanted) {
            wrong.push(format!("{level} {mode:?} {names:?} {columns:?} without the flag {part}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_flag_of_outputs_is_needed() {
    let (Some(whole), Some(mutant)) = (without(0), without(7)) else { return };
    for (columns, level) in COLUMNS.into_iter().flat_map(|x| LEVELS.map(|y| (x, y))) {
        let problem = problem_of(columns, 1, 190, Sequences::Dense);
        // A value that no query sees, beside some that are seen.
        let (inputs, _) = inputs(&whole, &problem, |name, at| name == "v" && at[1..3] == [0, 190]);
        let is_right = |workspace: &Workspace| {
            let (o, _) = outputs(workspace, &problem, &inputs, &flash(level));
            agree(&Tensors::from([("o", o)]), &Tensors::from([("o", inputs["o"].clone())]))
        };
        assert!(is_right(&whole), "{level} {columns:?}");
        assert!(!is_right(&mutant), "{level} {columns:?}");
    }
}

/// True if the second order on tensor cores gives finite numbers wherever no pair leads to a row of an operand that is
/// NaN: the first of q, of which queries see the first 11 keys, or key 190, which queries see from 180 on, and these
/// all keys.
fn is_finite_of_the_second_order(workspace: &Workspace, columns: [usize; 2], (struck, row): (&str, usize)) -> bool {
    let problem = problem_of(columns, 1, 190, Sequences::Dense);
    let hit = |name: &str, at: &[usize]| name == struck && at[1..3] == [0, row];
    let (mut inputs, lse) = inputs(workspace, &problem, hit);
    let operands = problem.operands(Pass::DoubleBackward);
    for (seed, name) in ["ddq", "ddk", "ddv"].into_iter().enumerate() {
        inputs.insert(name, numbers(inputs[&name[2..]].shape(), seed + 10));
    }
    inputs.insert("cot_o", numbers(inputs["o"].shape(), 20));
    let given = operands.iter().filter_map(|x| inputs.get_key_value(x.name));
    let given = given.fold(Views::new(), |all, (name, x)| all.with(name, x)).with("lse", &lse);
    let mut results: Tensors =
        [("gq", "q"), ("gk", "k"), ("gv", "v"), ("gdout", "o")].map(|(name, like)| (name, inputs[like].clone())).into();
    let mut places = ViewsMut::new();
    for (name, x) in &mut results {
        places = places.with(name, x);
    }
    let portable = Options { level: Level::Portable, ..Options::default() };
    run_in(workspace, &problem, Pass::DoubleBackward, &given, &mut places, &portable).unwrap();
    drop(places);
    let is_of_query = |name: &str| matches!(name, "gq" | "gdout");
    let is_beside = |name: &str, row: usize| match (struck, is_of_query(name)) {
        ("q", true) => row > 0,
        ("q", false) => row > 10,
        (_, true) => row < 180,
        (_, false) => false,
    };
    let is_right = |name: &str, x: &ArrayD<bf16>| {
        x.indexed_iter().all(|(at, x)| !is_beside(name, at[2]) || x.to_f32().is_finite())
    };
    results.iter().all(|(name, x)| is_right(name, x))
}

#[test]
fn flags_of_the_second_order_are_needed() {
    let (Some(whole), Some(mutant)) = (without(0), without(NONE)) else { return };
    // D and E of the kernels for sm90a, and of those for sm80.
    for columns in [[64, 64], [128, 128]] {
        for struck in [("q", 0), ("k", 190), ("v", 190)] {
            assert!(is_finite_of_the_second_order(&whole, columns, struck), "{struck:?} with flags, {columns:?}");
            assert!(!is_finite_of_the_second_order(&mutant, columns, struck), "{struck:?} without flags, {columns:?}");
        }
    }
}

/// dv of f32 on tensor cores, of scores of −4 that are products of a number near the largest and one near the least.
fn dv_of_overflow(workspace: &Workspace, options: &Options) -> Vec<f32> {
    let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 64, keys: 64, dim: 64 };
    let problem: Problem = Attention::new(extents).into();
    let of = |first: f32, other: f32| {
        ArrayD::from_shape_fn(IxDyn(&[1, 1, 64, 64]), |at| if at[3] == 0 { first } else { other })
    };
    let (q, k, ones) = (of(-f32::exp2(120.0), 0.0), of(f32::exp2(-115.0), 0.0), of(1.0, 1.0));
    let lse = ArrayD::from_elem(IxDyn(&[1, 1, 64]), -4.0_f32 + 64_f32.ln());
    let mut dv = ones.clone();
    let inputs = [("q", &q), ("k", &k), ("v", &ones), ("dout", &ones), ("o", &ones), ("lse", &lse)];
    let inputs = inputs.into_iter().fold(Views::new(), |all, (name, x)| all.with(name, x));
    let mut results = ViewsMut::new().with("dv", &mut dv);
    run_in(workspace, &problem, Pass::Backward, &inputs, &mut results, options).unwrap();
    drop(results);
    dv.into_iter().collect()
}

#[test]
fn products_of_f32_that_overflow_raise_flags() {
    let (Some(whole), Some(mutant)) = (without(0), without(6)) else { return };
    for precision in [Precision::Tf32, Precision::Bf16x3] {
        let options = Options { level: Level::Sm80, precision, ..Options::default() };
        let is_right = |dv: Vec<f32>| dv.iter().all(|x| (x - 1.0).abs() < 0.01);
        assert!(is_right(dv_of_overflow(&whole, &options)), "{precision}");
        let found = dv_of_overflow(&mutant, &options);
        assert!(is_right(found) == (precision == Precision::Bf16x3), "{precision}: 2¹²⁰ is a bf16");
    }
}

/// The bits of the rows of the first sequence, or of the rows that each batch element has.
fn bits(tensors: &Tensors, lengths: &[usize]) -> Vec<u16> {
    let own = |at: &IxDyn| at[2] < lengths[at[0]];
    let of = |x: &ArrayD<bf16>| {
        let kept = x.indexed_iter().filter(|(at, _)| own(at));
        kept.map(|(_, x)| x.to_bits()).collect::<Vec<_>>()
    };
    tensors.values().flat_map(of).collect()
}

#[test]
fn rows_of_other_sequences_and_of_none_change_no_bit() {
    let Some(whole) = without(0) else { return };
    let cu = vec![0, 90, 200];
    let packed = Sequences::Packed { cu_query: cu.clone(), cu_key: cu };
    let padded = Sequences::Lengths { query: vec![90, 130], key: vec![90, 130] };
    let cases = [(1, packed, vec![90]), (2, padded, vec![90, 130])];
    let cases = COLUMNS.into_iter().flat_map(|columns| cases.clone().map(|x| (columns, x)));
    for (level, (columns, (batch, sequences, lengths))) in
        LEVELS.into_iter().flat_map(|level| cases.clone().map(move |x| (level, x)))
    {
        let problem = problem_of(columns, batch, 200, sequences);
        let clean = inputs(&whole, &problem, |_, _| false);
        let struck = inputs(&whole, &problem, |_, at| at[2] == lengths[at[0]]);
        for names in [&ALL[..], &["dv"], &["o"]] {
            let of = |workspace: &Workspace, inputs: &(Tensors, ArrayD<f32>)| match names {
                ["o"] => bits(&[("o", outputs(workspace, &problem, &inputs.0, &flash(level)).0)].into(), &lengths),
                _ => bits(&gradients(workspace, &problem, inputs, names, &flash(level)), &lengths),
            };
            let wanted = of(&whole, &clean);
            assert!(of(&whole, &struck) == wanted, "{level} {columns:?} {names:?}, {lengths:?}");
            // Rows behind a sequence are loaded as 0 on sm80.
            let Some(mutant) = without(4).filter(|_| level == Level::Sm90a) else { continue };
            assert!(of(&mutant, &struck) != wanted, "{columns:?} {names:?}, {lengths:?}: rows are not cleared");
        }
    }
}

/// Packed sequences that are all rows: results are not filled beforehand, and no row is left out, also of those that
/// see nothing. The same with a sequence of no rows behind them, for which results are filled.
#[test]
fn packed_sequences_of_all_rows_are_written_whole() {
    let Some(workspace) = without(0) else { return };
    let levels = [Level::Sm90a, Level::Sm80, Level::Portable];
    for (level, columns) in levels.into_iter().flat_map(|level| COLUMNS.map(|x| (level, x))) {
        let options = if level == Level::Portable { Options { level, ..Options::default() } } else { flash(level) };
        let found = [0, 1].map(|empty| {
            let cu = |inner| [vec![0, inner], vec![200; 1 + empty]].concat();
            let packed = Sequences::Packed { cu_query: cu(90), cu_key: cu(40) };
            let problem = problem_of(columns, 1, 200, packed);
            let inputs = inputs(&workspace, &problem, |_, _| false);
            workspace.fill(f32::NAN).unwrap();
            let (o, lse) = outputs(&workspace, &problem, &inputs.0, &options);
            workspace.fill(f32::NAN).unwrap();
            let gradients = gradients(&workspace, &problem, &inputs, &ALL, &options);
            let lse: Vec<u32> = lse.iter().map(|x| x.to_bits()).collect();
            (words(&o), lse, gradients.values().map(words).collect::<Vec<_>>())
        });
        assert!(found[0] == found[1], "{level} {columns:?}");
    }
}

/// Inputs of a backward pass, with o and lse of the portable level; and the same with a NaN in the first query of
/// every head.
fn clean_and_struck(workspace: &Workspace, problem: &Problem) -> [tensors::Tensors; 2] {
    let portable = Options { level: Level::Portable, ..Options::default() };
    let clean = arrays::inputs(workspace, problem, Pass::Backward, &portable).unwrap();
    let mut struck = clean.clone();
    let Some(Tensor::Bf16(q)) = struck.get_mut("q") else { unreachable!("q is of the storage type") };
    q.index_axis_mut(Axis(2), 0).fill(bf16::NAN);
    [clean, struck]
}

/// Copies other inputs to the same memory.
fn put(held: &mut Held, inputs: &tensors::Tensors) {
    for (name, x) in &mut held.inputs {
        x.put(&held.stream, &inputs[name].bytes());
    }
}

#[test]
fn flags_are_those_of_a_call_on_its_stream() {
    let extents = Extents { batch: 1, query_heads: 4, key_heads: 2, queries: 200, keys: 200, dim: 64 };
    let attention = Attention::new(extents).mask(Mask::causal());
    let lazy = LazyAttention::new(extents).mask(Mask::causal());
    for problem in [attention.into(), lazy.into()] {
        LEVELS.into_iter().for_each(|level| flags_are_of_a_call(level, &problem));
    }
}

fn flags_are_of_a_call(level: Level, problem: &Problem) {
    let Some(workspace) = without(0) else { return };
    let [clean, struck] = clean_and_struck(&workspace, problem);
    let context = CudaContext::new(0).unwrap();
    let mut held = [&clean, &struck].map(|inputs| Held::new(context.new_stream().unwrap(), problem, inputs));
    let [inputs, outputs] = held[0].tensors();
    let pass = DevicePass::new(&workspace, problem, Pass::Backward, &inputs, &outputs, &flash(level)).unwrap();
    held.iter_mut().for_each(|held| held.enqueue(&pass));
    let [wanted, other] = [0, 1].map(|n| held[n].get());
    assert!(wanted != other, "a NaN reaches some gradients");
    // Two streams at once, many times.
    for _ in 0..20 {
        held.iter_mut().for_each(|held| held.enqueue(&pass));
    }
    assert!(held[0].get() == wanted && held[1].get() == other);
    // The memory of a call that had flags, with finite operands, and again with others.
    put(&mut held[1], &clean);
    held[1].enqueue(&pass);
    assert!(held[1].get() == wanted, "flags of the call before");
    put(&mut held[1], &struck);
    held[1].enqueue(&pass);
    assert!(held[1].get() == other);
    // The same from a graph.
    let (scratch, [inputs, outputs]) = (held[1].scratch(&pass), held[1].tensors());
    // SAFETY: as for `enqueue`; the tensors and the scratch memory live as long as what was recorded.
    let mut recorded = unsafe { pass.record(&inputs, &outputs, scratch) }.unwrap();
    for (inputs, results) in [(&clean, &wanted), (&struck, &other), (&clean, &wanted)] {
        put(&mut held[1], inputs);
        // SAFETY: as above; the stream is of the primary context.
        unsafe { recorded.enqueue(held[1].stream.cu_stream()) }.unwrap();
        assert!(held[1].get() == *results, "{level}: from a graph");
    }
}
