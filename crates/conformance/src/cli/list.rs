//! `etalon list`: what there is.

use super::table::table;
use super::{Outcome, say};
use etalon_conformance::laws;
use etalon_conformance::profile::Profile;
use etalon_conformance::tier::Tier;
use etalon_conformance::tiers;
use etalon_problem::{Algorithm, Attention, AttentionLse, Dtype, Extents, Pass, Problem, Role};

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Prints the JSON Schema of a problem file instead.
    #[arg(long)]
    schema: bool,
}

pub fn run(arguments: &Arguments) -> Outcome {
    if arguments.schema {
        say(&serde_json::to_string_pretty(&schemars::schema_for!(Problem))?);
        return Ok(true);
    }
    say(&everything());
    Ok(true)
}

fn everything() -> String {
    let (present, absent) = tiers::present();
    let mut all: Vec<Box<dyn Tier>> = vec![Box::new(tiers::Reference)];
    all.extend(present);
    let mut text = String::from("Tensors (optional ones in brackets)\n");
    text += &tensors().to_string();
    text += "\n\nTiers: the element types that each offers, by pass\n";
    text += &offers(&all).to_string();
    for absent in absent {
        text += &format!("\nabsent: {} ({})", absent.tier, absent.reason);
    }
    text += "\n\nProfiles\n";
    text += &profiles().to_string();
    text += "\n\nLaws\n";
    text += &law_list().to_string();
    text
}

/// A problem of each algorithm with every option set, so that all of its tensors show.
fn samples() -> [Problem; 2] {
    let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 1, keys: 1, dim: 1 };
    [
        Attention::new(extents).sinks().bias(1, 1).into(),
        AttentionLse::new(extents).sinks().bias(1, 1).into(),
    ]
}

fn tensors() -> comfy_table::Table {
    let mut table = table(&["algorithm", "pass", "in", "out"]);
    for problem in samples() {
        for pass in Pass::ALL {
            let names = |of: &dyn Fn(Role) -> bool| {
                let operands = problem.operands(pass);
                let names = operands.iter().filter(|operand| of(operand.role)).map(|operand| {
                    let option = ["sinks", "bias"].iter().any(|x| operand.name.ends_with(x));
                    match option || operand.role == Role::OptionalCotangent {
                        true => format!("[{}]", operand.name),
                        false => operand.name.to_string(),
                    }
                });
                names.collect::<Vec<_>>().join(" ")
            };
            table.add_row([
                problem.algorithm().name().to_string(),
                pass.name().to_string(),
                names(&|role| role != Role::Output),
                names(&|role| role == Role::Output),
            ]);
        }
    }
    table
}

fn offers(all: &[Box<dyn Tier>]) -> comfy_table::Table {
    let mut header = vec!["tier".to_string(), "algorithm".to_string()];
    header.extend(Pass::ALL.map(|pass| pass.name().to_string()));
    let mut table = table(&header);
    for tier in all {
        for algorithm in Algorithm::ALL {
            let mut row = vec![tier.name(), algorithm.name().to_string()];
            row.extend(Pass::ALL.map(|pass| {
                let offered = |dtype: &Dtype| tier.offers(algorithm, pass, *dtype).is_ok();
                let names = Dtype::ALL.into_iter().filter(offered).map(Dtype::name);
                let names = names.collect::<Vec<_>>().join(" ");
                if names.is_empty() { "–".to_string() } else { names }
            }));
            table.add_row(row);
        }
    }
    table
}

fn profiles() -> comfy_table::Table {
    let mut table =
        table(&["profile", "sums", "P stored", "dS stored", "exp (roundoffs)", "tanh", "ln"]);
    for profile in Profile::ALL {
        table.add_row([
            profile.name.to_string(),
            profile.accumulator.name().to_string(),
            profile.p_store.name().to_string(),
            profile.ds_store.name().to_string(),
            format!("{} + {}·|x|", profile.exp_constant, profile.exp_slope),
            profile.tanh.to_string(),
            profile.log.to_string(),
        ]);
    }
    table
}

fn law_list() -> comfy_table::Table {
    let mut table = table(&["law", "kind", "statement"]);
    for law in laws::all() {
        let kind = format!("{:?}", law.kind).to_lowercase();
        table.add_row([law.name.to_string(), kind, law.statement.to_string()]);
    }
    table
}
