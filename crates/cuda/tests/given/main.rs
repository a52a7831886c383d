//! Lengths, offsets and arrays of masks that lie on a device: one prepared pass gives, whatever they hold, the bits of
//! the problem that has them. Without a device, or a compiler, a test says that it was skipped.

#[path = "../gpu/arrays.rs"]
mod arrays;
mod call;
#[path = "../gpu/mod.rs"]
mod gpu;
#[path = "../gpu/numbers.rs"]
mod numbers;
#[path = "../gpu/tensors.rs"]
mod tensors;

use arrays::{DeviceArray, inputs};
use call::{Call, arrays, computed, integers};
use cudarc::driver::{CudaStream, DevicePtr};
use etalon_cuda::{
    DevicePass, DeviceTensor, DeviceTensors, Element, Level, Options, Precision, Target, Workspace, levels,
};
use etalon_problem::{
    Align, Attention, AttentionLse, BiasExtents, DistanceBias, Dtype, Error, Extents, LazyAttention, Mask, NamedArray,
    Pass, Problem, Role, Scores, Sequences,
};
use std::sync::{Arc, LazyLock};
use std::time::Instant;
use tensors::Tensor;

/// A device with its stream, and a workspace.
fn device() -> Option<(Arc<CudaStream>, &'static Workspace)> {
    static KEPT: LazyLock<Workspace> = LazyLock::new(Workspace::new);
    Some((gpu::stream()?, &KEPT))
}

/// A pass that was prepared for the first of some problems computes all of them, which differ in their arrays; so does
/// its graph. Returns whether the level computes it.
fn check(
    (stream, workspace): (&Arc<CudaStream>, &Workspace),
    problems: &[Problem],
    pass: Pass,
    options: &Options,
) -> bool {
    let first = match computed(workspace, &problems[0], pass, options) {
        Err(Error::Unsupported { .. }) => return false,
        first => first.unwrap(),
    };
    let wide = pass == Pass::Forward;
    let mut call = Call::new(stream, &problems[0], pass, &first[0], &arrays(&problems[0], wide));
    let [reads, writes] = call.tensors();
    let prepared = DevicePass::new(workspace, &problems[0], pass, &reads, &writes, options).unwrap();
    let scratch = stream.alloc_zeros::<u8>(prepared.scratch_bytes().max(256)).unwrap();
    let at = scratch.device_ptr(stream).0;
    // SAFETY: all tensors and the scratch memory live until the stream has been waited for, no two of them overlap,
    // and the stream is of the primary context.
    let mut recorded = unsafe { prepared.record(&reads, &writes, at) }.unwrap();
    for problem in problems {
        // Levels refuse a problem without a row in any sequence; the device finds that too late, and has the same
        // zeros.
        let portable = Options { level: Level::Portable, precision: Precision::default(), ..*options };
        let [own, wanted] = computed(workspace, problem, pass, options)
            .or_else(|_| computed(workspace, problem, pass, &portable))
            .unwrap();
        let (algorithm, level) = (problem.algorithm(), options.level);
        let what = format!("of {algorithm} {pass} by {level}: {:?}", problem.scores().unwrap().sequences);
        call.put(&own, &arrays(problem, wide));
        call.blank();
        let [reads, writes] = call.tensors();
        // SAFETY: as above.
        unsafe { prepared.enqueue(stream.cu_stream(), &reads, &writes, at) }.unwrap();
        call.check(&wanted, &what);
        call.blank();
        // SAFETY: as above.
        unsafe { recorded.enqueue(stream.cu_stream()) }.unwrap();
        call.check(&wanted, &format!("{what}, recorded"));
    }
    true
}

/// Every pass by every level. At least one level computes each of these passes.
fn check_all(problems: &[Problem], passes: &[Pass]) {
    let Some((stream, workspace)) = device() else { return };
    for &pass in passes {
        let mut done = 0;
        for options in gpu::options(workspace) {
            let (algorithm, target) = (problems[0].algorithm(), Target::default());
            if levels::offers(&options, algorithm, pass, Dtype::Bf16, &target).is_ok() {
                done += usize::from(check((&stream, workspace), problems, pass, &options));
            }
        }
        assert!(done > 0, "{pass}");
    }
}

const FIRST: [Pass; 2] = [Pass::Forward, Pass::Backward];

fn extents(batch: usize, dim: usize) -> Extents {
    Extents { batch, query_heads: 4, key_heads: 2, queries: 300, keys: 280, dim }
}

