//! Operands of more than 2³¹ elements: what lies behind them has the bits that it has alone. Needs some 70 GB of a
//! device's memory. Without it, or without a compiler, a test says that it was skipped.

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use etalon_cuda::{DevicePass, DeviceTensor, DeviceTensors, Level, Options, Precision, Workspace, levels, probe};
use etalon_problem::{
    Attention, AttentionLse, Decay, Dtype, Extents, LazyAttention, LinearAttention, LinearCrossEntropy, LinearExtents,
    Mask, Operand, Pass, Problem, Reduction, Role, Stored,
};
use half::bf16;
use std::sync::Arc;

const BEYOND: usize = 1 << 31;

/// A device with its stream, and a workspace.
fn device() -> Option<(Arc<CudaStream>, Workspace)> {
    if let Err(absent) = probe() {
        println!("skipped: {absent}");
        return None;
    }
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    Some((stream, Workspace::new()))
}

/// Options of a device's computations: levels that a pass of a problem is written for.
fn levels(workspace: &Workspace, problem: &Problem, pass: Pass) -> Vec<Options> {
    let strict = Options { level: Level::Portable, ..Options::default() };
    let flash = Options { precision: Precision::Flash, ..strict };
    let levels = [Level::Sm80, Level::Sm90a].map(|level| Options { level, ..flash });
    let target = workspace.target(0).unwrap();
    let is_there = |options: &Options| levels::offers(options, problem.algorithm(), pass, Dtype::Bf16, &target).is_ok();
    [strict].into_iter().chain(levels).filter(is_there).collect()
}

/// Small numbers that no rule repeats, as they are stored. Log-decays are below 0, targets among so many classes.
fn bytes(operand: &Operand, seed: usize, classes: usize) -> Vec<u8> {
    let mut at = seed;
    let mut next = || {
        at = at.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (at >> 40) % 257
    };
    let decay = matches!(operand.primal, "g" | "g_gamma");
    let mut number = || match next() as f32 / 128.0 - 1.0 {
        x if decay => -x.abs() / 8.0,
        x => x,
    };
    match Stored::of(operand.precision, Dtype::Bf16) {
        Stored::Float(Dtype::Bf16) => {
            (0..operand.len()).flat_map(|_| bf16::from_f32(number()).to_bits().to_ne_bytes()).collect()
        }
        Stored::Float(_) => (0..operand.len()).flat_map(|_| number().to_ne_bytes()).collect(),
        Stored::Integer => (0..operand.len()).flat_map(|_| ((next() % classes) as i64).to_ne_bytes()).collect(),
    }
}

/// Bytes of one element of an operand.
fn width(operand: &Operand) -> usize {
    match Stored::of(operand.precision, Dtype::Bf16) {
        Stored::Float(dtype) => dtype.bytes(),
        Stored::Integer => size_of::<i64>(),
    }
}

/// The operands of a pass on a device, with 0 before what is given.
struct Placed {
    list: Vec<(Operand, CudaSlice<u8>)>,
}

impl Placed {
    /// Nothing where there is too little memory. `given`: the bytes of an operand that is read.
    fn new(
        stream: &Arc<CudaStream>,
        operands: Vec<Operand>,
        given: &dyn Fn(&Operand) -> Option<Vec<u8>>,
    ) -> Option<Placed> {
        let mut list = Vec::new();
        for operand in operands {
            let mut memory = stream.alloc_zeros::<u8>(operand.len() * width(&operand)).ok()?;
            if let Some(bytes) = given(&operand) {
                let begin = memory.len() - bytes.len();
                stream.memcpy_htod(&bytes, &mut memory.slice_mut(begin..)).unwrap();
            }
            list.push((operand, memory));
        }
        Some(Placed { list })
    }

