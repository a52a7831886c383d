//! Operands in the memory of a device: any strides, any stream, in a graph, with the bits of the host's
//! door. Without a device, or a compiler, a test says that it was skipped.

mod gpu;
#[path = "gpu/numbers.rs"]
mod numbers;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use etalon_cuda::kernels::{ArchiveWriter, Compiler, Variant};
use etalon_cuda::{DevicePass, DeviceTensor, DeviceTensors, Level, Options, Precision, Settings, Workspace, run_in};
use etalon_problem::{Attention, Dtype, Error, Extents, Mask, Mode, Pass, Problem, Role, Sequences, Views, ViewsMut};
use half::bf16;
use ndarray::{ArrayD, ArrayViewD, IxDyn};
use numbers::numbers;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A device with its stream, and a workspace.
fn device() -> Option<(Arc<CudaStream>, Workspace)> {
    Some((gpu::stream()?, Workspace::new()))
}

fn problem(mask: Mask, sequences: Sequences) -> Problem {
    wide_problem(64, mask, sequences)
}

fn wide_problem(dim: usize, mask: Mask, sequences: Sequences) -> Problem {
    let extents = Extents { batch: 2, query_heads: 4, key_heads: 2, queries: 150, keys: 170, dim };
    let mut attention = Attention::new(extents).mask(mask);
    attention.scores.sequences = sequences;
    attention.into()
}

/// Layout of a tensor of four axes in memory.
#[derive(Clone, Copy, Debug)]
enum Lies {
    Dense,
    /// Rows of all heads side by side.
    Transposed,
    /// Every second element of a row.
    WithGaps,
}

const LAYS: [Lies; 3] = [Lies::Dense, Lies::Transposed, Lies::WithGaps];

/// The strides of a shape, and the elements that it takes.
fn strides(shape: &[usize], lies: Lies) -> (Vec<i64>, usize) {
    let [b, h, n, d] = [0, 1, 2, 3].map(|axis| shape[axis] as i64);
    let strides = match lies {
        Lies::Dense => [h * n * d, n * d, d, 1],
        Lies::Transposed => [n * h * d, d, h * d, 1],
        Lies::WithGaps => [2 * h * n * d, 2 * n * d, 2 * d, 2],
    };
    (strides.to_vec(), (b * strides[0]) as usize)
}

/// A tensor on the device, and what keeps its memory.
struct DeviceArray {
    memory: CudaSlice<u16>,
    strides: Vec<i64>,
    shape: Vec<usize>,
}

impl DeviceArray {
    fn put(stream: &Arc<CudaStream>, x: &ArrayD<bf16>, lies: Lies) -> DeviceArray {
        let (strides, elements) = strides(x.shape(), lies);
        let mut list = vec![bf16::NAN.to_bits(); elements];
        for (at, &value) in x.indexed_iter() {
            let place: i64 = strides.iter().enumerate().map(|(axis, s)| at[axis] as i64 * s).sum();
            list[place as usize] = value.to_bits();
        }
        let memory = stream.clone_htod(&list).unwrap();
        DeviceArray { memory, strides, shape: x.shape().to_vec() }
    }

    fn tensor(&self, stream: &CudaStream) -> DeviceTensor {
        let address = self.memory.device_ptr(stream).0;
        DeviceTensor::new(address, &self.shape, &self.strides, Dtype::Bf16).unwrap()
    }

    fn get(&self, stream: &Arc<CudaStream>) -> ArrayD<bf16> {
        let list = stream.clone_dtoh(&self.memory).unwrap();
        ArrayD::from_shape_fn(IxDyn(&self.shape), |at| {
            let place: i64 = self.strides.iter().enumerate().map(|(axis, s)| at[axis] as i64 * s).sum();
            bf16::from_bits(list[place as usize])
        })
    }
}

