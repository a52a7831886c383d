//! Marks that results bear by themselves: never written, not a number, one number, numbers of another type.

use super::super::candidate::{Candidate, Change};
use super::super::judge::Judge;
use super::super::places;
use super::{Rows, every_row};
use etalon_problem::Dtype;

/// So many elements with one number are no accident.
const FEWEST: usize = 4;

/// A kind of number, and its name.
type Mark = (&'static str, &'static str, fn(f64) -> bool);

const MARKS: [Mark; 3] = [
    ("zero", "0: were they written at all?", |x| x == 0.0),
    ("nan", "NaN: a row that sees nothing, or 0·∞?", f64::is_nan),
    (
        "infinite",
        "infinite: a sum beyond the type, or a maximum that was not subtracted?",
        f64::is_infinite,
    ),
];

pub(super) fn all<'a>(judge: &'a Judge<'a>, rows: &Rows) -> Vec<Candidate<'a>> {
    let got = judge.got();
    let off: Vec<usize> = (0..got.len()).filter(|&at| judge.is_off(at)).collect();
    let mut list = Vec::new();
    for (id, words, has) in MARKS {
        let own = off.iter().filter(|&&at| has(got[at])).count();
        if own > 0 {
            let text = match () {
                () if got.iter().all(|x| has(*x)) => format!("every element is {words}"),
                () if own == off.len() => format!(
                    "the {} {words}",
                    counted(own, "element that is off is", "elements that are off are")
                ),
                () => {
                    let place = places::of(judge.output(), &|at| judge.is_off(at) && has(got[at]));
                    let place = place.first().cloned().unwrap_or_default();
                    format!("{} {words} {place}", counted(own, "element is", "elements are"))
                }
            };
            list.push(mark(judge, id, &text, has));
        }
    }
    let one = got[off[0]];
    let constant = one.is_finite() && one != 0.0 && off.len() >= FEWEST;
    if constant && off.iter().all(|&at| got[at] == one) {
        let text = format!("every element that is off is {one:e}");
        list.push(mark(judge, "constant", &text, move |x| x == one));
    }
    list.extend(coarse(judge, rows));
    list
}

fn counted(n: usize, one: &str, many: &str) -> String {
    if n == 1 { format!("1 {one}") } else { format!("{n} {many}") }
}

fn mark<'a>(
    judge: &'a Judge<'a>,
    id: &str,
    text: &str,
    has: impl Fn(f64) -> bool + Send + Sync + 'a,
) -> Candidate<'a> {
    let (got, exact) = (judge.got(), judge.exact());
    let at = move |at: usize| if judge.is_off(at) && has(got[at]) { got[at] } else { exact[at] };
    let change = Change { rows: every_row(judge), fitted: 0, at: Box::new(at) };
    Candidate::pattern(judge, id, text, change)
}

/// Results that are numbers of a narrower type than the one in which they are stored, and as near to the
/// exact ones as that type allows.
fn coarse<'a>(judge: &'a Judge<'a>, rows: &Rows) -> Option<Candidate<'a>> {
    let (got, exact, width) = (judge.got(), judge.exact(), judge.width());
    let elements = || rows.off.iter().flat_map(|row| row * width..(row + 1) * width);
    let types = [(Dtype::Bf16, "bf16"), (Dtype::F16, "f16"), (Dtype::F32, "f32")];
    let is = |dtype: Dtype, at: usize| {
        let near = 4.0 * dtype.unit_roundoff() * exact[at].abs();
        dtype.round(got[at]) == got[at] && (got[at] - exact[at]).abs() <= near
    };
    let fits = |dtype: Dtype| elements().all(|at| !judge.is_off(at) || is(dtype, at));
    let (dtype, name) = types.into_iter().find(|(dtype, _)| fits(*dtype))?;
    // Of a type that is as narrow every result is a number.
    let narrow = elements().all(|at| !got[at].is_finite() || dtype.round(got[at]) == got[at]);
    let sharp = judge.output().bound.largest > dtype.max();
    (narrow && sharp).then(|| {
        let text =
            format!("every row that is off holds numbers of {name}: it was rounded on the way");
        let at = move |at: usize| {
            if judge.is_off(at) && is(dtype, at) { got[at] } else { exact[at] }
        };
        let change = Change { rows: rows.off.clone(), fitted: 0, at: Box::new(at) };
        Candidate::pattern(judge, "rounded", text, change)
    })
}
