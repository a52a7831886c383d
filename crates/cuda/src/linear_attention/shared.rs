//! The shared memory of the kernels that walk chunks.

use crate::family::Family;
use crate::options::Level;
use crate::variant::{Variant, declared_bytes, shared_bytes};
use etalon_problem::{Decay, Dtype, LinearAttention};

/// A kernel of linear_attention, and what a block of it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearKernel {
    /// Its name.
    pub name: &'static str,
    /// The level that it is one of.
    pub level: Level,
    /// The shared memory of a block, in bytes.
    pub bytes: u32,
}

/// The kernels of the first order that hold tiles in shared memory, of every level that could compute a problem of these
/// extents in a storage type, and what a block of each has there.
pub fn linear_shared(problem: &LinearAttention, storage: Dtype) -> Vec<LinearKernel> {
    let (dim, value_dim) = (problem.extents.dim, problem.value_dim);
    let (most, narrow) = (dim.max(value_dim), storage != Dtype::F32);
    let mut variants = vec![Variant::linear(storage, most, false)];
    if narrow && most <= 128 {
        variants.push(Variant::linear_tensor(storage, [dim, value_dim], true));
        variants.push(Variant::hopper_linear(storage, most, problem.decay == Decay::PerToken));
    }
    let level = |variant: &Variant| match variant.family {
        Family::Linear => Level::Portable,
        Family::LinearTensor => Level::Sm80,
        _ => Level::Sm90a,
    };
    let of = |variant: &Variant| {
        let (level, variant) = (level(variant), variant.clone());
        let names = variant.kernels().iter().filter(|name| !name.starts_with("mend"));
        let kernels = names.map(move |&name| {
            let bytes = shared_bytes(&variant, name) + declared_bytes(&variant, name).unwrap_or(0);
            LinearKernel { name, level, bytes }
        });
        kernels.filter(|kernel| kernel.bytes > UNNAMED).collect::<Vec<_>>()
    };
    variants.iter().flat_map(of).collect()
}

/// A kernel that has less holds no tile.
const UNNAMED: u32 = 4096;

#[cfg(test)]
mod tests {
    use super::*;
    use etalon_problem::LinearExtents;

    /// The table of docs/linear_attention.md, in KiB.
    #[test]
    fn a_block_has_what_the_docs_say() {
        let of = |dim, name, level| {
            let extents = LinearExtents { batch: 1, query_heads: 1, key_heads: 1, tokens: 9, dim };
            let all = linear_shared(&LinearAttention::new(extents), Dtype::Bf16);
            let found = all.into_iter().find(|x| x.name == name && x.level == level);
            found.map(|x| x.bytes.div_ceil(1024))
        };
        for (name, level, narrow, wide) in [
            ("attend", Level::Portable, 34, 34),
            ("attend", Level::Sm80, 40, 80),
            ("attend", Level::Sm90a, 147, 227),
            ("sums", Level::Portable, 34, 34),
            ("sums", Level::Sm80, 32, 64),
            ("flow", Level::Portable, 37, 37),
            ("flow", Level::Sm80, 51, 83),
        ] {
            assert_eq!(
                (of(64, name, level), of(128, name, level)),
                (Some(narrow), Some(wide)),
                "{name} {level}"
            );
        }
        assert_eq!(of(256, "attend", Level::Sm80), None);
    }
}
