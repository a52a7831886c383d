//! The variants of the kernels that are compiled.

use crate::family::Family;
use crate::unit::Unit;
use etalon_problem::Dtype;

/// A source with the values of its compile-time names: one module of kernels.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Variant {
    /// Which kernels.
    pub family: Family,
    /// Names and values, in the order of the source's comments.
    pub defines: Vec<(&'static str, String)>,
}

/// The widths of accumulators. Wider operands take several launches.
pub(crate) const WIDTHS: [usize; 3] = [64, 128, 256];

/// The narrowest accumulator that holds this many columns, or the widest.
pub(crate) fn width(columns: usize) -> usize {
    WIDTHS.into_iter().find(|&width| width >= columns).unwrap_or(WIDTHS[2])
}

/// Rows of a tile that a thread of the portable kernels has: 8, or 4 where it would have too few registers.
fn rows(family: Family, dim: usize, value_dim: Option<usize>) -> usize {
    let most = if matches!(family, Family::AttentionPortable | Family::AttentionFallback) {
        128
    } else {
        64
    };
    if width(dim.max(value_dim.unwrap_or(1))) > most { 4 } else { 8 }
}

/// Threads of a block of portable kernels.
pub(crate) fn threads(family: Family, dim: usize, value_dim: Option<usize>) -> u32 {
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

impl Variant {
    /// The portable kernels of a storage type, of operands with D and E columns (`None`: no values), with
    /// softcap, bias and arrays of flags or without.
    pub fn portable(storage: Dtype, dim: usize, value_dim: Option<usize>, options: bool) -> Self {
        Self::ffma(Family::AttentionPortable, storage, (dim, value_dim), options)
    }

    /// The backward pass where results of tensor cores are not finite, as [`Variant::portable`].
    pub fn fallback(storage: Dtype, dim: usize, value_dim: Option<usize>, options: bool) -> Self {
        Self::ffma(Family::AttentionFallback, storage, (dim, value_dim), options)
    }

    /// The kernels of the second order, as [`Variant::portable`].
    pub fn second(storage: Dtype, dim: usize, value_dim: Option<usize>, options: bool) -> Self {
        Self::ffma(Family::AttentionPortableSecondOrder, storage, (dim, value_dim), options)
    }

    /// The kernels of lazy_attention, with a bias or an array of flags or without.
    pub fn lazy(storage: Dtype, dim: usize, value_dim: usize, options: bool) -> Self {
        Self::ffma(Family::LazyPortable, storage, (dim, Some(value_dim)), options)
    }

    /// Those of them that walk tiles, on tensor cores of any device; `whole` as in [`Variant::tensor`].
    pub fn lazy_tensor(
        storage: Dtype,
        dim: usize,
        value_dim: usize,
        options: bool,
        whole: bool,
    ) -> Self {
        Variant {
            family: Family::LazySm80,
            defines: vec![
                ("STORAGE", number(storage)),
                ("OPTIONS", u8::from(options).to_string()),
                ("WHOLE", u8::from(whole).to_string()),
                ("CD", width(dim).to_string()),
                // Wider results take several launches.
                ("CE", width(value_dim).min(128).to_string()),
            ],
        }
    }

    /// Its forward pass, or its backward pass, for compute capability 9.0, of operands with so many columns: 64 or
    /// 128. `listed`: sequences are not those of the arrays.
    pub fn hopper_lazy(storage: Dtype, columns: usize, listed: bool, backward: bool) -> Self {
        let families = [Family::LazySm90aForward, Family::LazySm90aBackward];
        Variant {
            family: families[usize::from(backward)],
            defines: vec![
                ("STORAGE", number(storage)),
                ("D", columns.to_string()),
                ("LENGTHS", if listed { "2" } else { "0" }.to_string()),
            ],
        }
    }

    /// The warpgroups of one of its kernels: 64 queries each.
    pub(crate) fn lazy_groups(&self, kernel: &str) -> usize {
        match kernel {
            "scores" if self.define("D") == 64 => 4,
            "scores" => 3,
            "values" | "sums" if self.define("D") == 64 => 3,
            _ => 2,
        }
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

    /// The kernels of linear_attention, or of its second order, for results with so many columns.
    pub fn linear(storage: Dtype, columns: usize, second: bool) -> Self {
        let family =
            if second { Family::LinearPortableSecondOrder } else { Family::LinearPortable };
        Variant {
            family,
            defines: vec![
                ("R", linear_rows(columns, second).to_string()),
                ("STORAGE", number(storage)),
                ("CW", width(columns).to_string()),
            ],
        }
    }

    /// linear_cross_entropy of a storage type, of the second order or the first.
    pub fn cross_entropy(storage: Dtype, second: bool) -> Self {
        Variant {
            family: Family::CrossEntropyPortable,
            defines: vec![("STORAGE", number(storage)), ("SECOND", u8::from(second).to_string())],
        }
    }

    /// What shards of the classes of linear_cross_entropy need besides.
    pub fn cross_entropy_shards(storage: Dtype) -> Self {
        let defines = vec![("STORAGE", number(storage)), ("SECOND", "0".to_string())];
        Variant { family: Family::CrossEntropyShards, defines }
    }

    /// The first order of linear_cross_entropy on tensor cores.
    pub fn hopper_cross_entropy(storage: Dtype) -> Self {
        let defines = vec![("STORAGE", number(storage)), ("SECOND", "0".to_string())];
        Variant { family: Family::CrossEntropySm90a, defines }
    }

    /// The kernels of linear_attention on tensor cores of any device, of factors and results with so many
    /// columns. `whole`: rows of q, k, v and dout begin and end at multiples of 16 bytes.
    pub fn linear_tensor(storage: Dtype, columns: [usize; 2], whole: bool) -> Self {
        Variant {
            family: Family::LinearSm80,
            defines: vec![
                ("STORAGE", number(storage)),
                ("WHOLE", u8::from(whole).to_string()),
                ("KW", width(columns[0]).to_string()),
                ("CW", width(columns[1]).to_string()),
            ],
        }
    }

    /// The kernels of linear_attention for compute capability 9.0, of factors with so many columns: at most 128.
    /// `by_token`: with a log-decay for each token.
    pub fn hopper_linear(storage: Dtype, columns: usize, by_token: bool) -> Self {
        Variant {
            family: Family::LinearSm90a,
            defines: vec![
                ("STORAGE", number(storage)),
                ("KW", width(columns).to_string()),
                ("BY_TOKEN", u8::from(by_token).to_string()),
            ],
        }
    }

    /// Copies and fills of elements of 2 or 4 bytes.
    pub fn moves(bytes: usize) -> Self {
        Variant { family: Family::Move, defines: vec![("WORD", bytes.to_string())] }
    }

    /// The tables of lengths, offsets and masks that lie on the device.
    pub fn tables() -> Self {
        Variant { family: Family::Tables, defines: Vec::new() }
    }

    /// Products on a unit, of numbers of a storage type.
    pub fn peak(unit: Unit, storage: Dtype) -> Self {
        let (family, storage) = match unit {
            Unit::Ffma => (Family::PeakFfma, Dtype::F32),
            Unit::Mma => (Family::PeakMma, storage),
            Unit::Wgmma => (Family::PeakWgmma, storage),
        };
        // tf32 has half of the rate of bf16, three products of bf16 a third.
        let storage =
            if unit != Unit::Ffma && storage == Dtype::F32 { Dtype::Bf16 } else { storage };
        let unit = ("UNIT", (unit as u8).to_string());
        Variant { family, defines: vec![("STORAGE", number(storage)), unit] }
    }

    /// The same with another value of a name that it has.
    pub(crate) fn with(mut self, name: &str, value: usize) -> Self {
        self.defines.iter_mut().filter(|x| x.0 == name).for_each(|x| x.1 = value.to_string());
        self
    }

    /// The names of its kernels.
    pub fn kernels(&self) -> &'static [&'static str] {
        let options = self.defines.contains(&("OPTIONS", "1".to_string()));
        let values = self.define("VALUES") > 0;
        let fuses = self.define("CD") == 64 && self.define("CE") == 64;
        match self.family {
            Family::AttentionPortable => match (options, self.define("VALUES")) {
                (true, 0) => &[
                    "forward", "delta", "queries", "scale", "keys", "fused", "collect", "dsinks",
                    "dbias",
                ],
                (true, _) => {
                    &["forward", "delta", "queries", "keys", "fused", "collect", "dsinks", "dbias"]
                }
                (false, 0) => {
                    &["forward", "delta", "queries", "scale", "keys", "fused", "collect", "dsinks"]
                }
                (false, _) => {
                    &["forward", "delta", "queries", "keys", "fused", "collect", "dsinks"]
                }
            },
            Family::AttentionFallback => &["fallback"],
            Family::AttentionPortableSecondOrder if fuses && options => {
                &["tangents", "rows", "queries", "keys", "fused", "collect", "gsinks", "gbias"]
            }
            Family::AttentionPortableSecondOrder if fuses => {
                &["tangents", "rows", "queries", "keys", "fused", "collect", "gsinks"]
            }
            Family::AttentionPortableSecondOrder if options => {
                &["tangents", "rows", "queries", "keys", "gsinks", "gbias"]
            }
            Family::AttentionPortableSecondOrder => {
                &["tangents", "rows", "queries", "keys", "gsinks"]
            }
            Family::LazyPortable => &[
                "scores", "values", "measure", "inspect", "counts", "queries", "keys", "dbias",
                "dtau",
            ],
            Family::LazySm80 => &["scores", "values", "means", "queries", "keys"],
            Family::AttentionSm80 if self.define("CD") > 128 => &["forward"],
            Family::AttentionSm80 if options && values => {
                &["forward", "queries", "keys", "values", "dbias"]
            }
            Family::AttentionSm80 if options => &["forward", "queries", "keys", "dbias"],
            Family::AttentionSm80 if values => &["forward", "queries", "keys", "values"],
            Family::AttentionSm80 => &["forward", "queries", "keys"],
            Family::AttentionSm80Fused => &["fused", "collect"],
            Family::AttentionSm80F32 if options => &["forward", "queries", "keys", "dbias"],
            Family::AttentionSm80F32 => &["forward", "queries", "keys"],
            Family::AttentionSm80Wide if self.define("VALUES") == 0 => &["queries", "keys"],
            Family::AttentionSm80Wide => &["queries", "keys", "values"],
            Family::AttentionSm80SecondOrder => &["inspect", "tangents", "queries", "keys"],
            Family::AttentionSm90aForward => &["forward"],
            Family::LazySm90aForward => &["scores", "values", "sums"],
            Family::LazySm90aBackward => &["queries", "keys"],
            Family::AttentionSm90aBackward if self.define("RESULTS") == 2 => {
                &["delta", "keys", "values"]
            }
            Family::AttentionSm90aBackward => &["delta", "keys", "queries"],
            Family::LinearPortable if self.define("STORAGE") == 0 => {
                &["fill_gates", "sums", "scan", "attend", "flow", "sum_all", "sum_heads", "step"]
            }
            Family::LinearPortable => &[
                "fill_gates",
                "sums",
                "scan",
                "attend",
                "flow",
                "sum_all",
                "sum_heads",
                "step",
                "mend_sums",
                "mend",
            ],
            Family::LinearSm80 => &["sums", "attend", "flow"],
            Family::LinearPortableSecondOrder => {
                &["tangent_sums", "scan_second", "attend_second", "flow_second"]
            }
            Family::CrossEntropyPortable if self.define("SECOND") > 0 => &[
                "tokens",
                "logits",
                "motions",
                "totals",
                "finish",
                "loss",
                "gradients",
                "hidden",
                "head",
                "bias",
            ],
            Family::CrossEntropyPortable => &[
                "tokens",
                "logits",
                "totals",
                "finish",
                "loss",
                "gradients",
                "hidden",
                "head",
                "bias",
                "norms",
                "measure",
                "certify",
                "choose",
            ],
            Family::CrossEntropyShards => {
                &["place", "identities", "partials", "combine", "recall", "add", "sum"]
            }
            Family::CrossEntropySm90a => &[
                "leaves",
                "scale",
                "gradient",
                "hidden",
                "hidden_192",
                "head",
                "tree",
                "gather",
                "bias",
            ],
            Family::LinearSm90a if self.define("BY_TOKEN") > 0 => &[
                "attend",
                "attend_dots",
                "attend_back",
                "attend_back_dots",
                "sums",
                "sums_back",
                "scan",
                "flow",
            ],
            Family::LinearSm90a => &[
                "attend_plain",
                "attend",
                "attend_dots",
                "attend_back",
                "attend_back_dots",
                "sums",
                "sums_back",
                "scan",
            ],
            Family::Move => &["move"],
            Family::Tables => &["sequences", "rows"],
            Family::PeakFfma | Family::PeakMma | Family::PeakWgmma => &["peak"],
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
            Family::CrossEntropyPortable
            | Family::CrossEntropyShards
            | Family::CrossEntropySm90a
            | Family::Move
            | Family::Tables
            | Family::PeakFfma
            | Family::PeakMma
            | Family::PeakWgmma => true,
            Family::AttentionSm90aForward
            | Family::AttentionSm90aBackward
            | Family::LazySm90aForward
            | Family::LazySm90aBackward => dim <= self.define("D"),
            Family::LinearPortable | Family::LinearPortableSecondOrder | Family::LinearSm80 => {
                width(dim) == self.define("CW")
            }
            Family::LinearSm90a => width(dim) == self.define("KW"),
            Family::AttentionSm80Wide => width(dim).max(128) == self.define("CD"),
            _ => width(dim) == self.define("CD"),
        }
    }

    /// The value of a name.
    pub(crate) fn define(&self, name: &str) -> usize {
        let found = self.defines.iter().find(|(other, _)| *other == name);
        found.and_then(|(_, value)| value.parse().ok()).unwrap_or(0)
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
        // What sources assert of their layouts: `CHECK_SHARED` of `tile/types.cuh`.
        let shared = self.kernels().iter().map(|name| (name, shared_bytes(self, name)));
        let shared = shared.filter(|(_, bytes)| *bytes > 0);
        options.extend(shared.map(|(name, bytes)| format!("-DSHARED_{name}={bytes}")));
        if cfg!(feature = "racecheck") {
            options.push("-DARRIVALS=32".to_string()); // of `feed/barriers.cuh`
        }
        options
    }

    /// What tells it from others, in words.
    pub fn describe(&self) -> String {
        let defines = self.defines.iter().map(|(name, value)| format!(" {name}={value}"));
        format!("{}{}", self.family, defines.collect::<String>())
    }
}

/// How sources number a storage type.
pub(crate) fn number(storage: Dtype) -> String {
    let number = match storage {
        Dtype::Bf16 => 1,
        Dtype::F16 => 2,
        _ => 0,
    };
    number.to_string()
}

/// The shared memory of a block of a kernel that its source does not declare: tiles, as the constants of
/// the source lay them out, with room to align them. The source asserts that it is these bytes.
pub fn shared_bytes(variant: &Variant, kernel: &str) -> u32 {
    let (width, groups) = (variant.define("D"), variant.define("GROUPS"));
    let rows = |rows: usize| 2 * rows * width; // bytes of so many rows
    let (cd, ce) = (variant.define("CD"), variant.define("CE"));
    let bytes = match (variant.family, kernel) {
        // q; k and v in two stages.
        (Family::AttentionSm80, "forward") => {
            let (rows, keys) = match variant.define("TILES") {
                _ if cd > 128 => (64, 32),
                1 => (128, 32),
                2 => (64, 64),
                _ => (128, 64),
            };
            2 * rows * cd + 4 * keys * (cd + variant.define("VALUES") * ce)
        }
        // q; k and v, or two stages of k.
        (Family::AttentionSm80F32, "forward") => {
            let walked = if variant.define("VALUES") > 0 { cd + ce } else { 2 * cd };
            4 * 128 * cd + 4 * 32 * walked
        }
        // q and k, then dout and v in their place.
        (Family::AttentionSm80F32, "dbias") => 2 * 4 * 64 * cd.max(variant.define("VALUES") * ce),
        // What a block owns, and what it walks with two numbers a row.
        (Family::AttentionSm80F32, _) => {
            let columns = cd + variant.define("VALUES") * ce;
            let stages = if columns > 192 { 1 } else { 2 };
            4 * 64 * columns + stages * (4 * 32 * columns + 8 * 32)
        }
        // What a block owns, and two stages of what it walks with two numbers a row.
        (Family::AttentionSm80, "values") => {
            let walked = if (cd, ce) == (64, 64) { 64 } else { 32 };
            2 * 128 * cd + 2 * (2 * walked * (cd + ce) + 8 * walked)
        }
        // q, k, dout and v.
        (Family::AttentionSm80, "dbias") => 4 * 64 * (cd + variant.define("VALUES") * ce),
        // What a block owns, and what it walks with two numbers a row.
        (Family::AttentionSm80Wide, _) => {
            let columns = cd + variant.define("VALUES") * ce;
            2 * 64 * columns + variant.define("STAGES") * (2 * 32 * columns + 8 * 32)
        }
        // What a block owns, and what it walks: an operand and its tangent.
        (Family::AttentionSm80SecondOrder, "inspect") => 0,
        (Family::AttentionSm80SecondOrder, _) => {
            4 * (64 + 32) * (cd + variant.define("VALUES") * ce)
        }
        // As `keys`, with dS of a tile where no dout has room for it.
        (Family::AttentionSm80Fused, "fused") => {
            let values = variant.define("VALUES");
            6 * 64 * (cd + values * ce) + 16 * 64 + (1 - values.min(1)) * 2 * 64 * 64
        }
        (Family::AttentionSm80Fused, _) => 0,
        // What a block owns, and two stages of what it walks: 64 rows of 64 or 32.
        (Family::AttentionSm80, _) if variant.define("TILES") == 1 => {
            4 * 64 * (cd + variant.define("VALUES") * ce) + 16 * 32
        }
        (Family::AttentionSm80, _) => 6 * 64 * (cd + variant.define("VALUES") * ce) + 16 * 64,
        // q; k and its bias in two stages, and v.
        (Family::LazySm80, "scores") => 512 * cd + 2 * 768,
        (Family::LazySm80, "values") => 512 * cd + 256 * ce + 2 * 768,
        // What a block owns, and two stages of what it walks, with its bias and numbers of rows.
        (Family::LazySm80, "means" | "queries") => 384 * (cd + ce) + 2 * 512,
        (Family::LazySm80, _) => 384 * (cd + ce) + 2 * (512 + 768),
        // y; b and x of one tile; the state, or b and x of the next tile.
        (Family::LinearSm80, "attend") => {
            let (inner, outer) = (variant.define("KW"), variant.define("CW"));
            let pair = 128 * (inner + outer);
            128 * inner + pair + pair.max(2 * inner * outer)
        }
        // Both factors of a chunk.
        (Family::LinearSm80, "sums") => 256 * (variant.define("KW") + variant.define("CW")),
        // q, k, dout and v of a micro-chunk; w.
        (Family::LinearSm80, _) => {
            256 * (variant.define("KW") + variant.define("CW")) + 4 * 64 * 65
        }
        // q; k and v in two stages; P or o of each warpgroup; barriers.
        (Family::AttentionSm90aForward, _) => {
            1024 + rows(64 * groups) + 4 * rows(128) + groups * 16384 + 256
        }
        // q of some tiles, with dout; in stages k and its bias, and v; the largest scores of rows by stripe, or o; barriers.
        (
            Family::LazySm90aForward | Family::LazySm90aBackward,
            "scores" | "values" | "sums" | "queries",
        ) => {
            let queries = 64 * variant.lazy_groups(kernel);
            let (tiles, stages) = if width == 64 { (2, 4) } else { (1, 2) };
            let (own, walked, out) = match kernel {
                "scores" => (rows(queries), rows(128), 128 * queries),
                "queries" => (2 * rows(queries), 2 * rows(128), 0),
                _ => (rows(queries), 2 * rows(128), rows(queries)),
            };
            let near = 4 * (queries + 128);
            1024 + tiles * (own + 32) + stages * (walked + near + 32) + out
        }
        // k and v; q, dout, their numbers and bias in three stages; sums of diagonals; barriers.
        (Family::LazySm90aBackward, _) => {
            1024 + 2 * rows(128) + 3 * (2 * rows(64) + 1024 + 768) + 16 * (32 * 72 + 64) + 84
        }
        // What two tiles own; what they walk and its numbers in four stages, or two of dout beside; barriers.
        (Family::AttentionSm90aBackward, "keys" | "queries") if variant.define("RESULTS") == 0 => {
            1024 + 6 * rows(128) + 4 * (1024 + 32) + 56
        }
        (Family::AttentionSm90aBackward, "values") => 1024 + 6 * rows(128) + 2 * (1024 + 32) + 56,
        // k and v of two tiles; q, dout and their numbers in three stages; barriers.
        (Family::AttentionSm90aBackward, "keys") => {
            1024 + 4 * rows(128) + 3 * (2 * rows(64) + 512) + 104
        }
        // q, dout, dq; k and v in two stages; barriers.
        (Family::AttentionSm90aBackward, "queries") => 1024 + 7 * rows(128) + 104,
        // Four stages of a and five of b; barriers.
        (Family::CrossEntropySm90a, "leaves") => 1024 + 4 * 16384 + 5 * 32768 + 4 * 32 + 5 * 16,
        // Panels of both operands in four stages or five, and of what is stored; barriers.
        (Family::CrossEntropySm90a, "hidden") => 1024 + 4 * 49152 + 64,
        (Family::CrossEntropySm90a, "hidden_192") => 1024 + 5 * 40960 + 80,
        (Family::CrossEntropySm90a, "gradient" | "head") => 1024 + 4 * 49152 + 32768 + 64,
        (Family::LinearSm90a, "scan") => 0,
        // q and k, or dout and v, three times or six; two tables of decays; sums of columns and rows, w of blocks; barriers.
        (Family::LinearSm90a, "flow") => {
            196_608 + 2 * 8464 + 4608 + 8704 + 64 + 16 * (384 / variant.define("KW")) + 32
        }
        // y and b, and x, in two stages; x weighted; the state in two; out; decays and barriers.
        (Family::LinearSm90a, _) => {
            let inner = variant.define("KW");
            4 * 256 * inner + 3 * 16384 + 2 * 128 * inner + 16384 + 2568 + 80
        }
        _ => 0,
    };
    bytes as u32
}

/// The shared memory of a block of a kernel that its source declares; `None` of kernels of which nobody asks.
pub fn declared_bytes(variant: &Variant, kernel: &str) -> Option<u32> {
    // `Shared` of `tile/ffma.cuh`; what `flow` keeps of a chunk beside it, and a number of each thread.
    const SLABS: u32 = 34_816;
    match (variant.family, kernel) {
        (Family::AttentionPortable, "forward" | "queries" | "keys" | "fused" | "dbias") => {
            Some(SLABS)
        }
        (Family::AttentionFallback, _) => Some(SLABS),
        (
            Family::AttentionPortableSecondOrder,
            "tangents" | "queries" | "keys" | "fused" | "gbias",
        ) => Some(SLABS),
        (Family::AttentionPortable, "delta" | "scale" | "collect") => Some(0),
        (Family::AttentionPortableSecondOrder, "rows" | "collect") => Some(0),
        (Family::AttentionPortable | Family::AttentionPortableSecondOrder, "dsinks" | "gsinks") => {
            Some(if variant.define("R") == 8 { 512 } else { 1024 })
        }
        (Family::LinearPortable, "attend" | "sums") => Some(SLABS),
        (Family::LinearPortable, "flow") => {
            Some(SLABS + if variant.define("R") == 8 { 2576 } else { 3088 })
        }
        (Family::LinearSm80, "flow") => Some(2688),
        (Family::LinearSm80, "attend" | "sums") => Some(0),
        (Family::AttentionSm80Fused, _) => Some(0),
        _ => None,
    }
}
