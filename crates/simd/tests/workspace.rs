//! A pass allocates beside operands and results as much as its plan says, and with a workspace that is kept
//! its second call allocates nothing. A program of its own, because it counts every allocation of the
//! process, and one test, because two would count each other's.

use etalon_problem::{
    Align, Attention, AttentionLse, Blocking, Decay, Dtype, Error, Extents, LazyAttention,
    LinearAttention, LinearCrossEntropy, LinearExtents, Mask, NamedArray, Operand, Pass, Precision,
    Problem, Role, Sequences, Views, ViewsMut,
};
use etalon_simd::linear_cross_entropy::filter::{self, Certificate, Filter};
use etalon_simd::linear_cross_entropy::shard::{
    GradientsMut, Partial, Shard, backward_shard_into, combine, forward_shard, forward_shard_into,
};
use etalon_simd::{Mode, Options, Plan, Precision as Rounding, Workspace, run, run_in};
use etalon_simd::{
    attention, attention_lse, lazy_attention, linear_attention, linear_cross_entropy,
};
use half::bf16;
use ndarray::{Array, ArrayD, ShapeBuilder, s};
use peak_alloc::PeakAlloc;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts the bytes in use and, of the threads of a running pool, the calls.
struct Counting;

static MEMORY: PeakAlloc = PeakAlloc;
static CALLS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// True if calls of this thread are counted: threads of a pool that has ended still tidy up.
    static COUNTED: Cell<bool> = const { Cell::new(false) };
}

fn start(threads: usize) -> ThreadPool {
    let pool = ThreadPoolBuilder::new().num_threads(threads);
    let pool = pool.start_handler(|_| COUNTED.set(true)).exit_handler(|_| COUNTED.set(false));
    pool.build().unwrap()
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: `PeakAlloc` upholds the contract; a reallocation is the default one, by way of these two.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(usize::from(COUNTED.get()), Ordering::Relaxed);
        // SAFETY: the caller upholds the contract.
        unsafe { MEMORY.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract.
        unsafe { MEMORY.dealloc(memory, layout) }
    }
}

/// Allocations of the threads of the pool in the second of three calls, and in the third: their own and those
/// of rayon, which has none once all threads have begun.
fn later_calls(mut run: impl FnMut() -> Result<(), Error>) -> [usize; 2] {
    rayon::broadcast(|_| ());
    run().unwrap();
    [(); 2].map(|()| {
        let before = CALLS.load(Ordering::Relaxed);
        run().unwrap();
        CALLS.load(Ordering::Relaxed) - before
    })
}

/// The most bytes that `run` held at once, beyond those before: after [`later_calls`], in which the pool of threads
/// allocates what it keeps.
fn peak(run: impl FnOnce() -> Result<(), Error>) -> usize {
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    run().unwrap();
    MEMORY.peak_usage().saturating_sub(before)
}

fn wave<S: ShapeBuilder>(shape: S) -> Array<f32, S::Dim> {
    let mut t = 0.0f32;
    Array::from_shape_simple_fn(shape, || {
        t += 0.7;
        t.sin()
    })
}

/// Two query heads to a key head, and tiles that are not full.
fn extents(batch: usize, queries: usize) -> Extents {
    Extents { batch, query_heads: 6, key_heads: 3, queries, keys: queries, dim: 40 }
}

/// The tensors of a pass by name, each in the type that it is stored in.
#[derive(Default)]
struct Tensors {
    wide: BTreeMap<&'static str, ArrayD<f32>>,
    narrow: BTreeMap<&'static str, ArrayD<bf16>>,
    integers: BTreeMap<&'static str, ArrayD<i64>>,
}

