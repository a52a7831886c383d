//! One pass of one case on one tier, and what the laws ask about it.

use super::flaw::Flaw;
use crate::bounds::{self, Bounds};
use crate::cases::Case;
use crate::gates::{self, Statistic, Uninformative, g2};
use crate::profile::Profile;
use crate::stochastic::{self, KERNELS};
use crate::tensor::{Tensors, Values};
use crate::tier::{Filtered, Hints, Request, Tier};
use crate::tiers::{ask, ask_filtered, ask_in_turn};
use crate::types::Types;
use crate::typical::{Kernels, Typical};
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Operand, Pass, Problem};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Of some tensors those that a pass reads.
fn given(problem: &Problem, pass: Pass, inputs: &Tensors) -> Tensors {
    let given = |operand: Operand| {
        let tensor = inputs.get(operand.name).filter(|_| operand.role.is_given())?;
        Some((operand.name.to_string(), tensor.clone()))
    };
    problem.operands(pass).into_iter().filter_map(given).collect()
}

/// Something about each pass, made when first asked for.
type ByPass<T> = BTreeMap<Pass, OnceLock<Result<T, Flaw>>>;

fn by_pass<T>() -> ByPass<T> {
    Pass::ALL.into_iter().map(|pass| (pass, OnceLock::new())).collect()
}

/// The contents of the slot. They are made before the slot is locked, perhaps twice: while it waits for its own
/// parallel parts, a thread may be handed another trial of this case, and would wait for itself.
fn once<T>(
    slot: &OnceLock<Result<T, Flaw>>,
    make: impl FnOnce() -> Result<T, Flaw>,
) -> Result<&T, Flaw> {
    let result = match slot.get() {
        Some(result) => result,
        None => {
            let made = make();
            slot.get_or_init(|| made)
        }
    };
    result.as_ref().map_err(Clone::clone)
}

/// The errors of simulated kernels, of each when it is first asked for ([`stochastic::errors`]).
type Simulated = [OnceLock<Result<Arc<Values>, Flaw>>; KERNELS as usize];

/// A case with its exact results and their bounds: made when first asked for, shared by all tiers.
pub struct Exact {
    case: Case,
    profile: Profile,
    bounds: ByPass<Bounds>,
    typical: ByPass<Typical>,
    simulated: BTreeMap<Pass, Simulated>,
    others: Mutex<Vec<Other>>,
    /// Outputs that are not judged.
    omits: Vec<String>,
}

/// The exact results of a problem that a law makes of a case: each tier is asked the same.
struct Other {
    problem: Problem,
    pass: Pass,
    inputs: Tensors,
    bounds: Bounds,
}

impl Exact {
    /// A case for kernels of a profile.
    pub fn new(case: Case, profile: Profile) -> Self {
        let simulated = Pass::ALL.into_iter().map(|pass| (pass, Simulated::default())).collect();
        let others = Mutex::new(Vec::new());
        let omits = Vec::new();
        Exact { case, profile, bounds: by_pass(), typical: by_pass(), simulated, others, omits }
    }

    /// The same for kernels that do not return some outputs.
    pub fn without(self, omits: Vec<String>) -> Self {
        Exact { omits, ..self }
    }

    /// The case.
    pub fn case(&self) -> &Case {
        &self.case
    }

    /// The exact results of a pass of the case, with their bounds.
    pub(crate) fn pass(&self, pass: Pass) -> Result<&Bounds, Flaw> {
        once(&self.bounds[&pass], || self.of(&self.case.problem, pass, self.case.inputs_of(pass)))
    }

    fn typical(&self, pass: Pass) -> Result<&Typical, Flaw> {
        once(&self.typical[&pass], || {
            self.simulated(pass, self.case.inputs_of(pass), self.pass(pass)?)
        })
    }

    /// The errors of simulated kernels on a pass of the case with other inputs, and with their bounds.
    fn simulated(&self, pass: Pass, inputs: &Tensors, exact: &Bounds) -> Result<Typical, Flaw> {
        let case = &self.case;
        let (problem, dtype) = (&case.problem, case.dtype);
        Ok(Typical::new(&Kernels::new(problem, pass, dtype, &self.profile, inputs, exact)?)?)
    }

    fn of(&self, problem: &Problem, pass: Pass, inputs: &Tensors) -> Result<Bounds, Flaw> {
        let mut bounds = bounds::bounds(problem, pass, self.case.dtype, &self.profile, inputs)?;
        bounds.outputs.retain(|name, _| !self.omits.contains(name));
        Ok(bounds)
    }

