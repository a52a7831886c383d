//! Classes in shards: the bits of one device, by either door; and what is refused.

use super::tensor::Tensor;
use super::{CLASSES, Tensors, check, operands, outputs, problem, workspace};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use etalon_cuda::linear_cross_entropy::shard::{
    Dh, Partial, Shard, TILE, backward_shard, combine, combine_dh, forward_shard, output, prepare_backward,
    prepare_combine, prepare_combine_dh, prepare_forward, prepare_output,
};
use etalon_cuda::{DevicePass, DeviceTensor, DeviceTensors, Level, Options, Precision, Workspace};
use etalon_problem::{Dtype, Error, LinearCrossEntropy, Pass, Problem, Views, ViewsMut};
use ndarray::{Array2, Array3, array};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Results by name, as they lie in memory, those of all shards together.
type Results = BTreeMap<&'static str, Vec<u8>>;

/// Tensors that only the backward pass reads are no inputs of the forward pass.
fn is_cotangent(name: &str) -> bool {
    ["dloss", "dlse", "dlogprob", "dentropy"].contains(&name)
}

/// The inputs of a shard.
fn part(inputs: &Tensors, classes: &Range<usize>) -> Tensors {
    let own = |(name, x): &(&'static str, Tensor)| match *name {
        "w" | "bias" => (*name, x.rows(classes.clone())),
        _ => (*name, x.clone()),
    };
    inputs.iter().map(own).collect()
}

fn views(inputs: &Tensors, cotangents: bool) -> Views<'_> {
    let own = inputs.iter().filter(|(name, _)| cotangents || !is_cotangent(name));
    own.fold(Views::new(), |all, (name, x)| x.read(all, name))
}

fn places(outputs: &mut Tensors) -> ViewsMut<'_> {
    outputs.iter_mut().fold(ViewsMut::new(), |all, (name, x)| x.write(all, name))
}

/// Both passes of all shards, put together, of operands of the host.
fn on_host(
    workspace: &Workspace,
    problem: &LinearCrossEntropy,
    (inputs, storage): (&Tensors, Dtype),
    (shards, kind): (&[Range<usize>], Dh),
    options: &Options,
) -> Results {
    let ranks = shards.iter().map(|x| (Shard::new(problem, x.clone()).unwrap(), part(inputs, x)));
    let ranks: Vec<_> = ranks.collect();
    let partials = ranks.iter().map(|(rank, own)| {
        let own = forward_shard(workspace, rank, &views(own, false), options).unwrap();
        (rank.classes(), own)
    });
    let partials: Vec<_> = partials.collect();
    let all: Vec<_> = partials.iter().map(|(classes, x)| (classes.clone(), x.view())).collect();
    let totals = combine(workspace, problem, &all, options).unwrap();
    let whole: Problem = problem.clone().into();
    let (_, mut found) = operands(&whole, (Pass::Forward, storage));
    let (rank, own) = &ranks[0];
    let (own, mut to) = (views(own, false), places(&mut found));
    output(workspace, rank, &own, totals.view(), &mut to, options).unwrap();
    drop(to);
    let mut results: Results = found.iter().map(|(name, x)| (*name, x.bytes())).collect();
    let (_, gradients) = operands(&whole, (Pass::Backward, storage));
    let mut sums = Vec::new();
    for (rank, own) in &ranks {
        let parts = if kind == Dh::Sum { 1 } else { rank.nodes().count() };
        let mut dh = Array3::from_elem((parts, problem.tokens, problem.dim), f32::NAN);
        let mut head = gradients_of(&gradients, rank);
        let mut to = places(&mut head).with("dh", &mut dh);
        let own = views(own, true);
        backward_shard(workspace, rank, &own, totals.view(), &mut to, kind, options).unwrap();
        drop(to);
        sums.push((rank.classes(), dh));
        head.iter().for_each(|(name, x)| results.entry(name).or_default().extend(x.bytes()));
    }
    let sums: Vec<_> = sums.iter().map(|(classes, x)| (classes.clone(), x.view())).collect();
    let mut dh = gradients.into_iter().find(|(name, _)| *name == "dh").unwrap().1;
    combine_dh(workspace, problem, &sums, dh.view_mut(), options).unwrap();
    results.insert("dh", dh.bytes());
    results
}

