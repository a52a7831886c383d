//! Which variants there are, and the few of them in which every pair of choices is made.

use crate::cover::Cover;
use crate::effort::effort;
use crate::family::Family;
use crate::softmax::{CONSUMER, Hopper, Lengths, Results};
use crate::unit::Unit;
use crate::variant::{Compilation, Variant, WIDTHS};
use etalon_problem::Dtype::{self, Bf16, F16, F32};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

const FLAGS: [bool; 2] = [false, true];

/// Every variant that a pass may ask for.
pub fn every_variant() -> Vec<Variant> {
    let mut all = vec![Variant::moves(2), Variant::moves(4), Variant::tables()];
    all.push(Variant::peak(Unit::Ffma, F32));
    let tensor_cores = [Unit::Mma, Unit::Wgmma].into_iter();
    all.extend(tensor_cores.flat_map(|unit| [Bf16, F16].map(|x| Variant::peak(unit, x))));
    let values = [None, Some(WIDTHS[0]), Some(WIDTHS[1]), Some(WIDTHS[2])];
    for (storage, second) in [F32, Bf16, F16].into_iter().flat_map(|x| FLAGS.map(|y| (x, y))) {
        all.push(Variant::cross_entropy(storage, second));
        if !second {
            all.push(Variant::cross_entropy_shards(storage));
        }
        if storage != F32 && !second {
            all.push(Variant::hopper_cross_entropy(storage));
        }
    }
    for (storage, options) in [F32, Bf16, F16].into_iter().flat_map(|x| FLAGS.map(|y| (x, y))) {
        for (dim, value_dim) in WIDTHS.into_iter().flat_map(|x| values.map(|y| (x, y))) {
            all.push(Variant::portable(storage, dim, value_dim, options));
            all.push(Variant::second(storage, dim, value_dim, options));
            all.extend(value_dim.map(|width| Variant::lazy(storage, dim, width, options)));
            if let (true, Some(value_dim)) = (storage != F32 && dim <= 128, value_dim) {
                let lazy = |whole| Variant::lazy_tensor(storage, dim, value_dim, options, whole);
                all.extend(FLAGS.map(lazy));
            }
            if storage != F32 {
                let tensor = |whole| Variant::tensor(storage, dim, value_dim, options, whole);
                let tiles = if dim <= 128 { 0..3 } else { 0..1 };
                all.extend(tiles.flat_map(|n| FLAGS.map(|x| tensor(x).with("TILES", n))));
                let narrow = dim.max(value_dim.unwrap_or(1)) <= 128;
                let fused = |x| Variant::tensor_fused(storage, dim, value_dim, [options, x]);
                all.extend(FLAGS.map(fused).into_iter().filter(|_| narrow));
                all.extend(wide(storage, dim, value_dim, options));
            }
            if storage == Bf16 && dim.max(value_dim.unwrap_or(1)) <= 128 {
                all.extend(FLAGS.map(|x| Variant::tensor_second(dim, value_dim, [options, x])));
            }
        }
    }
    for (dim, value_dim) in
        [64, 128].into_iter().flat_map(|x| [None, Some(64), Some(128)].map(|y| (x, y)))
    {
        for (bf16x3, options) in FLAGS.into_iter().flat_map(|x| FLAGS.map(|y| (x, y))) {
            let of = |whole| Variant::tensor_f32(bf16x3, dim, value_dim, [options, whole]);
            all.extend(FLAGS.map(of));
        }
    }
    for (storage, width) in [F32, Bf16, F16].into_iter().flat_map(|x| WIDTHS.map(|y| (x, y))) {
        all.extend(FLAGS.map(|second| Variant::linear(storage, width, second)));
        for other in [64, 128] {
            let tensor = |whole| Variant::linear_tensor(storage, [width, other], whole);
            all.extend(FLAGS.map(tensor).into_iter().filter(|_| storage != F32 && width <= 128));
        }
    }
    for (storage, width) in [Bf16, F16].into_iter().flat_map(|x| [64, 128].map(|y| (x, y))) {
        all.extend(FLAGS.map(|by_token| Variant::hopper_linear(storage, width, by_token)));
        for (listed, backward) in FLAGS.into_iter().flat_map(|x| FLAGS.map(|y| (x, y))) {
            all.push(Variant::hopper_lazy(storage, width, listed, backward));
        }
        for (windowed, options) in FLAGS.into_iter().flat_map(|x| FLAGS.map(|y| (x, y))) {
            for lengths in [Lengths::Equal, Lengths::Own, Lengths::Listed] {
                let of = Hopper { storage, width, windowed, lengths, options }.within();
                all.extend(FLAGS.map(|values| Variant::hopper_forward(of, values)));
                let two = |values| Variant::hopper_forward(of, values).with("GROUPS", 2);
                all.extend(FLAGS.map(two));
                let results = [Results::Lse, Results::All, Results::Alone];
                all.extend(results.map(|results| Variant::hopper_backward(of, results)));
            }
        }
    }
    all.sort();
    // Wide values of the level sm80 take several launches of the same kernels, and some of sm90a are within others.
    all.dedup();
    all
}

