//! Operands in the memory of a device, the targets among them: the bits of the host's door, in a graph, and
//! what becomes of a target that nobody can refuse.

use super::tensor::Tensor;
use super::{Tensors, operands, outputs, problem, workspace};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use etalon_cuda::{DevicePass, DeviceTensor, DeviceTensors, Level, Options, Precision, Workspace};
use etalon_problem::{Dtype, LinearCrossEntropy, Pass, Problem, Reduction};
use ndarray::ArrayD;
use std::sync::Arc;

/// A tensor on the device, of which every `step`-th element is there.
struct DeviceArray {
    memory: CudaSlice<u8>,
    shape: Vec<usize>,
    tensor: Tensor,
    step: usize,
}

impl DeviceArray {
    fn new(stream: &Arc<CudaStream>, tensor: &Tensor, shape: &[usize], step: usize) -> DeviceArray {
        let bytes = tensor.stored().bytes();
        let mut list = vec![0xffu8; tensor.bytes().len().max(1) * step];
        for (at, one) in tensor.bytes().chunks(bytes).enumerate() {
            list[at * bytes * step..][..bytes].copy_from_slice(one);
        }
        let memory = stream.clone_htod(&list).unwrap();
        DeviceArray { memory, shape: shape.to_vec(), tensor: tensor.clone(), step }
    }

    fn on_device(&self, stream: &CudaStream) -> DeviceTensor {
        let mut strides = vec![self.step as i64; self.shape.len()];
        for axis in (1..self.shape.len()).rev() {
            strides[axis - 1] = strides[axis] * self.shape[axis] as i64;
        }
        let address = self.memory.device_ptr(stream).0;
        DeviceTensor::new(address, &self.shape, &strides, self.tensor.stored()).unwrap()
    }

    fn bytes(&self, stream: &Arc<CudaStream>) -> Vec<u8> {
        let bytes = self.tensor.stored().bytes();
        let list = stream.clone_dtoh(&self.memory).unwrap();
        let there = self.tensor.bytes().len() / bytes;
        (0..there).flat_map(|at| list[at * bytes * self.step..][..bytes].to_vec()).collect()
    }
}

/// Results of the device from inputs, twice, and once from a graph.
fn on_device(
    workspace: &Workspace,
    problem: &Problem,
    (pass, storage): (Pass, Dtype),
    inputs: &Tensors,
    step: usize,
    options: &Options,
) -> Vec<(&'static str, Vec<u8>)> {
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let shapes = problem.operands(pass);
    let shape = |name: &str| &shapes.iter().find(|x| x.name == name).unwrap().shape[..];
    let held = |(name, x): &(&'static str, Tensor)| (*name, DeviceArray::new(&stream, x, shape(name), step));
    let given: Vec<_> = inputs.iter().map(held).collect();
    let places: Vec<_> = operands(problem, (pass, storage)).1.iter().map(held).collect();
    let all = |list: &[(&'static str, DeviceArray)]| {
        list.iter().fold(DeviceTensors::new(), |all, (name, x)| all.with(name, x.on_device(&stream)))
    };
    let (from, to) = (all(&given), all(&places));
    let prepared = DevicePass::new(workspace, problem, pass, &from, &to, options).unwrap();
    let scratch = stream.clone_htod(&vec![0xffu8; prepared.scratch_bytes().max(256)]).unwrap();
    let at = scratch.device_ptr(&stream).0;
    let found = || {
        stream.synchronize().unwrap();
        places.iter().map(|(name, x)| (*name, x.bytes(&stream))).collect::<Vec<_>>()
    };
    // SAFETY: all tensors and the scratch memory live until the stream has been waited for, no two of them
    // overlap, and the stream is of the primary context.
    let enqueue = || unsafe { prepared.enqueue(stream.cu_stream(), &from, &to, at) }.unwrap();
    enqueue();
    let first = found();
    // Nothing is synchronised or allocated: else the capture would fail. Other threads may do both.
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    enqueue();
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).unwrap().expect("kernels were captured");
    for _ in 0..2 {
        graph.launch().unwrap();
        assert!(found() == first, "a graph has the bits of the first call");
    }
    first
}

/// Levels, passes and storage types; and with a budget in which chunks are several.
fn calls(workspace: &Workspace) -> Vec<(Options, (Pass, Dtype))> {
    let mut all = Vec::new();
    let portable = Options { level: Level::Portable, ..Options::default() };
    for storage in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        for pass in [Pass::Forward, Pass::ForwardBackward, Pass::DoubleBackward] {
            all.push((portable, (pass, storage)));
        }
    }
    let hopper = Options { level: Level::Sm90a, precision: Precision::Flash, ..portable };
    if workspace.capability(0) == Ok((9, 0)) {
        for storage in [Dtype::Bf16, Dtype::F16] {
            all.extend([Pass::Forward, Pass::ForwardBackward].map(|x| (hopper, (x, storage))));
        }
    }
    let small = all.iter().map(|(x, call)| (Options { memory_budget: 700 << 10, ..*x }, *call));
    let small: Vec<_> = small.collect();
    all.into_iter().chain(small).collect()
}

