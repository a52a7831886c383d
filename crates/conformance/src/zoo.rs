//! The zoo: known bugs, planted on purpose, and the laws that kill them.
//!
//! The host is a small tiled implementation; a [`Mutant`] changes a line or two of it. A suite that
//! lets a mutant live is blind to that bug; one that kills a control, which is correct but computes
//! in another way, raises false alarms.

mod attention;
mod host;
mod lazy_attention;
mod linear_attention;
mod linear_cross_entropy;
mod mutant;

pub use host::{CONTROLS, Host, Softmax, Style};
pub use mutant::Mutant;

use crate::cases::{Depth, Spec, specs};
use crate::laws::{self, Exact, Flaw, Law, Trial};
use crate::profile::Profile;
use crate::suite::share;
use crate::tier::Tier;
use etalon_problem::{Algorithm, Dtype, Pass};
use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};

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

impl Fate {
    fn is_kill(&self) -> bool {
        matches!(self, Fate::Killed { .. })
    }
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
        self.fates.iter().any(Fate::is_kill)
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

/// The cases of a core run, in f32, with the laws that look at each.
pub struct Ground {
    laws: Vec<Law>,
    cases: Vec<(Exact, Vec<(Pass, usize)>)>,
}

impl Ground {
    /// Those of a seed.
    pub fn new(seed: u64) -> Self {
        Ground::of(seed, host::WITH_HOST)
    }

    /// Those of a seed and these algorithms.
    fn of(seed: u64, algorithms: &[Algorithm]) -> Self {
        let laws = laws::all();
        let cases = algorithms.iter().flat_map(|&algorithm| {
            let specs = specs(algorithm, Depth::Core, seed);
            let cases = specs.map(|spec| Spec { dtype: Dtype::F32, ..spec }.build());
            let cases: Vec<Exact> =
                cases.map(|case| Exact::new(case, Profile::strict(Dtype::F32))).collect();
            let applicable = cases.par_iter().map(|exact| applicable(&laws, exact)).collect();
            cases.into_iter().zip(share(&laws, applicable)).collect::<Vec<_>>()
        });
        Ground { cases: cases.collect(), laws }
    }

    /// Runs tiers against the laws that `chosen` names; a law's hunt for a tier ends with the first
    /// kill. `progress` hears of every case that is done.
    fn hunt(&self, tiers: &[Host], chosen: &[usize], progress: Progress<'_>) -> Vec<Vec<Fate>> {
        let done = AtomicUsize::new(0);
        let mut fates = vec![vec![Fate::Alive(0); self.laws.len()]; tiers.len()];
        // The exact results of a case serve all tiers, so cases are the outer loop; chunks of them
        // let kills of earlier ones end the hunt.
        for chunk in self.cases.chunks(16) {
            let found: Vec<Vec<Found>> = chunk
                .par_iter()
                .map(|(exact, pairs)| {
                    let pairs = pairs.iter().copied().filter(|(_, law)| chosen.contains(law));
                    let found = self.trials(exact, &pairs.collect::<Vec<_>>(), tiers, &fates);
                    let done = done.fetch_add(1, Ordering::Relaxed) + 1;
                    progress(done, self.cases.len(), &exact.case().name);
                    found
                })
                .collect();
            for (tier, law, fate) in found.into_iter().flatten() {
                join(&mut fates[tier][law], fate);
            }
        }
        fates
    }

    fn trials(
        &self,
        exact: &Exact,
        pairs: &[(Pass, usize)],
        tiers: &[Host],
        fates: &[Vec<Fate>],
    ) -> Vec<Found> {
        let mut found = Vec::new();
        for (t, tier) in tiers.iter().enumerate() {
            if !tier.of().contains(&exact.case().spec.algorithm) {
                continue;
            }
            let trials = Pass::ALL.map(|pass| Trial::new(tier, exact, pass));
            for &(pass, law) in pairs.iter().filter(|(_, law)| !fates[t][*law].is_kill()) {
                let Some(trial) = trials.iter().find(|trial| trial.pass == pass) else { continue };
                let fate = match (self.laws[law].check)(trial) {
                    Ok(_) => Fate::Alive(1),
                    Err(Flaw::Unsupported(_)) => continue,
                    Err(Flaw::Fail(text) | Flaw::Vacuous(text)) => {
                        Fate::Killed { case: exact.case().name.clone(), text }
                    }
                };
                found.push((t, law, fate));
            }
        }
        found
    }
}

/// The tier, the law, and how its trial ended.
type Found = (usize, usize, Fate);

fn applicable(laws: &[Law], exact: &Exact) -> Vec<(Pass, usize)> {
    let pairs = Pass::ALL.into_iter().flat_map(|pass| (0..laws.len()).map(move |law| (pass, law)));
    pairs.filter(|&(pass, law)| laws[law].concerns(exact.case(), pass)).collect()
}

fn join(fate: &mut Fate, found: Fate) {
    match (&mut *fate, found) {
        (Fate::Alive(n), Fate::Alive(more)) => *n += more,
        (Fate::Alive(_), killed) => *fate = killed,
        (Fate::Killed { .. }, _) => {}
    }
}

/// What hears, from any thread, of every case that is done: its number, the number of all, and its
/// name.
pub type Progress<'a> = &'a (dyn Fn(usize, usize, &str) + Sync);

/// Mutants and controls against every law, on the cases of some algorithms.
pub fn kill_matrix(
    seed: u64,
    algorithms: &[Algorithm],
    mutants: &[Mutant],
    controls: &[Style],
    progress: Progress<'_>,
) -> Matrix {
    let ground = Ground::of(seed, algorithms);
    let mutants = mutants.iter().map(|&mutant| (Some(mutant), Host::mutant(mutant)));
    let controls = controls.iter().map(|&style| (None, Host::sound(style)));
    let (kinds, tiers): (Vec<_>, Vec<_>) = mutants.chain(controls).unzip();
    let every: Vec<usize> = (0..ground.laws.len()).collect();
    let rows = kinds.into_iter().zip(&tiers).zip(ground.hunt(&tiers, &every, progress));
    let row = |((mutant, tier), fates): ((_, &Host), _)| Row { name: tier.name(), mutant, fates };
    let rows = rows.map(row).collect();
    Matrix { laws: ground.laws.iter().map(|law| law.name).collect(), rows }
}

/// Whether the law that must kill a mutant does.
pub fn killed(mutant: Mutant, ground: &Ground) -> Fate {
    let Some(law) = ground.laws.iter().position(|law| law.name == mutant.killer()) else {
        return Fate::Alive(0);
    };
    let fates = ground.hunt(&[Host::mutant(mutant)], &[law], &|_, _, _| {});
    fates.into_iter().flatten().nth(law).unwrap_or(Fate::Alive(0))
}

/// What every law finds on a control.
pub fn alarms(style: Style, ground: &Ground) -> Vec<(&'static str, Fate)> {
    let every: Vec<usize> = (0..ground.laws.len()).collect();
    let fates = ground.hunt(&[Host::sound(style)], &every, &|_, _, _| {}).into_iter().flatten();
    ground.laws.iter().map(|law| law.name).zip(fates).collect()
}
