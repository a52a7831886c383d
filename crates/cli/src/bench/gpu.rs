//! A device of the cuda tier as a bench uses it.

use super::arguments::Arguments;
use crate::noise::Times;
use crate::outcome::Failure;
use etalon_cuda::{Level, Options, Precision, Settings, Unit, Workspace, peak_gflops};
use etalon_problem::{Dtype, Error, Pass, Problem, Views, ViewsMut};
use std::time::Duration;

/// A device, and how it is asked to compute.
pub struct Gpu {
    workspace: Workspace,
    options: Options,
    unit: Unit,
    dtype: Dtype,
}

/// What the device took, and what is told beside.
pub struct Timed {
    pub times: Times,
    /// Of the host, for a pass: the median.
    pub enqueue_ns: u64,
    /// What it enqueues: kernels, and fills.
    pub launches: usize,
    pub fills: usize,
    pub scratch_bytes: usize,
}

impl Gpu {
    /// The device that was asked for. Fails where it is not there.
    pub fn new(arguments: &Arguments) -> Result<Gpu, Failure> {
        let simd = [("--tune", arguments.tune), ("--blocking", arguments.blocking.is_some())];
        if let Some((name, _)) = simd.into_iter().find(|(_, given)| *given) {
            return Err(Failure(format!("{name} is an option of the simd tier: cuda has one way")));
        }
        let level = arguments.level.as_deref().map_or(Ok(Level::Auto), str::parse)?;
        let usual = if level == Level::Portable { Precision::Strict } else { Precision::Flash };
        let precision = arguments.precision.unwrap_or(usual);
        let (&Arguments { device, assume_finite, memory, .. }, defaults) =
            (arguments, Options::default());
        let memory_budget = memory.unwrap_or(defaults.memory_budget);
        let options =
            Options { device, level, precision, assume_finite, memory_budget, ..defaults };
        let workspace = Workspace::with(Settings::user());
        let unit = Unit::of(&workspace, &options, arguments.dtype)?;
        Ok(Gpu { workspace, options, unit, dtype: arguments.dtype })
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

    pub fn unit(&self) -> &'static str {
        match self.unit {
            Unit::Ffma => "fused multiply-adds",
            Unit::Mma => "mma.sync",
            Unit::Wgmma => "wgmma",
        }
    }

    /// Computes a pass on operands of the host.
    pub fn run(
        &self,
        problem: &Problem,
        pass: Pass,
        inputs: &Views<'_>,
        outputs: &mut ViewsMut<'_>,
    ) -> Result<(), Error> {
        etalon_cuda::run_in(&self.workspace, problem, pass, inputs, outputs, &self.options)
    }

    /// Times a pass on operands that lie on the device.
    pub fn time(
        &self,
        problem: &Problem,
        pass: Pass,
        inputs: &Views<'_>,
        seconds: f64,
    ) -> Result<Timed, Error> {
        let duration = Duration::from_secs_f64(seconds);
        let (workspace, options) = (&self.workspace, &self.options);
        let timing = etalon_cuda::time(workspace, problem, pass, inputs, options, duration)?;
        let whole = |list: Vec<f64>| Times::new(list.into_iter().map(|ns| ns as u64).collect());
        Ok(Timed {
            times: whole(timing.device_ns),
            enqueue_ns: whole(timing.enqueue_ns).median_ns,
            launches: timing.launches,
            fills: timing.fills,
            scratch_bytes: timing.scratch_bytes,
        })
    }

    /// Why the tier has no kernel for a pass, if so.
    pub fn refuses(&self, problem: &Problem, pass: Pass) -> Result<(), Error> {
        etalon_cuda::offers(&self.options, problem.algorithm(), pass, self.dtype)
    }
}
