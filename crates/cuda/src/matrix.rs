//! Which variants there are, and the few of them in which every pair of choices is made.

use crate::family::Family;
use crate::softmax::{CONSUMER, Hopper, Lengths, Results};
use crate::unit::Unit;
use crate::variant::{Variant, WIDTHS};
use etalon_problem::Dtype::{self, Bf16, F16, F32};
use std::collections::BTreeSet;

const FLAGS: [bool; 2] = [false, true];

/// Every variant that a pass may ask for.
pub fn every_variant() -> Vec<Variant> {
    let mut all = vec![Variant::moves(2), Variant::moves(4), Variant::peak(Unit::Ffma, F32)];
    let tensor_cores = [Unit::Mma, Unit::Wgmma].into_iter();
    all.extend(tensor_cores.flat_map(|unit| [Bf16, F16].map(|x| Variant::peak(unit, x))));
    let values = [None, Some(WIDTHS[0]), Some(WIDTHS[1]), Some(WIDTHS[2])];
    for (storage, second) in [F32, Bf16, F16].into_iter().flat_map(|x| FLAGS.map(|y| (x, y))) {
        all.push(Variant::cross_entropy(storage, second));
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
                all.extend(FLAGS.map(tensor));
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
        all.push(Variant::hopper_linear(storage, width));
        for (windowed, options) in FLAGS.into_iter().flat_map(|x| FLAGS.map(|y| (x, y))) {
            for lengths in [Lengths::Equal, Lengths::Own, Lengths::Listed] {
                let of = Hopper { storage, width, windowed, lengths, options }.within();
                all.extend(FLAGS.map(|values| Variant::hopper_forward(of, values)));
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

/// Variants for architectures in which every pair of choices is made that some variant makes: of two
/// options, of an option and a width, of any of them and an architecture.
pub fn pairwise_variants() -> Vec<Compilation> {
    Family::ALL.into_iter().flat_map(|family| cover(&all_of(family), pairs)).collect()
}

/// Those among [`pairwise_variants`] in which every choice is made.
pub fn choicewise_variants() -> Vec<Compilation> {
    Family::ALL
        .into_iter()
        .flat_map(|family| cover(&cover(&all_of(family), pairs), choices))
        .collect()
}

/// The variants of a family for each of its architectures.
fn all_of(family: Family) -> Vec<Compilation> {
    let own = every_variant().into_iter().filter(|variant| variant.family == family);
    let all = own.flat_map(|variant| {
        family.architectures().iter().map(move |&architecture| (architecture, variant.clone()))
    });
    all.filter(|(architecture, variant)| variant.fits(architecture)).collect()
}

/// A choice that a compilation makes, with its place among them: the architecture comes first.
type Choice<'a> = (usize, &'a str);

fn choices((architecture, variant): &Compilation) -> Vec<Choice<'_>> {
    let values = variant.defines.iter().map(|(_, value)| value.as_str());
    [*architecture].into_iter().chain(values).enumerate().collect()
}

fn pairs(compilation: &Compilation) -> Vec<[Choice<'_>; 2]> {
    let choices = choices(compilation);
    let all = (0..choices.len()).flat_map(|i| (0..i).map(move |j| (i, j)));
    all.map(|(i, j)| [choices[j], choices[i]]).collect()
}

/// Takes the compilation that has most of what none before it had, until there is nothing more.
fn cover<'a, T: Ord>(
    all: &'a [Compilation],
    of: impl Fn(&'a Compilation) -> Vec<T>,
) -> Vec<Compilation> {
    let mut open: BTreeSet<T> = all.iter().flat_map(&of).collect();
    let mut taken = Vec::new();
    while !open.is_empty() {
        let has = |x: &&'a Compilation| of(x).iter().filter(|one| open.contains(one)).count();
        // Of equals the first.
        let Some(best) = all.iter().rev().max_by_key(has) else { break };
        of(best).iter().for_each(|one| _ = open.remove(one));
        taken.push(best.clone());
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_choices_is_made_and_the_matrix_is_small() {
        let chosen = pairwise_variants();
        assert!(chosen.len() <= 265, "{}", chosen.len());
        let of = |family| chosen.iter().filter(move |x| x.1.family == family);
        for family in Family::ALL {
            let made: BTreeSet<_> = of(family).flat_map(pairs).collect();
            for compilation in all_of(family) {
                assert!(pairs(&compilation).iter().all(|pair| made.contains(pair)));
            }
        }
    }

    #[test]
    fn every_choice_is_made_among_the_pairs_for_every_architecture() {
        let (pairwise, chosen) = (pairwise_variants(), choicewise_variants());
        assert!(chosen.len() < pairwise.len() / 2, "{}", chosen.len());
        for compilation in pairwise.iter() {
            let family = compilation.1.family;
            let own = chosen.iter().filter(|x| x.1.family == family).flat_map(choices);
            for choice in choices(compilation) {
                assert!(own.clone().any(|made| made == choice), "{choice:?} of {family:?}");
            }
        }
        assert!(chosen.iter().all(|compilation| pairwise.contains(compilation)));
    }
}
