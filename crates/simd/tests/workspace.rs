//! What a pass allocates beside operands and results is what its plan says, and with a workspace that is
//! kept its second call allocates nothing. A program of its own, because it counts every allocation of
//! the process, and one test, because two would count each other's.

use etalon_problem::{
    Attention, AttentionLse, Blocking, Decay, Error, Extents, LinearAttention, LinearExtents, Mask,
    Pass,
};
use etalon_simd::{Mode, Options, Plan, Workspace, attention, attention_lse, linear_attention};
use ndarray::{Array, ShapeBuilder};
use peak_alloc::PeakAlloc;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts the bytes in use and, of the threads of a running pool, the calls.
struct Counting;

static MEMORY: PeakAlloc = PeakAlloc;
static CALLS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Whether calls of this thread are counted: those of a pool that has ended still tidy up.
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

/// How often the threads of the pool allocate in the second of three calls, and in the third: their own
/// allocations and those of rayon, which has none once all threads have begun.
fn later_calls(mut run: impl FnMut() -> Result<(), Error>) -> [usize; 2] {
    rayon::broadcast(|_| ());
    run().unwrap();
    [(); 2].map(|()| {
        let before = CALLS.load(Ordering::Relaxed);
        run().unwrap();
        CALLS.load(Ordering::Relaxed) - before
    })
}

