//! The zoo: known bugs, planted on purpose, and the laws that kill them.
//!
//! The host is a small tiled implementation. A [`Mutant`] misreads the request, spoils the results,
//! or changes a line or two of the host. A suite that lets a mutant live is blind to that bug; one
//! that kills a control, which is correct but computes in another way, raises false alarms.

mod host;
pub(crate) mod job;
pub(crate) mod mutant;
pub(crate) mod rows;

pub use crate::roster::{mutant, mutants};
pub use host::Host;
pub use job::{CONTROLS, Softmax, Style};
pub use mutant::Mutant;

use crate::cases::{Depth, Spec, specs};
use crate::laws::{self, Exact, Flaw, Law, Trial};
use crate::profile::Profile;
use crate::suite::{applicable, share};
use crate::tier::Tier;
use etalon_problem::{Algorithm, Dtype, Pass};
use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

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
                let mut fates = self.laws.iter().zip(&row.fates);
                fates.any(|(law, fate)| *law == mutant.killer && fate.is_kill())
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
        algorithms.contains(of) || mutants.iter().any(|mutant| mutant.of.contains(of))
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
    let killer = |law: &Law| law.name == mutant.killer;
    let fates = ground.hunt(&[Host::mutant(mutant)], killer, &|_, _, _| {});
    // The other laws were not asked.
    let found = fates.into_iter().flatten().find(|fate| *fate != Fate::Alive(0));
    found.unwrap_or(Fate::Alive(0))
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

/// What a law has found on a tier so far; before it the number of the case that killed, or a larger one.
type Finding = Mutex<(usize, Fate)>;

impl Ground {
    /// The cases of a seed and some algorithms.
    pub fn new(seed: u64, algorithms: &[Algorithm]) -> Self {
        let laws = laws::all();
        let cases = algorithms.iter().flat_map(|&algorithm| {
            let specs = specs(algorithm, Depth::Core, seed);
            let cases = specs.map(|spec| Spec { dtype: Dtype::F32, ..spec }.build());
            let cases: Vec<Exact> =
                cases.map(|case| Exact::new(case, Profile::strict(Dtype::F32))).collect();
            let pairs = cases.par_iter().map(|exact| applicable(&laws, exact.case())).collect();
            cases.into_iter().zip(share(&laws, pairs)).collect::<Vec<_>>()
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
        let nothing = |_: &Law| Mutex::new((usize::MAX, Fate::Alive(0)));
        let of_tier = |_: &Host| self.laws.iter().map(nothing).collect();
        let findings: Vec<Vec<Finding>> = tiers.iter().map(of_tier).collect();
        // The exact results of a case serve all tiers, so cases are the outer loop. Threads take
        // them in order: a kill by an earlier case spares its law all later ones, and the first kill
        // is the same for any number of threads.
        self.cases.iter().enumerate().par_bridge().for_each(|(number, (exact, _))| {
            for (tier, findings) in tiers.iter().zip(&findings) {
                self.judge(number, tier, &chosen, findings);
            }
            let done = done.fetch_add(1, Ordering::Relaxed) + 1;
            progress(done, self.cases.len(), &exact.case().name);
        });
        let fate =
            |finding: Finding| finding.into_inner().unwrap_or_else(PoisonError::into_inner).1;
        findings.into_iter().map(|of_tier| of_tier.into_iter().map(fate).collect()).collect()
    }

    /// The trials of a tier on a case, by laws that no earlier case has led to a kill.
    fn judge(
        &self,
        number: usize,
        tier: &Host,
        chosen: impl Fn(&Law) -> bool,
        findings: &[Finding],
    ) {
        let (exact, pairs) = &self.cases[number];
        if !tier.of().contains(&exact.case().spec.algorithm) {
            return;
        }
        let trials = Pass::ALL.map(|pass| Trial::new(tier, exact, pass));
        for &(pass, law) in pairs.iter().filter(|(_, law)| chosen(&self.laws[*law])) {
            let finding = || findings[law].lock().unwrap_or_else(PoisonError::into_inner);
            let Some(trial) = trials.iter().find(|trial| trial.pass == pass) else { continue };
            if finding().0 <= number {
                continue;
            }
            let outcome = (self.laws[law].check)(trial);
            match (outcome, &mut *finding()) {
                (Ok(_), (_, Fate::Alive(trials))) => *trials += 1,
                (Err(Flaw::Fail(text) | Flaw::Vacuous(text)), found) if number < found.0 => {
                    *found = (number, Fate::Killed { case: exact.case().name.clone(), text });
                }
                _ => {}
            }
        }
    }
}
