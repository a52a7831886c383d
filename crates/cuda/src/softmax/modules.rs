//! The modules of kernels that compute a pass, and the sizes of tiles that there are kernels for: queries by keys.

use super::spec::Spec;
use super::variants::{AttentionShape, Hopper, has_three};
use crate::family::Family;
use crate::options::{Level, Precision};
use crate::variant::Variant;
use etalon_problem::{Blocking, Dtype, Pass};

#[derive(Debug)]
pub(crate) struct Modules {
    pub portable: Variant,
    /// Kernels of the level sm80, in place of the portable one.
    pub tensor: Option<Variant>,
    /// Kernels of a backward pass of wide operands.
    pub wide: Option<Variant>,
    /// Kernels of the pass by keys with what these add to dq.
    pub fused: Option<Variant>,
    /// Kernels of the gradient of the bias.
    pub by_pairs: Option<Variant>,
    pub second: Variant,
    pub light_second: Variant,
    /// The second order on tensor cores, where all is finite.
    pub tensor_second: Option<Variant>,
}

impl Modules {
    pub fn new(spec: &Spec, level: Level) -> Modules {
        let (shape, sm80) = (spec.shape(), level == Level::Sm80);
        let tensor = tensor_variant(spec);
        let has_dbias = level != Level::Portable && !spec.is_wide();
        Modules {
            portable: shape.portable(Family::AttentionPortable),
            by_pairs: (has_dbias && tensor.kernels().contains(&"dbias")).then(|| tensor.clone()),
            tensor: sm80.then_some(tensor),
            wide: wide_variant(spec).filter(|_| sm80),
            fused: sm80.then(|| shape.sm80_fused()),
            second: shape.portable(Family::AttentionPortableSecondOrder),
            light_second: shape.light_second(),
            tensor_second: second_variant(spec),
        }
    }

    pub fn lazy(spec: &Spec, level: Level, has_bias: bool) -> Modules {
        let value_dim = spec.value_dim.or(Some(1));
        let options = has_bias || spec.counts.flags.is_some();
        let shape = AttentionShape { value_dim, options, ..spec.shape() };
        let portable = shape.lazy_portable();
        let tensor = (level == Level::Sm80).then(|| shape.lazy_sm80());
        Modules { portable, tensor, ..Modules::new(spec, Level::Portable) }
    }

    /// The module of the level sm80 which has a kernel.
    pub fn tensor_with(&self, kernel: &str) -> Option<&Variant> {
        let has = |variant: &&Variant| variant.kernels().contains(&kernel);
        self.wide.iter().chain(&self.tensor).find(has)
    }
}

/// The module, with as many stages as fit the shared memory.
fn wide_variant(spec: &Spec) -> Option<Variant> {
    let [one, two] = [1, 2].map(|stages| spec.shape().sm80_wide(stages));
    let fits = two.shared() <= spec.shared_memory();
    (spec.pass == Pass::Backward && spec.is_wide()).then_some(if fits { two } else { one })
}

/// The module of the forward pass, and of a backward pass that is not wide.
fn tensor_variant(spec: &Spec) -> Variant {
    match spec.storage {
        Dtype::F32 => spec.shape().sm80_f32(spec.options.precision == Precision::Bf16x3),
        _ => spec.shape().sm80().with("TILES", number(spec)),
    }
}

/// The module of the second order on tensor cores.
fn second_variant(spec: &Spec) -> Option<Variant> {
    let shape = spec.shape();
    let variant = if spec.has_second_sm90a() { shape.sm90a_second_order() } else { shape.sm80_second_order() };
    spec.has_tensor_second().then_some(variant)
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