/// The most bytes that `run` held at once, beyond those before.
fn peak(mut run: impl FnMut() -> Result<(), Error>) -> usize {
    run().unwrap(); // what the pool of threads allocates once
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

/// The plans of the passes of attention, and what they allocated.
fn attention(problem: &Attention, options: &Options) -> Vec<(Pass, Plan, usize)> {
    let scores = &problem.scores;
    let (mut q, mut k, mut v) =
        (wave(scores.q_shape()), wave(scores.k_shape()), wave(problem.v_shape()));
    let mut bias = scores.bias_shape().map(wave);
    let (dq, dk, dv, dbias) = (q.clone(), k.clone(), v.clone(), bias.clone());
    let inputs = attention::Inputs::new(dq.view(), dk.view(), dv.view());
    let inputs = attention::Inputs { bias: dbias.as_ref().map(|bias| bias.view()), ..inputs };
    let out = attention::forward(problem, &inputs, options).unwrap();
    let (mut to, mut tlse) = (out.o.clone(), out.lse.clone());
    let cotangents = attention::Cotangents::new(out.o.view());
    let second = attention::SecondCotangents {
        ddq: Some(dq.view()),
        ddk: Some(dk.view()),
        ddv: Some(dv.view()),
        ddbias: dbias.as_ref().map(|bias| bias.view()),
        cot_o: Some(out.o.view()),
        ..Default::default()
    };
    let tangents = attention::Tangents {
        tq: second.ddq,
        tk: second.ddk,
        tv: second.ddv,
        tbias: second.ddbias,
        ..Default::default()
    };
    Pass::ALL[..4]
        .iter()
        .map(|&pass| {
            let bytes = peak(|| match pass {
                Pass::Forward => {
                    let place = attention::OutputMut { o: to.view_mut(), lse: tlse.view_mut() };
                    attention::forward_into(problem, &inputs, place, options)
                }
                Pass::Backward => {
                    let place = attention::GradientsMut {
                        dq: Some(q.view_mut()),
                        dk: Some(k.view_mut()),
                        dv: Some(v.view_mut()),
                        dbias: bias.as_mut().map(|bias| bias.view_mut()),
                        ..Default::default()
                    };
                    attention::backward_into(problem, &inputs, &out, &cotangents, place, options)
                }
                Pass::DoubleBackward => {
                    let place = attention::SecondGradientsMut {
                        gq: Some(q.view_mut()),
                        gk: Some(k.view_mut()),
                        gv: Some(v.view_mut()),
                        gdout: Some(to.view_mut()),
                        gdlse: Some(tlse.view_mut()),
                        gbias: bias.as_mut().map(|bias| bias.view_mut()),
                        ..Default::default()
                    };
                    let (second, cotangents) = (&second, &cotangents);
                    attention::double_backward_into(
                        problem, &inputs, &out, cotangents, second, place, options,
                    )
                }
                _ => {
                    let place = attention::OutputTangentsMut {
                        to: Some(to.view_mut()),
                        tlse: Some(tlse.view_mut()),
                    };
                    attention::jvp_into(problem, &inputs, &out, &tangents, place, options)
                }
            });
            (pass, attention::plan::<f32>(problem, pass, options).unwrap(), bytes)
        })
        .collect()
}

/// The plans of the first passes of attention_lse, and what they allocated.
fn attention_lse(problem: &AttentionLse, options: &Options) -> Vec<(Pass, Plan, usize)> {
    let scores = &problem.scores;
    let (q, k) = (wave(scores.q_shape()), wave(scores.k_shape()));
    let (mut dq, mut dk) = (q.clone(), k.clone());
    let inputs = attention_lse::Inputs::new(q.view(), k.view());
    let mut out = attention_lse::forward(problem, &inputs, options).unwrap();
    let forward = peak(|| {
        let gradient = out.gradient.as_mut().map(|gradient| gradient.view_mut());
        let place = attention_lse::OutputMut { lse: out.lse.view_mut(), gradient };
        attention_lse::forward_into(problem, &inputs, place, options)
    });
    let dlse = out.lse.clone();
    let cotangents = attention_lse::Cotangents { dlse: dlse.view() };
    let backward = peak(|| {
        let (dq, dk) = (Some(dq.view_mut()), Some(dk.view_mut()));
        let place = attention_lse::GradientsMut { dq, dk, ..Default::default() };
        attention_lse::backward_into(problem, &inputs, &out, &cotangents, place, options)
    });
    let plan = |pass| attention_lse::plan::<f32>(problem, pass, options).unwrap();
    [(Pass::Forward, forward), (Pass::Backward, backward)]
        .map(|(pass, bytes)| (pass, plan(pass), bytes))
        .into()
}

/// The plans of the passes of linear attention, and what they allocated.
fn linear_attention(problem: &LinearAttention, options: &Options) -> Vec<(Pass, Plan, usize)> {
    let (mut dq, mut dk, mut dv) =
        (wave(problem.q_shape()), wave(problem.k_shape()), wave(problem.v_shape()));
    let (q, k, v) = (dq.clone(), dk.clone(), dv.clone());
    let mut dg = wave(problem.g_shape());
    let g = dg.map(|g| -g.abs());
    let mut state = wave(problem.state_shape());
    let initial = state.clone();
    let mut o = wave(problem.o_shape());
    let dout = o.clone();
    let inputs = linear_attention::Inputs::new(q.view(), k.view(), v.view());
    let inputs = inputs.g(g.view()).initial_state(initial.view());
    let cotangents = linear_attention::Cotangents::new(dout.view());
    let second = linear_attention::SecondCotangents {
        ddq: Some(q.view()),
        ddk: Some(k.view()),
        ddv: Some(v.view()),
        ddg: Some(g.view()),
        ddinitial_state: Some(initial.view()),
        ddscale: Some(0.5),
        cot_o: Some(dout.view()),
        ..Default::default()
    };
    let mut final_state = state.clone();
    let kept = Workspace::new();
    [Pass::Forward, Pass::Backward, Pass::DoubleBackward]
        .map(|pass| {
            let mut run = |workspace: &Workspace| match pass {
                Pass::Forward => {
                    let final_state = Some(state.view_mut());
                    let place = linear_attention::OutputMut { o: o.view_mut(), final_state };
                    linear_attention::forward_in(workspace, problem, &inputs, place, options)
                }
                Pass::Backward => {
                    let place = linear_attention::GradientsMut {
                        dq: Some(dq.view_mut()),
                        dk: Some(dk.view_mut()),
                        dv: Some(dv.view_mut()),
                        dg: Some(dg.view_mut()),
                        dinitial_state: Some(state.view_mut()),
                        ..Default::default()
                    };
                    let cotangents = &cotangents;
                    linear_attention::backward_in(
                        workspace, problem, &inputs, cotangents, place, options,
                    )
                }
                _ => {
                    let place = linear_attention::SecondGradientsMut {
                        gq: Some(dq.view_mut()),
                        gk: Some(dk.view_mut()),
                        gv: Some(dv.view_mut()),
                        gg: Some(dg.view_mut()),
                        ginitial_state: Some(state.view_mut()),
                        gdout: Some(o.view_mut()),
                        gdfinal_state: Some(final_state.view_mut()),
                        ..Default::default()
                    };
                    let (cotangents, second) = (&cotangents, &second);
                    linear_attention::double_backward_in(
                        workspace, problem, &inputs, cotangents, second, place, options,
                    )
                }
            };
            assert_eq!(later_calls(|| run(&kept)), [0; 2], "{pass} of {problem:?}");
            let bytes = peak(|| run(&Workspace::new()));
            (pass, linear_attention::plan::<f32>(problem, pass, options).unwrap(), bytes)
        })
        .to_vec()
}

/// The plan of a step, and what it allocated.
fn step(problem: &LinearAttention, options: &Options) -> (Pass, Plan, usize) {
    let e = &problem.extents;
    let [q, k, v] =
        [(e.query_heads, e.dim), (e.key_heads, e.dim), (e.key_heads, problem.value_dim)].map(
            |(heads, dim)| wave([1, e.batch, heads, dim]).index_axis_move(ndarray::Axis(0), 0),
        );
    let g = ndarray::Array2::from_elem([e.batch, e.key_heads], -0.1);
    let inputs = linear_attention::StepInputs {
        q: q.view(),
        k: k.view(),
        v: v.view(),
        g_gamma: None,
        g: Some(g.view()),
    };
    let mut state = wave([e.batch, e.key_heads, e.dim, problem.value_dim]);
    let mut o = ndarray::Array3::zeros([e.batch, e.query_heads, problem.value_dim]);
    let mut run = |workspace: &Workspace| {
        let (state, o) = (state.view_mut(), o.view_mut());
        linear_attention::step_in(workspace, problem, &inputs, state, o, options)
    };
    let kept = Workspace::new();
    assert_eq!(later_calls(|| run(&kept)), [0; 2], "step of {problem:?}");
    let bytes = peak(|| run(&Workspace::new()));
    (Pass::Step, linear_attention::plan::<f32>(problem, Pass::Step, options).unwrap(), bytes)
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
            for mode in [Mode::Separate, Mode::FusedPartials, Mode::ForwardGradient] {
                let options = Options { mode, ..Options::default() };
                let what = format!("{threads} threads, {mode:?},");
                let problem = Attention::new(extents(2, 701)).mask(Mask::causal());
                check(&what, attention(&problem, &options));
                check(&format!("{what} bias"), attention(&problem.bias(1, 1), &options));
                let problem = AttentionLse::new(extents(2, 701));
                check(&format!("{what} lse"), attention_lse(&problem, &options));
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
            for (heads, tokens) in [(6, 6000), (1, 20_000)] {
                let what = format!("{threads} threads, {heads} heads, linear attention");
                check(&what, linear_attention(&linear(heads, tokens), &Options::default()));
            }
            // Lists of many heads that share a state; long rows.
            for problem in [of(1, 12, 6000, 8), of(1, 1, 200, 2000)] {
                let what = format!("{threads} threads, {:?}", problem.extents);
                check(&what, linear_attention(&problem, &Options::default()));
            }
            // States for one thread, and for all.
            for heads in [6, 200] {
                let what = format!("{threads} threads, {heads} heads, linear attention");
                check(&what, vec![step(&linear(heads, 1), &Options::default())]);
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
    // Memory is linear in the length, whatever the mode, and independent of the batch.
    let pool = start(1);
    pool.install(|| {
        let bytes = |batch, length, pass| {
            let problem = Attention::new(extents(batch, length));
            attention::plan::<f32>(&problem, pass, &Options::default()).unwrap().workspace_bytes()
        };
        for &pass in &Pass::ALL[..4] {
            let long = bytes(1, 1 << 15, pass);
            assert!(bytes(1, 1 << 16, pass) <= 2 * long + (1 << 20), "{pass}");
            assert!(bytes(9, 1 << 15, pass) <= 2 * long, "{pass}: lists alone grow with the batch");
        }
    });
}