fn packed() -> Vec<Sequences> {
    let of = |cu_query: &[usize], cu_key: &[usize]| Sequences::Packed {
        cu_query: cu_query.to_vec(),
        cu_key: cu_key.to_vec(),
    };
    vec![
        of(&[0, 100, 100, 230, 300], &[0, 64, 90, 200, 280]),
        of(&[0, 0, 1, 2, 129], &[0, 128, 129, 130, 131]),
        of(&[0, 300, 300, 300, 300], &[0, 0, 0, 280, 280]),
        of(&[0, 64, 128, 192, 256], &[0, 64, 128, 192, 256]),
    ]
}

fn lengths() -> Vec<Sequences> {
    let of = |query: [usize; 3], key: [usize; 3]| Sequences::Lengths { query: query.to_vec(), key: key.to_vec() };
    vec![of([300, 17, 0], [280, 280, 64]), of([64, 128, 300], [0, 129, 280]), of([0; 3], [1; 3])]
}

#[test]
fn packed_sequences_on_the_device_give_the_bits_of_the_problem() {
    let chunks = Mask::ChunkedCausal { chunk: 50, align: Align::BottomRight };
    for mask in [Mask::causal(), Mask::window(70, 3), chunks] {
        for (dim, value_dim) in [(64, 64), (40, 128)] {
            let of = |sequences| {
                let plain = Scores { mask: mask.clone(), sequences, ..Scores::new(extents(1, dim)) };
                Problem::from(Attention { scores: plain, value_dim })
            };
            check_all(&packed().into_iter().map(of).collect::<Vec<_>>(), &FIRST);
        }
    }
}

#[test]
fn lengths_on_the_device_give_the_bits_of_the_problem() {
    let bias = BiasExtents { batch: 1, heads: 4 };
    for (mask, options) in [(Mask::causal(), false), (Mask::window(None, 40), true)] {
        let of = |sequences| {
            let mut plain = Scores { mask: mask.clone(), sequences, ..Scores::new(extents(3, 64)) };
            plain.sinks = options;
            (plain.softcap, plain.bias) = (options.then_some(2.0), options.then_some(bias));
            Problem::from(Attention { scores: plain, value_dim: 64 })
        };
        check_all(&lengths().into_iter().map(of).collect::<Vec<_>>(), &FIRST);
    }
}

#[test]
fn a_bias_of_packed_sequences_has_its_gradient() {
    let of = |sequences| {
        let bias = Some(BiasExtents { batch: 1, heads: 4 });
        let plain = Scores { bias, sequences, ..Scores::new(extents(1, 64)) };
        Problem::from(Attention { scores: plain, value_dim: 64 })
    };
    check_all(&packed().into_iter().map(of).collect::<Vec<_>>(), &FIRST);
}

/// Some flags, and ids of segments.
fn masks(batch: usize, heads: usize, seed: usize) -> Mask {
    let Extents { queries, keys, .. } = extents(batch, 64);
    let mut at = seed;
    let mut random = move |n: usize| {
        at = at.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (at >> 33) % n
    };
    let mut ids =
        |rows: usize| -> Vec<i64> { (0..batch * rows).map(|i| (i % rows / 50) as i64 - random(2) as i64).collect() };
    let segments = Mask::Segments {
        query: NamedArray::new("query_ids", &[batch, queries], ids(queries)),
        key: NamedArray::new("key_ids", &[batch, keys], ids(keys)),
    };
    let flags: Vec<bool> = (0..heads * queries * keys).map(|_| random(3) > 0).collect();
    let array = Mask::Array(NamedArray::new("flags", &[1, heads, queries, keys], flags));
    let chunks = Mask::ChunkedCausal { chunk: 33, align: Align::TopLeft };
    Mask::Or(vec![
        Mask::And(vec![Mask::causal(), array]),
        Mask::And(vec![segments, Mask::Or(vec![chunks, Mask::window(5, 5)])]),
    ])
}

#[test]
fn arrays_of_masks_on_the_device_give_the_bits_of_the_problem() {
    for (batch, heads) in [(2, 4), (2, 1)] {
        let of = |seed: usize| {
            let mask = masks(batch, heads, seed);
            let plain = Scores { mask, ..Scores::new(extents(batch, 64)) };
            Problem::from(Attention { scores: plain, value_dim: 64 })
        };
        check_all(&[of(1), of(2)], &FIRST);
    }
    let of = |(seed, sequences)| {
        let plain = Scores { mask: masks(1, 4, seed), sequences, ..Scores::new(extents(1, 64)) };
        Problem::from(Attention { scores: plain, value_dim: 64 })
    };
    check_all(&packed().into_iter().enumerate().map(of).collect::<Vec<_>>(), &FIRST);
}

