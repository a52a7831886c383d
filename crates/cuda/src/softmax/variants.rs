//! The variants of the kernels of attention on tensor cores.

use crate::family::Family;
use crate::options::Level;
use crate::unit::Unit;
use crate::variant::{Variant, number, shared_bytes, width};
use etalon_problem::{Blocking, Dtype};

/// What the kernels for compute capability 9.0 are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hopper {
    /// bf16 or f16.
    pub storage: Dtype,
    /// Columns of every operand: 64 or 128.
    pub width: usize,
    /// Which pairs the mask shows.
    pub visible: Visible,
    /// Whether sequences have lengths of their own.
    pub lengths: Lengths,
    /// Whether there is a softcap, a bias, or a scale that is not above 0.
    pub options: bool,
}

/// The pairs that a mask shows, by the value of WINDOW.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Visible {
    /// All.
    All,
    /// A window of keys that moves with the query.
    Window,
    /// Of each query a range of keys, from a table.
    Spans,
}

/// The lengths of sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Lengths {
    /// Those of the arrays.
    Equal,
    /// Of each batch element its own.
    Own,
    /// Sequences are listed: packed ones in the only batch element, or those of batch elements.
    Listed,
}

/// What kernels of the backward pass for compute capability 9.0 compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Results {
    /// dq and dk of attention_lse, each on its own.
    Lse,
    /// dq, and dk with dv.
    All,
    /// dk or dv, without the other.
    Alone,
}

impl Hopper {
    /// That which computes at least what is asked: not every choice is compiled with every other.
    pub fn within(self) -> Hopper {
        let lengths = match self.lengths {
            _ if self.visible == Visible::Spans => Lengths::Listed,
            Lengths::Own if self.options => Lengths::Listed,
            lengths => lengths,
        };
        let hides = self.options || lengths == Lengths::Listed;
        let visible = if hides { self.visible.max(Visible::Window) } else { self.visible };
        Hopper { visible, lengths, ..self }
    }

    fn defines(self) -> Vec<(&'static str, String)> {
        vec![
            ("STORAGE", number(self.storage)),
            ("D", self.width.to_string()),
            ("WINDOW", (self.visible as u8).to_string()),
            ("LENGTHS", (self.lengths as u8).to_string()),
            ("OPTIONS", u8::from(self.options).to_string()),
        ]
    }
}

/// Whether three warpgroups fit the registers: rows are 64 columns wide and nothing is asked besides.
pub(crate) fn has_three(of: Hopper) -> bool {
    of.width == 64 && !of.options && of.lengths != Lengths::Listed
}

/// The shared memory that a block may have on an architecture, in bytes.
pub(crate) fn most_shared(architecture: &str) -> u32 {
    match architecture {
        "sm_80" | "sm_87" => 166_912,
        "sm_86" | "sm_89" | "sm_120" | "sm_121" => CONSUMER,
        _ => 232_448,
    }
}

/// That of devices of compute capability 8.6, 8.9 and 12.0.
pub(crate) const CONSUMER: u32 = 101_376;

