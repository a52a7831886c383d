//! `etalon zoo`: the kill matrix.

use crate::advice::did_you_mean;
use crate::options;
use crate::outcome::{Failure, Outcome, say};
use crate::table::Table;
use crate::units;
use etalon_conformance::report::Status;
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
}

pub fn run(arguments: &Arguments) -> Outcome {
    let start = Instant::now();
    let (algorithms, mutants, controls) = choose(arguments)?;
    let (run, seed) = (&arguments.run, arguments.run.seed());
    let matrix =
        run.watch(|progress| kill_matrix(seed, &algorithms, &mutants, &controls, progress))?;
    say(&matrix_table(&matrix))?;
    for row in matrix.rows.iter().filter(|_| arguments.verbose) {
        say(&stories(row))?;
    }
    say(&format!("{}, {}", summary(&matrix), units::time(start.elapsed().as_secs_f64())))?;
    Ok(if matrix.sound() { Status::Passed } else { Status::Failed })
}

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

fn matrix_table(matrix: &Matrix) -> String {
    let mut table = Table::new(["mutant", "seen in public", "must fall to", "falls to"]);
    for row in &matrix.rows {
        let laws: Vec<&str> = row.kills().map(|(law, ..)| law).collect();
        let (address, killer) = match row.mutant {
            Some(mutant) => (mutant.address, mutant.killer),
            None => ("", "none: it is correct"),
        };
        let laws = if laws.is_empty() { "–".to_string() } else { laws.join(", ") };
        let name = row.name.trim_start_matches("zoo/");
        table.add_row([name, address, killer, &laws]);
    }
    table.to_string()
}

fn summary(matrix: &Matrix) -> String {
    let (mutants, controls): (Vec<&Row>, Vec<&Row>) =
        matrix.rows.iter().partition(|row| row.mutant.is_some());
    format!(
        "{}: {} of {} mutants fall to the law that must find them, {} of {} controls raise an alarm",
        if matrix.sound() { "PASSED" } else { "FAILED" },
        mutants.iter().filter(|row| row.sound()).count(),
        mutants.len(),
        controls.iter().filter(|row| !row.sound()).count(),
        controls.len()
    )
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
