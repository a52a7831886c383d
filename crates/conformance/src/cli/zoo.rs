//! `etalon zoo`: the kill matrix.

use super::table::table;
use super::{Outcome, options, say};
use etalon_conformance::zoo::{CONTROLS, Fate, Matrix, Mutant, Row, kill_matrix};
use etalon_problem::Algorithm;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The seed of the inputs.
    #[arg(long, default_value = "0", value_parser = options::seed)]
    seed: u64,
    /// Threads; as many as there are cores if absent.
    #[arg(long)]
    threads: Option<usize>,
    /// Also shows how each mutant was found out.
    #[arg(long)]
    verbose: bool,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let all =
        || kill_matrix(arguments.seed, &Algorithm::ALL, Mutant::ALL, &CONTROLS, &|_, _, _| {});
    let matrix = options::pool(arguments.threads)?.install(all);
    say(&format!("{}\n{}", matrix_table(&matrix), summary(&matrix)));
    if arguments.verbose {
        matrix.rows.iter().for_each(|row| say(&stories(&matrix, row)));
    }
    Ok(matrix.sound())
}

fn kills<'a>(matrix: &'a Matrix, row: &'a Row) -> impl Iterator<Item = (&'static str, &'a Fate)> {
    let fates = matrix.laws.iter().copied().zip(&row.fates);
    fates.filter(|(_, fate)| matches!(fate, Fate::Killed { .. }))
}

fn matrix_table(matrix: &Matrix) -> comfy_table::Table {
    let mut table = table(&["mutant", "seen in public", "must fall to", "falls to"]);
    for row in &matrix.rows {
        let laws: Vec<&str> = kills(matrix, row).map(|(law, _)| law).collect();
        let (address, killer) = match row.mutant {
            Some(mutant) => (mutant.address(), mutant.killer()),
            None => ("", "none: it is correct"),
        };
        let laws = if laws.is_empty() { "–".to_string() } else { laws.join(", ") };
        table.add_row([row.name.clone(), address.to_string(), killer.to_string(), laws]);
    }
    table
}

fn summary(matrix: &Matrix) -> String {
    let (mutants, controls): (Vec<&Row>, Vec<&Row>) =
        matrix.rows.iter().partition(|row| row.mutant.is_some());
    let by_own_law = |row: &&&Row| {
        let killer = row.mutant.map(|mutant| mutant.killer());
        kills(matrix, row).any(|(law, _)| Some(law) == killer)
    };
    format!(
        "{} of {} mutants fall to the law that must find them; {} of {} controls raise an alarm",
        mutants.iter().filter(by_own_law).count(),
        mutants.len(),
        controls.iter().filter(|row| row.killed()).count(),
        controls.len()
    )
}

fn stories(matrix: &Matrix, row: &Row) -> String {
    let mut text = format!("\n{}", row.name);
    if let Some(mutant) = row.mutant {
        text += &format!(": {}", mutant.story());
    }
    for (law, fate) in kills(matrix, row) {
        if let Fate::Killed { case, text: shown } = fate {
            text += &format!("\n  {law}, {case}: {shown}");
        }
    }
    text
}