/// The backward pass of wide operands on tensor cores, with two stages and, where not every device has the
/// shared memory for these, with one.
fn wide(
    storage: Dtype,
    dim: usize,
    value_dim: Option<usize>,
    options: bool,
) -> impl Iterator<Item = Variant> {
    let is_wide = dim.max(value_dim.unwrap_or(0)) > 128;
    let all = FLAGS.into_iter().filter(move |_| is_wide).flat_map(move |whole| {
        let of = |stages| Variant::tensor_wide(storage, dim, value_dim, [options, whole], stages);
        [of(2), of(1)].into_iter().take(if of(2).shared() > CONSUMER { 2 } else { 1 })
    });
    all.into_iter()
}

/// Some kernels of a variant for an architecture.
pub type Excerpt = (Compilation, Vec<&'static str>);

/// A list of at most 200 compilations in which every pair of choices is made that some variant makes: every
/// kernel for every architecture that it serves, every option in every kernel, and every pair of options.
pub fn pairwise_variants() -> Vec<Compilation> {
    PAIRWISE.clone()
}

/// What CI compiles: a list of at most 200 compilations, of each some kernels, in which every kernel is compiled for
/// every architecture that it serves and with every value of each of its options. The compiler takes little time for
/// it; for the last of them the most.
pub fn kernelwise_variants() -> Vec<Excerpt> {
    KERNELWISE.clone()
}

// Each takes a second.
static PAIRWISE: LazyLock<Vec<Compilation>> = LazyLock::new(|| {
    Family::ALL.into_iter().flat_map(|family| pairwise(&all_of(family))).collect()
});
static KERNELWISE: LazyLock<Vec<Excerpt>> = LazyLock::new(|| {
    let all = Family::ALL.into_iter().flat_map(|family| kernelwise(&all_of(family)));
    let mut all: Vec<Excerpt> = all.collect();
    all.sort_by_key(time);
    all
});

/// How long the compiler takes about for some kernels of a module, in µs.
fn time((compilation, kernels): &Excerpt) -> u64 {
    kernels.iter().map(|kernel| effort(compilation, kernel)).sum()
}

/// All kernels of a module.
fn whole(compilation: &Compilation) -> Excerpt {
    (compilation.clone(), compilation.1.kernels().to_vec())
}

/// The shortest list in which every pair is made, and of equals that which takes least time.
fn pairwise(all: &[Compilation]) -> Vec<Compilation> {
    let cover = Cover::new(all.iter().map(|x| (pairs(x), time(&whole(x)))));
    cover.shortest().into_iter().map(|x| all[x].clone()).collect()
}

/// Kernels of variants that have most of what [`kernelwise_variants`] must have, chosen by the measured times of 2100
/// kernels: a line for each module. What they lack is chosen by estimates; what is no more is passed over.
const MEASURED: &str = include_str!("kernelwise.txt");

/// Those measured that there are, and what they lack in the variants that take least time, among them those that are
/// compiled for another kernel.
fn kernelwise(all: &[Compilation]) -> Vec<Excerpt> {
    let mut taken = measured(all);
    for kernel in kernels(all) {
        let with = taken.iter().filter(|(_, kernels)| kernels.contains(&kernel));
        let made: BTreeSet<Choice> = with.flat_map(|(&x, _)| settings(&all[x])).collect();
        let lacks = |x: usize| -> Vec<_> {
            settings(&all[x]).into_iter().filter(|choice| !made.contains(choice)).collect()
        };
        let own = (0..all.len()).filter(|&x| all[x].1.kernels().contains(&kernel));
        let own: Vec<usize> = own.filter(|&x| !lacks(x).is_empty()).collect();
        let first = |x| if taken.contains_key(&x) { 0 } else { MODULE };
        let cover = own.iter().map(|&x| (lacks(x), effort(&all[x], kernel) + first(x)));
        for at in Cover::new(cover).easiest() {
            taken.entry(own[at]).or_default().push(kernel);
        }
    }
    taken.into_iter().map(|(x, kernels)| (all[x].clone(), kernels)).collect()
}

/// Which of some compilations were measured, with their kernels.
fn measured(all: &[Compilation]) -> BTreeMap<usize, Vec<&'static str>> {
    let number: BTreeMap<String, usize> = all
        .iter()
        .zip(0..)
        .map(|((architecture, variant), x)| (format!("{architecture} {}", variant.describe()), x))
        .collect();
    let lines = MEASURED.lines().filter_map(|line| {
        let (module, kernels) = line.split_once(": ")?;
        let &x = number.get(module)?;
        let own = kernels.split(' ').filter(|kernel| all[x].1.kernels().contains(kernel));
        Some((x, own.collect()))
    });
    lines.collect()
}

