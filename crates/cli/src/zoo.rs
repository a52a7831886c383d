//! `etalon zoo`: the kill matrix.

use crate::advice::did_you_mean;
use crate::form::{Form, Reports};
use crate::machine::about;
use crate::options;
use crate::outcome::{Failure, Outcome, say};
use crate::page::Block;
use crate::report::{Report, Study};
use crate::table::Table;
use crate::units;
use etalon_conformance::report::{About, Report as Run, Status};
use etalon_conformance::zoo::{CONTROLS, Matrix, Mutant, Row, Style, kill_matrix, mutants};
use etalon_problem::Algorithm;
use std::time::Instant;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Mutants and controls, by name; all if absent.
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    #[command(flatten)]
    run: options::Run,
    /// Also shows the case and the element by which each law found each mutant.
    #[arg(long)]
    verbose: bool,
    #[command(flatten)]
    reports: Reports,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let (start, about) = (Instant::now(), about());
    arguments.reports.refuse(Form::Junit, "a mutant is no check of a case")?;
    let drafts = arguments.reports.begin(&[])?;
    let (algorithms, mutants, controls) = choose(arguments)?;
    let (run, seed) = (&arguments.run, arguments.run.seed());
    let matrix =
        run.watch(|progress| kill_matrix(seed, &algorithms, &mutants, &controls, progress))?;
    say(&Table::of(rows(&matrix)).to_string())?;
    for row in matrix.rows.iter().filter(|_| arguments.verbose) {
        say(&stories(row))?;
    }
    let (status, verdict) = summary(&matrix);
    let about = About { depth: "zoo", seed, ..about };
    let report = Report {
        command: "etalon zoo",
        status,
        verdict: verdict.clone(),
        run: Run { about, ..Run::default() },
        studies: matrix.rows.iter().filter(|x| !x.sound()).map(|x| study(x, seed)).collect(),
        tables: vec![("Kill matrix", rows(&matrix)), ("How each law found them", kills(&matrix))],
        notes: Vec::new(),
        replay: Box::new(|_| String::new()),
    };
    let written = drafts.finish(&report, &|| json(&matrix, status, seed));
    say(&format!("{verdict}, {}", units::time(start.elapsed().as_secs_f64())))?;
    written.map(|()| status)
}

/// A row that is not as it must be.
fn study(row: &Row, seed: u64) -> Study {
    let name = row.name.trim_start_matches("zoo/");
    let text = match row.mutant {
        Some(mutant) => format!("{} does not find it: {}", mutant.killer, mutant.story),
        None => "It is correct, and raises an alarm.".to_string(),
    };
    let found = row.kills().map(|(law, case, shown)| format!("{law}, {case}: {shown}")).collect();
    let again = format!("etalon zoo {name} --seed {seed} --verbose");
    let blocks = vec![Block::Text(text), Block::Items(found), Block::Command(again)];
    let (title, status) = (name.to_string(), Status::Failed);
    Study { title, status, blocks, spreads: Vec::new() }
}

/// Every kill, the header first.
fn kills(matrix: &Matrix) -> Vec<Vec<String>> {
    let header = ["mutant", "law", "case", "how it shows"].map(String::from).to_vec();
    let of = |row: &Row| {
        let name = row.name.trim_start_matches("zoo/").to_string();
        let cells = |(law, case, shown): (&str, &str, &str)| {
            vec![name.clone(), law.to_string(), case.to_string(), shown.to_string()]
        };
        row.kills().map(cells).collect::<Vec<_>>()
    };
    [header].into_iter().chain(matrix.rows.iter().flat_map(of)).collect()
}

/// The matrix for programs.
fn json(matrix: &Matrix, status: Status, seed: u64) -> Result<String, serde_json::Error> {
    let row = |row: &Row| {
        let kill = |(law, case, shown): (&str, &str, &str)| serde_json::json!({ "law": law, "case": case, "symptom": shown });
        serde_json::json!({
            "name": row.name.trim_start_matches("zoo/"),
            "killer": row.mutant.map(|mutant| mutant.killer),
            "sound": row.sound(),
            "kills": row.kills().map(kill).collect::<Vec<_>>(),
        })
    };
    let rows: Vec<_> = matrix.rows.iter().map(row).collect();
    serde_json::to_string_pretty(&serde_json::json!({
        "schema": SCHEMA,
        "etalon": env!("CARGO_PKG_VERSION"),
        "status": status.name(),
        "seed": seed,
        "rows": rows,
    }))
}

/// The version of this form: it grows when a key changes its meaning or goes.
const SCHEMA: u32 = 1;

type Choice = (Vec<Algorithm>, Vec<Mutant>, Vec<Style>);

/// The algorithms, mutants and controls that were asked for. A mutant comes with its algorithms.
fn choose(arguments: &Arguments) -> Result<Choice, Failure> {
    let Arguments { names, run, .. } = arguments;
    let known = mutants();
    let all = || known.iter().map(|x| x.name).chain(CONTROLS.iter().map(|x| x.name));
    for name in names {
        if !all().any(|known| known == name) {
            let advice = did_you_mean(name, all());
            return Err(Failure(format!("`{name}` is no mutant and no control{advice}")));
        }
    }
    let named = |name: &str| names.is_empty() || names.iter().any(|wanted| wanted == name);
    let mut algorithms = run.algorithms();
    let of = |mutant: &Mutant| mutant.of.iter().any(|of| algorithms.contains(of));
    let mutants: Vec<Mutant> = mutants().into_iter().filter(|x| named(x.name) && of(x)).collect();
    let controls: Vec<Style> = CONTROLS.into_iter().filter(|x| named(x.name)).collect();
    if controls.is_empty() {
        algorithms.retain(|of| mutants.iter().any(|mutant| mutant.of.contains(of)));
    }
    if algorithms.is_empty() {
        return Err(Failure("no mutant is left: --algorithm excludes all that are named".into()));
    }
    Ok((algorithms, mutants, controls))
}

/// The matrix in words, the header first.
fn rows(matrix: &Matrix) -> Vec<Vec<String>> {
    let header = ["mutant", "seen in public", "must fall to", "falls to"].map(String::from);
    let row = |row: &Row| {
        let laws: Vec<&str> = row.kills().map(|(law, ..)| law).collect();
        let (address, killer) = match row.mutant {
            Some(mutant) => (mutant.address, mutant.killer),
            None => ("", "none: it is correct"),
        };
        let laws = if laws.is_empty() { "–".to_string() } else { laws.join(", ") };
        let name = row.name.trim_start_matches("zoo/");
        vec![name.to_string(), address.to_string(), killer.to_string(), laws]
    };
    [header.to_vec()].into_iter().chain(matrix.rows.iter().map(row)).collect()
}

/// The status, and the line that says so.
fn summary(matrix: &Matrix) -> (Status, String) {
    let (mutants, controls): (Vec<&Row>, Vec<&Row>) =
        matrix.rows.iter().partition(|row| row.mutant.is_some());
    let status = if matrix.sound() { Status::Passed } else { Status::Failed };
    let line = format!(
        "{status}: {} of {} mutants fall to the law that must find them, {} of {} controls raise an alarm",
        mutants.iter().filter(|row| row.sound()).count(),
        mutants.len(),
        controls.iter().filter(|row| !row.sound()).count(),
        controls.len()
    );
    (status, line)
}

fn stories(row: &Row) -> String {
    let mut text = format!("\n{}", row.name);
    if let Some(mutant) = row.mutant {
        text += &format!(": {}", mutant.story);
    }
    for (law, case, shown) in row.kills() {
        text += &format!("\n  {law}, {case}: {shown}");
    }
    text
}
