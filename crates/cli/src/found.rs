//! A check with the command that makes it again: in words, and as a report.

use crate::diagnosis;
use crate::page::Block;
use crate::report::{Report, Study};
use crate::units::{counted, digits};
use etalon_conformance::check::{Check, Output};
use etalon_conformance::report::{About, Record, Report as Run, Status, Verdict};
use std::time::Duration;

/// A check, and the command that makes it again.
#[derive(serde::Serialize)]
pub struct Found {
    #[serde(flatten)]
    pub check: Check,
    /// The share of the elements that may be undecided in results that pass.
    pub allow_undecided: f64,
    /// True if the profile is the strictest that holds, and no claim.
    pub auto: bool,
    /// Assumptions, omissions and ignored tensors.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

impl Found {
    /// The status of the check, where undecided elements are not allowed.
    pub fn status(&self) -> Status {
        match self.check.status {
            Status::Undecided if self.check.undecided() <= self.allow_undecided => Status::Passed,
            status => status,
        }
    }

    /// The findings as a report of a command: a record for each output, which is called by its name.
    pub fn report(
        &self,
        command: &'static str,
        (about, tier, case): (About, &str, &str),
        elapsed: Duration,
    ) -> Report<'_> {
        let Check { algorithm, pass, dtype, profile, outputs, .. } = &self.check;
        let elapsed = elapsed / u32::try_from(outputs.len()).unwrap_or(u32::MAX).max(1);
        let record = |output: &Output| Record {
            tier: tier.to_string(),
            algorithm: *algorithm,
            pass: *pass,
            dtype: *dtype,
            check: output.name.to_string(),
            case: case.to_string(),
            verdict: self.verdict_on(output),
            margin: Some(output.margin),
            elapsed,
        };
        let records = outputs.iter().map(record).collect();
        let about = About {
            profile: profile.name,
            depth: "one problem",
            allow_undecided: self.allow_undecided,
            ..about
        };
        let mut blocks = self.blocks();
        // Pictures of outputs that are off stand beside their places.
        if outputs.iter().all(|output| output.off == 0) {
            let pictures = |x: &Output| Block::Pictures(x.name, x.pictures.clone());
            blocks.extend(outputs.iter().map(pictures));
        }
        let study = Study {
            title: format!("{algorithm} {pass} in {dtype}, {case}"),
            status: self.status(),
            blocks,
            spreads: diagnosis::spreads(&self.check),
        };
        let replay = self.command.clone().unwrap_or_default();
        Report {
            command,
            status: self.status(),
            verdict: self.verdict(),
            run: Run { about, records, ..Run::default() },
            studies: vec![study],
            tables: Vec::new(),
            notes: Vec::new(),
            replay: Box::new(move |_| replay.clone()),
        }
    }

    /// The verdict on one output.
    fn verdict_on(&self, output: &Output) -> Verdict {
        let is_wide = self.check.too_wide && output.is_mostly_uninformative();
        let doubt = output.conspicuous.first().or(output.doubt.as_ref()).cloned();
        let doubt = doubt.or_else(|| is_wide.then(|| "the bounds are too wide".to_string()));
        match doubt {
            _ if output.off > 0 => Verdict::Fail(format!(
                "{}; {} of {} elements are off",
                diagnosis::worst(output),
                output.off,
                output.elements
            )),
            Some(doubt) if self.check.generic && !is_wide => Verdict::Fail(doubt),
            Some(doubt) => Verdict::Undecided(doubt),
            None => Verdict::Pass,
        }
    }