impl Tensors {
    /// Adds the `operands` that are not there yet.
    fn add<'a>(&mut self, storage: Dtype, operands: impl Iterator<Item = &'a Operand>) {
        for Operand { name, shape, precision, .. } in operands {
            // Log-decays are at most 0.
            let values = || wave(&shape[..]).mapv(|x| if *name == "g" { -x.abs() } else { x });
            if *precision == Precision::Integer {
                let mut next = 0..;
                let classes =
                    || Array::from_shape_simple_fn(&shape[..], || next.next().unwrap_or(0));
                self.integers.entry(name).or_insert_with(classes);
            } else if *precision == Precision::Storage && storage == Dtype::Bf16 {
                self.narrow.entry(name).or_insert_with(|| values().mapv(bf16::from_f32));
            } else {
                self.wide.entry(name).or_insert_with(values);
            }
        }
    }

    fn views(&self, operands: &[Operand]) -> Views<'_> {
        operands.iter().fold(Views::new(), |views, Operand { name, .. }| {
            let views = views.with_some(name, self.wide.get(name));
            let views = views.with_some(name, self.integers.get(name));
            views.with_some(name, self.narrow.get(name))
        })
    }

    fn views_mut(&mut self) -> ViewsMut<'_> {
        let views = ViewsMut::new();
        let views = self.wide.iter_mut().fold(views, |views, (name, x)| views.with(name, x));
        let views = self.integers.iter_mut().fold(views, |views, (name, x)| views.with(name, x));
        self.narrow.iter_mut().fold(views, |views, (name, x)| views.with(name, x))
    }
}

/// The passes of attention and attention_lse.
const SOFTMAX: &[Pass] = &[Pass::Forward, Pass::Backward, Pass::DoubleBackward, Pass::Jvp];

/// The plans of passes, and what these allocated. With a workspace that is kept, later calls allocate
/// nothing, whether what the forward pass saves is given or computed anew.
fn passes_of(
    problem: &Problem,
    passes: &[Pass],
    storage: Dtype,
    options: &Options,
    plan: impl Fn(Pass) -> Plan,
) -> Vec<(Pass, Plan, usize)> {
    let all = passes.iter().map(|&pass| (pass, plan(pass), true)).collect();
    measure(problem, all, storage, options)
}

/// Operands of a pass: some of the forward pass exist in [`Mode::ForwardGradient`] alone.
fn operands_of(problem: &Problem, pass: Pass, options: &Options) -> Vec<Operand> {
    let mut operands = problem.operands(pass);
    let optional = |x: &Operand| matches!(x.name, "gradient" | "pv_sum");
    operands.retain(|x| !optional(x) || options.mode == Mode::ForwardGradient);
    operands
}

/// As [`passes_of`], in every mode. Modes differ in some passes: those with the same plan and the same operands are
/// measured once.
fn in_every_mode(
    problem: &Problem,
    passes: &[Pass],
    plan: impl Fn(Pass, &Options) -> Plan,
) -> Vec<(Pass, Plan, usize)> {
    let (mut measured, mut known) = (Vec::new(), Vec::new());
    for mode in [Mode::Separate, Mode::FusedPartials, Mode::ForwardGradient] {
        let options = Options { mode, ..Options::default() };
        let planned = passes.iter().map(|&pass| {
            let plan = plan(pass, &options);
            let operands = operands_of(problem, pass, &options).into_iter().map(|x| x.name);
            let this = (pass, plan.clone(), operands.collect::<Vec<_>>());
            let is_new = !known.contains(&this);
            known.push(this);
            (pass, plan, is_new)
        });
        let planned = planned.collect();
        measured.extend(measure(problem, planned, Dtype::F32, &options));
    }
    // A backward pass has two modes everywhere.
    let backward = |(pass, ..): &&(Pass, _, _)| *pass == Pass::Backward;
    assert!(measured.iter().filter(backward).count() >= 2, "{problem:?}");
    measured
}

