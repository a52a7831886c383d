//! The levels of the cuda tier, as `docs/gpu.md` has them: passes, and every reason to refuse one.

use crate::outcome::Failure;
use crate::table::fold;
use etalon_cuda::{Level, Options, Precision, Target, levels};
use etalon_problem::{Algorithm, Dtype, Pass};

/// Columns of a line of a page.
const COLUMNS: usize = 119;

/// Algorithms of one level with the same passes and the same reasons.
struct Group {
    algorithms: Vec<&'static str>,
    passes: Vec<&'static str>,
    reasons: Vec<&'static str>,
}

impl Group {
    fn head(&self) -> String {
        format!("{}: {}", self.algorithms.join(", "), self.passes.join(", "))
    }
}

/// A list in Markdown: each level with the reasons that all of its algorithms have, and these with their own.
pub fn page() -> Result<String, Failure> {
    let mut text = String::new();
    for level in [Level::Sm90a, Level::Sm80, Level::Portable] {
        let mut groups = groups(level);
        let first = groups.first().map_or(Vec::new(), |group| group.reasons.clone());
        let in_all = |reason: &&str| groups.iter().all(|group| group.reasons.contains(reason));
        let common: Vec<&str> = first.into_iter().filter(in_all).collect();
        for group in &mut groups {
            group.reasons.retain(|reason| !common.contains(reason));
        }
        let head = format!("**`{level}`**");
        if groups.iter().all(|group| group.reasons.is_empty()) {
            let passes: Vec<String> = groups.iter().map(Group::head).collect();
            text += &item("* ", &sentence(head, &passes.join("; ")));
            continue;
        }
        text += &item("* ", &sentence(head, &common.join("; ")));
        for group in &groups {
            text += &item("  * ", &sentence(group.head(), &group.reasons.join("; ")));
        }
    }
    Ok(text)
}

fn groups(level: Level) -> Vec<Group> {
    let mut groups = Vec::<Group>::new();
    for algorithm in Algorithm::ALL {
        let row = levels::reasons(algorithm).into_iter().find(|row| row.0 == level);
        let Some((_, reasons)) = row else { continue };
        let passes = algorithm.passes().iter().filter(|&&pass| computes(level, algorithm, pass));
        let passes: Vec<_> = passes.map(|pass| pass.name()).collect();
        let same = |group: &&mut Group| group.passes == passes && group.reasons == reasons;
        match groups.iter_mut().find(same) {
            Some(group) => group.algorithms.push(algorithm.name()),
            None => groups.push(Group { algorithms: vec![algorithm.name()], passes, reasons }),
        }
    }
    groups
}

/// Tells whether a level computes a pass in a storage type, with a precision that permits it.
fn computes(level: Level, algorithm: Algorithm, pass: Pass) -> bool {
    let calls = [(Dtype::Bf16, Precision::Flash), (Dtype::F32, Precision::Tf32)];
    calls.into_iter().any(|(storage, precision)| {
        let options = Options { level, precision, ..Options::default() };
        levels::offers(&options, algorithm, pass, storage, &Target::default()).is_ok()
    })
}

fn sentence(head: String, rest: &str) -> String {
    if rest.is_empty() { head } else { format!("{head} – {rest}") }
}

/// An item of a list, its further lines indented as its text.
fn item(bullet: &str, text: &str) -> String {
    let indent = " ".repeat(bullet.len());
    let lines = fold(text, COLUMNS - bullet.len());
    format!("{bullet}{}\n", lines.join(&format!("\n{indent}")))
}
