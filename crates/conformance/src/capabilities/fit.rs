//! Extents that a declared kernel takes, near those of a case.

use super::{Kernel, Limit, Number};

/// Changes drawn numbers of a problem to such as a kernel takes.
pub(crate) type Fit<'a> = &'a dyn Fn(&mut [(Number, &mut usize)]);

impl Kernel {
    /// Changes each number to the nearest that the kernel takes, as far as numbers by themselves can tell. The query
    /// heads follow the key heads, and equal numbers the first of them.
    pub(crate) fn fit(&self, numbers: &mut [(Number, &mut usize)]) {
        let nearest = |name: &Number, x| self.limits.get(name).map_or(x, |limit| limit.nearest(x));
        for (name, x) in &mut *numbers {
            **x = nearest(name, **x);
        }
        for equal in &self.equal {
            let mut own = numbers.iter_mut().filter(|(name, _)| equal.contains(name));
            let Some((_, first)) = own.next() else { continue };
            own.for_each(|(_, x)| **x = **first);
        }
        let at = |wanted| numbers.iter().position(|(name, _)| *name == wanted);
        let heads = at(Number::QueryHeads).zip(at(Number::KeyHeads));
        if let Some((query, key)) = heads {
            let key = *numbers[key].1;
            let group = nearest(&Number::Group, *numbers[query].1 / key.max(1));
            *numbers[query].1 = key * group;
        }
    }
}

impl Limit {
    /// The nearest number that it takes; the number itself where it takes none.
    fn nearest(&self, x: usize) -> usize {
        if let Some(values) = &self.one_of {
            let taken = values.iter().copied().filter(|&value| self.takes(value).is_ok());
            return taken.min_by_key(|value| value.abs_diff(x)).unwrap_or(x);
        }
        let near = x.max(self.at_least.unwrap_or(0)).min(self.at_most.unwrap_or(usize::MAX));
        let step = self.multiple_of.unwrap_or(1).max(1);
        let below = near / step * step;
        let both = [near.checked_next_multiple_of(step), Some(below)].into_iter().flatten();
        let taken = both.filter(|&value| self.takes(value).is_ok());
        taken.min_by_key(|value| value.abs_diff(near)).unwrap_or(x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use etalon_problem::Algorithm;

    fn limit(text: &str) -> Limit {
        serde_json::from_str(text).expect(text)
    }

    #[test]
    fn the_nearest_number_is_one_that_is_taken() {
        let limits = [
            r#"{"one_of": [64, 128]}"#,
            r#"{"multiple_of": 16, "at_most": 250}"#,
            r#"{"at_least": 100, "multiple_of": 64}"#,
            r#"{"at_least": 3, "at_most": 5}"#,
            "{}",
        ];
        for text in limits {
            let limit = limit(text);
            for x in 0..300_usize {
                let near = limit.nearest(x);
                assert!(limit.takes(near).is_ok(), "{text}: {x} -> {near}");
                let mut nearer = (0..600_usize).filter(|&y| y.abs_diff(x) < near.abs_diff(x));
                let nearer = nearer.find(|&y| limit.takes(y).is_ok());
                assert_eq!(nearer, None, "{text}: {x} -> {near}");
            }
        }
        assert_eq!(limit(r#"{"at_least": 5, "at_most": 4}"#).nearest(9), 9, "it takes nothing");
    }

    #[test]
    fn heads_stay_in_groups_and_equal_numbers_equal() {
        let mut kernel = Kernel::of(Algorithm::Attention);
        kernel.limits.insert(Number::KeyHeads, limit(r#"{"multiple_of": 2, "at_least": 2}"#));
        kernel.limits.insert(Number::Group, limit(r#"{"one_of": [4]}"#));
        kernel.equal.push(vec![Number::Queries, Number::Keys]);
        let (mut query, mut key, mut queries, mut keys) = (3, 1, 17, 33);
        kernel.fit(&mut [
            (Number::QueryHeads, &mut query),
            (Number::KeyHeads, &mut key),
            (Number::Queries, &mut queries),
            (Number::Keys, &mut keys),
        ]);
        assert_eq!([query, key, queries, keys], [8, 2, 17, 17]);
    }
}
