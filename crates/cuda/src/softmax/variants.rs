//! The variants of the kernels of attention.

use crate::family::{Family, Unit};
use crate::options::Level;
use crate::shared::shared_bytes;
use crate::target::shared_memory;
use crate::variant::{Variant, number, width};
use etalon_problem::Dtype;

/// Choices at compile time of kernels for sm90a.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hopper {
    /// bf16 or f16.
    pub storage: Dtype,
    /// Columns of q and k: 64, 128, 192 or 256.
    pub width: usize,
    /// Columns of v and o: as many, but 128 beside 192.
    pub values: usize,
    /// The pairs that the mask shows.
    pub visible: Visible,
    pub lengths: Lengths,
    /// True if there is a softcap, a bias, or a scale that is not above 0.
    pub options: bool,
    /// True if a bias is all of these, and the copy engine reads it in boxes.
    pub boxes: bool,
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Lengths {
    /// The lengths of the arrays.
    Equal,
    /// Of each batch element its own.
    Own,
    /// Sequences are listed: packed ones in the only batch element, or those of batch elements.
    Listed,
}

/// Results of kernels of the backward pass for sm90a.
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
    /// Choices that compute at least these: not every one is compiled with every other.
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

    /// True if it has kernels that read a bias in boxes.
    pub fn has_boxes(self) -> bool {
        self.options && self.lengths == Lengths::Equal && self.visible != Visible::Spans && !self.is_wide()
    }

    /// True if one of these computes all gradients together.
    pub fn fuses_boxes(self) -> bool {
        self.has_boxes() && self.width == 128
    }

    /// The columns of an operand or a result.
    pub fn columns(self, name: &str) -> usize {
        match name {
            "v" | "o" | "dout" | "dv" => self.values,
            _ => self.width,
        }
    }

    /// True if D or E is above 128.
    pub fn is_wide(self) -> bool {
        self.width > 128
    }

    /// The keys of a block of the forward pass: as many as leave the registers room for the sums of o.
    pub fn block_keys(self, has_values: bool) -> usize {
        if has_values && self.values > 128 { 80 } else { 128 }
    }

    fn defines(self) -> [(&'static str, usize); 5] {
        [
            ("STORAGE", number(self.storage)),
            ("D", self.width),
            ("WINDOW", self.visible as usize),
            ("LENGTHS", self.lengths as usize),
            ("OPTIONS", usize::from(self.options) + usize::from(self.boxes)),
        ]
    }
}

/// True if three warpgroups fit the registers: rows are 64 columns wide and nothing is asked besides.
pub(crate) fn has_three(of: Hopper) -> bool {
    of.width == 64 && !of.options && of.lengths != Lengths::Listed
}

/// Operands as far as kernels of the levels portable and sm80 are compiled for them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionShape {
    pub storage: Dtype,
    /// D.
    pub dim: usize,
    /// E; `None`: no values.
    pub value_dim: Option<usize>,
    /// True with a softcap, a bias or an array of flags.
    pub options: bool,
    /// True if rows of q, k, v and dout begin and end at multiples of 16 bytes.
    pub whole: bool,
}

impl AttentionShape {
    /// D and E as the widths of accumulators.
    fn widths(self) -> [usize; 2] {
        [self.dim, self.value_dim.unwrap_or(1)].map(width)
    }

    /// Kernels in fused multiply-adds.
    pub fn portable(self, family: Family) -> Variant {
        let [columns, values] = self.widths();
        // Wider operands, and more sums than those of a first order, leave a thread too few registers for 8 rows of a
        // tile.
        let is_light = family == Family::AttentionPortable && columns.max(values) <= 128;
        self.variant(family, [columns, values]).insert(0, "R", if is_light { 8 } else { 4 })
    }

    /// Portable kernels of the second order to which narrow operands leave registers for 8 rows a thread: `tangents`,
    /// and the pass by keys that leaves partial sums.
    pub fn light_second(self) -> Variant {
        let variant = self.portable(Family::AttentionPortableSecondOrder);
        if self.widths() == [64, 64] { variant.with("R", 8) } else { variant }
    }

    /// Kernels with accumulators of so many columns.
    fn variant(self, family: Family, [columns, values]: [usize; 2]) -> Variant {
        let defines = [
            ("STORAGE", number(self.storage)),
            ("OPTIONS", self.options.into()),
            ("VALUES", self.value_dim.is_some().into()),
            ("CD", columns),
            ("CE", values),
        ];
        Variant::new(family, defines)
    }

    pub fn lazy_portable(self) -> Variant {
        self.portable(Family::LazyPortable).push("AGAIN", 0)
    }

    /// The kernel that computes groups again. It is seldom run: one serves problems with options and without.
    pub fn fallback(self, backward: bool) -> Variant {
        // Forward, columns of q have no accumulators.
        let shape = AttentionShape { dim: if backward { self.dim } else { 1 }, options: true, ..self };
        shape.portable(Family::AttentionFallback).push("BACKWARD", backward.into())
    }