fn bits(x: ArrayViewD<'_, bf16>) -> Vec<u16> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Inputs of the backward pass with o and lse of the host's door, and its gradients.
struct Expected {
    inputs: BTreeMap<&'static str, ArrayD<bf16>>,
    lse: ArrayD<f32>,
    outputs: BTreeMap<&'static str, ArrayD<bf16>>,
}

fn expected(workspace: &Workspace, problem: &Problem, options: &Options) -> Expected {
    let operands = problem.operands(Pass::Backward);
    let own = |x: &&etalon_problem::Operand| matches!(x.role, Role::Input | Role::Cotangent);
    let mut inputs: BTreeMap<&'static str, ArrayD<bf16>> =
        operands.iter().filter(own).enumerate().map(|(seed, x)| (x.name, numbers(&x.shape, seed + 1))).collect();
    let lse = operands.iter().find(|x| x.name == "lse").unwrap();
    let mut lse = ArrayD::<f32>::zeros(lse.shape.clone());
    let mut o = inputs["dout"].clone();
    let call = |pass: Pass, inputs: &Views<'_>, mut outputs: ViewsMut<'_>| {
        run_in(workspace, problem, pass, inputs, &mut outputs, options).unwrap();
    };
    let forward = ["q", "k", "v"].iter().fold(Views::new(), |all, name| all.with(name, &inputs[name]));
    call(Pass::Forward, &forward, ViewsMut::new().with("o", &mut o).with("lse", &mut lse));
    drop(forward);
    let mut outputs: BTreeMap<&'static str, ArrayD<bf16>> =
        [("dq", "q"), ("dk", "k"), ("dv", "v")].map(|(d, x)| (d, inputs[x].clone())).into();
    let mut places = ViewsMut::new();
    for (name, x) in &mut outputs {
        places = places.with(name, x);
    }
    inputs.insert("o", o);
    let given = inputs.iter().fold(Views::new(), |all, (name, x)| all.with(name, x));
    call(Pass::Backward, &given.with("lse", &lse), places);
    Expected { inputs, lse, outputs }
}

#[test]
fn strides_streams_and_graphs_give_the_bits_of_the_host_door() {
    let Some((stream, workspace)) = device() else { return };
    let lengths = Sequences::Lengths { query: vec![150, 33], key: vec![9, 170] };
    for (mask, sequences) in [(Mask::causal(), Sequences::Dense), (Mask::Full, lengths)] {
        let problem = problem(mask, sequences);
        for options in gpu::options(&workspace) {
            let expected = expected(&workspace, &problem, &options);
            for lies in LAYS {
                backward(&stream, &workspace, &problem, &options, &expected, lies);
            }
        }
    }
}

fn backward(
    stream: &Arc<CudaStream>,
    workspace: &Workspace,
    problem: &Problem,
    options: &Options,
    expected: &Expected,
    lies: Lies,
) {
    let inputs: BTreeMap<&str, DeviceArray> =
        expected.inputs.iter().map(|(name, x)| (*name, DeviceArray::put(stream, x, lies))).collect();
    let lse = stream.clone_htod(expected.lse.as_slice().unwrap()).unwrap();
    let outputs: BTreeMap<&str, DeviceArray> = expected
        .outputs
        .iter()
        .map(|(name, x)| (*name, DeviceArray::put(stream, &x.mapv(|_| bf16::NAN), lies)))
        .collect();
    let rows = DeviceTensor::of(&lse, stream, expected.lse.shape(), Dtype::F32).unwrap();
    let given =
        inputs.iter().fold(DeviceTensors::new().with("lse", rows), |all, (name, x)| all.with(name, x.tensor(stream)));
    let places = outputs.iter().fold(DeviceTensors::new(), |all, (name, x)| all.with(name, x.tensor(stream)));
    let pass = DevicePass::new(workspace, problem, Pass::Backward, &given, &places, options).unwrap();
    let scratch = stream.alloc_zeros::<u8>(pass.scratch_bytes().max(256)).unwrap();
    let at = scratch.device_ptr(stream).0;
    // Nothing is synchronised or allocated: else the capture would fail.
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
    // SAFETY: all tensors and the scratch memory live until the stream has been waited for, no two of them
    // overlap, and the stream is of the primary context.
    unsafe { pass.enqueue(stream.cu_stream(), &given, &places, at) }.unwrap();
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).unwrap().expect("kernels were captured");
    // SAFETY: as above.
    let mut recorded = unsafe { pass.record(&given, &places, at) }.unwrap();
    for again in [false, true, true, false] {
        match again {
            false => graph.launch().unwrap(),
            // SAFETY: as above.
            true => unsafe { recorded.enqueue(stream.cu_stream()) }.unwrap(),
        }
        stream.synchronize().unwrap();
        for (name, wanted) in &expected.outputs {
            let found = outputs[name].get(stream);
            assert_eq!(
                bits(found.view()),
                bits(wanted.view()),
                "{name}, {lies:?}, {} {}",
                options.level,
                options.assume_finite
            );
        }
    }
}

