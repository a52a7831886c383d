//! Which variants there are, and the few of them in which every pair of choices is made.

use crate::family::Family;
use crate::softmax::{CONSUMER, Hopper, Lengths, Results};
use crate::unit::Unit;
use crate::variant::{Variant, WIDTHS};
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

/// A variant for an architecture.
pub type Compilation = (&'static str, Variant);

/// A list of at most 200 compilations in which every pair of choices is made that some variant makes: every
/// kernel for every architecture that it serves, every option in every kernel, and every pair of options.
pub fn pairwise_variants() -> Vec<Compilation> {
    LISTED.iter().flat_map(|[_, pairs]| pairs.clone()).collect()
}

/// Those among [`pairwise_variants`] that CI compiles: every family for every architecture that it serves, every
/// option of the family, and every kernel, in the variants that take the compiler least time.
pub fn choicewise_variants() -> Vec<Compilation> {
    LISTED.iter().flat_map(|[choices, _]| choices.clone()).collect()
}

/// [`lists`] of each family: they take a second or two.
static LISTED: LazyLock<Vec<[Vec<Compilation>; 2]>> =
    LazyLock::new(|| Family::ALL.into_iter().map(|family| lists(&all_of(family))).collect());

/// What CI compiles of a family, and a list in which every pair is made: the shortest, with what takes least time in it;
/// or what takes least time of all and what it lacks, if that saves CI [`WORTH`].
fn lists(all: &[Compilation]) -> [Vec<Compilation>; 2] {
    let owned = |list: &[usize]| list.iter().map(|&x| all[x].clone()).collect::<Vec<_>>();
    let pairs = Choices::new(all, pairs);
    let list = pairs.shortest(&[]);
    let short = owned(&list);
    let within: Vec<_> = choicewise(&short).into_iter().map(|x| list[x]).collect();
    let easy = choicewise(all);
    if sum(all, &within) <= sum(all, &easy) + WORTH {
        return [owned(&within), short];
    }
    [owned(&easy), owned(&pairs.shortest(&easy))]
}

/// Every choice, in the compilations that take least time together.
fn choicewise(all: &[Compilation]) -> Vec<usize> {
    let choices = Choices::new(all, choices);
    choices.ease(choices.cover(&[], 0))
}

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

fn choices((architecture, variant): &Compilation) -> Vec<Choice<'_>> {
    let values = variant.defines.iter().map(|(_, value)| value.as_str());
    let mut all: Vec<_> = [*architecture].into_iter().chain(values).enumerate().collect();
    all.extend(variant.kernels().iter().map(|&kernel| (KERNEL, kernel)));
    all
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

/// What each compilation of a list has, as numbers below `count`.
struct Choices<'a> {
    all: &'a [Compilation],
    of: Vec<Vec<usize>>,
    count: usize,
}

/// Lists of pairs that are made, of which the shortest is taken.
const LISTS: usize = 100;

impl<'a> Choices<'a> {
    fn new<T: Ord>(all: &'a [Compilation], of: impl Fn(&'a Compilation) -> Vec<T>) -> Self {
        let own: Vec<Vec<T>> = all.iter().map(of).collect();
        let kinds: BTreeSet<&T> = own.iter().flatten().collect();
        let number: BTreeMap<&T, usize> = kinds.into_iter().zip(0..).collect();
        let of = own.iter().map(|own| own.iter().map(|one| number[one]).collect()).collect();
        let count = number.len();
        Choices { all, of, count }
    }

    /// Takes, after the first, the compilation that has most of what none before it had, until there is nothing more.
    /// Which one of equals is taken, a number decides.
    fn cover(&self, first: &[usize], number: usize) -> Vec<usize> {
        let mut taken = first.to_vec();
        let mut open = vec![true; self.count];
        taken.iter().flat_map(|&x| &self.of[x]).for_each(|&one| open[one] = false);
        while open.contains(&true) {
            let has = |x: usize| self.of[x].iter().filter(|&&one| open[one]).count();
            let best = (0..self.all.len()).max_by_key(|&x| (has(x), mixed(number, x)));
            let Some(best) = best else { break };
            self.of[best].iter().for_each(|&one| open[one] = false);
            taken.push(best);
        }
        taken
    }

    /// The shortest of some lists that begin with the first, and of equals that which takes least time.
    fn shortest(&self, first: &[usize]) -> Vec<usize> {
        let lists = (0..LISTS).map(|number| self.without_spare(self.cover(first, number), first));
        lists.min_by_key(|list| (list.len(), sum(self.all, list))).unwrap_or_default()
    }

    /// Without those beyond the first whose choices others have, too.
    fn without_spare(&self, mut taken: Vec<usize>, first: &[usize]) -> Vec<usize> {
        let mut made = vec![0; self.count];
        taken.iter().flat_map(|&x| &self.of[x]).for_each(|&one| made[one] += 1);
        taken.retain(|x| {
            let spare = !first.contains(x) && self.of[*x].iter().all(|&one| made[one] > 1);
            if spare {
                self.of[*x].iter().for_each(|&one| made[one] -= 1);
            }
            !spare
        });
        taken
    }

    /// In the place of each that is taken the easiest compilation that has all that no other one has.
    fn ease(&self, mut taken: Vec<usize>) -> Vec<usize> {
        let effort = |x: &usize| effort(&self.all[*x]);
        let mut easier = true;
        while easier {
            easier = false;
            taken.sort_by_key(|x| Reverse(effort(x)));
            for at in 0..taken.len() {
                let others = taken.iter().enumerate().filter(|&(other, _)| other != at);
                let mut made = vec![false; self.count];
                others.flat_map(|(_, &x)| &self.of[x]).for_each(|&one| made[one] = true);
                let own: Vec<_> = self.of[taken[at]].iter().filter(|&&one| !made[one]).collect();
                let serves = |x: &usize| own.iter().all(|one| self.of[*x].contains(one));
                let easiest = (0..self.all.len()).filter(serves).min_by_key(effort);
                if let Some(best) = easiest.filter(|x| effort(x) < effort(&taken[at])) {
                    (taken[at], easier) = (best, true);
                }
            }
        }
        taken
    }
}