/// Bytes that these passes allocate by these plans: of the passes that are wanted. The forward pass runs in
/// any case: the others read its results.
fn measure(
    problem: &Problem,
    passes: Vec<(Pass, Plan, bool)>,
    storage: Dtype,
    options: &Options,
) -> Vec<(Pass, Plan, usize)> {
    let kept = Workspace::new();
    let mut given = Tensors::default();
    let is_result = |x: &&Operand| matches!(x.role, Role::Output | Role::OptionalOutput);
    let mut measured = Vec::new();
    for (pass, plan, is_wanted) in passes {
        if !is_wanted && pass != Pass::Forward {
            continue;
        }
        let mut operands = operands_of(problem, pass, options);
        given.add(storage, operands.iter().filter(|x| x.role.is_given()));
        let mut results = Tensors::default();
        results.add(storage, operands.iter().filter(is_result));
        if !is_wanted {
            let (inputs, mut outputs) = (given.views(&operands), results.views_mut());
            run(problem, pass, &inputs, &mut outputs, options).unwrap();
        } else {
            for recompute in [false, true] {
                let options = Options { recompute, ..*options };
                let mut read = operands.clone();
                read.retain(|x| !is_result(&x) && (x.role.is_given() || !recompute));
                let calls = later_calls(|| {
                    let (inputs, mut outputs) = (given.views(&read), results.views_mut());
                    run_in(&kept, problem, pass, &inputs, &mut outputs, &options)
                });
                assert_eq!(calls, [0; 2], "{pass} of {problem:?}");
            }
            operands.retain(|x| !is_result(&x));
            let bytes = peak(|| {
                let (inputs, mut outputs) = (given.views(&operands), results.views_mut());
                run(problem, pass, &inputs, &mut outputs, options)
            });
            measured.push((pass, plan, bytes));
        }
        if pass == Pass::Forward {
            given.wide.append(&mut results.wide);
            given.narrow.append(&mut results.narrow);
        }
    }
    measured
}

/// As [`in_every_mode`], of attention.
fn attention(problem: &Attention) -> Vec<(Pass, Plan, usize)> {
    in_every_mode(&problem.clone().into(), SOFTMAX, |pass, options| {
        attention::plan::<f32>(problem, pass, options).unwrap()
    })
}

/// As [`in_every_mode`], of attention_lse.
fn attention_lse(problem: &AttentionLse) -> Vec<(Pass, Plan, usize)> {
    in_every_mode(&problem.clone().into(), SOFTMAX, |pass, options| {
        attention_lse::plan::<f32>(problem, pass, options).unwrap()
    })
}

/// As [`in_every_mode`], of lazy attention.
fn lazy_attention(problem: &LazyAttention) -> Vec<(Pass, Plan, usize)> {
    let passes = [Pass::Forward, Pass::Backward, Pass::DoubleBackward];
    in_every_mode(&problem.clone().into(), &passes, |pass, options| {
        lazy_attention::plan::<f32>(problem, pass, options).unwrap()
    })
}

/// As [`passes_of`], of linear cross-entropy.
fn cross_entropy(
    problem: &LinearCrossEntropy,
    storage: Dtype,
    options: &Options,
) -> Vec<(Pass, Plan, usize)> {
    let passes = [Pass::Forward, Pass::Backward, Pass::ForwardBackward, Pass::DoubleBackward];
    passes_of(&problem.clone().into(), &passes, storage, options, |pass| match storage {
        Dtype::Bf16 => linear_cross_entropy::plan::<bf16>(problem, pass, options).unwrap(),
        _ => linear_cross_entropy::plan::<f32>(problem, pass, options).unwrap(),
    })
}