/// Portable kernels give the bits of both modes, whatever the budget; those of sm80 the same bits with any budget.
#[test]
fn modes_and_budgets_give_the_bits_that_are_promised() {
    let Some((_, workspace)) = device() else { return };
    let flash = Options { precision: Precision::Flash, ..Options::default() };
    let lengths = Sequences::Lengths { query: vec![150, 33], key: vec![9, 170] };
    // One column more than a launch has, and the widths of one launch.
    let cases = [
        (64, Mask::causal(), Sequences::Dense),
        (64, Mask::Full, lengths.clone()),
        (128, Mask::causal(), Sequences::Dense),
        (257, Mask::Full, lengths),
    ];
    for (dim, mask, sequences) in cases {
        let has_lengths = matches!(sequences, Sequences::Lengths { .. });
        let problem = wide_problem(dim, mask, sequences);
        for level in [Level::Portable, Level::Sm80].into_iter().take(if dim > 128 { 1 } else { 2 }) {
            let fused = Options { level, mode: Mode::FusedPartials, ..flash };
            let wanted = expected(&workspace, &problem, &fused);
            let mut others = [1, 400_000].map(|bytes| Options { partials_budget: bytes, ..fused }).to_vec();
            if level == Level::Portable {
                others.push(Options { mode: Mode::Separate, ..fused });
            }
            for options in others {
                let found = expected(&workspace, &problem, &options);
                for (name, wanted) in &wanted.outputs {
                    assert_eq!(bits(found.outputs[name].view()), bits(wanted.view()), "{name} {options:?}");
                }
            }
        }
        if dim == 64 && has_lengths && workspace.capability(0) == Ok((9, 0)) {
            let options = Options { level: Level::Sm90a, mode: Mode::FusedPartials, ..flash };
            let q = numbers(&[2, 4, 150, 64], 1);
            let (kv, lse) = (numbers(&[2, 2, 170, 64], 2), ArrayD::<f32>::zeros(vec![2, 4, 150]));
            let (mut dq, mut dk) = (q.clone(), kv.clone());
            let inputs = [("q", &q), ("k", &kv), ("v", &kv), ("o", &q), ("dout", &q)];
            let inputs = inputs.into_iter().fold(Views::new(), |all, (name, x)| all.with(name, x));
            let inputs = inputs.with("lse", &lse);
            let mut outputs = ViewsMut::new().with("dq", &mut dq).with("dk", &mut dk);
            let refused = run_in(&workspace, &problem, Pass::Backward, &inputs, &mut outputs, &options);
            assert!(refused.unwrap_err().to_string().contains("the mode `fused` of sm90a"));
        }
    }
}

