//! The mutants: real bugs, with their stories.

use super::job::Job;
use super::rows::{Results, Rows};
use etalon_problem::Algorithm;

/// A known bug.
#[derive(Debug, Clone, Copy)]
pub struct Mutant {
    /// Its name.
    pub name: &'static str,
    /// The algorithms that have it.
    pub of: &'static [Algorithm],
    /// The mistake, in a sentence.
    pub story: &'static str,
    /// The law that must kill it; others may, too.
    pub killer: &'static str,
    /// Its public report: an issue (`owner/repository#number`) or a commit (`owner/repository@commit`); empty if it
    /// was made for this zoo.
    pub address: &'static str,
    /// The fault around a sound kernel; `None`: the kernel asks for the bug.
    pub(crate) change: Option<Change>,
}

/// A fault around a sound kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Change {
    /// It is asked something else.
    Request(fn(&mut Job)),
    /// It is not given these inputs.
    Unread(&'static [&'static str]),
    /// An input is misread.
    Input(&'static str, fn(&mut Rows)),
    /// An output is spoilt.
    Output(&'static str, fn(&mut Rows)),
    /// Outputs are spoilt.
    Outputs(fn(&Job, &mut Results)),
    /// Outputs of the second order are spoilt, by results of the first order.
    SecondOrder(fn(&mut Results, Results)),
}

impl Change {
    /// Turns a request into the one that the mutant answers.
    pub fn before(self, job: &mut Job) {
        match self {
            Change::Request(change) => change(job),
            Change::Unread(names) => names.iter().for_each(|name| drop(job.inputs.remove(*name))),
            Change::Input(name, change) => job.inputs.get_mut(name).into_iter().for_each(change),
            _ => {}
        }
    }

    /// Turns the results of a sound kernel into those of the mutant.
    pub fn after(self, job: &Job, results: &mut Results) {
        match self {
            Change::Output(name, change) => results.get_mut(name).into_iter().for_each(change),
            Change::Outputs(change) => change(job, results),
            _ => {}
        }
    }
}

/// The table of the bugs of some algorithms, so that a mutant cannot lack its story, its law or its
/// address. A row begins with a constant by which the kernel asks for the bug, or ends with a
/// [`Change`].
macro_rules! mutants {
    ($of:expr; $(
        $(#[doc = $story:literal])+
        $($bug:ident =)? $name:literal, $killer:literal, $address:literal $(, $change:expr)?;
    )*) => {
        $($(pub(super) const $bug: $crate::zoo::job::Bug = $crate::zoo::job::Bug($name);)?)*

        /// The known bugs.
        pub(crate) const MUTANTS: &[$crate::zoo::Mutant] = &[$($crate::zoo::Mutant {
            name: $name,
            of: $of,
            story: concat!($($story),+).trim_ascii(),
            killer: $killer,
            address: $address,
            change: [$(Some($change),)? None][0],
        }),*];
    };
}
pub(crate) use mutants;
