//! Changes of the exact results that kernels make by mistake: elements that were never written, a factor,
//! a shift, another order of heads, another layout.

mod factors;
mod marks;
mod moves;
mod names;

use super::candidate::Candidate;
use super::judge::Judge;
use etalon_problem::Problem;

/// Outputs of more elements are looked at in some rows first.
const ELEMENTS: usize = 1 << 20;

/// Rows that are looked at of such an output: as many that are off, and as many that are right.
const ROWS: usize = 1024;

/// The patterns of an output, if it is off, which may hold another output, or an input.
pub(super) fn all<'a>(
    problem: &Problem,
    judge: &'a Judge<'a>,
    others: &'a [Judge<'a>],
    inputs: &'a [(&'static str, &'a [f64])],
) -> Vec<Candidate<'a>> {
    if judge.output().off() == 0 {
        return Vec::new();
    }
    let rows = Rows::new(judge);
    let mut list = marks::all(judge, &rows);
    list.extend(factors::all(problem, judge, &rows));
    list.extend(moves::all(judge, &rows));
    list.extend(moves::copies(judge, &rows, others, inputs));
    list
}

/// Rows of an output that are looked at.
struct Rows {
    off: Vec<usize>,
    right: Vec<usize>,
}

impl Rows {
    fn new(judge: &Judge<'_>) -> Self {
        let own = judge.output().own_rows();
        let (off, right): (Vec<usize>, Vec<usize>) = (0..own.len()).partition(|&row| own[row]);
        if judge.exact().len() <= ELEMENTS {
            return Rows { off, right };
        }
        Rows { off: some(&off), right: some(&right) }
    }

    fn all(&self) -> Vec<usize> {
        self.off.iter().chain(&self.right).copied().collect()
    }
}

/// Entries of a list at equal distances.
fn some(list: &[usize]) -> Vec<usize> {
    list.iter().step_by(list.len().div_ceil(ROWS).max(1)).copied().collect()
}

/// Every row of an output.
pub(super) fn every_row(judge: &Judge<'_>) -> Vec<usize> {
    (0..judge.exact().len() / judge.width()).collect()
}