    /// The same for sm80.
    fn on_tensor_cores(self, family: Family, columns: [usize; 2]) -> Variant {
        self.variant(family, columns).insert(2, "WHOLE", self.whole.into())
    }

    /// The same of D up to 128, but for the forward pass; wider results take several launches.
    pub fn narrow(self, family: Family) -> Variant {
        let [columns, values] = self.widths();
        self.on_tensor_cores(family, [columns, values.min(128)])
    }

    pub fn sm80(self) -> Variant {
        self.narrow(Family::AttentionSm80).push("TILES", 0)
    }

    /// The first order of f32, with factors as sums of two bf16 or rounded to tf32, of D up to 128.
    pub fn sm80_f32(self, bf16x3: bool) -> Variant {
        self.narrow(Family::AttentionSm80F32).insert(1, "BF16X3", bf16x3.into())
    }

    /// The backward pass where D or E is above 128, with walked tiles in 1 or 2 stages.
    pub fn sm80_wide(self, stages: usize) -> Variant {
        let values = self.value_dim.map_or(64, |columns| width(columns).max(128));
        let widths = [width(self.dim).max(128), values];
        self.on_tensor_cores(Family::AttentionSm80Wide, widths).push("STAGES", stages)
    }

    pub fn lazy_sm80(self) -> Variant {
        let mut variant = self.narrow(Family::LazySm80);
        variant.defines.retain(|(name, _)| *name != "VALUES");
        variant
    }
}

impl Variant {
    /// Of portable kernels of lazy_attention those of the fallback, for problems with options and without.
    pub(crate) fn again(&self) -> Self {
        self.clone().with("AGAIN", 1).with("OPTIONS", 1)
    }

    /// The portable kernels of a storage type, of operands with D and E columns (`None`: no values), with softcap,
    /// bias and arrays of flags or without.
    pub fn portable(storage: Dtype, dim: usize, value_dim: Option<usize>, options: bool) -> Self {
        let shape = AttentionShape { storage, dim, value_dim, options, whole: false };
        shape.portable(Family::AttentionPortable)
    }

    pub(crate) fn hopper_forward(of: Hopper, values: bool) -> Self {
        let groups = ("GROUPS", if has_three(of) { 3 } else { 2 });
        let defines = [&of.defines()[..], &[groups, ("VALUES", values.into())]].concat();
        let variant = Variant { family: Family::AttentionSm90aForward, defines };
        if values { variant.with_values(of) } else { variant }
    }

    /// The same with E, where v has other columns than q.
    fn with_values(self, of: Hopper) -> Self {
        if of.values == of.width { self } else { self.insert(2, "E", of.values) }
    }

    /// Of wide operands each gradient has a kernel of its own, whatever is computed beside it.
    pub(crate) fn hopper_backward(of: Hopper, results: Results) -> Self {
        if of.is_wide() {
            return Variant::new(Family::AttentionSm90aWide, of.defines()).with_values(of);
        }
        let defines = [&of.defines()[..], &[("RESULTS", results as usize)]].concat();
        Variant { family: Family::AttentionSm90aBackward, defines }
    }

    /// A pass of lazy_attention for sm90a: sequences are those of the arrays, or listed.
    pub(crate) fn hopper_lazy(of: Hopper, backward: bool) -> Self {
        let family = if backward { Family::LazySm90aBackward } else { Family::LazySm90aForward };
        let lengths = ("LENGTHS", if of.lengths == Lengths::Equal { 0 } else { 2 });
        let variant = Variant::new(family, [("STORAGE", number(of.storage)), ("D", of.width), lengths]);
        if of.visible == Visible::Spans { variant.push("WINDOW", of.visible as usize) } else { variant }
    }

    /// The warpgroups of a kernel of lazy_attention for sm90a: 64 queries each.
    pub(crate) fn lazy_groups(&self, kernel: &str) -> usize {
        match kernel {
            "scores" if self.define("D") == 64 => 4,
            "scores" => 3,
            "values" | "sums" if self.define("D") == 64 => 3,
            _ => 2,
        }
    }

    pub(crate) fn unit(&self) -> Unit {
        self.family.unit()
    }

    pub(crate) fn level(&self) -> Level {
        match self.unit() {
            Unit::Ffma => Level::Portable,
            Unit::Mma => Level::Sm80,
            Unit::Wgmma => Level::Sm90a,
        }
    }

    /// The most shared memory of a block of its kernels.
    pub(crate) fn shared(&self) -> u32 {
        self.kernels().into_iter().map(|kernel| shared_bytes(self, kernel)).max().unwrap_or(0)
    }

    /// True if blocks of all its kernels have the shared memory that they take.
    pub fn fits(&self, architecture: &str) -> bool {
        self.shared() <= shared_memory(architecture)
    }
}
