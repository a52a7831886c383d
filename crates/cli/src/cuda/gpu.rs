//! A device of the cuda tier as a bench uses it.

use crate::bench::summary::OnDevice;
use crate::bench::tune::Tried;
use crate::noise::Times;
use crate::options::one_of;
use crate::outcome::Failure;
use etalon_conformance::tier::Hints;
use etalon_cuda::kernels::{LINEAR_CHUNK, Unit, launch_ns, peak_gflops};
use etalon_cuda::{DeviceId, Level, Options, Precision, Settings, Workspace, levels};
use etalon_problem::{Dtype, Error, Mode, Pass, Problem, Views, ViewsMut};
use std::time::Duration;

/// Options of a bench on a device.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Permitted rounding within a pass of cuda; strict with the level portable and flash with others if absent.
    #[arg(long, value_name = "P", value_parser = one_of(Precision::ALL))]
    precision: Option<Precision>,
    /// Tells cuda that all operands are finite numbers: it need not look for others.
    #[arg(long)]
    assume_finite: bool,
    /// The device of cuda: its ordinal or its UUID.
    #[arg(long, value_name = "ID", default_value = "0", value_parser = str::parse::<DeviceId>)]
    device: DeviceId,
}

/// A device, and how it is asked to compute.
pub struct Gpu {
    workspace: Workspace,
    options: Options,
    unit: Unit,
    dtype: Dtype,
}

/// Times that a search times each setting, in turns with the others.
const TURNS: usize = 3;

impl Gpu {
    /// The device that was asked for, for tensors of a storage type. Fails where it is not there.
    pub fn new(
        arguments: &Arguments,
        level: Option<&str>,
        dtype: Dtype,
        hints: Hints,
    ) -> Result<Gpu, Failure> {
        let level = level.map_or(Ok(Level::Auto), str::parse)?;
        let usual = if level == Level::Portable { Precision::Strict } else { Precision::Flash };
        let &Arguments { precision, assume_finite, device } = arguments;
        let defaults = Options::default();
        let options = Options {
            device,
            level,
            precision: precision.unwrap_or(usual),
            assume_finite,
            blocking: hints.blocking,
            partials_budget: hints.partials_budget.unwrap_or(defaults.partials_budget),
            memory_budget: hints.memory_budget.unwrap_or(defaults.memory_budget),
            ..defaults
        };
        let workspace = Workspace::with(Settings::user());
        let unit = Unit::of(&workspace, &options, dtype)?;
        Ok(Gpu { workspace, options, unit, dtype })
    }

    /// The device, the level and the precision, in words.
    pub fn describe(&self) -> Result<String, Error> {
        let Options { device, level, precision, assume_finite, .. } = self.options;
        let finite = if assume_finite { ", operands finite" } else { "" };
        let device = self.workspace.describe(device)?;
        Ok(format!("cuda/{level}, precision {precision}{finite}, {device}"))
    }

    /// GFLOP/s of the fastest arithmetic that passes may use, measured now, and its name.
    pub fn peak(&self) -> Result<f64, Error> {
        peak_gflops(&self.workspace, self.options.device, self.unit, self.dtype)
    }

    /// The host's time to enqueue a kernel that does nothing, in ns.
    pub fn launch(&self) -> Result<f64, Error> {
        launch_ns(&self.workspace, self.options.device, self.unit, self.dtype)
    }