/// The kernels of some compilations, first those that take most time.
fn kernels(all: &[Compilation]) -> Vec<&'static str> {
    let mut least: BTreeMap<&str, u64> = BTreeMap::new();
    for (compilation, kernel) in all.iter().flat_map(|x| x.1.kernels().iter().map(move |y| (x, y)))
    {
        let least = least.entry(kernel).or_insert(u64::MAX);
        *least = effort(compilation, kernel).min(*least);
    }
    let mut kernels: Vec<_> = least.into_iter().collect();
    kernels.sort_by_key(|&(_, least)| Reverse(least));
    kernels.into_iter().map(|(kernel, _)| kernel).collect()
}

/// What a module is taken to cost besides its kernels, in µs, that there be few.
const MODULE: u64 = 60_000;

/// The variants of a family for each of its architectures.
fn all_of(family: Family) -> Vec<Compilation> {
    let own = every_variant().into_iter().filter(|variant| variant.family == family);
    let all = own.flat_map(|variant| {
        family.architectures().iter().map(move |&architecture| (architecture, variant.clone()))
    });
    // Tiles that are taken where they are asked for alone: on the architecture on which they are timed.
    let usual = |x: &Compilation| x.0 == "sm_90" || x.1.define("TILES") == 0;
    all.filter(|x| x.1.fits(x.0) && usual(x)).collect()
}

/// What a compilation has, with its place: the architecture, then the values of its options, then its kernels.
type Choice<'a> = (usize, &'a str);

const ARCHITECTURE: usize = 0;
const KERNEL: usize = usize::MAX;

/// Without the kernels.
fn settings((architecture, variant): &Compilation) -> Vec<Choice<'_>> {
    let values = variant.defines.iter().map(|(_, value)| value.as_str());
    [*architecture].into_iter().chain(values).enumerate().collect()
}

fn choices(compilation: &Compilation) -> Vec<Choice<'_>> {
    let kernels = compilation.1.kernels().iter().map(|&kernel| (KERNEL, kernel));
    settings(compilation).into_iter().chain(kernels).collect()
}

/// Two options, an option and a kernel, or an architecture and a kernel.
fn pairs(compilation: &Compilation) -> Vec<[Choice<'_>; 2]> {
    let choices = choices(compilation);
    let all = (0..choices.len()).flat_map(|i| (0..i).map(move |j| (i, j)));
    let all = all.map(|(i, j)| [choices[j], choices[i]]);
    let is_kernel = |(place, _): Choice| place == KERNEL;
    all.filter(|&[x, y]| is_kernel(y) && !is_kernel(x) || x.0 != ARCHITECTURE && !is_kernel(y))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What of these some compilation of a family has.
    fn made<'a, T: Ord>(
        among: &'a [Compilation],
        family: Family,
        of: impl Fn(&'a Compilation) -> Vec<T>,
    ) -> BTreeSet<T> {
        among.iter().filter(|x| x.1.family == family).flat_map(of).collect()
    }

    #[test]
    fn every_pair_of_choices_is_made_and_the_matrix_is_small() {
        let chosen = pairwise_variants();
        assert!(chosen.len() <= 200, "{}", chosen.len());
        assert_eq!(chosen.iter().collect::<BTreeSet<_>>().len(), chosen.len());
        for family in Family::ALL {
            let all = all_of(family);
            let every: BTreeSet<_> = all.iter().flat_map(pairs).collect();
            assert_eq!(made(&chosen, family, pairs), every, "{family:?}");
        }
        // Each kernel for each architecture, and each option in each kernel.
        let all = all_of(Family::Second);
        let made = made(&all, Family::Second, pairs);
        for pair in [
            [(ARCHITECTURE, "sm_86"), (KERNEL, "fused")],
            [(2, "1"), (KERNEL, "gbias")],
            [(2, "1"), (3, "1")],
        ] {
            assert!(made.contains(&pair), "{pair:?}");
        }
    }

    #[test]
    fn every_kernel_is_compiled_for_every_architecture_and_with_every_option_in_little_time() {
        let chosen = kernelwise_variants();
        assert!(chosen.len() <= 200, "{}", chosen.len());
        let modules: BTreeSet<_> = chosen.iter().map(|(compilation, _)| compilation).collect();
        assert_eq!(modules.len(), chosen.len());
        for family in Family::ALL {
            let all: Vec<Excerpt> = all_of(family).iter().map(whole).collect();
            let own = chosen.iter().filter(|x| x.0.1.family == family);
            let own: BTreeSet<_> = own.flat_map(settings_of_kernels).collect();
            assert_eq!(own, all.iter().flat_map(settings_of_kernels).collect(), "{family:?}");
        }
        // Two minutes of two cores, with what is not counted here.
        let time: u64 = chosen.iter().map(time).sum();
        assert!(time < 220_000_000, "{time} µs");
    }

    /// Each kernel with the architecture, and with the value of each option.
    fn settings_of_kernels((compilation, kernels): &Excerpt) -> Vec<(&'static str, Choice<'_>)> {
        let of = |&kernel| settings(compilation).into_iter().map(move |choice| (kernel, choice));
        kernels.iter().flat_map(of).collect()
    }
}
