//! The figures of a program of somebody beside those of etalon, as a table and as JSON.

use super::subject::{self, Subject};
use crate::noise::{SPREAD, Times};
use crate::table::page;
use crate::units::{counted, digits, marked, time};
use etalon_conformance::report::Status;
use etalon_problem::{Pass, Problem};
use serde::{Serialize, Serializer};

/// Times of a round, in ns: of the candidate, of the program that computes nothing, of etalon's tier.
pub type Round = [u64; 3];

/// A pass of a problem: the verdict on timed calls, and the times if none of these is wrong.
#[derive(Debug, Serialize)]
pub struct Figure {
    #[serde(flatten)]
    pub subject: Subject,
    #[serde(serialize_with = "name")]
    pub status: Status,
    /// The fault, or the doubt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Rounds that were timed, and the calls of the candidate in them that were judged.
    pub rounds: usize,
    pub judged: usize,
    #[serde(flatten)]
    pub timed: Option<Timed>,
}

/// Times of a pass.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Timed {
    /// From before the first element was sent to the candidate until the last result was here.
    pub candidate: Times,
    /// The same of a program that computes nothing.
    pub null: Times,
    /// Of etalon's tier, in this process.
    pub own: Times,
    /// The median over the rounds of candidate / (own + null).
    pub ratio: f64,
}

fn name<S: Serializer>(status: &Status, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(status.name())
}

impl Figure {
    /// A figure of which nothing is known yet.
    pub fn blank(problem: &Problem, mask: &str, pass: Pass) -> Figure {
        Figure {
            subject: Subject::new(problem, mask, pass),
            status: Status::Passed,
            reason: None,
            rounds: 0,
            judged: 0,
            timed: None,
        }
    }

    /// The same with its times.
    pub fn with(self, rounds: &[Round]) -> Figure {
        let [candidate, null, own] = [0, 1, 2].map(|of| times(rounds, of));
        let timed = Timed { candidate, null, own, ratio: ratio(rounds) };
        Figure { timed: Some(timed), ..self }
    }

    /// Its row of the table.
    fn row(&self) -> Vec<String> {
        let Subject { pass, mask, length, dim, .. } = &self.subject;
        let mut row = vec![pass.to_string(), mask.clone(), length.to_string(), dim.to_string()];
        row.push(self.status.name().to_string());
        let median = |times: Times| time(times.median_ns as f64 * 1e-9);
        row.extend(match self.timed {
            Some(Timed { candidate, null, own, ratio }) => [
                median(candidate),
                marked(candidate.spread(), 1, SPREAD),
                median(null),
                median(own),
                digits(ratio),
                self.rounds.to_string(),
            ],
            None => [const { String::new() }; 6],
        });
        row
    }
}

/// The figures of a run.
#[derive(Debug, Serialize)]
pub struct Figures {
    pub etalon: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// Its command line, its name, and the profile that it claims.
    pub candidate: String,
    pub name: String,
    pub profile: String,
    /// The way of the tensors: shared files or frames.
    pub transport: &'static str,
    /// The tier beside it, with its level.
    pub tier: String,
    pub dtype: &'static str,
    pub threads: usize,
    pub figures: Vec<Figure>,
    /// Passes of problems that it does not take.
    pub not_asked: Vec<String>,
}

/// Of the columns.
const COLUMNS: &str = "candidate: from before the first element is sent until the last result is here, by etalon's \
    clock. null: the same of a program that computes nothing. own: etalon's tier, called in this process. Medians of \
    the rounds, in each of which all three have the same inputs, new ones. ratio: the median of candidate / (own + \
    null).";

impl Figures {
    /// The worst verdict.
    pub fn status(&self) -> Status {
        let any = |status| self.figures.iter().any(|figure| figure.status == status);
        let worst = [Status::Failed, Status::Undecided].into_iter().find(|status| any(*status));
        worst.unwrap_or(Status::Passed)
    }

    /// The printed paragraphs.
    pub fn lines(&self) -> Vec<String> {
        let Figures { name, tier, dtype, threads, transport, .. } = self;
        let threads = counted(*threads, "thread");
        let mut lines = vec![
            format!("{name} beside {tier}, {dtype}, {threads} of etalon; tensors by {transport}"),
            self.table(),
        ];
        for Figure { subject, status, reason, .. } in &self.figures {
            let Subject { algorithm, pass, mask, length, dim, .. } = subject;
            let Some(reason) = reason else { continue };
            let word = status.name().to_uppercase();
            lines.push(format!("{word} {algorithm} {pass}, {mask}, {length} × {dim}: {reason}"));
        }
        if let Some(figure) = self.figures.first() {
            lines.push(page(&format!("{}. {COLUMNS}", figure.subject.heads())));
        }
        if self.figures.iter().any(|x| x.timed.is_some_and(|x| x.candidate.spread() > SPREAD)) {
            lines.push(page("!: a spread above 20 %: the machine was busy, so measure again."));
        }
        let not_asked = self.not_asked.iter();
        lines.extend(not_asked.map(|what| page(&format!("not asked: {what}"))));
        let judged: usize = self.figures.iter().map(|figure| figure.judged).sum();
        let failed = self.figures.iter().filter(|x| x.status == Status::Failed).count();
        let word = self.status().name().to_uppercase();
        lines.push(match failed {
            0 => format!("{word}: {} judged", counted(judged, "timed call")),
            _ => format!("{word}: no time of {}", counted(failed, "figure")),
        });
        lines
    }

    fn table(&self) -> String {
        let times = ["candidate", "spread", "null", "own", "ratio", "rounds"];
        let header = ["pass", "mask", "length", "dim", "verdict"].into_iter().chain(times);
        subject::table(header, self.figures.iter().map(|figure| (&figure.subject, figure.row())))
    }
}

/// The median over the rounds of the candidate's time over that of etalon's tier and of the call of nothing.
fn ratio(rounds: &[Round]) -> f64 {
    let each = |[candidate, nothing, own]: &Round| {
        *candidate as f64 / nothing.saturating_add(*own).max(1) as f64
    };
    let mut ratios: Vec<f64> = rounds.iter().map(each).collect();
    ratios.sort_by(f64::total_cmp);
    ratios.get(ratios.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The times of one of the three.
fn times(rounds: &[Round], of: usize) -> Times {
    Times::new(rounds.iter().map(|round| round[of]).collect())
}