    pub fn unit(&self) -> &'static str {
        match self.unit {
            Unit::Ffma => "fused multiply-adds",
            Unit::Mma => "mma.sync",
            Unit::Wgmma => "wgmma",
        }
    }

    /// The tokens of a chunk of linear_attention.
    pub fn linear_chunk(&self) -> usize {
        LINEAR_CHUNK
    }

    /// Computes a pass in a mode on operands of the host.
    pub fn run(
        &self,
        problem: &Problem,
        (pass, mode): (Pass, Mode),
        inputs: &Views<'_>,
        outputs: &mut ViewsMut<'_>,
    ) -> Result<(), Error> {
        let options = Options { mode, ..self.options };
        etalon_cuda::run_in(&self.workspace, problem, pass, inputs, outputs, &options)
    }

    /// Times a pass in a mode on operands that lie on the device.
    pub fn time(
        &self,
        problem: &Problem,
        (pass, mode): (Pass, Mode),
        inputs: &Views<'_>,
        seconds: f64,
    ) -> Result<(Times, OnDevice), Error> {
        let options = Options { mode, ..self.options };
        self.time_with(problem, pass, inputs, &options, seconds)
    }

    fn time_with(
        &self,
        problem: &Problem,
        pass: Pass,
        inputs: &Views<'_>,
        options: &Options,
        seconds: f64,
    ) -> Result<(Times, OnDevice), Error> {
        let duration = Duration::from_secs_f64(seconds);
        let timing = etalon_cuda::time(&self.workspace, problem, pass, inputs, options, duration)?;
        let whole = |list: Vec<f64>| Times::new(list.into_iter().map(|ns| ns as u64).collect());
        let on_device = OnDevice {
            enqueue_ns: whole(timing.enqueue_ns).median_ns,
            recorded_ns: whole(timing.recorded_ns).median_ns,
            launches: timing.launches,
            fills: timing.fills,
            scratch_bytes: timing.scratch_bytes,
        };
        Ok((whole(timing.device_ns), on_device))
    }

    /// Times a pass in every mode and with every tile that there is a kernel for, in turns; nothing where there is one
    /// way.
    pub fn tune(
        &self,
        problem: &Problem,
        pass: Pass,
        inputs: &Views<'_>,
        seconds: f64,
    ) -> Result<Vec<Tried>, Error> {
        let target = self.workspace.target(self.options.device)?;
        let plan_of =
            |options: &Options| etalon_cuda::plan(problem, pass, self.dtype, options, &target);
        let usual = plan_of(&Options { blocking: None, ..self.options })?;
        let modes: &[Mode] = match pass {
            Pass::Backward => &[Mode::Separate, Mode::FusedPartials],
            _ => &[Mode::Auto],
        };
        let mut tried: Vec<(Option<Options>, Tried)> = Vec::new();
        for &mode in modes {
            let options = Options { mode, blocking: None, ..self.options };
            let plan = match plan_of(&options) {
                Ok(plan) => plan,
                Err(Error::Unsupported { reason, .. }) => {
                    let mode = mode.name();
                    tried.push((None, Tried { mode, refusal: Some(reason), ..Tried::default() }));
                    continue;
                }
                Err(error) => return Err(error),
            };
            for &blocking in &plan.blockings {
                let is_usual = (usual.level, usual.mode, usual.blocking)
                    == (plan.level, plan.mode, Some(blocking));
                let options = Options { blocking: Some(blocking), ..options };
                tried.push((Some(options), untimed(&options, plan.level, is_usual)));
            }
        }
        if tried.len() < 2 {
            return Ok(Vec::new());
        }
        let turns = TURNS * tried.len();
        for n in 0..turns {
            let of = n % tried.len();
            let (Some(options), tried) = &mut tried[of] else { continue };
            let (times, on_device) =
                self.time_with(problem, pass, inputs, options, seconds / turns as f64)?;
            tried.times_ns.push(times.median_ns);
            tried.scratch_bytes = on_device.scratch_bytes;
        }
        tried.sort_by_key(|(options, x)| options.map_or(u64::MAX, |_| x.median_ns()));
        Ok(tried.into_iter().map(|(_, tried)| tried).collect())
    }

    /// Why the tier has no kernel for a pass, if so.
    pub fn refuses(&self, problem: &Problem, pass: Pass) -> Result<(), Error> {
        let target = self.workspace.target(self.options.device)?;
        levels::offers(&self.options, problem.algorithm(), pass, self.dtype, &target)
    }
}

/// A way to compute a pass, before it is timed.
fn untimed(options: &Options, level: Level, usual: bool) -> Tried {
    Tried {
        mode: options.mode.name(),
        level: Some(level.name()),
        blocking: options.blocking,
        usual,
        ..Tried::default()
    }
}
