//! The variants of the kernels that are compiled.

use crate::family::{Family, Unit};
use etalon_problem::Dtype;

/// A source with the values of its compile-time names: some kernels, each of which is compiled by itself.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Variant {
    /// The kernels that are compiled together.
    pub family: Family,
    /// Names and values, in the order of the source's comments.
    pub defines: Vec<(&'static str, usize)>,
}

/// A kernel of a variant.
pub(crate) type KernelOf<'a> = (&'a Variant, &'static str);

/// The widths of accumulators. Wider operands take several launches.
pub(crate) const WIDTHS: [usize; 3] = [64, 128, 256];

/// The narrowest accumulator that holds this many columns, or the widest.
pub(crate) fn width(columns: usize) -> usize {
    WIDTHS.into_iter().find(|&width| width >= columns).unwrap_or(WIDTHS[2])
}

impl Variant {
    pub(crate) fn new<const N: usize>(family: Family, defines: [(&'static str, usize); N]) -> Self {
        Variant { family, defines: defines.into() }
    }

    /// The kernels of linear_attention for results with so many columns.
    pub(crate) fn linear(storage: Dtype, columns: usize, second: bool) -> Self {
        let (family, most) = match second {
            true => (Family::LinearPortableSecondOrder, 0),
            false => (Family::LinearPortable, 128),
        };
        // Wider results leave a thread too few registers for 8 rows.
        let rows = if width(columns) > most { 4 } else { 8 };
        Self::new(family, [("R", rows), ("STORAGE", number(storage)), ("CW", width(columns))])
    }

    /// Kernels of a family of linear_cross_entropy; in the second order those of the portable one alone.
    pub(crate) fn cross_entropy(family: Family, storage: Dtype, second: bool) -> Self {
        Self::new(family, [("STORAGE", number(storage)), ("SECOND", second.into())])
    }

    /// The kernels of linear_attention for sm80, of factors and results with so many columns. `whole`: rows of q, k, v
    /// and dout begin and end at multiples of 16 bytes.
    pub(crate) fn linear_tensor(storage: Dtype, columns: [usize; 2], whole: bool) -> Self {
        let columns = columns.map(width);
        let defines = [("STORAGE", number(storage)), ("WHOLE", whole.into()), ("KW", columns[0]), ("CW", columns[1])];
        Self::new(Family::LinearSm80, defines)
    }

    /// The kernels of linear_attention for sm90a, of factors with so many columns: at most 128.
    /// `by_token`: with a log-decay for each token.
    pub(crate) fn hopper_linear(storage: Dtype, columns: usize, by_token: bool) -> Self {
        let defines = [("STORAGE", number(storage)), ("KW", width(columns)), ("BY_TOKEN", by_token.into())];
        Self::new(Family::LinearSm90a, defines)
    }

    /// Copies and fills of elements of 2 or 4 bytes.
    pub fn moves(bytes: usize) -> Self {
        Self::new(Family::Move, [("WORD", bytes)])
    }

    /// The tables of lengths, offsets and masks that lie on the device.
    pub fn tables() -> Self {
        Self::new(Family::Tables, [])
    }

    pub(crate) fn peak(unit: Unit, storage: Dtype) -> Self {
        let (family, storage) = match (unit, storage) {
            (Unit::Ffma, _) => (Family::PeakFfma, Dtype::F32),
            (Unit::Mma, storage) => (Family::PeakMma, storage),
            (Unit::Wgmma, storage) => (Family::PeakWgmma, storage),
        };
        // tf32 has half of the rate of bf16, three products of bf16 a third.
        let storage = if unit != Unit::Ffma && storage == Dtype::F32 { Dtype::Bf16 } else { storage };
        Self::new(family, [("STORAGE", number(storage)), ("UNIT", unit as usize)])
    }

    /// The same with one more name, at a place among the others.
    pub(crate) fn insert(mut self, at: usize, name: &'static str, value: usize) -> Self {
        self.defines.insert(at, (name, value));
        self
    }

    /// The same with one more name, at the end.
    pub(crate) fn push(mut self, name: &'static str, value: usize) -> Self {
        self.defines.push((name, value));
        self
    }

    /// The same with another value of a name that it has.
    pub(crate) fn with(mut self, name: &str, value: usize) -> Self {
        self.defines.iter_mut().filter(|x| x.0 == name).for_each(|x| x.1 = value);
        self
    }

    /// The names of its kernels.
    pub fn kernels(&self) -> Vec<&'static str> {
        self.family.entries().filter(|name| !lacks(self, name)).collect()
    }

    /// The threads of a block that owns a tile of 64 rows: on tensor cores, and of portable kernels, where each has R
    /// rows of a tile.
    pub(crate) fn threads(&self) -> u32 {
        self.find("R").map_or(128, |rows| (64 / rows.max(1) * 16) as u32)
    }

    /// The storage type; `None` of copies, which take any.
    pub fn storage(&self) -> Option<Dtype> {
        let of = |dtype: &Dtype| self.defines.contains(&("STORAGE", number(*dtype)));
        [Dtype::F32, Dtype::Bf16, Dtype::F16].into_iter().find(of)
    }

    /// True if it is compiled for q and k with so many columns.
    pub fn serves(&self, dim: usize) -> bool {
        let of = |name: &str| self.find(name);
        let least = if self.family == Family::AttentionSm80Wide { 128 } else { 0 };
        match (of("D"), of("CD").or(of("CW")).or(of("KW"))) {
            (Some(most), _) => dim <= most,
            (None, Some(_)) if of("BACKWARD") == Some(0) => true,
            (None, Some(columns)) => width(dim).max(least) == columns,
            (None, None) => true,
        }
    }

    /// The value of a name, if it has that.
    pub(crate) fn find(&self, name: &str) -> Option<usize> {
        self.defines.iter().find(|x| x.0 == name).map(|x| x.1)
    }

    /// The value of a name; 0 without it.
    pub(crate) fn define(&self, name: &str) -> usize {
        self.find(name).unwrap_or(0)
    }

    /// The family and the values, in words.
    pub fn describe(&self) -> String {
        let defines = self.defines.iter().map(|(name, value)| format!(" {name}={value}"));
        format!("{}{}", self.family, defines.collect::<String>())
    }
}

/// The number by which sources know a storage type.
pub(crate) fn number(storage: Dtype) -> usize {
    match storage {
        Dtype::Bf16 => 1,
        Dtype::F16 => 2,
        _ => 0,
    }
}

/// Kernels of `AttentionShape::light_second`.
const LIGHT: [&str; 3] = ["tangents", "fused", "collect"];

/// True if the values of a variant leave a kernel of its family out.
fn lacks(variant: &Variant, kernel: &str) -> bool {
    use Family::*;
    let has = |name: &str| variant.define(name) > 0;
    let columns = [variant.define("CD"), variant.define("CE")];
    let (narrow, has_eight) = (columns == [64, 64], variant.define("R") == 8);
    match (variant.family, kernel) {
        (LazyPortable, "measure" | "dbias" | "dtau") => has("AGAIN"),
        (AttentionSm80, kernel) if columns[0] > 128 => kernel != "forward",
        (AttentionPortableSecondOrder, _) if narrow && has_eight != LIGHT.contains(&kernel) => true,
        (_, "dbias" | "gbias") => !has("OPTIONS"),
        (AttentionPortable, "scale") => has("VALUES"),
        (AttentionPortableSecondOrder, "fused" | "collect") => !narrow,
        (AttentionSm80 | AttentionSm80Wide, "values") => !has("VALUES"),
        // A bias in boxes has all gradients together, and `unseen` is of its own.
        (AttentionSm90aBackward, "unseen") => variant.define("OPTIONS") != 2,
        (AttentionSm90aBackward, "keys" | "queries") if variant.define("OPTIONS") == 2 => true,
        // dk or dv without the other.
        (AttentionSm90aBackward, "values") => variant.define("RESULTS") != 2,
        (AttentionSm90aBackward, "queries") => variant.define("RESULTS") == 2,
        (AttentionSm90aBackward, "fused" | "collect") => {
            variant.define("RESULTS") != 1 || variant.define("WINDOW") == 2 || has("LENGTHS")
        }
        (LinearPortable, "mend_sums" | "mend") => !has("STORAGE"),
        (CrossEntropyPortable, "motions") => !has("SECOND"),
        (CrossEntropyPortable, "norms" | "measure" | "certify" | "choose") => has("SECOND"),
        (LinearSm90a, "attend_plain") => has("BY_TOKEN"),
        (LinearSm90a, "flow") => !has("BY_TOKEN"),
        _ => false,
    }
}
