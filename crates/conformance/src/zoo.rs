//! The zoo: known bugs, planted on purpose, and the laws that kill them.
//!
//! The host is a small tiled implementation. A [`Mutant`] misreads the request, spoils the results,
//! or changes a line or two of the host. A suite that lets a mutant live is blind to that bug; one
//! that kills a control, which is correct but computes in another way, raises false alarms.

mod attention;
mod composed;
mod host;
mod job;
mod lazy_attention;
mod linear_attention;
mod linear_cross_entropy;
mod mutant;
mod scores;

pub use host::Host;
pub use job::{CONTROLS, Softmax, Style};
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

/// What hears, from any thread, of every case that is done: its number, the number of all, and its
/// name.
pub type Progress<'a> = &'a (dyn Fn(usize, usize, &str) + Sync);

/// Mutants and controls against every law, on the cases of `algorithms` and of all algorithms that
/// one of the mutants has.
pub fn kill_matrix(
    seed: u64,
    algorithms: &[Algorithm],
    mutants: &[Mutant],
    controls: &[Style],
    progress: Progress<'_>,
) -> Matrix {
    let concerned = |of: &Algorithm| {
        algorithms.contains(of) || mutants.iter().any(|mutant| mutant.of().contains(of))
    };
    let algorithms: Vec<Algorithm> = Algorithm::ALL.into_iter().filter(concerned).collect();
    let ground = Ground::new(seed, &algorithms);
    let mutants = mutants.iter().map(|&mutant| (Some(mutant), Host::mutant(mutant)));
    let controls = controls.iter().map(|&style| (None, Host::sound(style)));
    let (kinds, tiers): (Vec<_>, Vec<_>) = mutants.chain(controls).unzip();
    let fates = ground.hunt(&tiers, |_| true, progress);
    let row = |((mutant, tier), fates): ((_, &Host), _)| Row { name: tier.name(), mutant, fates };
    let rows = kinds.into_iter().zip(&tiers).zip(fates).map(row).collect();
    Matrix { laws: ground.laws.iter().map(|law| law.name).collect(), rows }
}

/// Whether the law that must kill a mutant does.
pub fn killed(mutant: Mutant, ground: &Ground) -> Fate {
    let killer = |law: &Law| law.name == mutant.killer();
    let fates = ground.hunt(&[Host::mutant(mutant)], killer, &|_, _, _| {});
    let found = ground.laws.iter().zip(fates.into_iter().flatten()).find(|(law, _)| killer(law));
    found.map_or(Fate::Alive(0), |(_, fate)| fate)
}

/// What every law finds on a control.
pub fn alarms(style: Style, ground: &Ground) -> Vec<(&'static str, Fate)> {
    let fates = ground.hunt(&[Host::sound(style)], |_| true, &|_, _, _| {});
    ground.laws.iter().map(|law| law.name).zip(fates.into_iter().flatten()).collect()
}

/// The cases of a core run, in f32, with the laws that look at each.
pub struct Ground {
    laws: Vec<Law>,
    cases: Vec<(Exact, Vec<(Pass, usize)>)>,
}

/// How one trial ended.
struct Found {
    case: usize,
    tier: usize,
    law: usize,
    kill: Option<String>,
}

impl Ground {
    /// The cases of a seed and some algorithms.
    pub fn new(seed: u64, algorithms: &[Algorithm]) -> Self {
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

    /// Runs tiers against the laws that `chosen` names: what each law found on each tier. A law
    /// leaves a tier alone after the first case that kills it.
    fn hunt(
        &self,
        tiers: &[Host],
        chosen: impl Fn(&Law) -> bool + Sync,
        progress: Progress<'_>,
    ) -> Vec<Vec<Fate>> {
        let done = AtomicUsize::new(0);
        let kills: Vec<AtomicUsize> =
            (0..tiers.len() * self.laws.len()).map(|_| AtomicUsize::new(usize::MAX)).collect();
        // The exact results of a case serve all tiers, so cases are the outer loop. Threads take
        // them in order: a kill by an earlier case spares its law all later ones, and the first kill
        // is the same for any number of threads.
        let cases = self.cases.iter().enumerate().par_bridge();
        let mut found: Vec<Found> = cases
            .flat_map_iter(|(case, (exact, pairs))| {
                let pairs = pairs.iter().filter(|(_, law)| chosen(&self.laws[*law]));
                let found = self.trials(case, &pairs.copied().collect::<Vec<_>>(), tiers, &kills);
                let done = done.fetch_add(1, Ordering::Relaxed) + 1;
                progress(done, self.cases.len(), &exact.case().name);
                found
            })
            .collect();
        found.sort_by_key(|found| found.case);
        let mut fates = vec![vec![Fate::Alive(0); self.laws.len()]; tiers.len()];
        for Found { case, tier, law, kill } in found {
            match (&mut fates[tier][law], kill) {
                (Fate::Alive(trials), None) => *trials += 1,
                (fate @ Fate::Alive(_), Some(text)) => {
                    *fate = Fate::Killed { case: self.cases[case].0.case().name.clone(), text };
                }
                (Fate::Killed { .. }, _) => {}
            }
        }
        fates
    }

    /// The trials of a case by laws that no earlier case has led to a kill.
    fn trials(
        &self,
        case: usize,
        pairs: &[(Pass, usize)],
        tiers: &[Host],
        kills: &[AtomicUsize],
    ) -> Vec<Found> {
        let exact = &self.cases[case].0;
        let mut found = Vec::new();
        let algorithm = exact.case().spec.algorithm;
        for (t, tier) in tiers.iter().enumerate().filter(|(_, x)| x.of().contains(&algorithm)) {
            let trials = Pass::ALL.map(|pass| Trial::new(tier, exact, pass));
            for &(pass, law) in pairs {
                let first_kill = &kills[t * self.laws.len() + law];
                let trial = trials.iter().find(|trial| trial.pass == pass);
                let (Some(trial), true) = (trial, first_kill.load(Ordering::Relaxed) > case) else {
                    continue;
                };
                let kill = match (self.laws[law].check)(trial) {
                    Ok(_) => None,
                    Err(Flaw::Unsupported(_)) => continue,
                    Err(Flaw::Fail(text) | Flaw::Vacuous(text)) => Some(text),
                };
                if kill.is_some() {
                    first_kill.fetch_min(case, Ordering::Relaxed);
                }
                found.push(Found { case, tier: t, law, kill });
            }
        }
        found
    }
}

fn applicable(laws: &[Law], exact: &Exact) -> Vec<(Pass, usize)> {
    let pairs = Pass::ALL.into_iter().flat_map(|pass| (0..laws.len()).map(move |law| (pass, law)));
    pairs.filter(|&(pass, law)| laws[law].concerns(exact.case(), pass)).collect()
}
