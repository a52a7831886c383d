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

/// Extents that no two symbols share, so that a shape tells which it is made of.
const EXTENTS: [(usize, &str); 10] = [
    (2, "B"),
    (6, "Hq"),
    (3, "Hk"),
    (5, "N"),
    (7, "M"),
    (11, "D"),
    (13, "E"),
    (17, "T"),
    (19, "V"),
    (23, "W"),
];

/// Problems of every algorithm with every option set, so that all of their tensors show.
fn full() -> Vec<Problem> {
    let [batch, query_heads, key_heads, queries, keys, dim, value_dim, tokens, vocab, width] =
        EXTENTS.map(|(extent, _)| extent);
    let extents = Extents { batch, query_heads, key_heads, queries, keys, dim };
    let attention = Attention::new(extents).value_dim(value_dim);
    let linear = LinearExtents { batch, query_heads, key_heads, tokens: queries, dim };
    let linear = LinearAttention::new(linear).value_dim(value_dim).initial_state().final_state();
    let outputs = TokenOutputs { lse: true, logprob: true, entropy: true, argmax: true };
    let loss = LinearCrossEntropy::new(tokens, dim, vocab).outputs(outputs);
    vec![
        attention.sinks().bias(batch, query_heads).into(),
        AttentionLse::new(extents).sinks().bias(batch, query_heads).into(),
        linear.clone().decay(Decay::PerHead).into(),
        linear.decay(Decay::PerToken).into(),
        LazyAttention::new(extents).value_dim(value_dim).bias(width).into(),
        loss.bias().class_weights().token_weights().into(),
    ]
}

/// Problems of every algorithm without options.
fn plain() -> Vec<Problem> {
    let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 1, keys: 1, dim: 1 };
    let linear = LinearExtents { batch: 1, query_heads: 1, key_heads: 1, tokens: 1, dim: 1 };
    vec![
        Attention::new(extents).into(),
        AttentionLse::new(extents).into(),
        LinearAttention::new(linear).into(),
        LazyAttention::new(extents).into(),
        LinearCrossEntropy::new(1, 1, 1).into(),
    ]
}

/// The tensors of a pass of an algorithm, each with whether it may be absent.
fn operands(algorithm: Algorithm, pass: Pass) -> Vec<(Operand, bool)> {
    let of = |problems: Vec<Problem>| -> Vec<Operand> {
        let own = problems.into_iter().filter(|problem| problem.algorithm() == algorithm);
        own.flat_map(|problem| problem.operands(pass)).collect()
    };
    let needed = of(plain());
    let mut list: Vec<(Operand, bool)> = Vec::new();
    for operand in of(full()) {
        let option = !needed.iter().any(|other| other.name == operand.name);
        if !list.iter().any(|(other, _)| other.name == operand.name) {
            let absent = option || operand.role == Role::OptionalCotangent;
            list.push((operand, absent));
        }
    }
    list
}

/// Every tensor of any pass, tensors of equal shape and type together.
fn shapes() -> Table {
    let mut names: Vec<(String, &str, Vec<&str>)> = Vec::new();
    let every = Algorithm::ALL.into_iter().flat_map(|algorithm| {
        algorithm.passes().iter().flat_map(move |&pass| operands(algorithm, pass))
    });
    for (operand, _) in every {
        let symbol = |extent: &usize| {
            let found = EXTENTS.iter().find(|(sample, _)| sample == extent);
            found.map_or(String::new(), |(_, symbol)| symbol.to_string())
        };
        let bias = operand.name.ends_with("bias") && operand.shape.len() == 4;
        let mut symbols: Vec<String> = operand.shape.iter().map(symbol).collect();
        if bias {
            // Its outer extents may also be 1.
            symbols.iter_mut().take(2).for_each(|symbol| symbol.push_str("|1"));
        }
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
    let mut table = Table::new(["pass", "in", "out"]);
    for algorithm in Algorithm::ALL {
        table.add_title(algorithm.name());
        for &pass in algorithm.passes() {
            let operands = operands(algorithm, pass);
            let names = |output: bool| {
                let names = operands.iter().filter(|(x, _)| (x.role == Role::Output) == output);
                let names = names.map(|(operand, absent)| match absent {
                    true => format!("[{}]", operand.name),
                    false => operand.name.to_string(),
                });
                names.collect::<Vec<_>>().join(" ")
            };
            table.add_row([pass.to_string(), names(false), names(true)]);
        }
    }
    table
}

/// The element types that each tier offers, by pass; algorithms that it lacks are left out.
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