/// A number that tells little of those that it is made of.
fn mixed(list: usize, at: usize) -> u64 {
    let x = (list as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (at as u64);
    let x = (x ^ x >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ x >> 29
}

/// What CI must save for a longer list: seconds of the compiler's time, in µs.
const WORTH: u64 = 2_000_000;

fn sum(all: &[Compilation], list: &[usize]) -> u64 {
    list.iter().map(|&x| effort(&all[x])).sum()
}

/// How long NVRTC 13.0 takes for it, in µs, by the times of the compilations of [`pairwise_variants`].
fn effort((architecture, variant): &Compilation) -> u64 {
    let percent = |(name, value): &(&str, String)| match (*name, value.as_str()) {
        ("R", "8") => 200,
        ("SECOND", "1") => 180,
        ("OPTIONS", "1") => 160,
        ("VALUES", "1") => 140,
        ("D" | "CD" | "CE" | "CW" | "KW", "128") => 135,
        ("D" | "CD" | "CE" | "CW" | "KW", "256") => 180,
        _ => 100,
    };
    let of_architecture = if *architecture == "sm_120" { 130 } else { 100 };
    let kernels = 1000 * of_kernel(variant.family) * variant.kernels().len() as u64;
    let all = variant.defines.iter().map(percent).chain([of_architecture]);
    all.fold(kernels, |effort, percent| effort * percent / 100)
}

/// The same in ms for a kernel of a family, where it takes least.
fn of_kernel(family: Family) -> u64 {
    match family {
        Family::Moves | Family::Peak | Family::TensorPeak | Family::CrossEntropyShards => 40,
        Family::HopperPeak | Family::Lazy | Family::Tables => 90,
        Family::CrossEntropy | Family::Portable => 115,
        Family::TensorSecond | Family::TensorWide | Family::Linear => 170,
        Family::Second | Family::TensorFused => 195,
        Family::Tensor | Family::HopperBackward => 260,
        Family::TensorF32 | Family::HopperLazyForward | Family::LazyTensor => 350,
        Family::LinearTensor => 430,
        Family::LinearSecond | Family::HopperCrossEntropy => 550,
        Family::HopperLinear | Family::HopperForward => 700,
        Family::HopperLazyBackward => 1200,
    }
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
        assert!(chosen.len() <= 210, "{}", chosen.len());
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
    fn every_choice_is_made_among_the_pairs_for_every_architecture() {
        let (pairwise, chosen) = (pairwise_variants(), choicewise_variants());
        // Two minutes of two cores, with what is not counted here.
        let time: u64 = chosen.iter().map(effort).sum();
        assert!(time < 200_000_000, "{time} µs");
        for family in Family::ALL {
            let all = all_of(family);
            let every: BTreeSet<_> = all.iter().flat_map(choices).collect();
            assert_eq!(made(&chosen, family, choices), every, "{family:?}");
            assert_eq!(made(&pairwise, family, choices), every, "{family:?}");
        }
        assert!(chosen.iter().all(|compilation| pairwise.contains(compilation)));
    }

    #[test]
    fn easier_compilations_are_preferred() {
        let all = all_of(Family::LinearTensor);
        let choices = Choices::new(&all, choices);
        let first = choices.cover(&[], 0);
        let (before, after) = (sum(&all, &first), sum(&all, &choices.ease(first.clone())));
        assert!(after < before, "{before} {after}");
    }
}