#[test]
fn every_pass_and_algorithm_takes_them() {
    let second = [Pass::Forward, Pass::Backward, Pass::DoubleBackward, Pass::Jvp];
    let small = Extents { queries: 90, keys: 75, ..extents(1, 64) };
    let of = |cu: [usize; 4]| {
        let cu_key = cu.iter().map(|&x| x * 5 / 6).collect();
        let sequences = Sequences::Packed { cu_query: cu.to_vec(), cu_key };
        Scores { mask: Mask::causal(), sequences, ..Scores::new(small) }
    };
    let cuts = [[0, 30, 66, 90], [0, 0, 70, 71]];
    let attention = cuts.map(|cu| Attention { scores: of(cu), value_dim: 64 }.into());
    check_all(&attention, &second);
    let lse = cuts.map(|cu| AttentionLse { scores: of(cu) }.into());
    check_all(&lse, &second);
    let bias = DistanceBias { width: 20, align: Align::BottomRight };
    for sequences in [packed(), lengths()] {
        let of = |sequences: Sequences| {
            let batch = if matches!(sequences, Sequences::Packed { .. }) { 1 } else { 3 };
            let plain = Scores { mask: Mask::causal(), sequences, ..Scores::new(extents(batch, 64)) };
            Problem::from(LazyAttention { scores: plain, bias: Some(bias), value_dim: 64 })
        };
        check_all(&sequences.into_iter().map(of).collect::<Vec<_>>(), &FIRST);
    }
}

/// Checks the documented treatment of numbers beyond the arrays, and of offsets that descend.
#[test]
fn offsets_beyond_the_arrays_are_cut() {
    let Some((stream, workspace)) = device() else { return };
    let of = |cu_query: &[usize], cu_key: &[usize]| {
        let sequences = Sequences::Packed { cu_query: cu_query.to_vec(), cu_key: cu_key.to_vec() };
        let plain = Scores { mask: Mask::causal(), sequences, ..Scores::new(extents(1, 64)) };
        Problem::from(Attention { scores: plain, value_dim: 64 })
    };
    let meant = of(&[0, 200, 200, 300], &[0, 280, 280, 280]);
    let numbers = [[-7, 200, 100, 1 << 33], [0, 1 << 40, 5, 280]];
    let options = Options::default();
    let [own, wanted] = computed(workspace, &meant, Pass::Forward, &options).unwrap();
    let names = ["sequences.cu_query", "sequences.cu_key"];
    let given = [0, 1].map(|i| integers(names[i], &[4], &numbers[i], true));
    let mut call = Call::new(&stream, &meant, Pass::Forward, &own, &given);
    call.put(&own, &given);
    let [reads, writes] = call.tensors();
    let pass = DevicePass::new(workspace, &meant, Pass::Forward, &reads, &writes, &options).unwrap();
    let scratch = stream.alloc_zeros::<u8>(pass.scratch_bytes().max(256)).unwrap();
    let at = scratch.device_ptr(&stream).0;
    // SAFETY: as in `check`.
    unsafe { pass.enqueue(stream.cu_stream(), &reads, &writes, at) }.unwrap();
    call.check(&wanted, "of offsets beyond the arrays");
}

