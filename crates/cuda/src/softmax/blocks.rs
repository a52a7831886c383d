//! The sizes of tiles that there are kernels for: queries by keys.

use crate::options::Level;
use crate::softmax::spec::Spec;
use crate::softmax::variants::{Hopper, has_three};
use etalon_problem::{Blocking, Dtype, Pass};

fn tile(queries: usize, keys: usize) -> Blocking {
    Blocking { queries, keys }
}

/// The tiles of a level.
pub(crate) fn of_level(spec: &Spec, level: Level) -> Vec<Blocking> {
    match level {
        Level::Sm90a => of_hopper(spec, spec.hopper()),
        Level::Sm80 => of_tensor(spec),
        _ => of_portable(),
    }
}

/// Tiles of the portable kernels, whatever the pass.
fn of_portable() -> Vec<Blocking> {
    vec![tile(64, 64)]
}

/// Tiles of the level sm80: the first is taken unless another is asked for. Forward, a block has all queries of a tile
/// and walks the keys; backward it has 64 queries or keys, and walks 64 or 32 of the others.
pub(crate) fn of_tensor(spec: &Spec) -> Vec<Blocking> {
    let narrow = spec.storage != Dtype::F32;
    match spec.pass {
        Pass::Forward if narrow && spec.extents.dim <= 128 => {
            vec![tile(128, 64), tile(128, 32), tile(64, 64)]
        }
        Pass::Forward if narrow => vec![tile(64, 32)],
        Pass::Forward => vec![tile(128, 32)],
        _ if spec.insists() => vec![tile(64, 64)],
        _ if narrow && !spec.is_wide() => vec![tile(64, 64), tile(64, 32)],
        _ => vec![tile(64, 32)],
    }
}

/// The number by which sources know a tile of the level sm80: TILES of `attention/sm80.cuh`.
pub(crate) fn number(spec: &Spec) -> usize {
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
        _ => vec![tile(128, 128)],
    }
}

/// The tile of a list that a hint means: the smallest that holds as many queries and keys, or else the largest;
/// without a hint the first.
pub(crate) fn chosen(list: &[Blocking], hint: Option<Blocking>) -> Blocking {
    let first = list.first().copied().unwrap_or(tile(64, 64));
    let Some(hint) = hint else { return first };
    let area = |x: &&Blocking| (x.queries * x.keys, x.queries);
    let holds = |x: &&Blocking| x.queries >= hint.queries && x.keys >= hint.keys;
    let smallest = list.iter().filter(holds).min_by_key(area);
    *smallest.or_else(|| list.iter().max_by_key(area)).unwrap_or(&first)
}

#[cfg(test)]
#[path = "../../tests/units/softmax/blocks.rs"]
mod tests;
