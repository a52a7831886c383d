//! Few of many that together have all that any of them has.

use std::collections::{BTreeMap, BTreeSet};

/// What each of many has, as numbers below `count`, and how much time it takes.
pub(crate) struct Cover {
    of: Vec<Vec<usize>>,
    effort: Vec<u64>,
    count: usize,
}

/// Lists that are made, of which the best is taken.
const LISTS: usize = 40;

impl Cover {
    pub(crate) fn new<T: Ord>(all: impl Iterator<Item = (Vec<T>, u64)>) -> Self {
        let (own, effort): (Vec<Vec<T>>, _) = all.unzip();
        let kinds: BTreeSet<&T> = own.iter().flatten().collect();
        let number: BTreeMap<&T, usize> = kinds.into_iter().zip(0..).collect();
        let of = own.iter().map(|own| own.iter().map(|one| number[one]).collect()).collect();
        let count = number.len();
        Cover { of, effort, count }
    }

    /// The shortest of some lists, and of equals that which takes least time.
    pub(crate) fn shortest(&self) -> Vec<usize> {
        // So much that only equals are told apart.
        let worth = |has: usize, _, chance: f64| has as f64 + chance / 2.0;
        let lists = (0..LISTS).map(|number| self.without_spare(self.list(number, worth)));
        lists.min_by_key(|list| (list.len(), self.sum(list))).unwrap_or_default()
    }

    /// Of some lists that which takes least time.
    pub(crate) fn easiest(&self) -> Vec<usize> {
        let worth =
            |has: usize, effort: u64, chance: f64| has as f64 / effort as f64 * (1.0 + chance);
        let lists = (0..LISTS).map(|number| {
            let mut list = self.list(number, worth);
            list.sort_by_key(|&x| std::cmp::Reverse(self.effort[x]));
            self.ease(self.without_spare(list))
        });
        lists.min_by_key(|list| self.sum(list)).unwrap_or_default()
    }

    fn sum(&self, list: &[usize]) -> u64 {
        list.iter().map(|&x| self.effort[x]).sum()
    }

    /// Takes the one that is worth most, by how much it has of what none before it had, by its effort and by chance,
    /// until there is nothing more.
    fn list(&self, number: usize, worth: impl Fn(usize, u64, f64) -> f64) -> Vec<usize> {
        let (mut taken, mut open) = (Vec::new(), vec![true; self.count]);
        while open.contains(&true) {
            let worth = |x: usize| {
                let has = self.of[x].iter().filter(|&&one| open[one]).count();
                if has == 0 { 0.0 } else { worth(has, self.effort[x], chance(number, x)) }
            };
            let all = (0..self.of.len()).map(|x| (worth(x), x));
            let Some((_, best)) = all.max_by(|x, y| x.0.total_cmp(&y.0)) else { break };
            self.of[best].iter().for_each(|&one| open[one] = false);
            taken.push(best);
        }
        taken
    }

    /// Without those whose choices others have, too.
    fn without_spare(&self, mut taken: Vec<usize>) -> Vec<usize> {
        let mut made = vec![0; self.count];
        taken.iter().flat_map(|&x| &self.of[x]).for_each(|&one| made[one] += 1);
        taken.retain(|x| {
            let spare = self.of[*x].iter().all(|&one| made[one] > 1);
            if spare {
                self.of[*x].iter().for_each(|&one| made[one] -= 1);
            }
            !spare
        });
        taken
    }

    /// In the place of each that is taken the easiest that has all that no other one has.
    fn ease(&self, mut taken: Vec<usize>) -> Vec<usize> {
        let mut easier = true;
        while easier {
            easier = false;
            for at in 0..taken.len() {
                let others = taken.iter().enumerate().filter(|&(other, _)| other != at);
                let mut made = vec![false; self.count];
                others.flat_map(|(_, &x)| &self.of[x]).for_each(|&one| made[one] = true);
                let own: Vec<_> = self.of[taken[at]].iter().filter(|&&one| !made[one]).collect();
                let serves = |x: &usize| own.iter().all(|one| self.of[*x].contains(one));
                let easiest = (0..self.of.len()).filter(serves).min_by_key(|&x| self.effort[x]);
                if let Some(best) = easiest.filter(|&x| self.effort[x] < self.effort[taken[at]]) {
                    (taken[at], easier) = (best, true);
                }
            }
        }
        taken
    }
}

/// A number from 0 to 1 that tells little of those that it is made of.
fn chance(list: usize, at: usize) -> f64 {
    let x = (list as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (at as u64);
    let x = (x ^ x >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (x >> 11) as f64 / (1u64 << 53) as f64
}