#[test]
fn archived_kernels_on_a_device_named_by_its_uuid_give_the_bits_of_compiled_ones() {
    let Some((_, workspace)) = device() else { return };
    let folder = tempfile::tempdir().unwrap();
    let archive = folder.path().join("archive");
    let writer = ArchiveWriter::new(&archive, Compiler::find(None).unwrap()).unwrap();
    let portable = Variant::portable(Dtype::Bf16, 64, Some(64), false);
    for variant in [portable, Variant::moves(2), Variant::moves(4)] {
        let architecture = variant.family.architecture_on(workspace.capability(0).unwrap());
        assert_eq!(writer.add(&variant, &architecture.unwrap()).unwrap(), variant.kernels().len());
    }
    writer.finish().unwrap();
    // No compiler lies there: what is not in the archive is refused.
    let nvrtc = Some(folder.path().join("nowhere"));
    let settings = Settings { archive: Some(archive), nvrtc, ..Settings::default() };
    let archived = Workspace::with(settings);
    let problem = problem(Mask::causal(), Sequences::Dense);
    let device = workspace.uuid(0).unwrap();
    let options = Options { level: Level::Portable, device, ..Options::default() };
    let [compiled, found] = [&workspace, &archived].map(|own| expected(own, &problem, &options));
    for (name, wanted) in &compiled.outputs {
        assert_eq!(bits(found.outputs[name].view()), bits(wanted.view()), "{name}");
    }
    let options = Options { level: Level::Sm80, precision: Precision::Flash, ..options };
    let q = numbers(&[2, 4, 150, 64], 1);
    let kv = numbers(&[2, 2, 170, 64], 2);
    let mut o = q.clone();
    let inputs = Views::new().with("q", &q).with("k", &kv).with("v", &kv);
    let mut outputs = ViewsMut::new().with("o", &mut o);
    let refused = run_in(&archived, &problem, Pass::Forward, &inputs, &mut outputs, &options);
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("nvidia-cuda-nvrtc") && text.contains("sm_"), "{text}");
}

#[test]
fn wrong_tensors_are_refused() {
    let Some((stream, workspace)) = device() else { return };
    let problem = problem(Mask::causal(), Sequences::Dense);
    let x = numbers(&[2, 4, 150, 64], 1);
    let y = numbers(&[2, 2, 170, 64], 2);
    let [q, o] = [&x, &x].map(|x| DeviceArray::put(&stream, x, Lies::Dense));
    let [k, v] = [&y, &y].map(|x| DeviceArray::put(&stream, x, Lies::Dense));
    let held = [("q", &q), ("k", &k), ("v", &v)];
    let inputs = held.iter().fold(DeviceTensors::new(), |all, (name, x)| all.with(name, x.tensor(&stream)));
    let outputs = DeviceTensors::new().with("o", o.tensor(&stream));
    let options = Options::default();
    let pass = DevicePass::new(&workspace, &problem, Pass::Forward, &inputs, &outputs, &options).unwrap();
    let scratch = stream.alloc_zeros::<u8>(pass.scratch_bytes().max(256)).unwrap();
    let at = scratch.device_ptr(&stream).0;
    let refused = |inputs: &DeviceTensors<'_>, at: u64| {
        // SAFETY: as in `backward`; what is refused is not enqueued.
        let error = unsafe { pass.enqueue(stream.cu_stream(), inputs, &outputs, at) }.unwrap_err();
        assert!(matches!(error, Error::Value { .. } | Error::Missing { .. } | Error::Unexpected { .. }));
        error.to_string()
    };
    let with =
        |q: DeviceTensor| DeviceTensors::new().with("q", q).with("k", k.tensor(&stream)).with("v", v.tensor(&stream));
    // Memory of the host, another layout, a tensor less, one too many, scratch that is not aligned.
    let own = q.tensor(&stream);
    let host = own.clone().at(x.as_ptr() as u64);
    assert!(refused(&with(host), at).contains("`q` must be an address of device 0"));
    let turned = DeviceArray::put(&stream, &x, Lies::Transposed);
    assert!(refused(&with(turned.tensor(&stream)), at).contains("strides"));
    let less = DeviceTensors::new().with("q", own.clone()).with("k", k.tensor(&stream));
    assert!(refused(&less, at).contains("`v`"));
    assert!(refused(&with(own.clone()).with("sinks", own.clone()), at).contains("`sinks`"));
    if pass.scratch_bytes() > 0 {
        assert!(refused(&with(own), at + 8).contains("256"));
    }
}

#[test]
fn a_tensor_has_a_stride_for_each_axis_and_the_slice_that_it_needs() {
    assert!(DeviceTensor::new(256, &[2, 3], &[3], Dtype::F32).is_err());
    let dense = DeviceTensor::new(256, &[2, 3], &[3, 1], Dtype::F32).unwrap();
    assert_eq!(dense, DeviceTensor::dense(256, &[2, 3], Dtype::F32));
}
