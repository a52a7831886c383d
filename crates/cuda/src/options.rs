//! Choices of a caller.

use crate::archive::Archive;
use crate::cache::Cache;
use crate::device_id::DeviceId;
use etalon_problem::{Blocking, Error, Mode, named};
use std::path::PathBuf;

named! {
    /// The kernels that compute.
    #[derive(Default)]
    Level, "level" {
        /// The fastest that the device, the problem and the precision permit.
        #[default]
        Auto = "auto",
        /// Fused multiply-adds in f32: every option, on every device from compute capability 8.0 on.
        Portable = "portable",
        /// The same tiles on tensor cores, of every device: [`Precision::Flash`], and of f32 [`Precision::Tf32`]
        /// and [`Precision::Bf16x3`].
        Sm80 = "sm80",
        /// The same with the shared memory that every device has: at most 101,376 bytes a block.
        Sm80Narrow = "sm80-99k",
        /// Tensor cores and the copy engine of compute capability 9.0: [`Precision::Flash`] alone.
        Sm90a = "sm90a",
        /// The same of linear_attention with short sequences cut into segments, as long ones are.
        Sm90aSegments = "sm90a-segments",
    }
}

named! {
    /// Rounding that a pass may do between its inputs and its results, where there are such kernels: others are
    /// stricter, as [`Precision::Strict`] for storage types that a precision does not name. Sums are f32 in any case.
    #[derive(Default)]
    Precision, "precision" {
        /// Nothing is stored in less than f32: the profile `f32-strict` for every storage type.
        #[default]
        Strict = "strict",
        /// For bf16 and f16 storage, P and dS may be rounded to that before they are multiplied: the profiles
        /// `bf16-flash` and `f16-flash`.
        Flash = "flash",
        /// For f32 storage, factors of matrix products may be rounded to tf32, which has 11 bits: the profile
        /// `f32-tf32`.
        Tf32 = "tf32",
        /// For f32 storage, factors of matrix products may be sums of two numbers in bf16, and their product three
        /// products of these: the profile `f32-bf16x3`.
        Bf16x3 = "bf16x3",
    }
}

impl Level {
    /// The level whose kernels it takes.
    pub(crate) fn kernels(self) -> Level {
        match self {
            Level::Sm80Narrow => Level::Sm80,
            Level::Sm90aSegments => Level::Sm90a,
            level => level,
        }
    }

    pub(crate) fn refusal(self, reason: &str) -> Error {
        Error::unsupported(format!("level {self}"), reason)
    }
}

impl Precision {
    /// Why tensor cores may not multiply factors in the storage type, where they may not.
    pub(crate) const FACTORS: &'static str =
        "tensor cores take factors in the storage type, which the precision `flash` permits";

    pub(crate) fn narrows_f32(self) -> bool {
        matches!(self, Precision::Tf32 | Precision::Bf16x3)
    }
}

/// Options of the cuda tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The device, by its ordinal or its UUID; the first one unless set.
    pub device: DeviceId,
    /// The kernels that compute.
    pub level: Level,
    /// Rounding on the way.
    pub precision: Precision,
    /// The caller's promise that all operands are finite: one that is not may then reach results that the definition
    /// keeps it from. Without it the kernels of linear_attention on tensor cores compute results again that are not
    /// finite. Other algorithms do not ask.
    pub assume_finite: bool,
    /// Queries and keys of a tile, of attention and attention_lse: rounded up to one that the level has kernels for
    /// ([`plan`](crate::plan) lists them); `None`: what was measured to be best. Other algorithms have one way.
    pub blocking: Option<Blocking>,
    /// Organisation of the backward pass of attention and attention_lse. [`Mode::Separate`] and
    /// [`Mode::FusedPartials`] insist: a level that lacks the second refuses, and [`Level::Auto`] takes one that has
    /// it. It changes nothing where no gradient beside that of q is asked for.
    pub mode: Mode,
    /// The most bytes of partial sums of dq that [`Mode::FusedPartials`] may keep: of as many tiles of 64 keys at a
    /// time as fit, at least of one and of the tiles before. [`Mode::Auto`] takes [`Mode::Separate`] where what fits
    /// would not keep the device busy. The result does not depend on it. A pass that would launch more than 100,000
    /// kernels is refused.
    pub partials_budget: usize,
    /// Bytes for logits and sums that a pass of linear_cross_entropy holds at once, beside operands, results, copies
    /// of operands and 100 bytes for each token; at least what a tile of 128 tokens and 256 classes takes. On
    /// [`Level::Sm90a`] sums of dh take up to three times 4TD bytes of it. A pass that would launch more than 100,000
    /// kernels is refused.
    pub memory_budget: usize,
    /// True: [`run`](crate::run()) computes the forward pass again where a later pass lacks what it
    /// saved; otherwise that is an error.
    pub recompute: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            device: DeviceId::default(),
            level: Level::default(),
            precision: Precision::default(),
            assume_finite: false,
            blocking: None,
            mode: Mode::Auto,
            partials_budget: 256 << 20,
            memory_budget: 512 << 20,
            recompute: false,
        }
    }
}

/// Facts of the machine for a [`Workspace`](crate::Workspace): kernels are looked for in the archive, then in the
/// cache, then compiled. The default has neither of the first, and finds NVRTC by the loader's own path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// The folder of an archive ([`ArchiveWriter`](crate::kernels::ArchiveWriter)), which may make NVRTC needless.
    pub archive: Option<PathBuf>,
    /// Compiled kernels, kept between processes.
    pub cache: Option<Cache>,
    /// The folder with NVRTC: the library's own, that of a toolkit, or the site-packages with the wheel
    /// `nvidia-cuda-nvrtc`.
    pub nvrtc: Option<PathBuf>,
    /// More compile-time names of kernels, such as `DROP=1`, for tests that a part of a kernel is needed: with any,
    /// all kernels are compiled and none is kept.
    #[doc(hidden)]
    pub defines: Vec<String>,
}

impl Settings {
    /// The most bytes that [`Settings::user`] keeps: some hundred kernels.
    const LIMIT: u64 = 64 << 20;

    /// The settings of a program that a user runs: at most 64 MiB of kernels are kept in the user's folder for caches
    /// (`XDG_CACHE_HOME`, or `.cache` in the home folder); the archive is [`Settings::user_archive`], if there is one.
    pub fn user() -> Self {
        let folder = user_folder("XDG_CACHE_HOME", ".cache");
        let cache = folder.map(|folder| Cache::of_user(folder, Settings::LIMIT));
        let archive = Settings::user_archive().filter(|folder| Archive::is_in(folder));
        Settings { archive, cache, ..Settings::default() }
    }

    /// The folder for the user's own archive: `etalon/cuda` in `XDG_DATA_HOME`, or in `.local/share` of the home
    /// folder. `None` without a home folder.
    pub fn user_archive() -> Option<PathBuf> {
        user_folder("XDG_DATA_HOME", ".local/share")
    }
}

/// A folder of the user's: in the one that a variable names, or else within the home folder.
fn user_folder(variable: &str, within: &str) -> Option<PathBuf> {
    let set = std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let folder = set.or_else(|| Some(std::env::home_dir()?.join(within)));
    Some(folder?.join("etalon/cuda"))
}
