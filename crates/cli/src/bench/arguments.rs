//! The arguments of `etalon bench`.

use super::masks::named;
use crate::cuda::gpu;
use crate::live;
use crate::options::{self, SIMD_DTYPES, one_of};
use etalon_problem::{Algorithm, Blocking, Decay, Dtype, Error, Pass, named};
use etalon_simd::Mode;
use std::path::PathBuf;

named! {
    /// Timed tier.
    #[derive(Default)]
    Tier, "tier" {
        /// SIMD kernels of this processor.
        #[default]
        Simd = "simd",
        /// CUDA kernels of a device.
        Cuda = "cuda",
    }
}

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Algorithms; all if absent.
    #[arg(long, value_name = "A,…", value_delimiter = ',', value_parser = one_of(Algorithm::ALL))]
    pub algorithm: Vec<Algorithm>,
    /// The tier that is timed. The times of cuda are those of the device, on operands that lie there.
    #[arg(long, value_name = "T", default_value = "simd", value_parser = one_of(Tier::ALL))]
    pub tier: Tier,
    /// The level of the tier; the best of this machine, or of cuda the best for each pass, if absent.
    #[arg(long, value_name = "L")]
    pub level: Option<String>,
    #[command(flatten)]
    pub gpu: gpu::Arguments,
    /// The storage type.
    #[arg(long, default_value = "f32", value_parser = one_of(SIMD_DTYPES))]
    pub dtype: Dtype,
    /// Queries and keys, or tokens.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [512, 2048], value_parser = at_least_1)]
    pub length: Vec<usize>,
    /// Elements of a query, a key and a value.
    #[arg(long, value_name = "D,…", value_delimiter = ',', default_values_t = [64, 128])]
    pub dim: Vec<usize>,
    /// Passes; all if absent.
    #[arg(long, value_name = "P,…", value_delimiter = ',', value_parser = one_of(Pass::ALL))]
    pub pass: Vec<Pass>,
    /// Masks: full; causal; window=256, causal and reaching back so many keys; segments=512, causal
    /// within segments of so many; array=512, the same as an array of pairs.
    #[arg(long, value_name = "M,…", value_delimiter = ',', default_values = ["full", "causal"], value_parser = named)]
    pub mask: Vec<String>,
    /// Batch elements.
    #[arg(long, default_value_t = 1, value_parser = at_least_1)]
    pub batch: usize,
    /// Query heads.
    #[arg(long, default_value_t = 4)]
    pub heads: usize,
    /// Key heads; as many as there are query heads if absent.
    #[arg(long, value_name = "H")]
    pub key_heads: Option<usize>,
    /// Tile sizes, as in 96x128: queries × keys; the measured best if absent. cuda rounds them up to tiles that it has
    /// kernels for.
    #[arg(long, value_name = "QxK", value_parser = options::blocking)]
    pub blocking: Option<Blocking>,
    /// The modes of a backward pass; gradient is a mode of attention_lse and lazy_attention alone.
    #[arg(long, value_name = "M,…", value_delimiter = ',', default_value = "auto", value_parser = one_of(Mode::ALL),
        conflicts_with = "candidate")]
    pub mode: Vec<Mode>,
    /// The bytes of partial sums of dq that a fused backward pass may keep; what the tier takes by default if absent.
    #[arg(long, value_name = "BYTES")]
    pub budget: Option<usize>,
    /// Decays of linear_attention.
    #[arg(long, value_name = "D,…", value_delimiter = ',', default_value = "none", value_parser = one_of(Decay::ALL))]
    pub decay: Vec<Decay>,
    /// c of S = c·tanh(s/c).
    #[arg(long, value_name = "C")]
    pub softcap: Option<f64>,
    /// Adds a bias for each head, and its gradient.
    #[arg(long)]
    pub bias: bool,
    /// The width W of lazy_attention's bias by distance.
    #[arg(long, value_name = "W", default_value_t = 512)]
    pub width: usize,
    /// By how much that bias falls with each distance: it makes tiles inactive.
    #[arg(long, value_name = "S", default_value_t = 0.0)]
    pub slope: f64,
    /// τ of lazy_attention.
    #[arg(long, value_name = "T", default_value_t = -1.0, allow_negative_numbers = true)]
    pub tau: f64,
    /// Classes of linear_cross_entropy.
    #[arg(long, value_name = "V", default_value_t = 32_000)]
    pub vocab: usize,
    /// Gradients of linear_cross_entropy in f32, whatever the storage type.
    #[arg(long)]
    pub wide_gradients: bool,
    /// The bytes that it may hold beside operands, results and 64 for each token (cuda: 100); what the tier takes by
    /// default if absent.
    #[arg(long, value_name = "BYTES")]
    pub memory: Option<usize>,
    /// Searches tile sizes for every pass, and of cuda modes, and prints the best, at many times the time.
    #[arg(long, conflicts_with_all = ["blocking", "candidate"])]
    pub tune: bool,
    #[command(flatten)]
    pub threads: options::Threads,
    #[command(flatten)]
    pub brought: live::Brought,
    /// Timed calls of the candidate that are judged, of each pass: the one whose results are furthest from etalon's,
    /// and others at random.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = at_least_1, requires = "candidate")]
    pub judged: usize,
    /// Seconds for the runs of a pass, of which there are at least three; their median counts.
    #[arg(long, value_name = "S", default_value_t = 2.0, value_parser = seconds)]
    pub seconds: f64,
    /// Also writes the figures as JSON.
    #[arg(long, value_name = "PATH")]
    pub json: Option<PathBuf>,
}

/// An extent that leaves something to be timed.
fn at_least_1(text: &str) -> Result<usize, Error> {
    let number = text.parse().ok().filter(|&x| x > 0);
    number.ok_or_else(|| Error::value("extent", "a whole number of at least 1", text))
}

/// The most seconds for a pass: a day.
const LONGEST: f64 = 86_400.0;

/// A number of seconds that ends.
fn seconds(text: &str) -> Result<f64, Error> {
    let number = text.parse::<f64>().ok().filter(|x| (0.0..=LONGEST).contains(x));
    number.ok_or_else(|| Error::value("seconds", format!("a number from 0 to {LONGEST}"), text))
}