/// The most bytes that a shard of all but some classes at either end holds at once in its forward and in its
/// backward pass. With a workspace that is kept, later calls allocate nothing.
fn shards(problem: &LinearCrossEntropy, options: &Options) -> [usize; 2] {
    let LinearCrossEntropy { tokens, dim, vocab, .. } = *problem;
    let (h, w, bias) = (wave((tokens, dim)), wave((vocab, dim)), wave(vocab));
    let targets = Array::from_shape_fn(tokens, |i| (i % vocab) as i64);
    let dloss = ArrayD::ones(vec![]);
    let inputs = |classes: Range<usize>| linear_cross_entropy::Inputs {
        bias: Some(bias.slice(s![classes.clone()])),
        ..linear_cross_entropy::Inputs::new(h.view(), w.slice(s![classes, ..]), targets.view())
    };
    let whole = Shard::new(problem, 0..vocab).unwrap();
    let totals = forward_shard(&whole, &inputs(0..vocab), options).unwrap();
    let totals = combine(problem, &[(0..vocab, totals.view())]).unwrap();
    let classes = vocab / 10..vocab - 300;
    let (shard, inputs) = (Shard::new(problem, classes.clone()).unwrap(), inputs(classes.clone()));
    let cotangents = linear_cross_entropy::Cotangents::default().dloss(dloss.view());
    let nodes = shard.nodes().count();
    let mut partials = Array::from_elem((nodes, tokens), Partial::identity());
    let mut dh = Array::zeros((nodes, tokens, dim));
    let (mut dw, mut dbias) = (Array::zeros((classes.len(), dim)), Array::zeros(classes.len()));
    let mut forward = |workspace: &Workspace| {
        forward_shard_into(workspace, &shard, &inputs, partials.view_mut(), options)
    };
    let mut backward = |workspace: &Workspace| {
        let places = GradientsMut::<f32> {
            dh: Some(dh.view_mut()),
            dw: Some(dw.view_mut()),
            dbias: Some(dbias.view_mut()),
        };
        let totals = totals.view();
        backward_shard_into(workspace, &shard, &inputs, totals, &cotangents, places, options)
    };
    let kept = Workspace::new();
    assert_eq!(later_calls(|| forward(&kept)), [0; 2], "forward_shard of {problem:?}");
    assert_eq!(later_calls(|| backward(&kept)), [0; 2], "backward_shard of {problem:?}");
    [peak(|| forward(&Workspace::new())), peak(|| backward(&Workspace::new()))]
}

/// The plan of a backward pass with a filter, and what it allocated. With a workspace that is kept, later calls
/// allocate nothing.
fn filtered(problem: &LinearCrossEntropy, options: &Options) -> (Pass, Plan, usize) {
    let LinearCrossEntropy { tokens, dim, vocab, .. } = *problem;
    let (h, w, bias) = (wave((tokens, dim)), wave((vocab, dim)), wave(vocab));
    let targets = Array::from_shape_fn(tokens, |i| (i % vocab) as i64);
    let dloss = ArrayD::ones(vec![]);
    let inputs = linear_cross_entropy::Inputs {
        bias: Some(bias.view()),
        ..linear_cross_entropy::Inputs::new(h.view(), w.view(), targets.view())
    };
    let cotangents = linear_cross_entropy::Cotangents::default().dloss(dloss.view());
    let (mut dh, mut dw) = (Array::<f32, _>::zeros((tokens, dim)), Array::zeros((vocab, dim)));
    let mut dbias = Array::zeros(vocab);
    let mut bounds =
        Certificate { dh: Array::zeros(tokens), dw: Array::zeros(vocab), tiles: (0, 0) };
    let mut backward = |workspace: &Workspace| {
        let places = linear_cross_entropy::GradientsMut {
            dh: Some(dh.view_mut()),
            dw: Some(dw.view_mut()),
            dbias: Some(dbias.view_mut()),
        };
        let (filter, bounds) = (Filter::Below { eps: 1e-7 }, bounds.view_mut());
        filter::backward_into(
            workspace,
            problem,
            &inputs,
            &cotangents,
            filter,
            places,
            bounds,
            options,
        )
    };
    let kept = Workspace::new();
    assert_eq!(later_calls(|| backward(&kept)), [0; 2], "a filter of {problem:?}");
    let bytes = peak(|| backward(&Workspace::new()));
    (Pass::Backward, filter::plan::<f32>(problem, options).unwrap(), bytes)
}

