//! Readings of the bias of lazy attention: how far it reaches, and what lies beyond.

use super::{Edit, Original, Reading};
use etalon_problem::{Axis, Mask, Problem};

pub(super) fn all(own: &Original<'_>) -> Vec<Reading> {
    let Problem::LazyAttention(problem) = own.problem else { return Vec::new() };
    let Some(bias) = problem.bias.filter(|bias| bias.width > 0) else { return Vec::new() };
    let width = bias.width;
    let far = own.problem.extent(Axis::Queries).max(own.problem.extent(Axis::Keys)).max(width);
    // The distance of which each column is read; none: 0.
    let none = usize::MAX;
    let shifted = |by: usize| (by..width + by).map(|d| if d < width { d } else { none });
    let list: [(&str, &str, Vec<usize>); 4] = [
        (
            "reach-one-less",
            "has a last distance that is not read",
            (0..width).map(|d| if d + 1 < width { d } else { none }).collect(),
        ),
        (
            "clamped",
            "stays at its last value beyond its reach",
            (0..far).map(|d| d.min(width - 1)).collect(),
        ),
        ("one-later", "begins with distance 1", [none].into_iter().chain(0..width).collect()),
        ("one-earlier", "begins with distance −1", shifted(1).collect()),
    ];
    let reading = |(change, text, order): (&str, &str, Vec<usize>)| {
        let mut problem = problem.clone();
        problem.bias.iter_mut().for_each(|bias| bias.width = order.len());
        let edit = Edit::Take { axis: 1, order: order.into(), beyond: 0.0 };
        let reading =
            Reading::plain(format!("bias-{change}"), format!("`bias` {text}"), &problem.into());
        reading.edit("bias", edit).of("bias")
    };
    let mut list: Vec<Reading> = list.into_iter().map(reading).collect();
    let mut problem = problem.clone();
    let window = Mask::Window { left: Some(width - 1), right: None, align: bias.align };
    problem.scores.mask = Mask::And(vec![problem.scores.mask, window]);
    let text = "`bias` is a window: keys beyond its reach are not seen";
    list.push(Reading::plain("bias-reach-as-mask", text, &problem.into()).of("bias"));
    list.retain(|reading| reading.problem.check().is_ok());
    list
}
