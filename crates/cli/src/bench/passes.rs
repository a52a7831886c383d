//! The passes of a problem, timed through the door of the tier: into memory that is kept, with a
//! workspace that is kept.

use super::arguments::{Arguments, Tier};
use super::subject::{Subject, length};
use super::summary::{Bandwidth, Figure, Figures};
use super::tune;
use crate::cuda::gpu::Gpu;
use crate::machine::{COMMIT, cpu};
use crate::needs;
use crate::noise::{Runs, Times};
use crate::outcome::Failure;
use crate::plans::SHARE;
use crate::units::time;
use etalon_conformance::generate::Stream;
use etalon_conformance::tensor::{Stored, Tensor, Tensors, views, views_mut};
use etalon_conformance::tier::{Hints, Request};
use etalon_conformance::tiers::saved;
use etalon_problem::{
    Algorithm, Axis, Dtype, Error, LinearAttention, Operand, Pass, Problem, Role, Views, ViewsMut,
};
use etalon_simd::{Level, Mode, Options, Workspace, linear_attention, probe, run_in};
use ndarray::{ArrayD, IxDyn};
use std::io::{Write, stderr};

/// The figures of a run in the making.
pub struct Bench<'a> {
    arguments: &'a Arguments,
    /// Of the simd tier.
    options: Options,
    /// The device that is timed in its place.
    gpu: Option<Gpu>,
    figures: Vec<Figure>,
    /// GFLOP/s of this machine.
    pub peak: f64,
}

/// A run of a pass that takes longer, in seconds, is announced.
const LONG: f64 = 10.0;