    fn tensors(&self, stream: &CudaStream, outputs: bool) -> DeviceTensors<'static> {
        let own = self.list.iter().filter(|(x, _)| (x.role == Role::Output) == outputs);
        own.fold(DeviceTensors::new(), |all, (x, memory)| {
            let stored = Stored::of(x.precision, Dtype::Bf16);
            all.with(x.name, DeviceTensor::dense(memory.device_ptr(stream).0, &x.shape, stored))
        })
    }

    /// Computes the pass. False where there is too little memory.
    fn compute(
        &self,
        (stream, workspace): (&Arc<CudaStream>, &Workspace),
        problem: &Problem,
        pass: Pass,
        options: &Options,
    ) -> bool {
        let (inputs, outputs) = (self.tensors(stream, false), self.tensors(stream, true));
        let pass = DevicePass::new(workspace, problem, pass, &inputs, &outputs, options).unwrap();
        let Ok(scratch) = stream.alloc_zeros::<u8>(pass.scratch_bytes().max(256)) else {
            return false;
        };
        let at = scratch.device_ptr(stream).0;
        // SAFETY: all tensors and the scratch memory live until the stream has been waited for, no two of them
        // overlap, and the stream is of the primary context.
        unsafe { pass.enqueue(stream.cu_stream(), &inputs, &outputs, at) }.unwrap();
        stream.synchronize().unwrap();
        true
    }

    /// The last so many bytes of a result.
    fn end(&self, stream: &Arc<CudaStream>, name: &str, bytes: usize) -> Vec<u8> {
        let (_, memory) = self.list.iter().find(|(x, _)| x.name == name).unwrap();
        stream.clone_dtoh(&memory.slice(memory.len() - bytes..)).unwrap()
    }
}

/// The last part of a problem, of an axis that every operand has first or does not have, beside that part alone.
fn check(alone: &Problem, many: &Problem, pass: Pass, classes: usize) {
    let Some((stream, workspace)) = device() else { return };
    // Sums over all parts are left out, and tensors that passes have in modes or by options alone.
    let pairs = || {
        let both = alone.operands(pass).into_iter().zip(many.operands(pass));
        let both = both.filter(|(x, y)| x.role != Role::Output || x.shape != y.shape);
        both.filter(|(x, _)| !matches!(x.name, "gradient" | "pv_sum"))
    };
    assert!(pairs().any(|(_, y)| y.len() > BEYOND));
    let data = |x: &Operand| {
        let seed = pairs().position(|(own, _)| own.name == x.name).unwrap();
        let own = pairs().nth(seed).unwrap().0;
        (x.role != Role::Output).then(|| bytes(&own, seed + 1, classes))
    };
    for options in levels(&workspace, alone, pass) {
        let what = format!("{} {pass}, {}", alone.algorithm(), options.level);
        let of = (&stream, &workspace);
        let small = Placed::new(&stream, pairs().map(|x| x.0).collect(), &data).unwrap();
        assert!(small.compute(of, alone, pass, &options));
        let large = Placed::new(&stream, pairs().map(|x| x.1).collect(), &data);
        if !large.as_ref().is_some_and(|large| large.compute(of, many, pass, &options)) {
            println!("skipped: too little memory for {what}");
            continue;
        }
        for (x, _) in pairs().filter(|(x, _)| x.role == Role::Output) {
            let bytes = x.len() * width(&x);
            let found = large.as_ref().unwrap().end(&stream, x.name, bytes);
            let wanted = small.end(&stream, x.name, bytes);
            assert!(wanted.iter().any(|x| *x != 0), "{what}: {} is 0", x.name);
            assert!(found == wanted, "{what}: {} has other bits behind 2³¹ elements", x.name);
        }
        println!("{what}: the same bits");
    }
}

const HEADS: usize = 2;
const TOKENS: usize = 200;
const DIM: usize = 64;

fn extents(batch: usize) -> Extents {
    let (query_heads, key_heads) = (HEADS, HEADS);
    Extents { batch, query_heads, key_heads, queries: TOKENS, keys: TOKENS, dim: DIM }
}

/// Batch elements of these extents that have more than 2³¹ elements.
const BATCH: usize = BEYOND / (HEADS * TOKENS * DIM) + 1;

#[test]
fn attention() {
    let of = |batch| Attention::new(extents(batch)).mask(Mask::causal()).into();
    [Pass::Forward, Pass::Backward].iter().for_each(|&pass| check(&of(1), &of(BATCH), pass, 1));
}

#[test]
fn attention_lse() {
    let of = |batch| AttentionLse::new(extents(batch)).into();
    [Pass::Forward, Pass::Backward].iter().for_each(|&pass| check(&of(1), &of(BATCH), pass, 1));
}

#[test]
fn lazy_attention() {
    let of = |batch| LazyAttention::new(extents(batch)).into();
    [Pass::Forward, Pass::Backward].iter().for_each(|&pass| check(&of(1), &of(BATCH), pass, 1));
}

