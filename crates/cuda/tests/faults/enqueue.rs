//! Passes over operands of a device: what each of them calls when it is enqueued, and how much memory it needs.

use crate::fake::{Fake, Part};
use etalon_cuda::{
    DevicePass, DeviceTensor, DeviceTensors, Element, Level, Options, Precision, Target, Workspace, levels,
};
use etalon_problem::{
    Algorithm, Attention, AttentionLse, BiasExtents, Dtype, Error, Extents, LazyAttention, LinearAttention,
    LinearCrossEntropy, LinearExtents, Operand, Pass, Problem, Role, Sequences, Stored,
};
use std::time::Instant;

/// A problem of an algorithm with so many tokens, D = E = 64.
pub fn problem(algorithm: Algorithm, tokens: usize) -> Problem {
    let (batch, query_heads, key_heads, dim) = (1, 2, 1, 64);
    let extents = Extents { batch, query_heads, key_heads, queries: tokens, keys: tokens, dim };
    match algorithm {
        Algorithm::Attention => Attention::new(extents).into(),
        Algorithm::AttentionLse => AttentionLse::new(extents).into(),
        Algorithm::LazyAttention => LazyAttention::new(extents).into(),
        Algorithm::LinearAttention => {
            let extents = LinearExtents { batch, query_heads, key_heads, tokens, dim };
            LinearAttention::new(extents).into()
        }
        Algorithm::LinearCrossEntropy => LinearCrossEntropy::new(tokens, dim, 1000).into(),
    }
}

/// The same with every gradient that there is in attention.
fn with_options(algorithm: Algorithm, tokens: usize) -> Problem {
    let mut problem = problem(algorithm, tokens);
    if let (Algorithm::Attention | Algorithm::AttentionLse, Some(scores)) = (algorithm, problem.scores_mut()) {
        scores.sinks = true;
        scores.bias = Some(BiasExtents { batch: 1, heads: 2 });
    }
    problem
}

/// The same of packed sequences, whose offsets lie on the device.
fn packed(algorithm: Algorithm, tokens: usize) -> Option<Problem> {
    let mut problem = problem(algorithm, tokens);
    let cu = vec![0, tokens / 3, tokens];
    problem.scores_mut()?.sequences = Sequences::Packed { cu_query: cu.clone(), cu_key: cu };
    Some(problem)
}

/// Tensors of a device for a pass of a problem, at addresses that stay, with scratch memory.
pub struct Tensors {
    pub problem: Problem,
    pub pass: Pass,
    pub options: Options,
    pub inputs: DeviceTensors<'static>,
    pub outputs: DeviceTensors<'static>,
    pub scratch: u64,
}

/// More than the scratch memory of passes of a few rows.
pub const SCRATCH: usize = 1 << 22;

impl Tensors {
    /// `elsewhere`: the operand that lies on the second device.
    pub fn new(
        fake: &Fake,
        problem: Problem,
        (pass, storage): (Pass, Dtype),
        options: Options,
        elsewhere: Option<&str>,
    ) -> Tensors {
        let device = |name: &str| i32::from(elsewhere == Some(name));
        let place = |name: &str, bytes: usize| fake.memory(device(name), bytes.max(1));
        let (inputs, outputs) = tensors(&problem, pass, storage, place);
        let scratch = place("scratch", SCRATCH);
        Tensors { problem, pass, options, inputs, outputs, scratch }
    }

    pub fn prepare(&self, workspace: &Workspace) -> Result<DevicePass, Error> {
        let Tensors { problem, pass, options, inputs, outputs, .. } = self;
        let pass = DevicePass::new(workspace, problem, *pass, inputs, outputs, options)?;
        assert!(pass.scratch_bytes() <= SCRATCH, "{}", pass.scratch_bytes());
        Ok(pass)
    }

    pub fn enqueue(&self, pass: &DevicePass) -> Result<(), Error> {
        let stream = std::ptr::null_mut();
        // SAFETY: the fake driver's default stream, and memory of it that stays.
        unsafe { pass.enqueue(stream, &self.inputs, &self.outputs, self.scratch) }
    }