#[test]
fn operands_on_the_device_give_the_bits_of_the_host_door() {
    let Some(workspace) = workspace() else { return };
    // With tokens that are ignored, and without.
    let kept: Problem = LinearCrossEntropy { ignore_index: -7, ..problem() }.into();
    for problem in [problem().into(), kept] {
        for (options, call) in calls(&workspace) {
            let inputs = fit(&problem, operands(&problem, call).0);
            let wanted = outputs(&workspace, &problem, call, &inputs, &options);
            for step in [1, 2] {
                let found = on_device(&workspace, &problem, call, &inputs, step, &options);
                for ((name, found), (_, wanted)) in found.iter().zip(&wanted) {
                    let what = format!("{name}, {} in {}, {}", call.0, call.1, options.level);
                    assert!(*found == wanted.bytes(), "{what}, {step}, {}", options.memory_budget);
                }
            }
        }
    }
}

/// Targets that are classes where none is ignored.
fn fit(problem: &Problem, mut inputs: Tensors) -> Tensors {
    let Problem::LinearCrossEntropy(problem) = problem else { return inputs };
    for (_, x) in &mut inputs {
        if let Tensor::I64(targets) = x {
            let class = |target: i64| {
                if target == -100 && problem.ignore_index != -100 { 3 } else { target }
            };
            targets.mapv_inplace(class);
        }
    }
    inputs
}

#[test]
fn a_target_that_is_no_class_makes_nan_of_what_its_token_adds_to() {
    let Some(workspace) = workspace() else { return };
    let problem: Problem = LinearCrossEntropy { reduction: Reduction::None, ..problem() }.into();
    let call = (Pass::ForwardBackward, Dtype::F32);
    let (mut inputs, _) = operands(&problem, call);
    let options = Options::default();
    let set = |inputs: &mut Tensors, target: i64| {
        for (_, x) in inputs {
            if let Tensor::I64(targets) = x {
                targets[[7]] = target;
            }
        }
    };
    set(&mut inputs, 5);
    let wanted = outputs(&workspace, &problem, call, &inputs, &options);
    for wrong in [-1, 1500, i64::MIN, i64::MAX, 1 << 32] {
        set(&mut inputs, wrong);
        let found = on_device(&workspace, &problem, call, &inputs, 1, &options);
        for ((name, found), (_, wanted)) in found.iter().zip(&wanted) {
            let Tensor::F32(wanted) = wanted else { continue };
            let found: Vec<f32> = bytemuck::pod_collect_to_vec(found);
            let found = ArrayD::from_shape_vec(wanted.shape(), found).unwrap();
            let same = match *name {
                "dw" | "dbias" => found.iter().all(|x| x.is_nan()),
                "loss" | "logprob" | "dh" => found
                    .outer_iter()
                    .zip(wanted.outer_iter())
                    .enumerate()
                    .all(|(at, (x, y))| if at == 7 { x.iter().all(|x| x.is_nan()) } else { x == y }),
                "lse" | "entropy" => found == wanted,
                _ => true,
            };
            assert!(same, "{name} of the target {wrong}");
        }
    }
}
