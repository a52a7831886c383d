//! The kernels: their sources, and the variants of them that are compiled.

use crate::cache::Cache;
use etalon_problem::Dtype;
use std::fmt::Write;

/// A source with the values of its compile-time names: one module of kernels.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Variant {
    /// Which kernels.
    pub family: Family,
    /// Names and values, in the order of the source's comments.
    pub defines: Vec<(&'static str, String)>,
}

/// Kernels that are compiled together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// attention and attention_lse in fused multiply-adds.
    Portable,
    /// Their second order in fused multiply-adds.
    Second,
    /// Their first order on tensor cores of any device.
    Tensor,
    /// Their forward pass on the tensor cores of compute capability 9.0.
    HopperForward,
    /// The backward pass of attention on them.
    HopperBackward,
    /// linear_attention in fused multiply-adds.
    Linear,
    /// Its second order in fused multiply-adds.
    LinearSecond,
    /// Its first order on tensor cores of any device.
    LinearTensor,
    /// Copies and fills of tensors with strides.
    Moves,
}

/// The widths of accumulators. Wider operands take several launches.
pub(crate) const WIDTHS: [usize; 3] = [64, 128, 256];

/// The narrowest accumulator that holds this many columns, or the widest.
pub(crate) fn width(columns: usize) -> usize {
    WIDTHS.into_iter().find(|&width| width >= columns).unwrap_or(WIDTHS[2])
}

/// Rows of a tile that a thread of the portable kernels has: 8, or 4 where it would have too few registers.
fn rows(family: Family, dim: usize, value_dim: Option<usize>) -> usize {
    let most = if family == Family::Second { 64 } else { 128 };
    if width(dim.max(value_dim.unwrap_or(1))) > most { 4 } else { 8 }
}

/// Threads of a block of the portable kernels, of the second order or the first.
pub(crate) fn threads(second: bool, dim: usize, value_dim: Option<usize>) -> u32 {
    let family = if second { Family::Second } else { Family::Portable };
    (64 / rows(family, dim, value_dim) * 16) as u32
}

/// Rows of a tile that a thread of the kernels of linear_attention has.
fn linear_rows(columns: usize, second: bool) -> usize {
    if second || width(columns) > 128 { 4 } else { 8 }
}

/// Threads of a block of the kernels of linear_attention.
pub(crate) fn linear_threads(columns: usize, second: bool) -> u32 {
    (64 / linear_rows(columns, second) * 16) as u32
}

impl Family {
    /// All of them.
    pub const ALL: [Family; 9] = [
        Family::Portable,
        Family::Second,
        Family::Tensor,
        Family::HopperForward,
        Family::HopperBackward,
        Family::Linear,
        Family::LinearSecond,
        Family::LinearTensor,
        Family::Moves,
    ];