    /// Records the pass, and enqueues what was recorded twice.
    pub fn record(&self, pass: &DevicePass) -> Result<(), Error> {
        let stream = std::ptr::null_mut();
        // SAFETY: the fake driver's default stream, and memory of it that stays.
        let mut recorded = unsafe { pass.record(&self.inputs, &self.outputs, self.scratch) }?;
        // SAFETY: as above.
        (0..2).try_for_each(|_| unsafe { recorded.enqueue(stream) })
    }
}

/// All operands of a pass, each where `place` puts so many bytes.
fn tensors(
    problem: &Problem,
    pass: Pass,
    storage: Dtype,
    place: impl Fn(&str, usize) -> u64,
) -> (DeviceTensors<'static>, DeviceTensors<'static>) {
    let operands = problem.operands(pass);
    let of = |which: &dyn Fn(&Operand) -> bool| {
        operands.iter().filter(|x| which(x)).fold(DeviceTensors::new(), |all, x| {
            let stored = Stored::of(x.precision, storage);
            all.with(x.name, DeviceTensor::dense(place(x.name, 8 * x.len()), &x.shape, stored))
        })
    };
    let given = |x: &Operand| x.role.is_given() || x.role == Role::Saved;
    let sequences = problem.scores().map(|scores| &scores.sequences);
    let is_packed = matches!(sequences, Some(Sequences::Packed { .. }));
    let offsets = ["sequences.cu_query", "sequences.cu_key"].into_iter().filter(|_| is_packed);
    let inputs =
        offsets.fold(of(&given), |all, name| all.with(name, DeviceTensor::dense(place(name, 12), &[3], Element::I32)));
    (inputs, of(&|x| x.role == Role::Output))
}

/// Every level, with the storage types and the precisions that differ there.
const WAYS: [(Level, Precision, Dtype); 8] = [
    (Level::Portable, Precision::Strict, Dtype::F32),
    (Level::Portable, Precision::Strict, Dtype::Bf16),
    (Level::Sm80, Precision::Tf32, Dtype::F32),
    (Level::Sm80, Precision::Bf16x3, Dtype::F32),
    (Level::Sm80, Precision::Flash, Dtype::Bf16),
    (Level::Sm80Narrow, Precision::Flash, Dtype::Bf16),
    (Level::Sm90a, Precision::Flash, Dtype::Bf16),
    (Level::Sm90aSegments, Precision::Flash, Dtype::Bf16),
];

/// Calls `body` for each algorithm, pass and options that there are kernels for, with its name.
pub fn each_pass(mut body: impl FnMut(&str, Algorithm, (Pass, Dtype), Options)) {
    for algorithm in Algorithm::ALL {
        for &pass in algorithm.passes() {
            for (level, precision, storage) in WAYS {
                let options = Options { level, precision, ..Options::default() };
                let target = Target::default();
                if levels::offers(&options, algorithm, pass, storage, &target).is_err() {
                    continue;
                }
                let f32 = storage == Dtype::F32 && precision != Precision::Strict;
                let level = if f32 { precision.to_string() } else { level.to_string() };
                let name = format!("{algorithm} {pass} {level} {storage}");
                body(&name, algorithm, (pass, storage), options);
            }
        }
    }
}

/// Functions that may be called when a pass is enqueued: none that waits, none that allocates.
const CALLS: [&str; 6] = [
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuLaunchKernel",
    "cuMemsetD32Async",
    "cuPointerGetAttribute",
    "cuTensorMapEncodeTiled",
];

/// Calls `body` for each pass of attention that has the gradient of a bias, of no sequence, with the fills of it: no
/// kernel writes that gradient.
pub fn each_unread_bias(fake: &Fake, mut body: impl FnMut(&str, usize)) {
    let workspace = Workspace::new();
    each_pass(|name, algorithm, call, options| {
        let is_bias = |x: &Operand| x.role == Role::Output && ["dbias", "gbias"].contains(&x.name);
        let none = Sequences::Lengths { query: Vec::new(), key: Vec::new() };
        for sequences in [Sequences::Dense, none] {
            let mut problem = with_options(algorithm, 100);
            let Some(scores) = problem.scores_mut() else { return };
            (scores.extents.batch, scores.sequences) = (0, sequences);
            if !problem.operands(call.0).iter().any(is_bias) {
                return;
            }
            let tensors = Tensors::new(fake, problem, call, options, None);
            // Other levels take what this one refuses.
            let Ok(pass) = tensors.prepare(&workspace) else { continue };
            fake.fail(Part::Driver, "cuMemsetD32Async", 0, 0);
            tensors.enqueue(&pass).unwrap_or_else(|error| panic!("{name}: {error}"));
            body(name, fake.calls(Part::Driver));
        }
    });
}

