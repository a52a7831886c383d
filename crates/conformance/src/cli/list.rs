//! `etalon list`: what there is.

use super::table::table;
use super::{Outcome, say};
use etalon_conformance::laws;
use etalon_conformance::profile::Profile;
use etalon_conformance::tier::Tier;
use etalon_conformance::tiers;
use etalon_problem::{
    Algorithm, Attention, AttentionLse, Dtype, Extents, Pass, Precision, Problem, Role,
};

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
    text += "\n\nShapes: B batch elements, Hq query heads, Hk key heads, N queries, M keys, D and E \
             elements of a key and a value\n";
    text += &shapes().to_string();
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

/// Extents that no two symbols share, so that a shape tells which it is made of.
const EXTENTS: [(usize, &str); 7] =
    [(2, "B"), (6, "Hq"), (3, "Hk"), (5, "N"), (7, "M"), (11, "D"), (13, "E")];

/// A problem of each algorithm with every option set, so that all of its tensors show.
fn samples() -> [Problem; 2] {
    let [batch, query_heads, key_heads, queries, keys, dim, value_dim] =
        EXTENTS.map(|(extent, _)| extent);
    let extents = Extents { batch, query_heads, key_heads, queries, keys, dim };
    let attention = Attention::new(extents).value_dim(value_dim);
    [
        attention.sinks().bias(batch, query_heads).into(),
        AttentionLse::new(extents).sinks().bias(batch, query_heads).into(),
    ]
}

/// Every tensor of any pass, tensors of equal shape and type together.
fn shapes() -> comfy_table::Table {
    let mut names: Vec<(String, &str, Vec<&str>)> = Vec::new();
    let problems = samples();
    let of = |pass| problems.iter().flat_map(move |problem| problem.operands(pass));
    for operand in Pass::ALL.into_iter().flat_map(of) {
        let symbol = |extent: &usize| {
            let found = EXTENTS.iter().find(|(sample, _)| sample == extent);
            found.map_or(String::new(), |(_, symbol)| symbol.to_string())
        };
        let bias = operand.name.ends_with("bias");
        let mut symbols: Vec<String> = operand.shape.iter().map(symbol).collect();
        if bias {
            // Its outer extents may also be 1.
            symbols.iter_mut().take(2).for_each(|symbol| symbol.push_str("|1"));
        }
        let stored = match operand.precision {
            Precision::Storage => "as q",
            Precision::Wide => "f32 (f64 beside f64)",
        };
        let shape = format!("[{}]", symbols.join(", "));
        match names.iter_mut().find(|(s, t, _)| (s.as_str(), *t) == (shape.as_str(), stored)) {
            Some((_, _, names)) if names.contains(&operand.name) => {}
            Some((_, _, names)) => names.push(operand.name),
            None => names.push((shape, stored, vec![operand.name])),
        }
    }
    let mut table = table(&["shape", "stored", "tensors"]);
    for (shape, stored, names) in names {
        table.add_row([shape, stored.to_string(), names.join(" ")]);
    }
    table
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