    /// The texts that make its source, in order: rooms of the prelude, then the kernels.
    fn texts(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Family::Portable => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("pairs.cuh", include_str!("kernels/pairs.cuh")),
                ("copies.cuh", include_str!("kernels/copies.cuh")),
                ("ffma.cuh", include_str!("kernels/ffma.cuh")),
                ("portable.cu", include_str!("kernels/portable.cu")),
            ],
            Family::Second => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("pairs.cuh", include_str!("kernels/pairs.cuh")),
                ("copies.cuh", include_str!("kernels/copies.cuh")),
                ("ffma.cuh", include_str!("kernels/ffma.cuh")),
                ("portable_second.cu", include_str!("kernels/portable_second.cu")),
            ],
            Family::Tensor => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("pairs.cuh", include_str!("kernels/pairs.cuh")),
                ("copies.cuh", include_str!("kernels/copies.cuh")),
                ("mma.cuh", include_str!("kernels/mma.cuh")),
                ("sm80.cu", include_str!("kernels/sm80.cu")),
            ],
            Family::HopperForward => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("feed.cuh", include_str!("kernels/feed.cuh")),
                ("wgmma.cuh", include_str!("kernels/wgmma.cuh")),
                ("sm90a_forward.cu", include_str!("kernels/sm90a_forward.cu")),
            ],
            Family::HopperBackward => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("feed.cuh", include_str!("kernels/feed.cuh")),
                ("wgmma.cuh", include_str!("kernels/wgmma.cuh")),
                ("sm90a_backward.cu", include_str!("kernels/sm90a_backward.cu")),
            ],
            Family::Linear => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("pairs.cuh", include_str!("kernels/pairs.cuh")),
                ("copies.cuh", include_str!("kernels/copies.cuh")),
                ("ffma.cuh", include_str!("kernels/ffma.cuh")),
                ("linear.cuh", include_str!("kernels/linear.cuh")),
                ("linear_flow.cuh", include_str!("kernels/linear_flow.cuh")),
                ("linear_factors.cuh", include_str!("kernels/linear_factors.cuh")),
                ("linear_sums.cuh", include_str!("kernels/linear_sums.cuh")),
                ("linear.cu", include_str!("kernels/linear.cu")),
                ("linear_totals.cu", include_str!("kernels/linear_totals.cu")),
            ],
            Family::LinearSecond => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("pairs.cuh", include_str!("kernels/pairs.cuh")),
                ("copies.cuh", include_str!("kernels/copies.cuh")),
                ("ffma.cuh", include_str!("kernels/ffma.cuh")),
                ("linear.cuh", include_str!("kernels/linear.cuh")),
                ("linear_flow.cuh", include_str!("kernels/linear_flow.cuh")),
                ("linear_factors.cuh", include_str!("kernels/linear_factors.cuh")),
                ("linear_sums.cuh", include_str!("kernels/linear_sums.cuh")),
                ("linear_second.cu", include_str!("kernels/linear_second.cu")),
            ],
            Family::LinearTensor => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("pairs.cuh", include_str!("kernels/pairs.cuh")),
                ("copies.cuh", include_str!("kernels/copies.cuh")),
                ("mma.cuh", include_str!("kernels/mma.cuh")),
                ("linear.cuh", include_str!("kernels/linear.cuh")),
                ("linear_flow.cuh", include_str!("kernels/linear_flow.cuh")),
                ("linear_sm80.cu", include_str!("kernels/linear_sm80.cu")),
            ],
            Family::Moves => &[("move.cu", include_str!("kernels/move.cu"))],
        }
    }

    /// What it is compiled for on devices of a compute capability; `None` if it does not run there.
    pub fn architecture_on(self, (major, minor): (i32, i32)) -> Option<String> {
        match self {
            Family::HopperForward | Family::HopperBackward => {
                ((major, minor) == (9, 0)).then(|| "sm_90a".to_string())
            }
            _ => Some(format!("sm_{major}{minor}")),
        }
    }

    /// The architectures that CI compiles it for.
    pub fn architectures(self) -> &'static [&'static str] {
        match self {
            Family::HopperForward | Family::HopperBackward => &["sm_90a"],
            _ => &["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"],
        }
    }
}

impl Variant {
    /// The portable kernels of a storage type, of operands with D and E columns (`None`: no values), with
    /// softcap, bias and arrays of flags or without.
    pub fn portable(storage: Dtype, dim: usize, value_dim: Option<usize>, options: bool) -> Self {
        Self::ffma(Family::Portable, storage, (dim, value_dim), options)
    }

    /// The kernels of the second order, as [`Variant::portable`].
    pub fn second(storage: Dtype, dim: usize, value_dim: Option<usize>, options: bool) -> Self {
        Self::ffma(Family::Second, storage, (dim, value_dim), options)
    }

    fn ffma(
        family: Family,
        storage: Dtype,
        (dim, value_dim): (usize, Option<usize>),
        options: bool,
    ) -> Self {
        Variant {
            family,
            defines: vec![
                ("R", rows(family, dim, value_dim).to_string()),
                ("STORAGE", number(storage)),
                ("OPTIONS", u8::from(options).to_string()),
                ("VALUES", u8::from(value_dim.is_some()).to_string()),
                ("CD", width(dim).to_string()),
                ("CE", width(value_dim.unwrap_or(1)).to_string()),
            ],
        }
    }

    /// The kernels on tensor cores of any device, as [`Variant::portable`].
    /// `whole`: rows of q, k, v and dout begin and end at multiples of 16 bytes.
    pub fn tensor(
        storage: Dtype,
        dim: usize,
        value_dim: Option<usize>,
        options: bool,
        whole: bool,
    ) -> Self {
        // Wider results take several launches.
        let accumulator = width(value_dim.unwrap_or(1)).min(128);
        Variant {
            family: Family::Tensor,
            defines: vec![
                ("STORAGE", number(storage)),
                ("OPTIONS", u8::from(options).to_string()),
                ("WHOLE", u8::from(whole).to_string()),
                ("VALUES", u8::from(value_dim.is_some()).to_string()),
                ("CD", width(dim).to_string()),
                ("CE", accumulator.to_string()),
            ],
        }
    }