/// An array of another shape or type, one too many or too few, is refused when the pass is prepared or enqueued.
#[test]
fn wrong_arrays_are_refused() {
    let Some((stream, workspace)) = device() else { return };
    let problem = Problem::from(Attention {
        scores: Scores { sequences: packed()[0].clone(), ..Scores::new(extents(1, 64)) },
        value_dim: 64,
    });
    let options = Options::default();
    let own = inputs(workspace, &problem, Pass::Forward, &options).unwrap();
    let call = Call::new(&stream, &problem, Pass::Forward, &own, &[]);
    let cu = DeviceArray::new(&stream, &[0; 40], &[5], Element::I32);
    let [_, writes] = call.tensors();
    let reads = || {
        let [reads, _] = call.tensors();
        reads
    };
    let name = "sequences.cu_query";
    let prepare =
        |reads: &DeviceTensors<'_>| DevicePass::new(workspace, &problem, Pass::Forward, reads, &writes, &options);
    let refused = |tensor: DeviceTensor, text: &str| {
        let error = prepare(&reads().with(name, tensor)).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(text), "{error}");
    };
    let at = cu.memory.device_ptr(&stream).0;
    refused(DeviceTensor::dense(at, &[4], Element::I32), "[5]");
    refused(DeviceTensor::dense(at, &[5], Element::Bool), "i32 or i64");
    refused(DeviceTensor::dense(at, &[5], Dtype::F32), "i32 or i64");
    refused(DeviceTensor::new(at, &[5], &[2], Element::I32).unwrap(), "one after the other");
    refused(DeviceTensor::dense(at + 2, &[5], Element::I32), "multiple of 4");
    let twice = reads().with(name, cu.tensor(&stream)).with(name, cu.tensor(&stream));
    assert!(prepare(&twice).unwrap_err().to_string().contains("one tensor"));
    let other = reads().with("sequences.query", cu.tensor(&stream));
    assert!(prepare(&other).unwrap_err().to_string().contains("sequences.query"));
    let pass = prepare(&reads().with(name, cu.tensor(&stream))).unwrap();
    let scratch = stream.alloc_zeros::<u8>(pass.scratch_bytes().max(256)).unwrap();
    let at = scratch.device_ptr(&stream).0;
    // SAFETY: as in `check`; what is refused is not enqueued.
    let missing = unsafe { pass.enqueue(stream.cu_stream(), &reads(), &writes, at) };
    assert!(missing.unwrap_err().to_string().contains(name));
}

/// Prints what the tables cost: the time of a pass that makes them in every call beside one that was given them.
#[test]
#[ignore = "measures"]
fn what_the_tables_cost() {
    let Some((stream, workspace)) = device() else { return };
    let extents = Extents { batch: 1, query_heads: 4, key_heads: 4, queries: 16384, keys: 16384, dim: 128 };
    let cu: Vec<usize> = (0..=8).map(|s| 2048 * s).collect();
    let sequences = Sequences::Packed { cu_query: cu.clone(), cu_key: cu };
    let packed = Scores { mask: Mask::causal(), sequences, ..Scores::new(extents) };
    let square = Extents { queries: 4096, keys: 4096, ..extents };
    let flags: Vec<bool> = (0..4096 * 4096).map(|i| i % 7 != 0).collect();
    let flags = NamedArray::new("flags", &[1, 1, 4096, 4096], flags);
    let masked = Scores { mask: Mask::Array(flags), ..Scores::new(square) };
    for scores in [packed, masked] {
        let problem = Problem::from(Attention { scores, value_dim: 128 });
        let options = Options { precision: Precision::Flash, ..Options::default() };
        for pass in FIRST {
            let own = problem
                .operands(pass)
                .into_iter()
                .enumerate()
                .filter(|(_, x)| matches!(x.role, Role::Input | Role::Cotangent | Role::Saved));
            let own = own.map(|(seed, x)| (x.name, Tensor::random(&x, seed + 1))).collect();
            let times = [true, false].map(|on_device| {
                let arrays = if on_device { arrays(&problem, false) } else { Vec::new() };
                let mut call = Call::new(&stream, &problem, pass, &own, &arrays);
                call.put(&own, &arrays);
                milliseconds(&call, workspace, &problem, pass, &options)
            });
            let [own, kept] = times;
            let what = problem.scores().unwrap().mask.describe();
            println!("{pass} with {what}: {own:.3} ms, {kept:.3} ms with tables that are kept");
        }
    }
}

/// The least time of a recorded pass, of some.
fn milliseconds(call: &Call<'_>, workspace: &Workspace, problem: &Problem, pass: Pass, options: &Options) -> f64 {
    let [reads, writes] = call.tensors();
    let prepared = DevicePass::new(workspace, problem, pass, &reads, &writes, options).unwrap();
    let scratch = call.stream.alloc_zeros::<u8>(prepared.scratch_bytes().max(256)).unwrap();
    let at = scratch.device_ptr(call.stream).0;
    // SAFETY: as in `check`.
    let mut recorded = unsafe { prepared.record(&reads, &writes, at) }.unwrap();
    let mut round = || {
        let start = Instant::now();
        for _ in 0..20 {
            // SAFETY: as in `check`.
            unsafe { recorded.enqueue(call.stream.cu_stream()) }.unwrap();
        }
        call.stream.synchronize().unwrap();
        start.elapsed().as_secs_f64() * 1e3 / 20.0
    };
    round();
    (0..10).map(|_| round()).fold(f64::INFINITY, f64::min)
}
