//! `etalon list`: what there is.

use crate::outcome::{Outcome, say};
use crate::table::Table;
use etalon_conformance::laws;
use etalon_conformance::profile::Profile;
use etalon_conformance::tier::Tier;
use etalon_conformance::tiers;
use etalon_problem::{
    Algorithm, Attention, AttentionLse, Decay, Dtype, Extents, LazyAttention, LinearAttention,
    LinearCrossEntropy, LinearExtents, Operand, Pass, Precision, Problem, Role, TokenOutputs,
};

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Prints the JSON Schema of a problem file instead.
    #[arg(long)]
    schema: bool,
}

pub fn run(arguments: &Arguments) -> Outcome {
    if arguments.schema {
        say(&serde_json::to_string_pretty(&schemars::schema_for!(Problem))?)?;
        return Ok(true);
    }
    say(&everything())?;
    Ok(true)
}

fn everything() -> String {
    let (present, absent) = tiers::present();
    let mut all: Vec<Box<dyn Tier>> = vec![Box::new(tiers::Reference)];
    all.extend(present);
    let mut text = String::from("Tensors (optional ones in brackets)\n");
    text += &tensors().to_string();
    text += "\n\nShapes: B batch elements, Hq query heads, Hk key heads, N queries, M keys, D and E \
             elements\nof a key and a value, W distances, T tokens, V classes\n";
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

/// Problems of every algorithm with every option set, so that all of their tensors show.
fn full() -> Vec<Problem> {
    let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 1, keys: 1, dim: 1 };
    let linear = LinearExtents { batch: 1, query_heads: 1, key_heads: 1, tokens: 1, dim: 1 };
    let linear = LinearAttention::new(linear).initial_state().final_state();
    let outputs = TokenOutputs { lse: true, logprob: true, entropy: true, argmax: true };
    let loss = LinearCrossEntropy::new(1, 1, 1).outputs(outputs);
    vec![
        Attention::new(extents).sinks().bias(1, 1).into(),
        AttentionLse::new(extents).sinks().bias(1, 1).into(),
        linear.clone().decay(Decay::PerHead).into(),
        linear.decay(Decay::PerToken).into(),
        LazyAttention::new(extents).bias(1).into(),
        loss.bias().class_weights().token_weights().into(),
    ]
}

/// The tensors of a pass of an algorithm.
fn operands(algorithm: Algorithm, pass: Pass) -> Vec<Operand> {
    let own = full().into_iter().filter(|problem| problem.algorithm() == algorithm);
    let mut list: Vec<Operand> = Vec::new();
    for operand in own.flat_map(|problem| problem.operands(pass)) {
        if !list.iter().any(|other| other.name == operand.name) {
            list.push(operand);
        }
    }
    list
}

/// Every tensor of any pass, tensors of equal axes and type together.
fn shapes() -> Table {
    let mut names: Vec<(String, &str, Vec<&str>)> = Vec::new();
    let every = Algorithm::ALL.into_iter().flat_map(|algorithm| {
        algorithm.passes().iter().flat_map(move |&pass| operands(algorithm, pass))
    });
    for operand in every {
        let symbols: Vec<&str> = operand.axes.iter().map(|axis| axis.symbol()).collect();
        let stored = match operand.precision {
            Precision::Storage => "as q (h)",
            Precision::Wide => "f32 (f64 beside f64)",
            Precision::Integer => "i64",
        };
        let shape = format!("[{}]", symbols.join(", "));
        match names.iter_mut().find(|(s, t, _)| (s.as_str(), *t) == (shape.as_str(), stored)) {
            Some((_, _, names)) if names.contains(&operand.name) => {}
            Some((_, _, names)) => names.push(operand.name),
            None => names.push((shape, stored, vec![operand.name])),
        }
    }
    let mut table = Table::new(["shape", "stored", "tensors"]);
    for (shape, stored, names) in names {
        table.add_row([shape, stored.to_string(), names.join(" ")]);
    }
    table
}

fn tensors() -> Table {
    let mut table = Table::new(["pass", "in", "saved by the forward pass", "out"]);
    for algorithm in Algorithm::ALL {
        table.add_title(algorithm.name());
        for &pass in algorithm.passes() {
            let operands = operands(algorithm, pass);
            let names = |of: fn(Role) -> bool| {
                let names = operands.iter().filter(|x| of(x.role));
                let optional = |x: &Operand| {
                    use Role::{OptionalCotangent, OptionalOutput, OptionalSaved};
                    let optional = [OptionalCotangent, OptionalOutput, OptionalSaved];
                    x.option.is_some() || optional.contains(&x.role)
                };
                let names = names.map(|x| match optional(x) {
                    true => format!("[{}]", x.name),
                    false => x.name.to_string(),
                });
                names.collect::<Vec<_>>().join(" ")
            };
            table.add_row([
                pass.to_string(),
                names(Role::is_given),
                names(|role| matches!(role, Role::Saved | Role::OptionalSaved)),
                names(|role| matches!(role, Role::Output | Role::OptionalOutput)),
            ]);
        }
    }
    table
}

fn offers(all: &[Box<dyn Tier>]) -> Table {
    let mut table = Table::new(["algorithm"].into_iter().chain(Pass::ALL.map(Pass::name)));
    for tier in all {
        table.add_title(&tier.name());
        for algorithm in Algorithm::ALL {
            let cells = Pass::ALL.map(|pass| {
                let offered = |dtype: &Dtype| tier.offers(algorithm, pass, *dtype).is_ok();
                let names = Dtype::ALL.into_iter().filter(offered).map(Dtype::name);
                Some(names.collect::<Vec<_>>().join(" ")).filter(|names| !names.is_empty())
            });
            if cells.iter().any(Option::is_some) {
                let cells = cells.map(|names| names.unwrap_or("–".to_string()));
                table.add_row([algorithm.to_string()].into_iter().chain(cells));
            }
        }
    }
    table
}

fn profiles() -> Table {
    let mut table =
        Table::new(["profile", "sums", "P stored", "dS stored", "exp (roundoffs)", "tanh", "ln"]);
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

fn law_list() -> Table {
    let mut table = Table::new(["law", "kind", "statement"]);
    for law in laws::all() {
        let kind = format!("{:?}", law.kind).to_lowercase();
        table.add_row([law.name.to_string(), kind, law.statement.to_string()]);
    }
    table
}