    /// The forward pass on tensor cores, of operands 64 or 128 columns wide; whether the mask is a window,
    /// and whether batch elements have lengths of their own.
    pub fn hopper_forward(
        storage: Dtype,
        width: usize,
        [windowed, lengths]: [bool; 2],
        values: bool,
    ) -> Self {
        // Three warpgroups fit the registers where rows are 64 columns wide.
        let groups = if width == 128 { 2 } else { 3 };
        Variant {
            family: Family::HopperForward,
            defines: vec![
                ("STORAGE", number(storage)),
                ("D", width.to_string()),
                ("WINDOW", u8::from(windowed).to_string()),
                ("GROUPS", groups.to_string()),
                ("VALUES", u8::from(values).to_string()),
                ("LENGTHS", u8::from(lengths).to_string()),
            ],
        }
    }

    /// The backward pass on tensor cores.
    pub fn hopper_backward(storage: Dtype, width: usize, [windowed, lengths]: [bool; 2]) -> Self {
        Variant {
            family: Family::HopperBackward,
            defines: vec![
                ("STORAGE", number(storage)),
                ("D", width.to_string()),
                ("WINDOW", u8::from(windowed).to_string()),
                ("LENGTHS", u8::from(lengths).to_string()),
            ],
        }
    }

    /// The kernels of linear_attention, or of its second order, for results with so many columns.
    pub fn linear(storage: Dtype, columns: usize, second: bool) -> Self {
        let family = if second { Family::LinearSecond } else { Family::Linear };
        Variant {
            family,
            defines: vec![
                ("R", linear_rows(columns, second).to_string()),
                ("STORAGE", number(storage)),
                ("CW", width(columns).to_string()),
            ],
        }
    }

    /// The kernels of linear_attention on tensor cores of any device, of factors and results with so many
    /// columns. `whole`: rows of q, k, v and dout begin and end at multiples of 16 bytes.
    pub fn linear_tensor(storage: Dtype, columns: [usize; 2], whole: bool) -> Self {
        Variant {
            family: Family::LinearTensor,
            defines: vec![
                ("STORAGE", number(storage)),
                ("WHOLE", u8::from(whole).to_string()),
                ("KW", width(columns[0]).to_string()),
                ("CW", width(columns[1]).to_string()),
            ],
        }
    }

    /// Copies and fills of elements of 2 or 4 bytes.
    pub fn moves(bytes: usize) -> Self {
        Variant { family: Family::Moves, defines: vec![("WORD", bytes.to_string())] }
    }