impl Variant {
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
            family: Family::AttentionSm80,
            defines: vec![
                ("STORAGE", number(storage)),
                ("OPTIONS", u8::from(options).to_string()),
                ("WHOLE", u8::from(whole).to_string()),
                ("VALUES", u8::from(value_dim.is_some()).to_string()),
                ("CD", width(dim).to_string()),
                ("CE", accumulator.to_string()),
                ("TILES", "0".to_string()),
            ],
        }
    }

    /// Their pass by keys with what these add to dq, D and E up to 128.
    pub fn tensor_fused(
        storage: Dtype,
        dim: usize,
        value_dim: Option<usize>,
        [options, whole]: [bool; 2],
    ) -> Self {
        let plain = Self::tensor(storage, dim, value_dim, options, whole);
        let defines = plain.defines.into_iter().filter(|(name, _)| *name != "TILES").collect();
        Variant { family: Family::AttentionSm80Fused, defines }
    }

    /// Those of f32, with factors as sums of two numbers in `bf16` or rounded to tf32, D up to 128, as
    /// [`Variant::tensor`].
    pub fn tensor_f32(
        bf16x3: bool,
        dim: usize,
        value_dim: Option<usize>,
        [options, whole]: [bool; 2],
    ) -> Self {
        let flags = [("BF16X3", bf16x3), ("OPTIONS", options), ("WHOLE", whole)];
        let mut defines = vec![("STORAGE", number(Dtype::F32))];
        defines.extend(flags.map(|(name, flag)| (name, u8::from(flag).to_string())));
        defines.push(("VALUES", u8::from(value_dim.is_some()).to_string()));
        defines.push(("CD", width(dim).to_string()));
        // Wider results take several launches.
        defines.push(("CE", width(value_dim.unwrap_or(1)).min(128).to_string()));
        Variant { family: Family::AttentionSm80F32, defines }
    }

    /// Their backward pass where D or E is above 128, with walked tiles in 1 or 2 stages.
    pub fn tensor_wide(
        storage: Dtype,
        dim: usize,
        value_dim: Option<usize>,
        [options, whole]: [bool; 2],
        stages: usize,
    ) -> Self {
        let columns = width(dim).max(128);
        let values = value_dim.map_or(64, |columns| width(columns).max(128));
        Variant {
            family: Family::AttentionSm80Wide,
            defines: vec![
                ("STORAGE", number(storage)),
                ("OPTIONS", u8::from(options).to_string()),
                ("WHOLE", u8::from(whole).to_string()),
                ("VALUES", u8::from(value_dim.is_some()).to_string()),
                ("CD", columns.to_string()),
                ("CE", values.to_string()),
                ("STAGES", stages.to_string()),
            ],
        }
    }

    /// Their second order of bf16, with D and E up to 128.
    pub fn tensor_second(
        dim: usize,
        value_dim: Option<usize>,
        [options, whole]: [bool; 2],
    ) -> Self {
        Variant {
            family: Family::AttentionSm80SecondOrder,
            defines: vec![
                ("STORAGE", number(Dtype::Bf16)),
                ("OPTIONS", u8::from(options).to_string()),
                ("WHOLE", u8::from(whole).to_string()),
                ("VALUES", u8::from(value_dim.is_some()).to_string()),
                ("CD", width(dim).to_string()),
                ("CE", width(value_dim.unwrap_or(1)).to_string()),
            ],
        }
    }

    /// The forward pass on the tensor cores of compute capability 9.0.
    pub(crate) fn hopper_forward(of: Hopper, values: bool) -> Self {
        let mut defines = of.defines();
        defines.push(("GROUPS", if has_three(of) { "3" } else { "2" }.to_string()));
        defines.push(("VALUES", u8::from(values).to_string()));
        Variant { family: Family::AttentionSm90aForward, defines }
    }

    /// The same with tiles of so many queries: 64 for each warpgroup.
    pub(crate) fn hopper_forward_of(of: Hopper, values: bool, tile: Blocking) -> Self {
        Self::hopper_forward(of, values).with("GROUPS", tile.queries / 64)
    }

    /// The backward pass on them.
    pub(crate) fn hopper_backward(of: Hopper, results: Results) -> Self {
        let mut defines = of.defines();
        defines.push(("RESULTS", (results as u8).to_string()));
        Variant { family: Family::AttentionSm90aBackward, defines }
    }

    /// The forward pass of lazy_attention on them, or its backward pass: sequences are those of the arrays, or listed.
    pub(crate) fn hopper_lazy(of: Hopper, backward: bool) -> Self {
        let families = [Family::LazySm90aForward, Family::LazySm90aBackward];
        let listed = of.lengths != Lengths::Equal;
        let mut defines = vec![
            ("STORAGE", number(of.storage)),
            ("D", of.width.to_string()),
            ("LENGTHS", if listed { "2" } else { "0" }.to_string()),
        ];
        if of.visible == Visible::Spans {
            defines.push(("WINDOW", (of.visible as u8).to_string()));
        }
        Variant { family: families[usize::from(backward)], defines }
    }

    /// Which arithmetic computes its products.
    pub(crate) fn unit(&self) -> Unit {
        match self.family {
            Family::AttentionSm80
            | Family::AttentionSm80Fused
            | Family::AttentionSm80F32
            | Family::AttentionSm80Wide
            | Family::AttentionSm80SecondOrder
            | Family::LazySm80
            | Family::LinearSm80
            | Family::PeakMma => Unit::Mma,
            Family::AttentionSm90aForward
            | Family::AttentionSm90aBackward
            | Family::LazySm90aForward
            | Family::LazySm90aBackward
            | Family::LinearSm90a
            | Family::CrossEntropySm90a
            | Family::PeakWgmma => Unit::Wgmma,
            _ => Unit::Ffma,
        }
    }

    /// The level whose kernels are these.
    pub(crate) fn level(&self) -> Level {
        match self.unit() {
            Unit::Ffma => Level::Portable,
            Unit::Mma => Level::Sm80,
            Unit::Wgmma => Level::Sm90a,
        }
    }

    /// The shared memory of a block of the kernel that takes most of it.
    pub(crate) fn shared(&self) -> u32 {
        self.kernels().iter().map(|kernel| shared_bytes(self, kernel)).max().unwrap_or(0)
    }

    /// Whether blocks of all its kernels have the shared memory that they take.
    pub fn fits(&self, architecture: &str) -> bool {
        self.shared() <= most_shared(architecture)
    }
}
