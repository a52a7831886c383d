//! The verdict on answers.

use super::Arguments;
use super::folder::{Entry, Folders, INDEX, Index, SCHEMA, is_plain, read_given};
use crate::options;
use crate::outcome::{Failure, Outcome, say};
use crate::table::{Table, page};
use crate::units::{counted, digits};
use etalon_conformance::profile::Profile;
use etalon_conformance::questions::Probe;
use etalon_conformance::report::{Status, Verdict};
use etalon_conformance::vectors;
use etalon_problem::{Error, shortened};
use std::collections::BTreeMap;
use std::path::Path;

/// The most characters of a name that an index lists.
const NAME: usize = 100;

/// A probe that was asked, and how it ended.
struct Judged<'a> {
    probe: &'a Probe,
    folders: &'a [String],
    verdict: Verdict,
}

pub fn judge(arguments: &Arguments, folder: &Path) -> Outcome {
    let path = folder.join(INDEX);
    let wrong = |reason: String| Failure(format!("{}: {reason}", path.display()));
    let index: Index = vectors::parse_json(&path, "list of probes", &vectors::read_text(&path)?)?;
    if index.schema != SCHEMA {
        return Err(Error::value("schema", SCHEMA.to_string(), index.schema).into());
    }
    let declared = arguments.capabilities()?;
    let capabilities = declared.as_ref().or(index.capabilities.as_ref());
    if let Some(capabilities) = capabilities {
        capabilities.check().map_err(|error| wrong(error.to_string()))?;
    }
    let given = index.problems.iter().map(|brought| read_given(folder, brought));
    let given = given.collect::<Result<Vec<_>, Failure>>()?;
    let claim = options::claim(&arguments.profile)?;
    let (mut judged, mut answered) = (Vec::new(), false);
    for Entry { probe, folders } in &index.probes {
        if let Some(name) = folders.iter().find(|name| !is_plain(name)) {
            return Err(wrong(Error::value("folders", "names of folders", name).to_string()));
        }
        let files = Folders { root: folder, names: folders };
        answered |= files.any_answer();
        let profile = |dtype| claim.of(dtype).unwrap_or_else(|| Profile::flash(dtype));
        let verdict = probe.judge(profile, &given, capabilities, &files).map_err(|reason| {
            let name = folders.first().map_or("", String::as_str);
            wrong(format!("{}: {reason}", shortened(name, NAME)))
        })?;
        judged.push(Judged { probe, folders, verdict });
    }
    if !answered {
        let reason = "no folder holds outputs.safetensors: run your kernel on each first";
        return Err(Failure(format!("{}: {reason}", folder.display())));
    }
    let unasked: Vec<&Probe> = index.not_asked.iter().map(|x| &x.probe).collect();
    say(&table(&judged, &unasked))?;
    for Judged { probe, folders, verdict } in &judged {
        if let (true, Some(text)) = (*verdict != Verdict::Pass, verdict.reason()) {
            let folders = folders.join(", ");
            let (law, word) = (&probe.law, verdict.name());
            say(&page(&format!("{law} in {folders}: {word}: {text}")))?;
        }
    }
    let (status, line) = headline(&judged, unasked.len(), arguments.allow_undecided);
    say(&line)?;
    Ok(status)
}

/// The verdict in one line. What is undecided passes up to an allowed share of the probes that were asked.
fn headline(judged: &[Judged<'_>], unasked: usize, allowed: f64) -> (Status, String) {
    let count = |so: fn(&Verdict) -> bool| judged.iter().filter(|x| so(&x.verdict)).count();
    let failed = count(Verdict::is_negative);
    let held = count(|verdict| *verdict == Verdict::Pass);
    let open = count(|verdict| verdict.status() == Status::Undecided);
    let unasked = unasked + count(|verdict| !verdict.is_check());
    let few = open as f64 <= allowed * (held + open) as f64;
    let status = match (failed, held, open) {
        (1.., ..) => Status::Failed,
        (0, 1.., _) if few => Status::Passed,
        _ => Status::Undecided,
    };
    let hold = if held == 1 { "holds" } else { "hold" };
    let fail = if failed == 1 { "fails" } else { "fail" };
    let mut line = format!("{status}: {} {hold}, {failed} {fail}", counted(held, "probe"));
    let share = if status == Status::Passed {
        format!(" ({} % allowed)", digits(100.0 * allowed))
    } else {
        String::new()
    };
    let open = (open > 0).then(|| format!(", {open} undecided{share}"));
    let unasked = (unasked > 0).then(|| format!(", {unasked} not asked"));
    line.extend([open, unasked].into_iter().flatten());
    (status, line)
}

/// Probes by law and pass: how many hold, fail, are undecided, and were not asked.
fn table(judged: &[Judged<'_>], unasked: &[&Probe]) -> String {
    let mut counts: BTreeMap<(&str, &str, &str), [usize; 4]> = BTreeMap::new();
    let asked = judged.iter().map(|x| {
        let at = match x.verdict.status() {
            _ if !x.verdict.is_check() => 3,
            Status::Passed => 0,
            Status::Failed => 1,
            Status::Undecided => 2,
        };
        (x.probe, at)
    });
    for (probe, at) in asked.chain(unasked.iter().map(|probe| (*probe, 3))) {
        let subject = probe.case.split('/').next().unwrap_or_default();
        counts.entry((subject, &probe.law, &probe.pass)).or_default()[at] += 1;
    }
    let mut table = Table::new(["probe", "pass", "hold", "fail", "undecided", "not asked"]);
    for ((subject, law, pass), counts) in counts {
        table.add_title(subject);
        let cells =
            counts.map(|count| if count == 0 { "–".to_string() } else { count.to_string() });
        table.add_row([law.to_string(), pass.to_string()].into_iter().chain(cells));
    }
    table.to_string()
}
