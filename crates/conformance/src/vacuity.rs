//! Power of the cases of a run to tell right from wrong: about every output, at every value of every axis of the grid.
//! A case alone may be uninformative: where rows see a key or two, whole gradients cancel.

use crate::bounds::Bounds;
use crate::cases::Spec;
use crate::gates::sharpness;
use crate::laws::Exact;
use crate::report::{Record, Verdict};
use etalon_problem::{Algorithm, Dtype, Pass};
use std::collections::BTreeMap;
use std::time::Duration;

/// Of so few elements nothing is asked.
const FEWEST_ELEMENTS: usize = 5;

/// Of so many cases of a value one must be informative, and of fewer nothing is asked. Where scores are large a
/// derivative is one in five or six cases, in the others every row has a single key that counts: four such cases are
/// all uninformative two times in five.
const ONE_IN: usize = 8;

/// An output of a case: at which point, and whether its bounds are informative.
#[derive(Clone)]
pub(crate) struct OutputSharpness {
    spec: Spec,
    pass: Pass,
    output: String,
    informative: bool,
}

/// Sharpness of the bounds of a case for every output of the passes that `asked` names.
pub(crate) fn sharpness_of(exact: &Exact, asked: impl Fn(Pass) -> bool) -> Vec<OutputSharpness> {
    let spec = exact.case().spec;
    let passes = spec.algorithm.passes().iter().copied().filter(|pass| asked(*pass));
    let of_pass = |pass: Pass| {
        let bounds: Option<&Bounds> = exact.pass(pass).ok();
        let outputs = bounds.into_iter().flat_map(|bounds| &bounds.outputs);
        outputs.filter_map(move |(name, bound)| {
            let (sharp, all) = sharpness(bound);
            // Four elements in five, as of generic inputs.
            let informative = 5 * sharp >= 4 * all;
            let output = name.clone();
            (all >= FEWEST_ELEMENTS).then_some(OutputSharpness { spec, pass, output, informative })
        })
    };
    passes.flat_map(of_pass).collect()
}

/// The values of axes at which the cases say too little about some output.
pub(crate) fn uninformative(outputs: &[OutputSharpness]) -> Vec<Record> {
    type Group<'a> = (Algorithm, Pass, &'a str, String);
    let mut groups: BTreeMap<Group<'_>, (usize, usize)> = BTreeMap::new();
    for found in outputs {
        for value in found.spec.values() {
            let group = (found.spec.algorithm, found.pass, found.output.as_str(), value);
            let (informative, all) = groups.entry(group).or_default();
            *informative += usize::from(found.informative);
            *all += 1;
        }
    }
    let uninformative =
        groups.into_iter().filter(|(_, (informative, all))| *informative < *all / ONE_IN);
    let record = |((algorithm, pass, output, value), (informative, all)): (Group<'_>, _)| Record {
        tier: "every tier".to_string(),
        algorithm,
        pass,
        dtype: Dtype::F64,
        check: "informative".to_string(),
        case: value,
        verdict: Verdict::Vacuous(format!(
            "in {informative} of {all} cases the bounds of {output} could notice an error of a tenth"
        )),
        margin: None,
        elapsed: Duration::ZERO,
    };
    uninformative.map(record).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::{Depth, specs};

    #[test]
    fn a_value_whose_cases_are_blunt_is_named() {
        let spec = specs(Algorithm::Attention, Depth::Core, 0).next().unwrap();
        let sharpness = |informative| {
            let (pass, output) = (Pass::Forward, "o".to_string());
            OutputSharpness { spec, pass, output, informative }
        };
        let one_in = |n: usize| (0..n).map(|at| sharpness(at == 0)).collect::<Vec<_>>();
        assert!(uninformative(&one_in(15)).is_empty(), "one in eight is enough");
        let found = uninformative(&one_in(16));
        let none = |n: usize| uninformative(&vec![sharpness(false); n]);
        assert_eq!(none(ONE_IN).len(), found.len());
        assert!(none(ONE_IN - 1).is_empty(), "of few cases each may be uninformative by itself");
        assert_eq!(found.len(), spec.values().len(), "one for each axis");
        assert!(found.iter().all(|record| record.verdict.is_negative()));
        assert!(found.iter().any(|record| record.case.starts_with("family=")));
    }
}