#[test]
fn linear_attention() {
    let of = |batch| {
        let extents = LinearExtents { batch, query_heads: HEADS, key_heads: HEADS, tokens: TOKENS, dim: DIM };
        LinearAttention::new(extents).decay(Decay::PerHead).into()
    };
    [Pass::Forward, Pass::Backward].iter().for_each(|&pass| check(&of(1), &of(BATCH), pass, 1));
}

#[test]
fn tokens_of_linear_cross_entropy() {
    let (dim, vocab) = (2048, 300);
    let of = |tokens| {
        let reduction = Reduction::None;
        LinearCrossEntropy { reduction, ..LinearCrossEntropy::new(tokens, dim, vocab) }.into()
    };
    for pass in [Pass::Forward, Pass::Backward, Pass::ForwardBackward] {
        check(&of(64), &of(BEYOND / dim + 64), pass, vocab);
    }
}

/// Of so many classes only the last ones have a row of w that is not 0.
#[test]
fn classes_of_linear_cross_entropy() {
    let (tokens, dim, last) = (70, 2048, 100);
    let vocab = BEYOND / dim + last;
    let problem: Problem = LinearCrossEntropy::new(tokens, dim, vocab).into();
    let Some((stream, workspace)) = device() else { return };
    let pass = Pass::ForwardBackward;
    let number = |i: usize, j: usize| bf16::from_f32(((i * 7919 + j * 104_729) % 129) as f32 / 1024.0 - 0.0625);
    let row = |i: usize| (0..dim).map(move |j| f64::from(number(i, j).to_f32())).collect::<Vec<f64>>();
    let target = |t: usize| t * 13 % last;
    let stored = |begin: usize, rows: usize| {
        let all = (begin..begin + rows).flat_map(|i| (0..dim).map(move |j| (i, j)));
        all.flat_map(|(i, j)| number(i, j).to_bits().to_ne_bytes()).collect::<Vec<u8>>()
    };
    let given = |x: &Operand| match x.name {
        "h" => Some(stored(0, tokens)),
        "w" => Some(stored(tokens, last)),
        "targets" => {
            let first = vocab - last;
            Some((0..tokens).flat_map(|t| ((first + target(t)) as i64).to_ne_bytes()).collect())
        }
        "dloss" => Some(1f32.to_ne_bytes().to_vec()),
        _ => None,
    };
    let (h, w): (Vec<_>, Vec<_>) = ((0..tokens).map(row).collect(), (tokens..tokens + last).map(row).collect());
    // The gradient of the loss with respect to the last logits of each token.
    let da: Vec<Vec<f64>> = (0..tokens)
        .map(|t| {
            let logit = |c: usize| h[t].iter().zip(&w[c]).map(|(x, y)| x * y).sum::<f64>();
            let weights: Vec<f64> = (0..last).map(|c| logit(c).exp()).collect();
            let sum = weights.iter().sum::<f64>() + (vocab - last) as f64;
            let share = |c: usize| weights[c] / sum - f64::from(u8::from(c == target(t)));
            (0..last).map(|c| share(c) / tokens as f64).collect()
        })
        .collect();
    for options in levels(&workspace, &problem, pass) {
        let what = format!("{pass}, {}", options.level);
        let placed = Placed::new(&stream, problem.operands(pass), &given);
        let of = (&stream, &workspace);
        if !placed.as_ref().is_some_and(|placed| placed.compute(of, &problem, pass, &options)) {
            println!("skipped: too little memory for {what}");
            continue;
        }
        let placed = placed.unwrap();
        // da and a result are rounded to 8 bits: each by 2⁻⁹ of the terms of a sum at most, and as much again for all
        // that is f32.
        let close = |name: &str, rows: usize, term: &dyn Fn(usize, usize, usize) -> f64, terms: usize| {
            let found = placed.end(&stream, name, rows * dim * 2);
            for (at, x) in found.chunks_exact(2).enumerate() {
                let (i, j) = (at / dim, at % dim);
                let x = f64::from(bf16::from_bits(u16::from_ne_bytes([x[0], x[1]])).to_f32());
                let list = (0..terms).map(|n| term(i, j, n));
                let (sum, size) = list.fold((0.0, 0.0), |(s, a), x| (s + x, a + x.abs()));
                assert!((x - sum).abs() <= size / 128.0, "{what}: {name}[{i}, {j}] = {x}, not {sum}");
            }
        };
        close("dh", tokens, &|t, j, c| da[t][c] * w[c][j], last);
        close("dw", last, &|c, j, t| da[t][c] * h[t][j], tokens);
        println!("{what}: the last classes are right");
    }
}
