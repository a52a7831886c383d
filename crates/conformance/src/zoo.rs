//! The zoo: known bugs, planted on purpose, and the laws that kill them.
//!
//! The host is a small tiled implementation; a [`Mutant`] changes a line or two of it. A suite that
//! lets a mutant live is blind to that bug; one that kills a control, which is correct but computes
//! in another way, raises false alarms.

mod backward;
mod forward;
mod host;
mod mutant;

pub use host::{CONTROLS, Host, Softmax, Style};
pub use mutant::Mutant;

use crate::cases::{Case, Depth, specs};
use crate::laws::{self, Exact, Flaw, Law, Trial};
use crate::profile::Profile;
use crate::tier::Tier;
use etalon_problem::{Algorithm, Dtype, Pass};
use rayon::prelude::*;

/// How a law ended over all cases that it applies to.
#[derive(Debug, Clone, PartialEq)]
pub enum Fate {
    /// It held in that many trials.
    Alive(usize),
    /// It was broken: by which case, and how that showed.
    Killed {
        /// The case's name.
        case: String,
        /// First bad element, got, expected.
        text: String,
    },
}

/// A row of the matrix.
#[derive(Debug, Clone)]
pub struct Row {
    /// The tier's name: `zoo/…`.
    pub name: String,
    /// The mutant; `None` for a control.
    pub mutant: Option<Mutant>,
    /// What each law found, in the matrix' order of laws.
    pub fates: Vec<Fate>,
}

/// Mutants and controls against laws.
#[derive(Debug, Clone)]
pub struct Matrix {
    /// The laws' names.
    pub laws: Vec<&'static str>,
    /// The mutants, then the controls.
    pub rows: Vec<Row>,
}

impl Row {
    /// Whether some law killed it.
    pub fn killed(&self) -> bool {
        self.fates.iter().any(|fate| matches!(fate, Fate::Killed { .. }))
    }
}

impl Matrix {
    /// Whether every mutant was killed by the law that must, and no control by any.
    pub fn sound(&self) -> bool {
        self.rows.iter().all(|row| match row.mutant {
            None => !row.killed(),
            Some(mutant) => {
                self.laws.iter().zip(&row.fates).any(|(law, fate)| {
                    *law == mutant.killer() && matches!(fate, Fate::Killed { .. })
                })
            }
        })
    }
}

/// The cases of a core run, in f32.
pub struct Ground {
    cases: Vec<Case>,
}

impl Ground {
    /// Those of a seed.
    pub fn new(seed: u64) -> Self {
        let all = Algorithm::ALL.into_iter().flat_map(|algorithm| {
            specs(algorithm, Depth::Core, seed).map(|spec| {
                let spec = crate::cases::Spec { dtype: Dtype::F32, ..spec };
                spec.build()
            })
        });
        Ground { cases: all.collect() }
    }

    /// Runs tiers against laws; a law's hunt for a tier ends with the first kill.
    fn hunt(&self, tiers: &[Host], laws: &[Law]) -> Vec<Vec<Fate>> {
        let passes = [Pass::Forward, Pass::Backward];
        let mut fates = vec![vec![Fate::Alive(0); laws.len()]; tiers.len()];
        // The exact results of a case serve all tiers, so cases are the outer loop; chunks of them
        // let kills of earlier ones end the hunt.
        for chunk in self.cases.chunks(16) {
            let found: Vec<Vec<(usize, usize, Fate)>> =
                chunk.par_iter().map(|case| trials(case, &passes, tiers, laws, &fates)).collect();
            for (tier, law, fate) in found.into_iter().flatten() {
                join(&mut fates[tier][law], fate);
            }
        }
        fates
    }
}

fn join(fate: &mut Fate, found: Fate) {
    match (&mut *fate, found) {
        (Fate::Alive(n), Fate::Alive(more)) => *n += more,
        (Fate::Alive(_), killed) => *fate = killed,
        (Fate::Killed { .. }, _) => {}
    }
}

fn trials(
    case: &Case,
    passes: &[Pass],
    tiers: &[Host],
    laws: &[Law],
    fates: &[Vec<Fate>],
) -> Vec<(usize, usize, Fate)> {
    let exact = Exact::new(case, Profile::strict(case.dtype));
    let mut found = Vec::new();
    for &pass in passes {
        let applicable: Vec<usize> =
            (0..laws.len()).filter(|&law| (laws[law].applies)(case, pass)).collect();
        for (t, tier) in tiers.iter().enumerate() {
            let trial = Trial::new(tier, &exact, pass);
            for &law in applicable.iter().filter(|law| matches!(fates[t][**law], Fate::Alive(_))) {
                let fate = match (laws[law].check)(&trial) {
                    Ok(_) => Fate::Alive(1),
                    Err(Flaw::Unsupported(_)) => continue,
                    Err(Flaw::Fail(text) | Flaw::Vacuous(text)) => {
                        Fate::Killed { case: case.name.clone(), text }
                    }
                };
                found.push((t, law, fate));
            }
        }
    }
    found
}

/// Every mutant and every control against every law.
pub fn kill_matrix(seed: u64) -> Matrix {
    let laws = laws::all();
    let mutants = Mutant::ALL.iter().map(|&mutant| (Some(mutant), Host::mutant(mutant)));
    let controls = CONTROLS.iter().map(|&style| (None, Host::sound(style)));
    let (kinds, tiers): (Vec<_>, Vec<_>) = mutants.chain(controls).unzip();
    let fates = Ground::new(seed).hunt(&tiers, &laws);
    let rows = kinds.into_iter().zip(&tiers).zip(fates);
    let row = |((mutant, tier), fates): ((_, &Host), _)| Row { name: tier.name(), mutant, fates };
    Matrix { laws: laws.iter().map(|law| law.name).collect(), rows: rows.map(row).collect() }
}

/// Whether the law that must kill a mutant does.
pub fn killed(mutant: Mutant, ground: &Ground) -> Fate {
    let law: Vec<Law> = laws::find(mutant.killer()).into_iter().collect();
    let fates = ground.hunt(&[Host::mutant(mutant)], &law);
    fates.into_iter().flatten().next().unwrap_or(Fate::Alive(0))
}

/// What every law finds on a control.
pub fn alarms(style: Style, ground: &Ground) -> Vec<(&'static str, Fate)> {
    let laws = laws::all();
    let fates = ground.hunt(&[Host::sound(style)], &laws).into_iter().flatten();
    laws.iter().map(|law| law.name).zip(fates).collect()
}
