//! Times passes of attention, lazy_attention or linear_attention on operands that lie on the device: by events on the
//! stream, and the host's time to enqueue. Arguments: batch, heads, length, dim, storage; `causal` or `full`, after
//! which the width of its bias makes it lazy_attention; or `linear`, with a decay per head.
//!
//! ```sh
//! cargo run --release -p etalon-cuda --example device_speed -- 4 16 4096 128 bf16 causal
//! ```

use cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use etalon_cuda::{
    DevicePass, DeviceTensor, DeviceTensors, Level, Options, Precision, Settings, Workspace,
};
use etalon_problem::{
    Attention, Decay, Dtype, Extents, LazyAttention, LinearAttention, LinearExtents, Mask, Operand,
    Pass, Problem, Role, Stored,
};
use std::collections::BTreeMap;
use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

/// Passes that are timed together, and how often.
const TOGETHER: usize = 10;
const ROUNDS: usize = 20;

/// The memory of tensors by name.
type Memory = BTreeMap<&'static str, (CudaSlice<u8>, Operand)>;

struct Bench {
    stream: Arc<CudaStream>,
    workspace: Workspace,
    problem: Problem,
    storage: Dtype,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, usual: usize| arguments.get(at).map_or(Ok(usual), |x| x.parse());
    let (batch, heads) = (number(0, 4)?, number(1, 16)?);
    let (length, dim) = (number(2, 4096)?, number(3, 128)?);
    let storage: Dtype = arguments.get(4).map_or("bf16", String::as_str).parse()?;
    let mask = match arguments.get(5).map(String::as_str) {
        Some("full") => Mask::Full,
        _ => Mask::causal(),
    };
    let extents =
        Extents { batch, query_heads: heads, key_heads: heads, queries: length, keys: length, dim };
    let width = arguments.get(6).map(|x| x.parse()).transpose()?;
    let linear = arguments.get(5).is_some_and(|x| x == "linear");
    let problem: Problem = match width {
        _ if linear => {
            let extents =
                LinearExtents { batch, query_heads: heads, key_heads: heads, tokens: length, dim };
            LinearAttention::new(extents).decay(Decay::PerHead).into()
        }
        Some(width) => LazyAttention::new(extents).mask(mask).bias(width).into(),
        None => Attention::new(extents).mask(mask).into(),
    };
    let lazy = width.is_some();
    let stream = CudaContext::new(0)?.new_stream()?;
    let workspace = Workspace::with(Settings::user());
    let bench = Bench { stream, workspace, problem, storage };
    let flash = Options { precision: Precision::Flash, ..Options::default() };
    println!("| pass | options | ms | µs to enqueue | scratch MiB |\n|---|---|---|---|---|");
    let portable = Options { level: Level::Portable, ..Options::default() };
    let second = (!lazy).then_some(Pass::DoubleBackward);
    for pass in [Pass::Forward, Pass::Backward].into_iter().chain(second) {
        bench.time(pass, "portable", &portable)?;
    }
    if matches!(bench.problem, Problem::LinearAttention(_)) {
        bench.time(Pass::Step, "portable", &portable)?;
        if storage == Dtype::F32 {
            return Ok(());
        }
        let finite = Options { assume_finite: true, ..flash };
        for pass in [Pass::Forward, Pass::Backward] {
            bench.time(pass, "flash", &flash)?;
            bench.time(pass, "flash, finite", &finite)?;
        }
        return Ok(());
    }
    if storage == Dtype::F32 {
        return Ok(()); // the others multiply on tensor cores
    }
    bench.time(Pass::Forward, "flash", &flash)?;
    bench.time(Pass::Backward, "flash", &flash)?;
    if lazy {
        return Ok(()); // sm80 is all it has
    }
    bench.time(Pass::Backward, "flash, finite", &Options { assume_finite: true, ..flash })?;
    let any = Options { level: Level::Sm80, ..flash };
    bench.time(Pass::Forward, "sm80, flash", &any)?;
    bench.time(Pass::Backward, "sm80, flash", &any)
}