/// Places for dw and dbias of a shard.
fn gradients_of(gradients: &Tensors, rank: &Shard<'_>) -> Tensors {
    let head = gradients.iter().filter(|(name, _)| *name != "dh");
    head.map(|(name, x)| (*name, x.rows(rank.classes()))).collect()
}

/// Both passes of all classes at once.
fn at_once(
    workspace: &Workspace,
    problem: &LinearCrossEntropy,
    (inputs, storage): (&Tensors, Dtype),
    options: &Options,
) -> BTreeMap<&'static str, Tensor> {
    let whole: Problem = problem.clone().into();
    let forward: Tensors = inputs.iter().filter(|(name, _)| !is_cotangent(name)).cloned().collect();
    let mut all = outputs(workspace, &whole, (Pass::Forward, storage), &forward, options);
    all.extend(outputs(workspace, &whole, (Pass::Backward, storage), inputs, options));
    all.into_iter().collect()
}

/// Levels and storage types, and budgets in which chunks are one and several.
fn calls(workspace: &Workspace) -> Vec<(Options, Dtype)> {
    let hopper = workspace.capability(0) == Ok((9, 0));
    let portable = Options { level: Level::Portable, ..Options::default() };
    let tensor = Options { level: Level::Sm90a, precision: Precision::Flash, ..portable };
    let mut all: Vec<_> = [Dtype::F32, Dtype::Bf16, Dtype::F16].into_iter().map(|x| (portable, x)).collect();
    all.extend([Dtype::Bf16, Dtype::F16].into_iter().filter(|_| hopper).map(|x| (tensor, x)));
    let small: Vec<_> = all.iter().map(|(x, y)| (Options { memory_budget: 700 << 10, ..*x }, *y)).collect();
    all.into_iter().chain(small).collect()
}

/// Shards that end there.
fn shards(ends: &[usize]) -> Vec<Range<usize>> {
    let begins = std::iter::once(0).chain(ends.iter().copied());
    begins.zip(ends).map(|(begin, &end)| begin..end).collect()
}

/// Problems: one with every option, and one with none, of which tensor cores keep only m and l.
fn problems() -> [LinearCrossEntropy; 2] {
    [problem(), LinearCrossEntropy::new(300, 40, CLASSES)]
}

#[test]
fn shards_give_the_bits_of_all_classes() {
    let Some(workspace) = workspace() else { return };
    // Two nodes; quarters of the tree; uneven, one of no classes and one of two nodes; a tile each.
    let tiles = [vec![4, 6], vec![2, 4, 6], vec![0, 3, 3, 5, 6], vec![1, 2, 3, 4, 5, 6]];
    for (problem, (options, storage)) in
        problems().iter().flat_map(|x| calls(&workspace).into_iter().map(move |y| (x, y)))
    {
        let (inputs, _) = operands(&problem.clone().into(), (Pass::Backward, storage));
        let wanted = at_once(&workspace, problem, (&inputs, storage), &options);
        for ends in &tiles {
            let ends: Vec<_> = ends.iter().map(|x| CLASSES.min(x * TILE)).collect();
            for kind in [Dh::Nodes, Dh::Sum] {
                let shards = shards(&ends);
                let found = on_host(&workspace, problem, (&inputs, storage), (&shards, kind), &options);
                for (name, wanted) in &wanted {
                    let level = options.level;
                    let what = format!("{name} in {storage}, {level}, {shards:?}, {kind:?}");
                    let exact = match level {
                        _ if *name != "dh" => true,
                        Level::Portable => kind == Dh::Nodes,
                        _ => shards.iter().all(|x| x.start % (2 * TILE) == 0),
                    };
                    let same = found[name] == wanted.bytes();
                    assert!(same || !exact, "{what}, {}", options.memory_budget);
                    near(&found[name], wanted, &what);
                }
            }
        }
    }
}