/// Launches and fills of a pass, such as `3 + 1`. Fails where it calls anything else than it may, or asks for an
/// address twice.
fn enqueued(fake: &Fake, name: &str, tensors: &Tensors, pass: &DevicePass) -> String {
    let calls = |function: &str| {
        fake.fail(Part::Driver, function, 0, 0);
        tensors.enqueue(pass).unwrap_or_else(|error| panic!("{name}: {error}"));
        fake.calls(Part::Driver)
    };
    calls(""); // from here on every address is known
    for function in Part::Driver.functions() {
        let found = calls(function);
        assert!(found == 0 || CALLS.contains(&function), "{name} calls {function}");
        match function {
            "cuPointerGetAttribute" => assert_eq!(found, 0, "{name} looks addresses up again"),
            "cuCtxGetCurrent" => assert_eq!(found, 1, "{name} binds its context {found} times"),
            _ => {}
        }
    }
    format!("{} + {}", calls("cuLaunchKernel"), calls("cuMemsetD32Async"))
}

/// Calls `body` for each of these with a problem without options and, of attention, with all: its name, the tensors
/// and the pass.
fn each_prepared_pass(fake: &Fake, mut body: impl FnMut(&str, &Tensors, &DevicePass)) {
    let workspace = Workspace::new();
    each_pass(|name, algorithm, call, options| {
        let mut of = |name: &str, problem: Problem| {
            let tensors = Tensors::new(fake, problem, call, options, None);
            let pass = tensors.prepare(&workspace);
            body(name, &tensors, &pass.unwrap_or_else(|error| panic!("{name}: {error}")));
        };
        of(name, problem(algorithm, 100));
        if matches!(algorithm, Algorithm::Attention | Algorithm::AttentionLse) {
            of(&format!("{name} with options"), with_options(algorithm, 100));
        }
        if let Some(problem) = packed(algorithm, 100) {
            of(&format!("{name} with offsets"), problem);
        }
    });
}

/// Enqueues every pass, and returns what each launches and fills: of a problem without options, of attention also of
/// one with sinks and a bias, and of what has scores of packed sequences, whose offsets calls give.
pub fn launches(fake: &Fake) -> String {
    let mut text = String::new();
    each_prepared_pass(fake, |name, tensors, pass| {
        text += &format!("{name}: {}\n", enqueued(fake, name, tensors, pass));
    });
    text
}

/// Calls of which the shortest counts, in rounds of so many.
const ROUNDS: [usize; 2] = [20, 50];

/// The time of each pass to be enqueued with a driver that does nothing: what the crate itself takes.
pub fn own_time(fake: &Fake) -> String {
    let mut text = String::new();
    each_prepared_pass(fake, |name, tensors, pass| {
        let [rounds, calls] = ROUNDS;
        let round = || {
            let begin = Instant::now();
            (0..calls).for_each(|_| tensors.enqueue(pass).unwrap());
            begin.elapsed().as_nanos() / calls as u128
        };
        let best = (0..rounds).map(|_| round()).min().unwrap_or(0);
        text += &format!("{name}: {best} ns for {}\n", enqueued(fake, name, tensors, pass));
    });
    text
}

/// The scratch memory and the tables of every pass, of so many tokens.
pub fn bytes(tokens: usize) -> Vec<(String, [usize; 2])> {
    let workspace = Workspace::new();
    let mut list = Vec::new();
    each_pass(|name, algorithm, (pass, storage), options| {
        let problem = problem(algorithm, tokens);
        // Nothing is read or written: any address is as good.
        let (inputs, outputs) = tensors(&problem, pass, storage, |_, _| 1 << 20);
        let pass = DevicePass::new(&workspace, &problem, pass, &inputs, &outputs, &options);
        let pass = pass.unwrap_or_else(|error| panic!("{name}: {error}"));
        list.push((name.to_string(), [pass.scratch_bytes(), pass.table_bytes()]));
    });
    list
}