impl Bench {
    /// Tensors of small random numbers, those that `which` picks.
    fn memory(
        &self,
        pass: Pass,
        which: impl Fn(&Operand) -> bool,
    ) -> Result<Memory, Box<dyn Error>> {
        let mut memory = Memory::new();
        for operand in self.problem.operands(pass).into_iter().filter(|x| which(x)) {
            let mut at = operand.name.len() as u64;
            let mut number = || {
                at = at.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (at >> 40) as f32 / (1 << 23) as f32 - 1.0
            };
            // Log-decays are at most 0.
            let gates = ["g", "g_gamma"].contains(&operand.name);
            let mut number = || if gates { -0.1 * number().abs() } else { number() };
            let bytes: Vec<u8> = match Stored::of(operand.precision, self.storage) {
                Stored::Float(Dtype::Bf16) => (0..operand.len())
                    .flat_map(|_| half::bf16::from_f32(number()).to_ne_bytes())
                    .collect(),
                Stored::Float(Dtype::F16) => (0..operand.len())
                    .flat_map(|_| half::f16::from_f32(number()).to_ne_bytes())
                    .collect(),
                _ => (0..operand.len()).flat_map(|_| number().to_ne_bytes()).collect(),
            };
            memory.insert(operand.name, (self.stream.clone_htod(&bytes)?, operand));
        }
        Ok(memory)
    }

    fn tensor(&self, (bytes, operand): &(CudaSlice<u8>, Operand)) -> DeviceTensor {
        let dtype = match Stored::of(operand.precision, self.storage) {
            Stored::Float(dtype) => dtype,
            Stored::Integer => Dtype::F32, // attention has none
        };
        DeviceTensor::dense(bytes.device_ptr(&self.stream).0, &operand.shape, dtype)
    }

    fn tensors(&self, memory: &Memory) -> DeviceTensors<'static> {
        memory.iter().fold(DeviceTensors::new(), |all, (name, x)| all.with(name, self.tensor(x)))
    }

    fn time(&self, pass: Pass, name: &str, options: &Options) -> Result<(), Box<dyn Error>> {
        // Of the second order with the cotangents of dq, dk and dv, as where a penalty is put on them.
        let needed = |x: &Operand| {
            matches!(x.role, Role::Input | Role::Saved | Role::Cotangent)
                || ["ddq", "ddk", "ddv"].contains(&x.name)
        };
        let inputs = self.memory(pass, needed)?;
        // The gradients of tensors alone: few programs train a scale.
        let outputs = self.memory(pass, |x| x.role == Role::Output && x.primal != "scale")?;
        let (given, places) = (self.tensors(&inputs), self.tensors(&outputs));
        let (workspace, problem) = (&self.workspace, &self.problem);
        // lse and o of the forward pass, so that weights are those of a training step.
        if matches!(self.problem, Problem::Attention(_)) && pass != Pass::Forward {
            let names = |names: &[&str]| {
                let some = inputs.iter().filter(|(name, _)| names.contains(name));
                some.fold(DeviceTensors::new(), |all, (name, x)| all.with(name, self.tensor(x)))
            };
            let (read, written) = (names(&["q", "k", "v", "bias", "tau"]), names(&["o", "lse"]));
            let first =
                DevicePass::new(workspace, problem, Pass::Forward, &read, &written, options)?;
            self.enqueue(&first, &read, &written, 1)?;
        }
        let prepared = DevicePass::new(workspace, problem, pass, &given, &places, options)?;
        let (mut times, mut hosts) = (Vec::new(), Vec::new());
        self.enqueue(&prepared, &given, &places, TOGETHER)?;
        for _ in 0..ROUNDS {
            let (time, host) = self.enqueue(&prepared, &given, &places, TOGETHER)?;
            times.push(time);
            hosts.push(host);
        }
        times.sort_by(f64::total_cmp);
        hosts.sort_by(f64::total_cmp);
        let (time, host) = (times[ROUNDS / 2], hosts[ROUNDS / 2]);
        let scratch = prepared.scratch_bytes() >> 20;
        println!("| {pass} | {name} | {time:.3} | {host:.1} | {scratch} |");
        Ok(())
    }

    /// Milliseconds on the device and microseconds of the host, for each of some passes in a row.
    fn enqueue(
        &self,
        pass: &DevicePass,
        inputs: &DeviceTensors<'_>,
        outputs: &DeviceTensors<'_>,
        times: usize,
    ) -> Result<(f64, f64), Box<dyn Error>> {
        let scratch = self.stream.alloc_zeros::<u8>(pass.scratch_bytes().max(256))?;
        let at = scratch.device_ptr(&self.stream).0;
        let begin = self.stream.record_event(Some(CU_EVENT_DEFAULT))?;
        let start = Instant::now();
        for _ in 0..times {
            // SAFETY: the tensors and the scratch memory live until the stream has been waited for, no two
            // overlap, and the stream is of the primary context.
            unsafe { pass.enqueue(self.stream.cu_stream(), inputs, outputs, at)? };
        }
        let host = start.elapsed().as_secs_f64() * 1e6;
        let end = self.stream.record_event(Some(CU_EVENT_DEFAULT))?;
        self.stream.synchronize()?;
        let device = f64::from(begin.elapsed_ms(&end)?);
        Ok((device / times as f64, host / times as f64))
    }
}
