//! The cuda tier: one [`Tier`] per level.

mod shards;

use super::reference::has;
use super::{door, filters};
use crate::profile::Profile;
use crate::report::Absent;
use crate::tensor::Tensors;
use crate::tier::{Choice, Filtered, Hints, Refusal, Request, Tier};
use etalon_cuda::{
    Level, Options, Precision, Settings, Target, Workspace, levels, linear_cross_entropy,
};
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Algorithm, Dtype, Error, Pass};
use ndarray::Array1;
use std::sync::{LazyLock, Mutex, PoisonError};

/// One level of the cuda tier, or a precision of f32 on the level sm80, on the first device.
#[derive(Debug, Clone, Copy)]
pub struct Cuda {
    level: Level,
    precision: Precision,
}

/// The devices and what was compiled for them.
static WORKSPACE: LazyLock<Workspace> = LazyLock::new(|| Workspace::with(Settings::user()));

/// The levels of this machine, and those that it lacks.
pub(super) fn present() -> (Vec<Box<dyn Tier>>, Vec<Absent>) {
    let (levels, absent) = Cuda::levels();
    (levels.into_iter().map(|level| Box::new(level) as Box<dyn Tier>).collect(), absent)
}

impl Cuda {
    /// A level, whether this machine has it or not.
    pub fn new(level: Level) -> Self {
        let precision = match level {
            Level::Auto | Level::Portable => Precision::Strict,
            _ => Precision::Flash,
        };
        Cuda { level, precision }
    }

    /// The tensor cores of every device on f32, as a precision lets them multiply it.
    fn of_f32(precision: Precision) -> Self {
        Cuda { level: Level::Sm80, precision }
    }

    /// The levels of this machine, and those that it lacks.
    pub fn levels() -> (Vec<Cuda>, Vec<Absent>) {
        let (mut present, mut absent) = (Vec::new(), Vec::new());
        let flash =
            [Level::Sm90a, Level::Sm90aSegments, Level::Sm80, Level::Sm80Narrow].map(Cuda::new);
        let of_f32 = [Precision::Tf32, Precision::Bf16x3].map(Cuda::of_f32);
        // The last one is what `cuda` alone stands for: the one that every caller may have.
        for tier in flash.into_iter().chain(of_f32).chain([Cuda::new(Level::Portable)]) {
            match tier.missing() {
                None => present.push(tier),
                Some(reason) => absent.push(Absent { tier: tier.name(), reason }),
            }
        }
        (present, absent)
    }

    /// Why this machine cannot run it.
    fn missing(self) -> Option<String> {
        let reason = |error: Error| match error {
            Error::Unsupported { reason, .. } => reason,
            error => error.to_string(),
        };
        // Every level computes the one of these passes or the other in its precision, on devices that have it.
        let one_of =
            [(Algorithm::Attention, Dtype::F32), (Algorithm::LinearAttention, Dtype::Bf16)];
        let options = self.options(Hints::default());
        let found = WORKSPACE.target(0).and_then(|target| {
            let offers = |(algorithm, dtype)| {
                levels::offers(&options, algorithm, Pass::Forward, dtype, &target)
            };
            let [first, second] = one_of.map(offers);
            first.or(second)
        });
        found.err().map(reason)
    }

    fn options(self, hints: Hints) -> Options {
        let (Cuda { level, precision }, usual) = (self, Options::default());
        Options {
            level,
            precision,
            blocking: hints.blocking,
            mode: hints.mode,
            partials_budget: hints.partials_budget.unwrap_or(usual.partials_budget),
            memory_budget: hints.memory_budget.unwrap_or(usual.memory_budget),
            recompute: hints.recompute,
            ..usual
        }
    }
}

impl Tier for Cuda {
    fn name(&self) -> String {
        match self.precision {
            Precision::Tf32 | Precision::Bf16x3 => format!("cuda/{}", self.precision),
            _ => format!("cuda/{}", self.level),
        }
    }

    fn offers(&self, algorithm: Algorithm, pass: Pass, dtype: Dtype) -> Result<(), String> {
        has(algorithm, pass)?;
        if let Some(reason) = self.missing() {
            return Err(reason);
        }
        let of_f32 = matches!(self.precision, Precision::Tf32 | Precision::Bf16x3);
        if of_f32 && dtype != Dtype::F32 {
            return Err(format!("`{}` is a precision of f32", self.precision));
        }
        let options = self.options(Hints::default());
        let offered = levels::offers(&options, algorithm, pass, dtype, &Target::default());
        offered.map_err(|error| match error {
            Error::Unsupported { reason, .. } => reason,
            error => error.to_string(),
        })
    }

    fn profile(&self, dtype: Dtype) -> Profile {
        match self.precision {
            Precision::Strict => Profile::strict(dtype),
            Precision::Flash => Profile::flash(dtype),
            Precision::Tf32 => Profile::tf32(),
            Precision::Bf16x3 => Profile::bf16x3(),
        }
    }

    fn lost(&self) -> Option<String> {
        WORKSPACE
            .check(0)
            .err()
            .filter(|error| matches!(error, Error::ContextLost { .. }))
            .map(|x| x.to_string())
    }

    fn sums_dh_along_the_tree(&self) -> bool {
        self.level == Level::Portable
    }

    fn gives_the_bits_beside_nan(&self) -> bool {
        // Tensor cores leave groups with a NaN to `portable`.
        self.level == Level::Portable
    }

    fn has(&self, choice: Choice) -> bool {
        match choice {
            // Of filtered passes the tensor cores have none.
            Choice::Filter => self.level == Level::Portable,
            Choice::States => false,
            _ => true,
        }
    }

    fn any_budget_gives_the_bits(&self) -> bool {
        // Chunks of tokens are terms of what is summed over tokens.
        false
    }

    fn run(&self, request: &Request<'_>) -> Result<Tensors, Refusal> {
        let options = self.options(request.hints);
        if let Some((problem, classes)) = super::shards::of(request) {
            return Ok(shards::run(request, problem, &classes, &WORKSPACE, &options)?);
        }
        door::outputs(request, &|problem, pass, inputs, outputs| {
            etalon_cuda::run_in(&WORKSPACE, problem, pass, inputs, outputs, &options)
        })
    }

    /// In the workspace that all requests share: what is compiled is in it.
    fn in_turn(&self, requests: &[Request<'_>]) -> Result<Option<Vec<Tensors>>, Refusal> {
        let answers = requests.iter().map(|request| {
            if let Some(x) = request.hints.stale {
                WORKSPACE.fill(x as f32)?;
            }
            self.run(request)
        });
        answers.collect::<Result<_, _>>().map(Some)
    }

    fn filtered(&self, request: &Request<'_>, filter: Filter) -> Result<Option<Filtered>, Refusal> {
        let Some(problem) = filters::of(request).filter(|_| self.level == Level::Portable) else {
            return Ok(None);
        };
        let (options, found) = (self.options(request.hints), Mutex::default());
        let outputs = door::outputs(request, &|_, _, inputs, outputs| {
            let certificate = linear_cross_entropy::filtered_backward(
                &WORKSPACE, problem, inputs, outputs, filter, &options,
            )?;
            *found.lock().unwrap_or_else(PoisonError::into_inner) = certificate;
            Ok(())
        })?;
        let found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
        let numbers = |list: &Array1<f32>| list.iter().map(|&x| f64::from(x)).collect();
        let (dh, dw, tiles) = (numbers(&found.dh), numbers(&found.dw), found.tiles);
        Ok(Some(Filtered { outputs, dh, dw, tiles, classes: linear_cross_entropy::TILE }))
    }
}
