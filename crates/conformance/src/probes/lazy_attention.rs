//! The probes of lazy_attention: rows of one key, whose weight is exactly 1, and rows in which the
//! bias gives one key all the weight. With τ and 1/n binary fractions, e is one, too.

use super::arrays::{Arrays, NEIGHBOUR, Room, STEP, compare};
use super::inputs::{fill, is_dyadic, place, skeleton};
use crate::generate::Stream;
use crate::laws::flaw::{Judgement, worst};
use crate::laws::lazy_attention::at_distances;
use crate::laws::tensors::everywhere;
use crate::laws::trial::Trial;
use crate::laws::visible::Visible;
use crate::tensor::Tensors;
use etalon_problem::{DistanceBias, LazyAttention, Mask, Problem, Scores};
use std::collections::BTreeMap;

/// Adds what a pair gives by τ, where its weight P + τ/n is above 0.
fn add_dtau(y: &mut Arrays, x: &Arrays, row: [usize; 3], key: [usize; 3], n: f64) {
    y.add("dtau", &[row[1]], x.product(("dout", row), ("v", key)) / n);
}

/// τ of the heads in turn: below, on and above the kink of a row of one key.
const AROUND_THE_KINK: [f64; 5] = [-1.0, -0.5, 0.0, 1.0, -2.0];

/// Every row sees its aligned key alone: P = 1, so that o = (1 + τ) v or 0, dS = dlse, and dtau the
/// sum of dout·v over the heads above the kink. All operands are small integers.
pub(super) fn kink_probe(trial: &Trial<'_>) -> Judgement {
    let (mut problem, scores) = skeleton(trial.case)?;
    let scores = Scores { mask: Mask::window(0, 0), ..scores };
    if let Problem::LazyAttention(lazy) = &mut problem {
        (lazy.bias, lazy.scores) = (None, scores.clone());
    }
    let stream = Stream::new(trial.case.spec.seed, "kink_probe");
    let small = |salt, at: &[usize]| stream.integer(place(salt, at), -2, 2) as f64;
    let tau = |head: usize| AROUND_THE_KINK[head % AROUND_THE_KINK.len()];
    let inputs = fill(trial.case, &problem, trial.pass, |x, at| match x.name {
        "tau" => tau(at[0]),
        // On the kink the score is 0: in any base its weight is 1, and on one side of it.
        "q" if tau(at[1]) == -1.0 => 0.0,
        "q" => small(1, at),
        "k" => small(2, at),
        "v" => small(3, at),
        "dout" => small(4, at),
        _ => 8.0 * small(5, at),
    });
    let visible = Visible::new(&scores, &inputs);
    let (x, mut y) = (Arrays::of(&inputs)?, Arrays::results(&problem, trial.pass));
    let (x_sizes, mut sizes) = (x.sizes(), y.zeros());
    let (sigma, mut scaled) = (scores.scale(), y.zeros());
    for ((b, h, i, j), _) in visible.pairs.indexed_iter().filter(|(_, seen)| **seen) {
        let (row, key) = ([b, h, i], [b, h / visible.group(), j]);
        let weight = (1.0 + tau(h)).max(0.0);
        let score = sigma * x.product(("q", row), ("k", key));
        y.set("lse", &row, score);
        sizes.set("lse", &row, score.abs().max(1.0));
        sizes.add_sizes(&x_sizes, row, key, (sigma.abs(), 1.0 + score.abs() / 8.0));
        add_dtau(&mut sizes, &x_sizes, row, key, 1.0);
        y.add_ds(&x, row, key, sigma, x.at("dlse", &row));
        scaled.add_ds(&x_sizes, row, key, sigma.abs(), x_sizes.at("dlse", &row));
        y.add_value(&x, row, key, weight);
        if weight > 0.0 {
            add_dtau(&mut y, &x, row, key, 1.0);
        }
    }
    let room = Room { sizes: &sizes, scaled: (!is_dyadic(sigma)).then_some(&scaled) };
    compare((&trial.ask(&problem, &inputs)?, trial.profile()), &y, room, everywhere)
}

/// q is 0 and the bias climbs by 18 with each distance, from 36: each row's weight lies on the farthest
/// visible key that it reaches. Where n is a power of two, o = (1 + τ/n) v there (and for τ > 0 τ/n
/// times the other values), lse is that bias, dS is dlse there and 0 elsewhere. Rows whose 1 + τ/n a kernel may
/// round, in the type of its weights, do not count.
pub(super) fn reach_probe(trial: &Trial<'_>) -> Judgement {
    worst([(-0.5, 256), (0.5, 8)].map(|(tau, addresses)| one_way(trial, tau, addresses)))
}

