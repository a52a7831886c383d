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
use crate::laws::{self, Exact, Flaw, Kind, Law, Trial};
use crate::profile::Profile;
use crate::suite::{applicable, choose};
use crate::tier::Tier;
use etalon_problem::{Algorithm, Dtype, Pass};
use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// The outcome of a law over all cases that it applies to.
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
    /// The outcome of each law, by name.
    pub fates: Vec<(&'static str, Fate)>,
}

/// Mutants and controls against laws.
#[derive(Debug, Clone)]
pub struct Matrix {
    /// The mutants, then the controls.
    pub rows: Vec<Row>,
}

impl Row {
    /// The laws that killed it: the name, the case's name, and how that showed.
    pub fn kills(&self) -> impl Iterator<Item = (&'static str, &str, &str)> {
        self.fates.iter().filter_map(|(law, fate)| match fate {
            Fate::Killed { case, text } => Some((*law, case.as_str(), text.as_str())),
            Fate::Alive(_) => None,
        })
    }

    /// True if a mutant was killed by the law that must, or a control by none.
    pub fn sound(&self) -> bool {
        match self.mutant {
            None => self.kills().next().is_none(),
            Some(mutant) => self.kills().any(|(law, ..)| law == mutant.killer),
        }
    }
}

impl Matrix {
    /// True if every mutant was killed by the law that must, and no control by any.
    pub fn sound(&self) -> bool {
        self.rows.iter().all(Row::sound)
    }
}

/// A function that is called, from any thread, for every case that is done: with its number, the number of all, and
/// its name.
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
    let ground = Ground::new(seed, Depth::Core, &algorithms);
    let mutants = mutants.iter().copied().map(Host::mutant);
    let tiers: Vec<Host> = mutants.chain(controls.iter().copied().map(Host::sound)).collect();
    let fates = ground.hunt(&tiers, |_| true, progress);
    let row = |(tier, fates): (&Host, _)| Row { name: tier.name(), mutant: tier.mutant, fates };
    Matrix { rows: tiers.iter().zip(fates).map(row).collect() }
}

/// Fate of a mutant under the law that must kill it.
pub fn killed(mutant: Mutant, ground: &Ground) -> Fate {
    let killer = |law: &Law| law.name == mutant.killer;
    let fates = ground.hunt(&[Host::mutant(mutant)], killer, &|_, _, _| {});
    let own = fates.into_iter().flatten().find(|(law, _)| *law == mutant.killer);
    own.map_or(Fate::Alive(0), |(_, fate)| fate)
}

/// Outcomes of every law on a control.
pub fn alarms(style: Style, ground: &Ground) -> Vec<(&'static str, Fate)> {
    ground.hunt(&[Host::sound(style)], |_| true, &|_, _, _| {}).concat()
}

/// The cases of a run in f32, without the large ones, with the laws that look at each.
pub struct Ground {
    laws: Vec<Law>,
    cases: Vec<(Exact, Vec<(Pass, usize)>)>,
}

/// The finding of a law on a tier so far; before it the number of the case that killed, or a larger one.
type Finding = Mutex<(usize, Fate)>;

impl Ground {
    /// The cases of a seed and some algorithms.
    pub fn new(seed: u64, depth: Depth, algorithms: &[Algorithm]) -> Self {
        // A promise of etalon's own tiers matters here where some bug breaks it.
        let broken = |law: &Law| mutants().iter().any(|mutant| mutant.killer == law.name);
        let matters = |law: &Law| law.kind != Kind::Contract || broken(law);
        // The ground is in f32.
        let of_f16 = |law: &Law| law.name == "ends_of_type";
        let asked = |law: &Law| law.asks.is_none_or(Host::chooses) && !of_f16(law);
        let laws = laws::all().into_iter().filter(|law| matters(law) && asked(law));
        let laws: Vec<Law> = laws.collect();
        let cases = algorithms.iter().flat_map(|&algorithm| {
            let specs = specs(algorithm, depth, seed);
            // Large cases are about the tiles and memory of a real kernel.
            let specs = specs.filter(|spec| !spec.is_large());
            let cases = specs.map(|spec| Spec { dtype: Dtype::F32, ..spec }.build());
            let cases: Vec<Exact> =
                cases.map(|case| Exact::new(case, Profile::strict(Dtype::F32))).collect();
            let pairs = cases.par_iter().map(|exact| applicable(&laws, exact.case())).collect();
            cases.into_iter().zip(choose(depth, &laws, pairs)).collect::<Vec<_>>()
        });
        Ground { cases: cases.collect(), laws }
    }

    /// Runs tiers against the laws that `chosen` names: what every law found on each tier. A law
    /// leaves a tier alone after the first case that kills it.
    fn hunt(
        &self,
        tiers: &[Host],
        chosen: impl Fn(&Law) -> bool + Sync,
        progress: Progress<'_>,
    ) -> Vec<Vec<(&'static str, Fate)>> {
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
        let fate = |(law, finding): (&Law, Finding)| {
            (law.name, finding.into_inner().unwrap_or_else(PoisonError::into_inner).1)
        };
        let named = |of_tier| self.laws.iter().zip::<Vec<_>>(of_tier).map(fate).collect();
        findings.into_iter().map(named).collect()
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