/// Masks with and without arrays, operands that not every problem has, sequences of several lengths.
fn problems() -> Vec<Attention> {
    let extents = extents(1, 201);
    let plain = || Attention::new(extents);
    let ids = || NamedArray::new("ids", &[1, 201], (0..201).map(|i| i / 40).collect::<Vec<_>>());
    let seen = (0..201 * 201).map(|i| i % 7 < 5).collect::<Vec<_>>();
    let seen = Mask::Array(NamedArray::new("seen", &[1, 1, 201, 201], seen));
    let segments = Mask::Segments { query: ids(), key: ids() };
    let window = Mask::Window { left: Some(30), right: Some(0), align: Align::TopLeft };
    let mut sinks = plain().mask(window);
    sinks.scores.sinks = true;
    let mut packed = plain().mask(Mask::causal());
    let offsets = vec![0, 70, 70, 120, 190];
    packed.scores.sequences =
        Sequences::Packed { cu_query: offsets.clone(), cu_key: vec![0, 80, 100, 140, 201] };
    let of_masks = [Mask::causal(), segments.clone(), Mask::Or(vec![segments, seen.clone()]), seen]
        .map(|mask| plain().mask(mask));
    let of_biases = [plain().bias(1, 1), plain().bias(1, 6), packed.clone().bias(1, 6)];
    of_masks.into_iter().chain(of_biases).chain([sinks, packed]).collect()
}

/// As [`passes_of`], of linear attention: all but a step.
fn linear_attention(problem: &LinearAttention, options: &Options) -> Vec<(Pass, Plan, usize)> {
    let passes = [Pass::Forward, Pass::Backward, Pass::DoubleBackward];
    passes_of(&problem.clone().into(), &passes, Dtype::F32, options, |pass| {
        linear_attention::plan::<f32>(problem, pass, options).unwrap()
    })
}

/// As [`passes_of`], of a step.
fn step(problem: &LinearAttention, options: &Options) -> Vec<(Pass, Plan, usize)> {
    passes_of(&problem.clone().into(), &[Pass::Step], Dtype::F32, options, |pass| {
        linear_attention::plan::<f32>(problem, pass, options).unwrap()
    })
}

/// Every allocation is in the plan, and the plan is not a bound so wide that it says nothing: what
/// it rounds up are the scratches of threads that found no task, and lists.
fn check(what: &str, plans: Vec<(Pass, Plan, usize)>) {
    for (pass, plan, bytes) in plans {
        let planned = plan.workspace_bytes();
        assert!(bytes <= planned, "{what} {pass}: {bytes} allocated, {plan:?} {planned}");
        assert!(4 * planned <= 5 * bytes, "{what} {pass}: {bytes} allocated, {plan:?} {planned}");
    }
}