    /// The names of its kernels.
    pub fn kernels(&self) -> &'static [&'static str] {
        let options = self.defines.contains(&("OPTIONS", "1".to_string()));
        match self.family {
            Family::Portable if options => {
                &["forward", "delta", "queries", "keys", "dsinks", "dbias"]
            }
            Family::Portable => &["forward", "delta", "queries", "keys", "dsinks"],
            Family::Second if options => {
                &["tangents", "rows", "queries", "keys", "gsinks", "gbias"]
            }
            Family::Second => &["tangents", "rows", "queries", "keys", "gsinks"],
            Family::Tensor if self.define("CD") > 128 => &["forward"],
            Family::Tensor => &["forward", "queries", "keys"],
            Family::HopperForward => &["forward"],
            Family::HopperBackward => {
                &["inspect", "delta", "keys", "queries", "cleanse", "cleanse_rows", "merge"]
            }
            Family::Linear => {
                &["fill_gates", "sums", "scan", "attend", "flow", "sum_all", "sum_heads", "step"]
            }
            Family::LinearTensor => &["sums", "attend", "flow"],
            Family::LinearSecond => {
                &["tangent_sums", "scan_second", "attend_second", "flow_second"]
            }
            Family::Moves => &["move"],
        }
    }

    /// The storage type; `None` of copies, which take any.
    pub fn storage(&self) -> Option<Dtype> {
        let of = |dtype: &Dtype| self.defines.contains(&("STORAGE", number(*dtype)));
        [Dtype::F32, Dtype::Bf16, Dtype::F16].into_iter().find(of)
    }

    /// Whether it is compiled for passes whose q and k have so many columns.
    pub fn serves(&self, dim: usize) -> bool {
        match self.family {
            Family::Moves => true,
            Family::HopperForward | Family::HopperBackward => dim <= self.define("D"),
            Family::Linear | Family::LinearSecond | Family::LinearTensor => {
                width(dim) == self.define("CW")
            }
            _ => width(dim) == self.define("CD"),
        }
    }

    /// The value of a name.
    fn define(&self, name: &str) -> usize {
        let found = self.defines.iter().find(|(other, _)| *other == name);
        found.and_then(|(_, value)| value.parse().ok()).unwrap_or(0)
    }

    /// The whole source. Messages of the compiler name the file and its line.
    pub fn source(&self) -> String {
        let mut source = String::new();
        for (name, text) in self.family.texts() {
            let _ = writeln!(source, "#line 1 \"{name}\"\n{text}");
        }
        source
    }

    /// The options of the compiler, for an architecture.
    pub fn options(&self, architecture: &str) -> Vec<String> {
        let mut options = vec![
            format!("--gpu-architecture={architecture}"),
            "--std=c++17".to_string(),
            "-default-device".to_string(),
            "--ptxas-options=-v".to_string(),
        ];
        options.extend(self.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        options
    }

    /// The name of its machine code in a cache or an archive: a hash of the source, the options, the
    /// architecture, and the version of the compiler.
    pub(crate) fn key(&self, architecture: &str, nvrtc: &str) -> String {
        Cache::key(&[&self.source(), &self.options(architecture).join("\n"), nvrtc])
    }

    /// What tells it from others, in words.
    pub fn describe(&self) -> String {
        let defines = self.defines.iter().map(|(name, value)| format!("{name}={value}"));
        format!("{:?} {}", self.family, defines.collect::<Vec<_>>().join(" "))
    }
}

/// How sources number a storage type.
fn number(storage: Dtype) -> String {
    let number = match storage {
        Dtype::Bf16 => 1,
        Dtype::F16 => 2,
        _ => 0,
    };
    number.to_string()
}

/// The shared memory of a block of a kernel that its source does not declare: tiles, as the constants of
/// the source lay them out, with room to align them.
pub fn shared_bytes(variant: &Variant, kernel: &str) -> u32 {
    let (width, groups) = (variant.define("D"), variant.define("GROUPS"));
    let rows = |rows: usize| 2 * rows * width; // bytes of so many rows
    let (cd, ce) = (variant.define("CD"), variant.define("CE"));
    let bytes = match (variant.family, kernel) {
        // q; k and v in two stages.
        (Family::Tensor, "forward") => {
            let (rows, keys) = if cd > 128 { (64, 32) } else { (128, 64) };
            2 * rows * cd + 4 * keys * (cd + ce)
        }
        // What a block owns, and two stages of what it walks.
        (Family::Tensor, _) => 6 * 64 * (cd + variant.define("VALUES") * ce) + 16 * 64,
        // y; b and x of one tile; the state, or b and x of the next tile.
        (Family::LinearTensor, "attend") => {
            let (inner, outer) = (variant.define("KW"), variant.define("CW"));
            let pair = 128 * (inner + outer);
            128 * inner + pair + pair.max(2 * inner * outer)
        }
        // Both factors of a chunk.
        (Family::LinearTensor, "sums") => 256 * (variant.define("KW") + variant.define("CW")),
        // q, k, dout and v of a micro-chunk; w.
        (Family::LinearTensor, _) => {
            256 * (variant.define("KW") + variant.define("CW")) + 4 * 64 * 65
        }
        // q; k and v in two stages; P or o of each warpgroup; barriers.
        (Family::HopperForward, _) => {
            1024 + rows(64 * groups) + 4 * rows(128) + groups * 16384 + 256
        }
        // k, v; q, dout and their numbers in three stages; barriers.
        (Family::HopperBackward, "keys") => 2048 + 2 * rows(128) + 3 * (2 * rows(64) + 512),
        // q, dout; k and v in two stages; barriers.
        (Family::HopperBackward, "queries") => 2048 + 2 * rows(128) + 4 * rows(128),
        _ => 0,
    };
    bytes as u32
}