    /// As [`Exact::of`], kept for the next tier. What is large is not kept.
    fn other(&self, problem: &Problem, pass: Pass, inputs: &Tensors) -> Result<Bounds, Flaw> {
        if self.case.spec.is_large() {
            return self.of(problem, pass, inputs);
        }
        let others = || self.others.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |x: &&Other| (x.pass, &x.problem, &x.inputs) == (pass, problem, inputs);
        if let Some(known) = others().iter().find(same) {
            return Ok(known.bounds.clone());
        }
        let bounds = self.of(problem, pass, inputs)?;
        let (problem, inputs) = (problem.clone(), inputs.clone());
        others().push(Other { problem, pass, inputs, bounds: bounds.clone() });
        Ok(bounds)
    }
}

/// One of the calls that share a workspace.
#[derive(Clone, Copy)]
pub struct Turn<'a> {
    pub problem: &'a Problem,
    pub inputs: &'a Tensors,
    pub hints: Hints,
}

/// One pass of one case on one tier.
pub struct Trial<'a> {
    /// The tier under judgement.
    pub tier: &'a dyn Tier,
    /// The case.
    pub case: &'a Case,
    /// The pass.
    pub pass: Pass,
    exact: &'a Exact,
    clean: ByPass<Tensors>,
}

impl<'a> Trial<'a> {
    /// A trial of a tier.
    pub fn new(tier: &'a dyn Tier, exact: &'a Exact, pass: Pass) -> Self {
        Trial { tier, case: &exact.case, pass, exact, clean: by_pass() }
    }

    /// The arithmetic that the tier claims.
    pub fn profile(&self) -> &Profile {
        &self.exact.profile
    }