#[test]
fn shards_may_be_cut_anywhere() {
    let Some(workspace) = workspace() else { return };
    for (problem, (options, storage)) in
        problems().iter().flat_map(|x| calls(&workspace).into_iter().map(move |y| (x, y)))
    {
        let (inputs, _) = operands(&problem.clone().into(), (Pass::Backward, storage));
        let wanted = at_once(&workspace, problem, (&inputs, storage), &options);
        for ends in [vec![100, 1400, CLASSES], vec![1, 2, 300, 301, CLASSES]] {
            let shards = shards(&ends);
            for kind in [Dh::Nodes, Dh::Sum] {
                let found = on_host(&workspace, problem, (&inputs, storage), (&shards, kind), &options);
                for (name, wanted) in &wanted {
                    let what = format!("{name} in {storage}, {}, {shards:?}", options.level);
                    near(&found[name], wanted, &what);
                }
            }
        }
    }
}

/// Equal numbers, or those that differ by a hundredth of the largest at most.
fn near(found: &[u8], wanted: &Tensor, what: &str) {
    let mut other = wanted.clone();
    match &mut other {
        Tensor::F32(x) => bytemuck::cast_slice_mut(x.as_slice_mut().unwrap()).copy_from_slice(found),
        Tensor::Bf16(x) => bytemuck::cast_slice_mut(x.as_slice_mut().unwrap()).copy_from_slice(found),
        Tensor::F16(x) => bytemuck::cast_slice_mut(x.as_slice_mut().unwrap()).copy_from_slice(found),
        Tensor::I64(x) => bytemuck::cast_slice_mut(x.as_slice_mut().unwrap()).copy_from_slice(found),
    }
    check(&other.numbers(), &wanted.numbers(), false, what);
}

// ---- operands on the device ----------------------------------------------------------------------------------------

/// Memory of a device whose bytes are all ones at first: NaN.
struct Memory {
    stream: Arc<CudaStream>,
    held: Vec<CudaSlice<u8>>,
}

impl Memory {
    fn bytes(&mut self, bytes: &[u8]) -> u64 {
        let more = vec![0xff; bytes.len().max(1).next_multiple_of(256) - bytes.len()];
        let slice = self.stream.clone_htod(&[bytes, &more].concat()).unwrap();
        let address = slice.device_ptr(&self.stream).0;
        self.held.push(slice);
        address
    }

    fn room(&mut self, shape: &[usize]) -> DeviceTensor {
        let bytes = vec![0xff; 4 * shape.iter().product::<usize>()];
        DeviceTensor::dense(self.bytes(&bytes), shape, Dtype::F32)
    }

    fn tensor(&mut self, x: &Tensor) -> DeviceTensor {
        DeviceTensor::dense(self.bytes(&x.bytes()), x.shape(), x.stored())
    }

    fn tensors(&mut self, all: &Tensors) -> DeviceTensors<'static> {
        all.iter().fold(DeviceTensors::new(), |list, (name, x)| list.with(name, self.tensor(x)))
    }
}

/// A pass with its operands, prepared.
struct Prepared {
    pass: DevicePass,
    inputs: DeviceTensors<'static>,
    outputs: DeviceTensors<'static>,
    scratch: u64,
}

impl Prepared {
    fn new(
        memory: &mut Memory,
        (inputs, outputs): (DeviceTensors<'static>, DeviceTensors<'static>),
        prepare: impl FnOnce(&DeviceTensors<'_>, &DeviceTensors<'_>) -> DevicePass,
    ) -> Prepared {
        let pass = prepare(&inputs, &outputs);
        let scratch = memory.bytes(&vec![0xff; pass.scratch_bytes()]);
        Prepared { pass, inputs, outputs, scratch }
    }
}