#[test]
fn a_pass_allocates_what_its_plan_says() {
    for threads in [1, 3] {
        let pool = start(threads);
        pool.install(|| {
            let what = format!("{threads} threads,");
            let problem = Attention::new(extents(1, 301)).mask(Mask::causal());
            check(&what, attention(&problem));
            check(&format!("{what} bias"), attention(&problem.bias(1, 1)));
            let problem = AttentionLse::new(extents(1, 301));
            check(&format!("{what} lse"), attention_lse(&problem));
            let problem = LazyAttention::new(extents(1, 301));
            check(&format!("{what} lazy"), lazy_attention(&problem));
            let problem = LazyAttention::new(extents(1, 701)).bias(200);
            check(&format!("{what} lazy, bias"), lazy_attention(&problem));
        });
    }
    for threads in [1, 3] {
        let pool = start(threads);
        pool.install(|| {
            for problem in problems() {
                for storage in [Dtype::F32, Dtype::Bf16] {
                    let options = Options::default();
                    passes_of(&problem.clone().into(), SOFTMAX, storage, &options, |pass| {
                        attention::plan::<f32>(&problem, pass, &options).unwrap()
                    });
                }
            }
        });
    }
    let of = |key_heads, group, tokens, dim| {
        let query_heads = group * key_heads;
        let extents = LinearExtents { batch: 1, query_heads, key_heads, tokens, dim };
        let problem = LinearAttention::new(extents).value_dim(56).decay(Decay::PerToken);
        problem.initial_state().final_state()
    };
    let linear = |key_heads, tokens| of(key_heads, 2, tokens, 40);
    for threads in [1, 3] {
        let pool = start(threads);
        pool.install(|| {
            // Six heads are left to a thread each; of one head, many spans are worked on at once.
            for (heads, tokens) in [(6, 1500), (1, 5000)] {
                let what = format!("{threads} threads, {heads} heads, linear attention");
                check(&what, linear_attention(&linear(heads, tokens), &Options::default()));
            }
            // Lists of many heads that share a state; long rows.
            for problem in [of(1, 12, 1500, 8), of(1, 1, 100, 2000)] {
                let what = format!("{threads} threads, {:?}", problem.extents);
                check(&what, linear_attention(&problem, &Options::default()));
            }
            // States for one thread, and for all.
            for heads in [6, 200] {
                let what = format!("{threads} threads, {heads} heads, linear attention");
                check(&what, step(&linear(heads, 1), &Options::default()));
            }
        });
    }
    // No buffer has a row and a column for every token of a chunk: what a thread holds grows as its
    // chunk does, and the states that are kept become fewer.
    let pool = start(1);
    pool.install(|| {
        let bytes = |chunk| {
            let blocking = Some(Blocking::new(chunk, 24));
            let options = Options { blocking, ..Options::default() };
            linear_attention(&linear(1, 1024), &options).into_iter().map(|(_, _, bytes)| bytes)
        };
        for (long, short) in bytes(256).zip(bytes(64)) {
            assert!(long <= 4 * short, "a chunk of 256: {long}, of 64: {short}");
        }
    });
    // Linear cross-entropy, with a filter or without, holds its budget and 64 bytes for each token, in the second
    // order 100, whatever the number of tokens and classes; its logits alone would take twice that or more.
    const SMALL: usize = 16 << 10;
    for (threads, megabytes) in [(1, 4), (3, 8)] {
        let pool = start(threads);
        pool.install(|| {
            let (strict, split) = (Rounding::Strict, Rounding::Split2);
            let kinds = [(Dtype::F32, strict), (Dtype::Bf16, strict), (Dtype::Bf16, split)];
            for (storage, precision) in kinds {
                for (tokens, vocab) in [(150, 12_000), (900, 5000)] {
                    let problem = LinearCrossEntropy::new(tokens, 40, vocab).bias();
                    let memory_budget = megabytes << 20;
                    let options = Options { memory_budget, precision, ..Options::default() };
                    let what = format!("{threads} threads, {tokens} tokens, {precision}");
                    let mut plans = cross_entropy(&problem, storage, &options);
                    plans.push(filtered(&problem, &options));
                    for (pass, _, bytes) in &plans {
                        let each = if *pass == Pass::DoubleBackward { 100 } else { 64 };
                        let most = options.memory_budget + each * tokens + SMALL;
                        assert!(*bytes <= most, "{what} {pass}: {bytes} of {most}");
                    }
                    check(&what, plans);
                    let most = options.memory_budget + 64 * tokens + SMALL;
                    let bytes = shards(&problem, &options);
                    assert!(
                        bytes.iter().all(|x| *x <= most),
                        "{what}, shards: {bytes:?} of {most}"
                    );
                }
            }
        });
    }
    // Memory is linear in the length, whatever the mode, and independent of the batch.
    let pool = start(1);
    pool.install(|| {
        let bytes = |batch, length, pass| {
            let problem = Attention::new(extents(batch, length));
            attention::plan::<f32>(&problem, pass, &Options::default()).unwrap().workspace_bytes()
        };
        for &pass in SOFTMAX {
            let long = bytes(1, 1 << 15, pass);
            assert!(bytes(1, 1 << 16, pass) <= 2 * long + (1 << 20), "{pass}");
            assert!(bytes(9, 1 << 15, pass) <= 2 * long, "{pass}: lists alone grow with the batch");
        }
    });
}