    /// The inputs and cotangents of the pass.
    pub fn inputs(&self) -> &'a Tensors {
        self.case.inputs_of(self.pass)
    }

    /// Results of the tier for the case as it is: computed once.
    pub fn clean(&self) -> Result<&Tensors, Flaw> {
        self.clean_in(self.pass)
    }

    /// As [`Trial::clean`], of a pass of its own.
    pub fn clean_in(&self, pass: Pass) -> Result<&Tensors, Flaw> {
        let first = || self.ask_pass(&self.case.problem, pass, self.case.inputs_of(pass));
        self.clean[&pass].get_or_init(first).as_ref().map_err(Clone::clone)
    }

    /// The exact results of the case with their bounds.
    pub fn bounds(&self) -> Result<&Bounds, Flaw> {
        self.exact.pass(self.pass)
    }

    /// As [`Trial::bounds`], of a pass of its own.
    pub fn bounds_in(&self, pass: Pass) -> Result<&Bounds, Flaw> {
        self.exact.pass(pass)
    }

    /// Conspicuous errors of results of the pass: of the case, or of other inputs with their bounds (gate G2).
    pub fn conspicuous(
        &self,
        outputs: &Tensors,
        others: Option<(&Tensors, &Bounds)>,
    ) -> Result<Vec<Statistic>, Flaw> {
        let mut found = match others {
            None => self.g2(outputs, self.bounds()?, self.exact.typical(self.pass)?),
            Some((inputs, exact)) => self.statistics(outputs, inputs, exact)?,
        };
        found.retain(|statistic| statistic.margin() > 1.0);
        Ok(found)
    }

    /// The statistics of results of the pass for other inputs with their bounds: the slope of every output first,
    /// then what is conspicuous about it (gate G2).
    pub fn statistics(
        &self,
        outputs: &Tensors,
        inputs: &Tensors,
        exact: &Bounds,
    ) -> Result<Vec<Statistic>, Flaw> {
        Ok(self.g2(outputs, exact, &self.exact.simulated(self.pass, inputs, exact)?))
    }

    fn g2(&self, outputs: &Tensors, exact: &Bounds, typical: &Typical) -> Vec<Statistic> {
        let operands = self.case.problem.operands(self.pass);
        g2(&operands, &self.exact.profile, exact, typical, outputs)
    }

    /// Of outputs of the case that are uninformative, whether they err as correct kernels do.
    pub fn doubts(&self, outputs: &Tensors) -> Result<Vec<Uninformative>, Flaw> {
        let (exact, operands) = (self.bounds()?, self.case.problem.operands(self.pass));
        let Case { problem, dtype, .. } = self.case;
        let types = Types::from(*dtype);
        gates::uninformative(&operands, self.profile(), exact, outputs, |kernel| {
            let slot = &self.exact.simulated[&self.pass][kernel as usize];
            let errors = once(slot, || {
                let (pass, profile, inputs) = (self.pass, self.profile(), self.inputs());
                let errors =
                    stochastic::errors(problem, pass, &types, profile, inputs, exact, kernel);
                Ok(Arc::new(errors?))
            });
            errors.cloned()
        })
    }

    /// Bounds of another problem, or of other inputs.
    pub fn bounds_of(&self, problem: &Problem, inputs: &Tensors) -> Result<Bounds, Flaw> {
        self.exact.other(problem, self.pass, inputs)
    }

    /// Bounds of a pass of the case for other inputs.
    pub fn bounds_for(&self, pass: Pass, inputs: &Tensors) -> Result<Bounds, Flaw> {
        self.exact.other(&self.case.problem, pass, inputs)
    }

    /// Results of the tier for a problem: of `inputs` it gets the operands of the pass.
    pub fn ask(&self, problem: &Problem, inputs: &Tensors) -> Result<Tensors, Flaw> {
        self.ask_pass(problem, self.pass, inputs)
    }

    /// Results of the tier for the case's problem and other inputs.
    pub fn ask_with(&self, inputs: &Tensors) -> Result<Tensors, Flaw> {
        self.ask(&self.case.problem, inputs)
    }

    /// Results of the tier for the case as it is, with hints.
    pub fn ask_hinted(&self, hints: Hints) -> Result<Tensors, Flaw> {
        self.ask_hinted_with(self.inputs(), hints)
    }

    /// The same for other inputs.
    pub fn ask_hinted_with(&self, inputs: &Tensors, hints: Hints) -> Result<Tensors, Flaw> {
        self.request(&self.case.problem, self.pass, inputs, hints)
    }

    /// The same for another problem and its inputs.
    pub fn ask_hinted_of(
        &self,
        problem: &Problem,
        inputs: &Tensors,
        hints: Hints,
    ) -> Result<Tensors, Flaw> {
        self.request(problem, self.pass, inputs, hints)
    }

    /// As [`Trial::ask`], for a pass of its own.
    pub fn ask_pass(
        &self,
        problem: &Problem,
        pass: Pass,
        inputs: &Tensors,
    ) -> Result<Tensors, Flaw> {
        self.request(problem, pass, inputs, Hints::default())
    }

    fn request(
        &self,
        problem: &Problem,
        pass: Pass,
        inputs: &Tensors,
        hints: Hints,
    ) -> Result<Tensors, Flaw> {
        problem.check()?;
        let hints = Hints { blocking: hints.blocking.or(self.case.blocking()), ..hints };
        let inputs = given(problem, pass, inputs);
        let request = Request { problem, pass, dtype: self.case.dtype, inputs: &inputs, hints };
        Ok(ask(self.tier, &request)?)
    }

    /// Results of the tier for some problems with their inputs, and for the case as it is, one after the other in one
    /// workspace.
    pub fn ask_in_turn(&self, turns: &[Turn<'_>]) -> Result<Vec<Tensors>, Flaw> {
        let (pass, dtype) = (self.pass, self.case.dtype);
        let inputs: Vec<Tensors> =
            turns.iter().map(|turn| given(turn.problem, pass, turn.inputs)).collect();
        let requests = turns.iter().zip(&inputs).map(|(turn, inputs)| {
            turn.problem.check()?;
            let hints = turn.hints;
            let hints = Hints { blocking: hints.blocking.or(self.case.blocking()), ..hints };
            Ok(Request { problem: turn.problem, pass, dtype, inputs, hints })
        });
        let requests = requests.collect::<Result<Vec<_>, Flaw>>()?;
        let none = || Flaw::NotAsked("the tier keeps no workspace".to_string());
        ask_in_turn(self.tier, &requests)?.ok_or_else(none)
    }

    /// Results of the tier for the case as it is, with a filter and hints.
    pub fn ask_filtered(&self, filter: Filter, hints: Hints) -> Result<Filtered, Flaw> {
        let Case { problem, dtype, .. } = self.case;
        let (pass, inputs) = (self.pass, given(problem, self.pass, self.inputs()));
        let hints = Hints { blocking: hints.blocking.or(self.case.blocking()), ..hints };
        let request = Request { problem, pass, dtype: *dtype, inputs: &inputs, hints };
        let none = || Flaw::NotAsked("the tier has no filter".to_string());
        ask_filtered(self.tier, &request, filter)?.ok_or_else(none)
    }
}