fn one_way(trial: &Trial<'_>, tau: f64, addresses: usize) -> Judgement {
    let stream = Stream::new(trial.case.spec.seed, "reach_probe");
    let (mut problem, scores) = skeleton(trial.case)?;
    let Problem::LazyAttention(lazy) = &mut problem else { return Ok(None) };
    let all = DistanceBias { width: scores.extents.keys.max(1), align: Default::default() };
    lazy.bias.get_or_insert(all);
    let visible = Visible::new(&scores, &Tensors::new());
    let counts = visible.counts();
    let edges = edges(lazy, &visible);
    let counted = |row: &[usize]| {
        let row = [row[0], row[1], row[2]];
        let weight = 1.0 + tau / counts[row] as f64;
        let kept = trial.profile().stores().iter().all(|x| x.round(weight) == weight);
        edges.contains_key(&row) && counts[row].is_power_of_two() && kept
    };
    let small = |salt, at: &[usize]| stream.integer(place(salt, at), -2, 2) as f64;
    let inputs = fill(trial.case, &problem, trial.pass, |x, at| match x.name {
        "tau" => tau,
        "bias" => STEP * (at[1] + 2) as f64,
        "k" => small(2, at),
        // Neighbours in every direction differ.
        "v" => (1 + (7 * at[2] + 31 * at[1] + 57 * at[0] + 13 * at[3]) % addresses) as f64,
        // Of two columns, so that the sums stay exact whatever E.
        "dout" if at[3] < 2 && counted(at) => small(4, at),
        "dlse" if counted(at) => 8.0 * small(5, at),
        _ => 0.0,
    });
    let (x, mut y) = (Arrays::of(&inputs)?, Arrays::results(&problem, trial.pass));
    let (x_sizes, mut sizes) = (x.sizes(), y.zeros());
    let (sigma, mut scaled) = (scores.scale(), y.zeros());
    for (&row, &((d, edge), next)) in &edges {
        let ([b, h, _], n) = (row, counts[row] as f64);
        let key = |j| [b, h / visible.group(), j];
        let score = STEP * (d + 2) as f64;
        y.set("lse", &row, score);
        y.add("dbias", &[h, d], x.at("dlse", &row));
        y.add_ds(&x, row, key(edge), sigma, x.at("dlse", &row));
        scaled.add_ds(&x_sizes, row, key(edge), sigma.abs(), x_sizes.at("dlse", &row));
        sizes.set("lse", &row, score);
        let again = 1.0 + score / 8.0;
        let of_edge = x_sizes.product(("dout", row), ("v", key(edge)));
        let d_score = x_sizes.at("dlse", &row) + 2.0 * of_edge;
        sizes.add_sizes(&x_sizes, row, key(edge), (sigma.abs(), again));
        sizes.add("dbias", &[h, d], d_score * again);
        if let Some((d, next)) = next {
            sizes.add_neighbour(&x_sizes, row, key(next), (sigma.abs(), of_edge));
            let dp = x_sizes.product(("dout", row), ("v", key(next)));
            sizes.add("dbias", &[h, d], (d_score + dp) * NEIGHBOUR);
        }
        for j in visible.keys(row) {
            let weight = f64::from(j == edge) + tau / n;
            if weight > 0.0 {
                y.add_value(&x, row, key(j), weight);
                add_dtau(&mut y, &x, row, key(j), n);
                add_dtau(&mut sizes, &x_sizes, row, key(j), n);
                sizes.add_value(&x_sizes, row, key(j), tau.abs() / n);
            }
        }
    }
    let outputs = trial.ask(&problem, &inputs)?;
    let room = Room { sizes: &sizes, scaled: (!is_dyadic(sigma)).then_some(&scaled) };
    compare((&outputs, trial.profile()), &y, room, |name, at| {
        !matches!(name, "o" | "lse") || counted(at)
    })
}

/// Of every row that reaches a visible key: the distance of the farthest one, and which it is; and the
/// same of the one before it.
type Edges = BTreeMap<[usize; 3], ((usize, usize), Option<(usize, usize)>)>;

fn edges(lazy: &LazyAttention, visible: &Visible) -> Edges {
    let mut edges = Edges::new();
    for (pair, d) in at_distances(lazy).into_iter().filter(|(pair, _)| visible.pairs[*pair]) {
        let [b, h, i, j] = pair;
        edges
            .entry([b, h, i])
            .and_modify(|(edge, next)| {
                let second = (d, j).min(*edge);
                *next = Some(next.map_or(second, |next| next.max(second)));
                *edge = (d, j).max(*edge);
            })
            .or_insert(((d, j), None));
    }
    edges
}
