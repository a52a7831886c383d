//! `etalon list`: what there is.

use crate::cuda::levels;
use crate::outcome::{Outcome, say};
use crate::summary;
use crate::table::{Table, page};
use crate::units;
use etalon_conformance::capabilities::{Capabilities, with_every_tensor};
use etalon_conformance::laws;
use etalon_conformance::profile::Profile;
use etalon_conformance::report::Status;
use etalon_conformance::tier::Tier;
use etalon_conformance::tiers;
use etalon_conformance::vector_set::Manifest;
use etalon_problem::{Algorithm, Dtype, Operand, Pass, Precision, Problem, Role};
use std::collections::BTreeSet;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Prints the JSON Schema of a problem file, of a capabilities file, or of the manifest of test vectors, instead.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "problem",
        value_parser = ["problem", "capabilities", "vectors"])]
    schema: Option<String>,
    /// Prints which level of the cuda tier computes what, and why others do not, as Markdown, instead.
    #[arg(long, conflicts_with = "schema")]
    levels: bool,
}

pub fn run(arguments: &Arguments) -> Outcome {
    if let Some(file) = &arguments.schema {
        let schema = match file.as_str() {
            "capabilities" => schemars::schema_for!(Capabilities),
            "vectors" => schemars::schema_for!(Manifest),
            _ => schemars::schema_for!(Problem),
        };
        say(&serde_json::to_string_pretty(&schema)?)?;
        return Ok(Status::Passed);
    }
    let text = if arguments.levels { levels::page()? } else { everything() };
    say(text.trim_end())?;
    Ok(Status::Passed)
}

/// The letters of extents.
const SHAPES: &str = "Shapes: B batch elements, Hq query heads, Hk key heads, N queries, M keys, D and E elements of a \
    key and a value, W distances, T tokens, V classes";

fn everything() -> String {
    let (mut present, absent) = tiers::present();
    present.insert(0, Box::new(tiers::Reference));
    let absent = summary::absent(&absent).into_iter();
    let absent = absent
        .map(|(tiers, reason)| page(&format!("absent: {tiers}: {reason}")))
        .map(|x| format!("\n{x}"));
    format!(
        "Tensors (optional ones in brackets)\n{}\n\n\
         {}\n{}\n\n\
         Tiers: the element types that each offers, by pass\n{}{}\n\n\
         Profiles (errors of exp, tanh and ln in roundoffs)\n{}\n\n\
         Laws\n{}",
        tensors(),
        page(SHAPES),
        shapes(),
        offers(&present),
        absent.collect::<String>(),
        profiles(),
        law_list(),
    )
}

/// The tensors of a pass of an algorithm.
fn operands(algorithm: Algorithm, pass: Pass) -> Vec<Operand> {
    let own = with_every_tensor().into_iter().filter(|problem| problem.algorithm() == algorithm);
    let mut seen = BTreeSet::new();
    own.flat_map(|problem| problem.operands(pass)).filter(|x| seen.insert(x.name)).collect()
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
    use Role::{OptionalCotangent, OptionalOutput, OptionalSaved, Output, Saved};
    let mut table = Table::new(["pass", "in", "saved by the forward pass", "out"]);
    for algorithm in Algorithm::ALL {
        table.add_title(algorithm.name());
        for &pass in algorithm.passes() {
            let operands = operands(algorithm, pass);
            let names = |of: fn(Role) -> bool| {
                let optional = [OptionalCotangent, OptionalOutput, OptionalSaved];
                let name = |x: &Operand| match x.option.is_some() || optional.contains(&x.role) {
                    true => format!("[{}]", x.name),
                    false => x.name.to_string(),
                };
                operands.iter().filter(|x| of(x.role)).map(name).collect::<Vec<_>>().join(" ")
            };
            table.add_row([
                pass.to_string(),
                names(Role::is_given),
                names(|role| matches!(role, Saved | OptionalSaved)),
                names(|role| matches!(role, Output | OptionalOutput)),
            ]);
        }
    }
    table
}

fn offers(all: &[Box<dyn Tier>]) -> Table {
    // Two words have room on two lines.
    let passes = Pass::ALL.map(|pass| pass.name().replace('_', " "));
    let mut table = Table::new(["algorithm".to_string()].into_iter().chain(passes));
    for tier in all {
        table.add_title(&tier.name());
        for algorithm in Algorithm::ALL {
            let cells = Pass::ALL.map(|pass| {
                let offered = |dtype: &Dtype| tier.offers(algorithm, pass, *dtype).is_ok();
                let names: Vec<_> =
                    Dtype::ALL.into_iter().filter(offered).map(Dtype::name).collect();
                if names.is_empty() { "–".to_string() } else { names.join(" ") }
            });
            if cells.iter().any(|cell| cell != "–") {
                table.add_row([algorithm.to_string()].into_iter().chain(cells));
            }
        }
    }
    table
}

fn profiles() -> Table {
    let mut table = Table::new([
        "profile",
        "sums",
        "factors",
        "P",
        "dS",
        "dk of a head",
        "also stored",
        "exp",
        "tanh",
        "ln",
    ]);
    for profile in Profile::named() {
        table.add_row([
            profile.name.to_string(),
            profile.accumulator.name().to_string(),
            match profile.factor {
                0.0 => "exact".to_string(),
                factor => format!("± {}", units::digits(factor)),
            },
            weights(profile.p_store, profile.pieces),
            weights(profile.ds_store, profile.pieces),
            profile.group_store.name().to_string(),
            also_stored(&profile),
            format!("{} + {}·|x|", profile.exp_constant, profile.exp_slope),
            profile.tanh.to_string(),
            profile.log.to_string(),
        ]);
    }
    table
}

/// The type of a weight, and of how many such numbers it is the sum.
fn weights(store: Dtype, pieces: usize) -> String {
    if pieces == 1 { store.name().to_string() } else { format!("{pieces} × {store}") }
}

/// Tensors that a profile stores in less than the type of its sums, beside P, dS and the gradients of a head.
fn also_stored(profile: &Profile) -> String {
    let &Profile { accumulator, score_store, dp_store, weight_store, .. } = profile;
    let kept = [
        ("scores", score_store),
        ("dP", dp_store),
        ("P normalised", weight_store),
        ("p − [y]", profile.residual_store),
        ("dw of chunks", profile.chunk_store),
    ];
    let kept = kept.into_iter().filter(|(_, dtype)| *dtype != accumulator);
    let kept: Vec<String> = kept.map(|(what, dtype)| format!("{what}: {dtype}")).collect();
    if kept.is_empty() { "–".to_string() } else { kept.join(", ") }
}

fn law_list() -> Table {
    let mut table = Table::new(["law", "kind", "statement"]);
    for law in laws::all() {
        let kind = format!("{:?}", law.kind).to_lowercase();
        table.add_row([law.name.to_string(), kind, law.statement.to_string()]);
    }
    table
}
