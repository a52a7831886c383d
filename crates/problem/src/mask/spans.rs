//! The ranges of keys that the queries of a sequence see, where the data of a mask decide.

use std::collections::HashMap;
use std::ops::Range;

/// The keys of the id of each query; none of a negative id. `None` where those of some query do not lie side by side.
pub(super) fn of_segments(query: &[i64], key: &[i64]) -> Option<Vec<Range<usize>>> {
    let mut runs: HashMap<i64, Option<Range<usize>>> = HashMap::new();
    let mut start = 0;
    for run in key.chunk_by(|a, b| a == b) {
        let range = start..start + run.len();
        start = range.end;
        runs.entry(run[0]).and_modify(|split| *split = None).or_insert(Some(range));
    }
    let of = |id: &i64| match runs.get(id).filter(|_| *id >= 0) {
        Some(run) => run.clone(),
        None => Some(0..0),
    };
    query.iter().map(of).collect()
}