    pub fn verdict(&self) -> String {
        let Check { algorithm, pass, dtype, profile, outputs, .. } = &self.check;
        let (thing, of) = match &self.check.trace {
            Some(_) => ("tensor", format!("the trace of {algorithm} {pass} in {dtype}")),
            None => ("output", format!("{algorithm} {pass} in {dtype}")),
        };
        let status = self.status();
        let count = |so: fn(&Output) -> bool| outputs.iter().filter(|output| so(output)).count();
        let all = counted(outputs.len(), thing);
        let off = count(|output| output.off > 0);
        let doubtful = count(|output| output.undecided > 0);
        let bounds = format!("the bounds of {profile}");
        let text = match (off, self.check.status) {
            (0, Status::Passed) if self.auto => {
                format!("{profile} is the strictest profile that holds for {of}")
            }
            (0, Status::Passed) => format!("{all} of {of} within {bounds}"),
            (0, _) if status == Status::Passed => format!(
                "{} % undecided ({} % allowed), all else within {bounds}",
                digits(100.0 * self.check.undecided()),
                digits(100.0 * self.allow_undecided)
            ),
            (0, _) if self.check.too_wide && doubtful == 0 => {
                format!(
                    "{profile} is the strictest profile that may hold for {of}, and too wide to judge it"
                )
            }
            (0, _) if doubtful == 0 => format!("errors of {of} are conspicuous, within {bounds}"),
            (0, _) => format!("{bounds} cannot judge {doubtful} of {all} of {of}"),
            (_, _) if self.auto => {
                format!("no profile holds for {of}; this is what {profile} says")
            }
            _ => format!("{off} of {all} of {of} beyond {bounds}"),
        };
        format!("{status}: {text}")
    }

    /// All but the verdict; little of it where all is well.
    pub fn blocks(&self) -> Vec<Block> {
        let check = &self.check;
        let mut blocks = vec![diagnosis::table(check)];
        blocks.extend(self.notes.iter().cloned().map(Block::Text));
        let first = check.trace.as_ref().and_then(|trace| trace.first.as_ref());
        blocks.extend(first.map(|first| Block::Text(format!("First off: {}", first.text))));
        blocks.extend(diagnosis::places(check));
        let within = || check.outputs.iter().filter(|output| output.off == 0);
        let doubts: Vec<String> = within().filter_map(|output| output.doubt.clone()).collect();
        let sharp: Vec<String> = within().filter_map(right_though_uninformative).collect();
        if !sharp.is_empty() {
            blocks.push(Block::Title(
                "What the bounds judge only with simulated kernels:".to_string(),
            ));
            blocks.push(Block::Items(sharp));
        }
        if !doubts.is_empty() {
            blocks.push(Block::Title("What the bounds cannot judge:".to_string()));
            blocks.push(Block::Items(doubts));
        }
        let conspicuous: Vec<String> =
            check.outputs.iter().flat_map(|output| output.conspicuous.clone()).collect();
        if !conspicuous.is_empty() {
            blocks.push(Block::Title("Conspicuous errors (gate G2):".to_string()));
            blocks.push(Block::Items(conspicuous));
        }
        blocks.extend(self.what_would_decide().map(Block::Text));
        blocks.extend(diagnosis::explained(check));
        if let (true, Some(command)) = (self.status() != Status::Passed, &self.command) {
            blocks.push(Block::Text("To see it again:".to_string()));
            blocks.push(Block::Command(command.clone()));
        }
        blocks
    }

    /// The next step where nothing is off, but something could be wrong.
    fn what_would_decide(&self) -> Option<String> {
        let check = &self.check;
        let off = check.outputs.iter().any(|output| output.off > 0);
        if off || check.status == Status::Passed {
            return None;
        }
        if !check.conspicuous && check.outputs.iter().all(|output| output.undecided == 0) {
            return Some(DECIDES.to_string());
        }
        let inputs = match &check.structured {
            _ if check.generic => {
                let text = "The inputs are random: a correct kernel does not err so.";
                return Some(format!("{text} If they are not, say --structured."));
            }
            Some(reason) => {
                format!("The inputs are not random ({reason}), so that this may be no error.")
            }
            None => "The inputs count as structured, so that this may be no error.".to_string(),
        };
        Some(format!("{inputs} {DECIDES}"))
    }
}

const DECIDES: &str = "What would decide: random inputs with a mean of 0 and scores of a deviation of about 1, a \
    narrower --profile, or `etalon probe`, whose right answers are known exactly.";

/// The elements that count as right though they are uninformative, in a sentence.
fn right_though_uninformative(output: &Output) -> Option<String> {
    let &Output { name, uninformative, elements, undecided, .. } = output;
    (uninformative > 0 && undecided == 0).then(|| {
        let (have, their, they) =
            if uninformative == 1 { ("has a bound", "its row", "it errs") } else { ("have bounds", "their rows", "they err") };
        format!(
            "{uninformative} of {elements} elements of {name} {have} wider than half of the scale of {their}, or none; \
             {they} no more than simulated correct kernels"
        )
    })
}