impl<'a> Bench<'a> {
    /// Fails where the tier or the level that was asked for is not there.
    pub fn new(arguments: &'a Arguments) -> Result<Bench<'a>, Failure> {
        let &Arguments { tier, blocking, budget, memory, .. } = arguments;
        let hints =
            Hints { blocking, partials_budget: budget, memory_budget: memory, ..Hints::default() };
        let gpu = || Gpu::new(&arguments.gpu, arguments.level.as_deref(), arguments.dtype, hints);
        let (named, gpu) = match tier {
            Tier::Simd => (simd_options(arguments)?, None),
            Tier::Cuda => (Options::default(), Some(gpu()?)),
        };
        let usual = Options::default();
        let memory_budget = memory.unwrap_or(usual.memory_budget);
        let partials_budget = budget.unwrap_or(usual.partials_budget);
        let options = Options { blocking, partials_budget, memory_budget, ..named };
        Ok(Bench { arguments, options, gpu, figures: Vec::new(), peak: 0.0 })
    }

    /// GFLOP/s of products and nothing else, measured now.
    pub fn measure_peak(&self) -> Result<f64, Error> {
        match &self.gpu {
            None => Ok(probe::fma_gflops(self.options.level)),
            Some(gpu) => gpu.peak(),
        }
    }

    /// The same of products of bf16, where the level multiplies it.
    fn measure_bf16_peak(&self) -> Option<f64> {
        let in_bf16 = self.gpu.is_none() && self.arguments.dtype == Dtype::Bf16;
        in_bf16.then_some(self.options.level).and_then(probe::bf16_gflops)
    }

    /// All figures, with the peak before and after they were taken.
    pub fn into_figures(self, after: f64, threads: usize) -> Result<Figures, Failure> {
        let (tier, bf16_peak_gflops) = (self.tier()?, self.measure_bf16_peak());
        let Bench { arguments, gpu, figures, peak, .. } = self;
        let unit = gpu.as_ref().map_or("fused multiply-adds", Gpu::unit);
        let mut figures = Figures {
            etalon: env!("CARGO_PKG_VERSION"),
            commit: COMMIT,
            cpu: cpu(),
            tier,
            dtype: arguments.dtype.name(),
            threads,
            unit,
            peak_gflops: peak,
            peak_gflops_after: after,
            bf16_peak_gflops,
            launch_ns: gpu.as_ref().map(Gpu::launch).transpose()?.map(|ns| ns as u64),
            figures,
        };
        figures.settle();
        Ok(figures)
    }

    /// The tier with its level, and the device.
    pub fn tier(&self) -> Result<String, Error> {
        match &self.gpu {
            None => Ok(format!("simd/{}", self.options.name())),
            Some(gpu) => gpu.describe(),
        }
    }

    /// Computes a pass in a mode, on operands that lie in the memory of this process.
    pub fn run(
        &self,
        workspace: &Workspace,
        problem: &Problem,
        (pass, mode): (Pass, Mode),
        inputs: &Views<'_>,
        outputs: &mut ViewsMut<'_>,
    ) -> Result<(), Error> {
        let options = Options { mode, ..self.options };
        match &self.gpu {
            None => run_in(workspace, problem, pass, inputs, outputs, &options),
            Some(gpu) => gpu.run(problem, (pass, mode), inputs, outputs),
        }
    }

    /// Random inputs of a seed for some operands.
    pub fn inputs(
        &self,
        problem: &Problem,
        operands: &[Operand],
        seed: u64,
        which: &dyn Fn(&Operand) -> bool,
    ) -> Result<Tensors, Failure> {
        let mut inputs = made(operands, self.arguments.dtype, seed, which);
        self.set_lazy(problem, &mut inputs);
        self.set_head(problem, &mut inputs, seed)?;
        Ok(inputs)
    }

    /// Times those passes of a problem that are wanted, with the first length also a step; `mask` is
    /// the mask or the decay in words.
    pub fn problem(&mut self, problem: &Problem, mask: &str) -> Result<(), Failure> {
        for (pass, mode) in self.passes(problem) {
            let figure = self.figure(problem, mask, pass, mode)?;
            self.figures.push(figure);
        }
        Ok(())
    }

    /// Fails unless there is memory for every pass of a problem that is wanted.
    pub fn afford(&self, problem: &Problem) -> Result<(), Failure> {
        problem.check()?;
        for (pass, mode) in self.passes(problem) {
            let options = Options { mode, ..self.options };
            let simd = self.gpu.is_none().then_some(&options);
            needs::afford_run(problem, pass, self.arguments.dtype, simd)?;
            if let Some(gpu) = &self.gpu {
                gpu.refuses(problem, pass)?;
            }
        }
        Ok(())
    }

    /// The passes of a problem that are wanted, in their modes.
    pub fn passes(&self, problem: &Problem) -> Vec<(Pass, Mode)> {
        let wanted = &self.arguments.pass;
        let first = self.arguments.length.first() == Some(&length(problem));
        let passes = problem.algorithm().passes().iter().filter(|&&pass| {
            let wanted = match &self.gpu {
                // Passes that are not asked for by name may be missing there.
                Some(gpu) if wanted.is_empty() => gpu.refuses(problem, pass).is_ok(),
                _ => wanted.is_empty() || wanted.contains(&pass),
            };
            wanted && (pass != Pass::Step || first)
        });
        let modes = |&pass| {
            let modes = self.modes(problem.algorithm(), pass).into_iter();
            modes.map(move |mode| (pass, mode))
        };
        passes.flat_map(modes).collect()
    }

    /// Tells beforehand of a pass that will take long.
    fn announce(&self, problem: &Problem, pass: Pass, flops: u64) {
        let seconds = flops as f64 / (SHARE * self.peak) * 1e-9;
        if seconds > LONG {
            // If nobody reads stderr, nobody waits for the news.
            let _ = writeln!(
                stderr(),
                "{} {pass}, {} × {}: about {} for each of four runs or more",
                problem.algorithm(),
                length(problem),
                problem.extent(Axis::Dim),
                time(seconds)
            );
        }
    }

    /// The modes in which a pass is timed: a backward pass in every one that the algorithm has.
    fn modes(&self, algorithm: Algorithm, pass: Pass) -> Vec<Mode> {
        let one = matches!(algorithm, Algorithm::LinearAttention | Algorithm::LinearCrossEntropy);
        let lazy = algorithm == Algorithm::LazyAttention;
        if pass != Pass::Backward || one || lazy && self.gpu.is_some() {
            return vec![Mode::Auto];
        }
        let further = lazy || algorithm == Algorithm::AttentionLse;
        let has = |mode| mode != Mode::ForwardGradient || further;
        self.arguments.mode.iter().copied().filter(|&mode| has(mode)).collect()
    }

    /// τ and the bias by distance of lazy attention, as they were asked for.
    fn set_lazy(&self, problem: &Problem, inputs: &mut Tensors) {
        let &Arguments { slope, tau, .. } = self.arguments;
        let Problem::LazyAttention(problem) = problem else { return };
        let heads = [problem.scores.extents.query_heads];
        let all = [("tau", ArrayD::from_elem(&heads[..], tau))].into_iter();
        let bias = problem
            .bias_shape()
            .map(|shape| ArrayD::from_shape_fn(&shape[..], |at| 0.0 - slope * at[1] as f64));
        for (name, values) in all.chain(bias.map(|bias| ("bias", bias))) {
            inputs.insert(name.to_string(), Tensor::round(&values, Dtype::F32));
        }
    }

    /// The targets of linear cross-entropy: any classes; and a w that gives logits of a variance of 1.
    fn set_head(&self, problem: &Problem, inputs: &mut Tensors, seed: u64) -> Result<(), Failure> {
        let Problem::LinearCrossEntropy(problem) = problem else { return Ok(()) };
        let w = inputs["w"].numbers("w")? / (problem.dim as f64).sqrt();
        inputs.insert("w".to_string(), Tensor::round(&w, self.arguments.dtype));
        let stream = Stream::new(seed, "targets");
        let class = |at: IxDyn| stream.below(at[0], problem.vocab) as f64;
        let targets = ArrayD::from_shape_fn(vec![problem.tokens], class);
        inputs.insert("targets".to_string(), Tensor::store(&targets, Stored::Integer));
        Ok(())
    }

    fn figure(
        &self,
        problem: &Problem,
        mask: &str,
        pass: Pass,
        mode: Mode,
    ) -> Result<Figure, Failure> {
        let &Arguments { dtype, seconds, tune, .. } = self.arguments;
        let (operands, options) = (problem.operands(pass), Options { mode, ..self.options });
        let flops = match (&self.gpu, problem) {
            (Some(gpu), Problem::LinearAttention(linear)) => {
                linear_flops(linear, pass, gpu.linear_chunk())
            }
            _ => flops(problem, pass, &options)?,
        };
        self.announce(problem, pass, flops);
        let (workspace, hints) = (Workspace::new(), Hints { mode, ..Hints::default() });
        let mut inputs = self.inputs(problem, &operands, 0, &|x| is_given(problem, x))?;
        let request = Request { problem, pass, dtype, inputs: &inputs, hints };
        inputs.extend(saved(&request, &|problem, pass, inputs, outputs| {
            self.run(&Workspace::new(), problem, (pass, mode), inputs, outputs)
        })?);
        let blank = self.blank(problem, mask, (pass, mode), flops);
        if let Some(gpu) = &self.gpu {
            let (times, on_device) = gpu.time(problem, (pass, mode), &views(&inputs)?, seconds)?;
            let search = || gpu.tune(problem, pass, &views(&inputs)?, seconds);
            // It is the same in every mode.
            let first = self.arguments.mode.first() == Some(&mode) || pass != Pass::Backward;
            let tried = if tune && first { search()? } else { Vec::new() };
            return Ok(Figure { on_device: Some(on_device), tried, ..blank.with(times) });
        }
        // A step works in place, so its states have values before the first.
        let mut outputs = made(&operands, dtype, 0, &|x| x.role == Role::Output);
        let mut run = |options: &Options| {
            let places = &mut views_mut(&mut outputs)?;
            run_in(&workspace, problem, pass, &views(&inputs)?, places, options)
        };
        let in_bf16 = options.multiplies_bf16(pass, dtype);
        let peak = || match in_bf16 {
            true => probe::bf16_sample(options.level),
            false => probe::fma_sample(options.level),
        };
        let runs = Runs::beside(seconds, || run(&options), peak)?;
        let linear = matches!(problem, Problem::LinearAttention(_));
        let tune = tune && !matches!(problem, Problem::LinearCrossEntropy(_)); // its budget decides
        let best = tune.then(|| tune::best(linear, pass, &options, seconds, &mut run));
        let best = best.transpose()?.flatten();
        let ns = runs.times.median_ns.max(1) as f64;
        let bandwidth = || -> Result<Bandwidth, Failure> {
            let bytes = outputs["final_state"].len() * size_of::<f32>();
            let memory = probe::update_gbps(options.level, bytes)?;
            Ok(Bandwidth { states: 2.0 * bytes as f64 / ns, memory })
        };
        let gigabytes = (pass == Pass::Step).then(bandwidth).transpose()?;
        let (first_ns, share) = (Some(runs.first_ns), Some(flops as f64 / runs.possible));
        Ok(Figure { first_ns, gigabytes, best, share, ..blank.with(runs.times) })
    }

    /// A figure without its times.
    fn blank(
        &self,
        problem: &Problem,
        mask: &str,
        (pass, mode): (Pass, Mode),
        flops: u64,
    ) -> Figure {
        Figure {
            subject: Subject::new(problem, mask, pass),
            mode: mode.name(),
            flops,
            first_ns: None,
            times: Times::new(Vec::new()),
            gflops: 0.0,
            share: None, // when the peak is known
            gigabytes: None,
            best: None,
            tried: Vec::new(),
            on_device: None,
        }
    }
}

/// The level of the simd tier that was asked for, with what it rounds.
fn simd_options(arguments: &Arguments) -> Result<Options, Error> {
    let best = || Options::of_level(Level::best().in_f32());
    let Some(name) = &arguments.level else { return Ok(best()) };
    let known = || Options::of_levels().map(|options| options.name()).collect::<Vec<_>>();
    let expected = || format!("one of {} on this machine", known().join(", "));
    Options::by_name(name).ok_or_else(|| Error::value("level", expected(), name))
}

/// Tensors of a pass, of bell-shaped numbers of a seed; log-decays between 0 and −0.1.
fn made(
    operands: &[Operand],
    dtype: Dtype,
    seed: u64,
    which: &dyn Fn(&Operand) -> bool,
) -> Tensors {
    let tensor = |x: &Operand| {
        let (stream, mut next) = (Stream::new(seed, x.name), 0);
        let decay = matches!(x.primal, "g" | "g_gamma");
        let values = ArrayD::from_shape_simple_fn(x.shape.as_slice(), || {
            next += 1;
            if decay { -0.1 * stream.uniform(next) } else { stream.normal(next) }
        });
        (x.name.to_string(), Tensor::store(&values, Stored::of(x.precision, dtype)))
    };
    operands.iter().filter(|x| which(x)).map(tensor).collect()
}

/// True if a pass is timed with an operand: with every input and needed cotangent, and of the optional
/// cotangents with those that belong to inputs; with linear attention's also that of o, and with that of a
/// loss.
pub fn is_given(problem: &Problem, operand: &Operand) -> bool {
    let linear = matches!(problem, Problem::LinearAttention(_));
    let forward = || problem.operands(Pass::Forward).into_iter();
    let of_input = || forward().any(|x| x.name == operand.primal && x.role == Role::Input);
    match operand.role {
        Role::Input => operand.becomes.is_none(),
        Role::Cotangent => true,
        Role::OptionalCotangent => {
            of_input() || linear && operand.name == "cot_o" || operand.name == "dloss"
        }
        _ => false,
    }
}

/// The flops of the products of a pass: what a kernel that wastes nothing computes.
fn flops(problem: &Problem, pass: Pass, options: &Options) -> Result<u64, Error> {
    let scores = match problem {
        Problem::LinearAttention(problem) => {
            let plan = linear_attention::plan::<f32>(problem, Pass::Forward, options)?;
            return Ok(linear_flops(problem, pass, plan.blocking.queries));
        }
        Problem::LinearCrossEntropy(x) => {
            // h·w, and those for dh and dw; of the second order also ddh·w and h·ddw, and those of da with
            // ddw and ddh.
            let products = match pass {
                Pass::Forward => 1,
                Pass::DoubleBackward => 7,
                _ => 3,
            };
            let extents = [2, products, x.tokens, x.dim, x.vocab];
            return Ok(extents.iter().fold(1, |flops: u64, &n| flops.saturating_mul(n as u64)));
        }
        other => other.scores(),
    };
    let product = match scores {
        Some(x) => x.visible_pairs()?.saturating_mul(2 * x.extents.dim as u64),
        None => 0,
    };
    if let Problem::LazyAttention(_) = problem {
        let further = options.mode == Mode::ForwardGradient;
        // As if every pair were active: q·k and e·v; then q·k, dout·v and those for dq, dk and dv, and
        // without a sum of the forward pass also q·k and dout·v for Δ. Of the second order the scores with
        // their motion, dout·v and dout·ddv in each of three sweeps, four products by rows and three by columns.
        let products = match pass {
            Pass::Forward => 2,
            Pass::Backward => 7 - 2 * u64::from(further),
            _ => 3 * 5 + 4 + 3,
        };
        return Ok(product.saturating_mul(products));
    }
    let with_values = matches!(problem, Problem::Attention(_));
    let products = match (pass, with_values) {
        (Pass::Forward, true) => 2,          // q·k and p·v
        (Pass::Backward, true) => 5,         // q·k, dout·v, and those for dq, dk and dv
        (Pass::DoubleBackward, true) => 19, // the least known in O(N) memory: 11 by rows, 8 by columns
        (_, true) => 5,                     // q·k, ddq·k, q·ddk, and those of v and ddv
        (Pass::Forward, false) => 1,        // q·k
        (Pass::Backward, false) => 3,       // q·k and those for dq and dk
        (Pass::DoubleBackward, false) => 13, // 3 for the tangents of lse, 5 by rows, 5 by columns
        (_, false) => 3,                    // q·k, ddq·k and q·ddk
    };
    Ok(product.saturating_mul(products))
}

/// With chunks of so many tokens.
fn linear_flops(problem: &LinearAttention, pass: Pass, chunk: usize) -> u64 {
    let x = &problem.extents;
    let [batch, heads, d, e] = [x.batch, x.query_heads, x.dim, problem.value_dim].map(|n| n as u64);
    if pass == Pass::Step {
        // q·H for every query head, and the two operations of kᵀ v for every key head.
        return 2 * (heads + x.key_heads as u64) * batch * d * e;
    }
    let chunk = chunk.min(x.tokens) as u64;
    let tokens = batch * heads * x.tokens as u64;
    let forward = tokens * (4 * d * e + chunk * (d + e));
    match pass {
        Pass::Forward => forward,
        Pass::Backward => forward * 5 / 2,
        // Fifteen products within a chunk, eighteen with states; of the former eight with D.
        _ => tokens * (36 * d * e + chunk * (8 * d + 7 * e)),
    }
}
