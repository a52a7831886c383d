//! Programs that cheat, one trick each, and the check that finds it. The table of `docs/protocol.md` is this list.

use crate::{SAME, Test, program};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;

pub const TESTS: &[Test] =
    &[("every_cheat_is_found", every_cheat_is_found), ("the_page_lists_the_cheats", the_page)];

/// The end of a run on a cheat.
#[derive(Clone, Copy, PartialEq)]
enum End {
    /// It fails, and a check of this name, or with these words in its symptom, is among the failures.
    Fails(&'static str),
    /// It is undecided.
    Undecided,
    /// It passes: nothing is wrong with it.
    Passes,
}

/// A trick: the mode of the program, further options, what it does, how the run ends, and what finds it.
struct Cheat {
    mode: &'static str,
    options: &'static [&'static str],
    does: &'static str,
    end: End,
    found: &'static str,
}

const fn cheat(mode: &'static str, does: &'static str, end: End, found: &'static str) -> Cheat {
    Cheat { mode, options: &[], does, end, found }
}

const CHEATS: &[Cheat] = &[
    cheat(
        "by-shape",
        "returns what it returned for these extents before",
        End::Fails("homogeneity"),
        "laws that ask the same extents with other elements",
    ),
    cheat(
        "former",
        "returns the results of the request before, where they fit",
        End::Fails("homogeneity"),
        "the same",
    ),
    cheat(
        "zeros",
        "answers at once with zeros, and computes afterwards",
        End::Fails("bound"),
        "`bound`: only the bytes that arrived are judged",
    ),
    cheat("nan", "answers with NaN", End::Fails("bound"), "`bound`: NaN only where it is exact"),
    cheat(
        "mean",
        "answers with the mean of the values",
        End::Fails("bound"),
        "`bound`, and probes whose mean says nothing",
    ),
    cheat(
        "inputs",
        "returns its inputs, changed, beside the results",
        End::Fails("`k` was given, but "),
        "results are those of the pass; etalon's own inputs are out of reach",
    ),
    cheat(
        "twice",
        "answers a request twice, before the next one is asked",
        End::Fails("answered request "),
        "an answer has the number of its request",
    ),
    cheat(
        "spies",
        "reads the seed from the command line of etalon, and is right where it finds one",
        End::Fails("bound"),
        "the seed is drawn by etalon, and is on no command line",
    ),
    cheat(
        "bf16",
        "computes in bf16 what it claims in f32",
        End::Fails("bound"),
        "`bound`, which follows from `--profile`",
    ),
    cheat(
        "short",
        "reads keys and values beyond the sixteenth as zeros",
        End::Fails("bound"),
        "`bound` on extents that are drawn, and probes of each key",
    ),
    cheat(
        "one-head",
        "is right in the first head alone",
        End::Fails("bound"),
        "`bound`: each element counts",
    ),
    cheat(
        "generic",
        "is right where elements look random, and else returns the mean",
        End::Fails("bound"),
        "families of structured elements, and probes",
    ),
    cheat(
        "probes",
        "is right where elements look like those of a probe, and else returns the mean",
        End::Fails("bound"),
        "`bound` on random elements",
    ),
    cheat(
        "drifts",
        "is right in the first hundred calls",
        End::Fails("bound"),
        "cases of the beginning are judged again at the end",
    ),
    Cheat {
        mode: "jitters",
        options: &["--deterministic"],
        does: "returns other bits each time, within the bounds",
        end: End::Fails("determinism"),
        found: "`determinism`, where the same bits are claimed",
    },
    cheat(
        "refuses-when-long",
        "refuses what it would get wrong",
        End::Undecided,
        "what is refused within the capabilities is undecided",
    ),
    cheat(
        "remembers",
        "returns what it returned for the same bits before",
        End::Passes,
        "nothing: that is right, and a request is seldom repeated",
    ),
];

/// The verdict on a program.
fn verdict(cheat: &Cheat) -> Value {
    let line = program(cheat.mode, "");
    let mut command = Command::new(env!("CARGO_BIN_EXE_etalon"));
    command.args(["verify", "--depth", "smoke", "--json", "--candidate", &line]);
    // Whoever reads the seed finds none.
    if cheat.mode != "spies" {
        command.args(SAME);
    }
    let output = command.args(cheat.options).output().expect("etalon starts");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

fn every_cheat_is_found() {
    let missed = CHEATS.iter().filter_map(|cheat| {
        let found = verdict(cheat);
        let is_one = |part: &str| {
            let failures = found["failures"].as_array().expect("a list");
            failures.iter().any(|x| {
                x["law"] == part || x["symptom"].as_str().is_some_and(|text| text.contains(part))
            })
        };
        let so = match cheat.end {
            End::Fails(part) => found["status"] == "failed" && is_one(part),
            End::Undecided => found["status"] == "undecided",
            End::Passes => found["status"] == "passed",
        };
        (!so).then(|| format!("{}: {found:#}", cheat.mode))
    });
    let missed: Vec<String> = missed.collect();
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

fn the_page() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/protocol.md");
    let page = fs::read_to_string(path).expect("docs/protocol.md");
    for Cheat { does, end, found, .. } in CHEATS {
        let end = match end {
            End::Fails(_) => "fails",
            End::Undecided => "undecided",
            End::Passes => "passes",
        };
        let row = format!("| {does} | {end} | {found} |");
        assert!(page.contains(&row), "docs/protocol.md lacks the row\n{row}");
    }
}