/// The same with operands on a device, once enqueued and once more from a graph; dh with the sum of every node.
fn on_device(
    workspace: &Workspace,
    problem: &LinearCrossEntropy,
    (inputs, storage): (&Tensors, Dtype),
    shards: &[Range<usize>],
    options: &Options,
) -> Results {
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let mut memory = Memory { stream: stream.clone(), held: Vec::new() };
    let memory = &mut memory;
    let (tokens, dim) = (problem.tokens, problem.dim);
    let ranks: Vec<_> = shards.iter().map(|x| Shard::new(problem, x.clone()).unwrap()).collect();
    let nodes: usize = ranks.iter().map(|rank| rank.nodes().count()).sum();
    let whole: Problem = problem.clone().into();
    let none = DeviceTensors::new;
    // Partials that all ranks gather lie side by side here.
    let partials = memory.bytes(&vec![0xff; Partial::BYTES * nodes * tokens]);
    let parts = memory.bytes(&vec![0xff; 4 * nodes * tokens * dim]);
    let totals = memory.room(&[tokens, Partial::BYTES / 4]);
    let mut steps = Vec::new();
    let mut before = 0;
    let forward: Tensors = inputs.iter().filter(|(name, _)| !is_cotangent(name)).cloned().collect();
    for rank in &ranks {
        let own = rank.nodes().count();
        let at = partials + (Partial::BYTES * before * tokens) as u64;
        let to = DeviceTensor::dense(at, &[own, tokens, Partial::BYTES / 4], Dtype::F32);
        let from = memory.tensors(&part(&forward, &rank.classes()));
        let call = (from, none().with("partials", to));
        let prepare =
            |x: &DeviceTensors<'_>, y: &DeviceTensors<'_>| prepare_forward(workspace, rank, x, y, options).unwrap();
        steps.push(Prepared::new(memory, call, prepare));
        before += own;
    }
    let all = DeviceTensor::dense(partials, &[nodes, tokens, Partial::BYTES / 4], Dtype::F32);
    let call = (none().with("partials", all), none().with("totals", totals.clone()));
    let prepare = |x: &DeviceTensors<'_>, y: &DeviceTensors<'_>| {
        prepare_combine(workspace, problem, shards, x, y, options).unwrap()
    };
    steps.push(Prepared::new(memory, call, prepare));
    let (_, outputs) = operands(&whole, (Pass::Forward, storage));
    let needed = |x: &&(&'static str, Tensor)| !["h", "w", "bias"].contains(&x.0);
    let needed: Tensors = forward.iter().filter(needed).cloned().collect();
    let from = memory.tensors(&needed).with("totals", totals.clone());
    let call = (from, memory.tensors(&outputs));
    let prepare =
        |x: &DeviceTensors<'_>, y: &DeviceTensors<'_>| prepare_output(workspace, &ranks[0], x, y, options).unwrap();
    steps.push(Prepared::new(memory, call, prepare));
    let mut found: Vec<(&'static str, usize, Vec<u64>)> =
        outputs.iter().map(|(name, x)| (*name, x.bytes().len(), Vec::new())).collect();
    let first = memory.held.len() - 1 - outputs.len();
    for (at, (.., addresses)) in found.iter_mut().enumerate() {
        addresses.push(first as u64 + at as u64);
    }
    let (_, gradients) = operands(&whole, (Pass::Backward, storage));
    let mut heads = Vec::new();
    before = 0;
    for rank in &ranks {
        let own = rank.nodes().count();
        let at = parts + (4 * before * tokens * dim) as u64;
        let dh = DeviceTensor::dense(at, &[own, tokens, dim], Dtype::F32);
        let from = memory.tensors(&part(inputs, &rank.classes())).with("totals", totals.clone());
        let head = gradients_of(&gradients, rank);
        let first = memory.held.len();
        let to = memory.tensors(&head).with("dh", dh);
        heads.extend(head.iter().enumerate().map(|(at, (name, x))| (*name, first + at, x.bytes().len())));
        let prepare = |x: &DeviceTensors<'_>, y: &DeviceTensors<'_>| {
            prepare_backward(workspace, rank, x, y, Dh::Nodes, options).unwrap()
        };
        steps.push(Prepared::new(memory, (from, to), prepare));
        before += own;
    }
    let dh = gradients.iter().find(|(name, _)| *name == "dh").unwrap().1.clone();
    let all = DeviceTensor::dense(parts, &[nodes, tokens, dim], Dtype::F32);
    let dh_at = memory.held.len();
    let call = (none().with("parts", all), none().with("dh", memory.tensor(&dh)));
    let sum = (shards, Dh::Nodes);
    let prepare = |x: &DeviceTensors<'_>, y: &DeviceTensors<'_>| {
        prepare_combine_dh(workspace, problem, sum, x, y, options).unwrap()
    };
    steps.push(Prepared::new(memory, call, prepare));
    let enqueue = || {
        for step in &steps {
            // SAFETY: all tensors and the scratch memory live until the stream has been waited for, no two of them
            // overlap, and the stream is of the primary context.
            let done = unsafe {
                let scratch = step.scratch;
                step.pass.enqueue(stream.cu_stream(), &step.inputs, &step.outputs, scratch)
            };
            done.unwrap();
        }
    };
    let read = || {
        stream.synchronize().unwrap();
        let bytes = |at: usize, len: usize| stream.clone_dtoh(&memory.held[at]).unwrap()[..len].to_vec();
        let mut results = Results::new();
        for (name, len, at) in &found {
            results.insert(name, bytes(at[0] as usize, *len));
        }
        for &(name, at, len) in &heads {
            results.entry(name).or_default().extend(bytes(at, len));
        }
        results.insert("dh", bytes(dh_at, dh.bytes().len()));
        results
    };
    enqueue();
    let first = read();
    // Nothing is synchronised or allocated: else the capture would fail.
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    enqueue();
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).unwrap().expect("kernels were captured");
    graph.launch().unwrap();
    assert!(read() == first, "a graph has the bits of the first call");
    first
}

#[test]
fn shards_on_the_device_give_the_bits_of_the_host_door() {
    let Some(workspace) = workspace() else { return };
    let shards = shards(&[0, 3 * TILE, 3 * TILE, 5 * TILE, CLASSES]);
    // With tokens that are ignored, and without.
    for ignore_index in [-100, -7] {
        let problem = LinearCrossEntropy { ignore_index, ..problem() };
        for (options, storage) in calls(&workspace) {
            let (mut inputs, _) = operands(&problem.clone().into(), (Pass::Backward, storage));
            for (_, x) in &mut inputs {
                if let (Tensor::I64(targets), -7) = (x, ignore_index) {
                    targets.mapv_inplace(|y| if y == -100 { 3 } else { y });
                }
            }
            let call = (&inputs, storage);
            let wanted = on_host(&workspace, &problem, call, (&shards, Dh::Nodes), &options);
            let found = on_device(&workspace, &problem, call, &shards, &options);
            for (name, wanted) in &wanted {
                let (level, budget) = (options.level, options.memory_budget);
                assert!(found[name] == *wanted, "{name} in {storage}, {level}, {budget}");
            }
        }
    }
}

// ---- refusals ------------------------------------------------------------------------------------------------------

#[test]
fn what_is_no_shard_is_refused_without_a_device() {
    let problem = LinearCrossEntropy::new(2, 4, 600);
    for classes in [Range { start: 3, end: 2 }, 0..601, 601..601] {
        let error = Shard::new(&problem, classes).unwrap_err().to_string();
        assert!(error.contains("0..600"), "{error}");
    }
    let huge = LinearCrossEntropy::new(1, 1, 1 << 31);
    let (shard, none) = (Shard::new(&huge, 0..1).unwrap(), Views::new());
    let refused = forward_shard(&Workspace::new(), &shard, &none, &Options::default());
    assert!(refused.unwrap_err().to_string().contains("32 bits"));
    let nodes: Vec<_> = Shard::new(&problem, 100..600).unwrap().nodes().collect();
    assert_eq!(nodes, [100..256, 256..512, 512..600]);
}

#[test]
fn what_does_not_fit_together_is_refused_without_a_device() {
    let (workspace, options) = (Workspace::new(), Options::default());
    let problem = LinearCrossEntropy::new(2, 4, 600);
    let own = |classes: u32, target| Partial { m: 0.0, l: 1.0, classes, target, ..Partial::identity() };
    let rows = |x, y| array![[own(x, Some(0.0)), own(x, y)]];
    let refused =
        |shards: &[(Range<usize>, _)]| combine(&workspace, &problem, shards, &options).unwrap_err().to_string();
    let (a, b) = (rows(512, None), rows(88, None));
    let error = refused(&[(0..512, a.view()), (512..600, b.view())]);
    assert!(error.contains("targets[0]") && error.contains("512..600"), "{error}");
    let error = refused(&[(0..512, a.view())]);
    assert!(error.contains("all 600 classes"), "{error}");
    let error = refused(&[(512..600, b.view()), (0..512, a.view())]);
    assert!(error.contains("classes from 0 on"), "{error}");
    let error = refused(&[(0..256, a.view()), (256..600, b.view())]);
    assert!(error.contains("shards[1]"), "{error}");
    let error = refused(&[(0..512, b.view()), (512..600, b.view())]);
    assert!(error.contains("of 512 classes"), "{error}");
    let (dh, mut place) = (Array3::zeros((2, 2, 4)), Array2::<f32>::zeros((2, 4)));
    let parts = [(0..512, dh.view()), (512..600, dh.view())];
    let error = combine_dh(&workspace, &problem, &parts, (&mut place).into(), &options);
    assert!(error.unwrap_err().to_string().contains("shards[0]"));
}

#[test]
fn totals_of_some_classes_are_refused_without_a_device() {
    let (workspace, options) = (Workspace::new(), Options::default());
    let problem = LinearCrossEntropy::new(2, 4, 600);
    let rank = Shard::new(&problem, 0..512).unwrap();
    let (h, w) = (Array2::<f32>::zeros((2, 4)), Array2::<f32>::zeros((512, 4)));
    let targets = array![1i64, -100];
    let inputs = Views::new().with("h", &h).with("w", &w).with("targets", &targets);
    let refused = |total: Partial| {
        let totals = array![total, Partial::identity()];
        let mut places = ViewsMut::new();
        let found = output(&workspace, &rank, &inputs, totals.view(), &mut places, &options);
        let error = found.unwrap_err().to_string();
        let kind = Dh::Sum;
        let found = backward_shard(&workspace, &rank, &inputs, totals.view(), &mut places, kind, &options);
        assert_eq!(found.unwrap_err().to_string(), error);
        error
    };
    let total = Partial { m: 0.0, l: 1.0, classes: 512, target: Some(0.0), ..Partial::identity() };
    assert!(refused(total).contains("all 600 classes"));
    let error = refused(Partial { classes: 600, target: None, ..total });
    assert!(error.contains("targets[0]") && error.contains("one of the shards"), "{error}");
}

#[test]
fn more_classes_than_31_bits_count_are_refused_before_a_device_is_asked() {
    let problem = LinearCrossEntropy::new(1, 1, 1 << 31);
    let shard = Shard::new(&problem, 0..1 << 31).unwrap();
    let (workspace, options, none) = (Workspace::new(), Options::default(), DeviceTensors::new());
    let refused = |error: Option<Error>| match error {
        Some(Error::Unsupported { what, .. }) => assert_eq!(what, "a vocabulary of 2147483648"),
        other => panic!("{other:?}"),
    };
    refused(prepare_forward(&workspace, &shard, &none, &none, &options).err());
    refused(prepare_backward(&workspace, &shard, &none, &none, Dh::Sum, &options).err());
    let all = std::slice::from_ref(&(0..1 << 31));
    refused(prepare_combine(&workspace, &problem, all, &none, &none, &options).err());
    let sum = (all, Dh::Sum);
    refused(prepare_combine_dh(&workspace, &problem, sum, &none, &none, &options).err());
    refused(forward_shard(&workspace, &shard, &Views::new(), &options).err());
    let none = Array2::from_elem((1, 1), Partial::identity());
    let shards = [(shard.classes(), none.view())];
    refused(combine(&workspace, &problem, &shards, &options).err());
}
