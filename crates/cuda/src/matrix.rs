//! Which variants there are, and the few of them in which every pair of choices is made.

use crate::variant::{Family, Variant, WIDTHS};
use etalon_problem::Dtype::{Bf16, F16, F32};
use std::collections::BTreeSet;

const FLAGS: [bool; 2] = [false, true];

/// Every variant that a pass may ask for.
pub fn every_variant() -> Vec<Variant> {
    let mut all = vec![Variant::moves(2), Variant::moves(4)];
    let values = [None, Some(WIDTHS[0]), Some(WIDTHS[1]), Some(WIDTHS[2])];
    for (storage, options) in [F32, Bf16, F16].into_iter().flat_map(|x| FLAGS.map(|y| (x, y))) {
        for (dim, value_dim) in WIDTHS.into_iter().flat_map(|x| values.map(|y| (x, y))) {
            all.push(Variant::portable(storage, dim, value_dim, options));
            all.push(Variant::second(storage, dim, value_dim, options));
            if storage != F32 {
                let tensor = |whole| Variant::tensor(storage, dim, value_dim, options, whole);
                all.extend(FLAGS.map(tensor));
            }
        }
    }
    for (storage, width) in [Bf16, F16].into_iter().flat_map(|x| [64, 128].map(|y| (x, y))) {
        for flags in FLAGS.into_iter().flat_map(|x| FLAGS.map(|y| [x, y])) {
            all.extend(FLAGS.map(|values| Variant::hopper_forward(storage, width, flags, values)));
            all.push(Variant::hopper_backward(storage, width, flags));
        }
    }
    all.sort();
    // Wide values of the level sm80 take several launches of the same kernels.
    all.dedup();
    all
}

/// A variant for an architecture.
pub type Compilation = (&'static str, Variant);

/// Variants for architectures in which every pair of choices is made that some variant makes: of two
/// options, of an option and a width, of any of them and an architecture.
pub fn pairwise_variants() -> Vec<Compilation> {
    let every = every_variant();
    let of = |family: Family| {
        let own = every.iter().filter(move |variant| variant.family == family);
        let all = own.flat_map(|variant| {
            family.architectures().iter().map(move |&architecture| (architecture, variant.clone()))
        });
        pairwise(all.collect())
    };
    Family::ALL.into_iter().flat_map(of).collect()
}

/// Two choices that a compilation makes, each with its place among them.
type Pair<'a> = [(usize, &'a str); 2];

fn pairs((architecture, variant): &Compilation) -> Vec<Pair<'_>> {
    let values = variant.defines.iter().map(|(_, value)| value.as_str());
    let choices: Vec<_> = [*architecture].into_iter().chain(values).enumerate().collect();
    let all = (0..choices.len()).flat_map(|i| (0..i).map(move |j| (i, j)));
    all.map(|(i, j)| [choices[j], choices[i]]).collect()
}

/// Takes what makes most pairs that were not made before, until all are.
fn pairwise(all: Vec<Compilation>) -> Vec<Compilation> {
    let mut open: BTreeSet<Pair<'_>> = all.iter().flat_map(pairs).collect();
    let mut taken = Vec::new();
    while !open.is_empty() {
        let makes = |x: &&Compilation| pairs(x).iter().filter(|pair| open.contains(*pair)).count();
        // Of equals the first.
        let Some(best) = all.iter().rev().max_by_key(makes) else { break };
        pairs(best).iter().for_each(|pair| _ = open.remove(pair));
        taken.push(best.clone());
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_choices_is_made_and_the_matrix_is_small() {
        let (every, chosen) = (every_variant(), pairwise_variants());
        assert!(chosen.len() <= 200, "{}", chosen.len());
        let made: BTreeSet<_> = chosen
            .iter()
            .flat_map(|x| pairs(x).into_iter().map(|pair| (x.1.family, pair)))
            .collect();
        for variant in &every {
            for &architecture in variant.family.architectures() {
                let compilation = (architecture, variant.clone());
                for pair in pairs(&compilation) {
                    assert!(
                        made.contains(&(variant.family, pair)),
                        "{pair:?} of {:?}",
                        variant.family
                    );
                }
            }
        }
    }
}
