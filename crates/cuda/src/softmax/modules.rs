//! The modules of kernels that compute a pass, and the sizes of tiles that there are kernels for: queries by keys.

use super::prepared::Prepared;
use super::spec::Spec;
use super::variants::{AttentionShape, Hopper, has_three};
use crate::family::Family;
use crate::options::{Level, Precision};
use crate::variant::Variant;
use etalon_problem::{Blocking, Dtype, Pass};

impl Prepared<'_> {
    pub fn is_sm80(&self) -> bool {
        self.choice.level == Level::Sm80
    }

    pub fn portable(&self) -> Variant {
        self.spec.shape().portable(Family::AttentionPortable)
    }

    /// The module of the level sm80 which has a kernel, where it computes the pass.
    pub fn tensor_with(&self, kernel: &str) -> Option<Variant> {
        let modules = self.wide().into_iter().chain([tensor_variant(&self.spec)]);
        modules.filter(|_| self.is_sm80()).find(|variant| variant.kernels().contains(&kernel))
    }

    /// Kernels of a backward pass of wide operands, with as many stages as fit the shared memory.
    pub fn wide(&self) -> Option<Variant> {
        let spec = &self.spec;
        let [one, two] = [1, 2].map(|stages| spec.shape().sm80_wide(stages));
        let fits = two.shared() <= spec.shared_memory();
        let has = self.is_sm80() && spec.pass == Pass::Backward && spec.is_wide();
        has.then_some(if fits { two } else { one })
    }

    /// Kernels of the pass by keys with what these add to dq.
    pub fn fused(&self) -> Variant {
        if self.is_sm80() { self.spec.shape().narrow(Family::AttentionSm80Fused) } else { self.portable() }
    }

    /// Kernels of the gradient of the bias that are not portable: for sm90a, too, those of sm80.
    pub fn by_pairs(&self) -> Option<Variant> {
        let has = |own: &Variant| self.choice.level != Level::Portable && own.kernels().contains(&"dbias");
        Some(tensor_variant(&self.spec)).filter(|own| !self.spec.is_wide() && has(own))
    }

    /// The second order on tensor cores, where all is finite.
    pub fn tensor_second(&self) -> Option<Variant> {
        let family = match self.spec.has_second_sm90a() {
            true => Family::AttentionSm90aSecondOrder,
            false => Family::AttentionSm80SecondOrder,
        };
        self.spec.has_tensor_second().then(|| self.spec.shape().narrow(family))
    }

    /// Operands as far as kernels of lazy_attention are compiled for them.
    pub fn lazy_shape(&self) -> AttentionShape {
        let options = self.distance_bias.is_some() || self.spec.counts.flags.is_some();
        AttentionShape { options, ..self.spec.shape() }
    }
}

/// The module of the forward pass, and of a backward pass that is not wide.
fn tensor_variant(spec: &Spec) -> Variant {
    match spec.storage {
        Dtype::F32 => spec.shape().sm80_f32(spec.options.precision == Precision::Bf16x3),
        _ => spec.shape().sm80().with("TILES", number(spec)),
    }
}

fn tile(queries: usize, keys: usize) -> Blocking {
    Blocking { queries, keys }
}

pub(crate) fn of_level(spec: &Spec, level: Level) -> Vec<Blocking> {
    match level {
        Level::Sm80 => of_tensor(spec),
        Level::Sm90a => of_hopper(spec, spec.hopper()),
        // Of the portable kernels, whatever the pass.
        _ => vec![tile(64, 64)],
    }
}

/// Tiles of the level sm80. Forward, a block has all queries of a tile and walks the keys; backward it has 64 queries
/// or keys, and walks 64 or 32 of the others.
fn of_tensor(spec: &Spec) -> Vec<Blocking> {
    let narrow = spec.storage != Dtype::F32;
    match spec.pass {
        Pass::Forward if narrow && spec.extents.dim <= 128 => vec![tile(128, 64), tile(128, 32), tile(64, 64)],
        Pass::Forward if narrow => vec![tile(64, 32)],
        Pass::Forward => vec![tile(128, 32)],
        _ if spec.insists() => vec![tile(64, 64)],
        _ if narrow && !spec.is_wide() => vec![tile(64, 64), tile(64, 32)],
        _ => vec![tile(64, 32)],
    }
}

/// The number by which sources know a tile of the level sm80: TILES of `attention/sm80.cuh`.
fn number(spec: &Spec) -> usize {
    let list = of_tensor(spec);
    match chosen(&list, spec.options.blocking) {
        _ if list.len() == 1 => 0,
        Blocking { keys: 32, .. } => 1,
        Blocking { queries: 64, .. } if spec.pass == Pass::Forward => 2,
        _ => 0,
    }
}

/// Tiles of the level sm90a: two warpgroups with 64 queries each, or three where these fit the registers.
pub(crate) fn of_hopper(spec: &Spec, variant: Hopper) -> Vec<Blocking> {
    match spec.pass {
        Pass::Forward if has_three(variant) => vec![tile(192, 128), tile(128, 128)],
        Pass::Forward => vec![tile(128, variant.block_keys(spec.value_dim.is_some()))],
        _ => vec![tile(128, 128)],
    }
}

/// The tile of a list that a hint means: the smallest that holds as many queries and keys, else the largest; without a
/// hint the first.
pub(crate) fn chosen(list: &[Blocking], hint: Option<Blocking>) -> Blocking {
    let first = list.first().copied().unwrap_or(tile(64, 64));
    let Some(hint) = hint else { return first };
    let area = |x: &&Blocking| (x.queries * x.keys, x.queries);
    let holds = |x: &&Blocking| x.queries >= hint.queries && x.keys >= hint.keys;
    let smallest = list.iter().filter(holds).min_by_key(area);
    *smallest.or_else(|| list.iter().max_by_key(area)).unwrap_or(&first)
}
