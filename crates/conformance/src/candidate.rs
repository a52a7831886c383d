//! A kernel that somebody brings: what it takes is declared, and a function answers for it.

use crate::capabilities::{Capabilities, Kernel};
use crate::profile::Profile;
use crate::tensor::Tensors;
use crate::tier::{Refusal, Request, Tier};
use crate::tiers::{Reference, ask};
use etalon_problem::{Algorithm, Dtype, Pass, Problem, Role};

/// The answer of a kernel to a request: every output of the pass that it returns, by name.
pub type Answer<'a> = &'a (dyn Fn(&Request<'_>) -> Result<Tensors, Refusal> + Sync);

/// A kernel that somebody brings, as a tier of one algorithm.
pub struct Candidate<'a> {
    /// Its name in reports.
    pub name: String,
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Capabilities of it and perhaps of others.
    pub capabilities: &'a Capabilities,
    /// The arithmetic that it claims; `None`: the usual of each storage type.
    pub profile: Option<Profile>,
    /// Computes the answers, from any thread.
    pub answer: Answer<'a>,
    /// True if walks over whole functions are to be thinned.
    pub slow: bool,
    /// Why it can answer nothing any more, if so.
    pub lost: Option<&'a (dyn Fn() -> Option<String> + Sync)>,
}

impl Candidate<'_> {
    fn kernels(&self) -> impl Iterator<Item = &Kernel> {
        self.capabilities.kernels.iter().filter(|kernel| kernel.algorithm == self.algorithm)
    }

    /// Tensors that a later pass reads of the forward pass: the kernel's own where it has that pass and returns them,
    /// else the exact results, rounded to their types.
    fn saved(&self, request: &Request<'_>) -> Result<Tensors, Refusal> {
        let &Request { problem, pass, dtype, .. } = request;
        let read = problem.operands(pass).into_iter().filter(|x| x.role == Role::Saved);
        let read: Vec<&str> = read.map(|x| x.name).collect();
        if read.is_empty() {
            return Ok(Tensors::new());
        }
        let forward = problem.operands(Pass::Forward);
        let of_forward = |name: &str| forward.iter().any(|x| x.name == name && x.role.is_given());
        let inputs = request.inputs.iter().filter(|(name, _)| of_forward(name));
        let inputs: Tensors = inputs.map(|(name, x)| (name.clone(), x.clone())).collect();
        let forward = Request { pass: Pass::Forward, inputs: &inputs, ..*request };
        let takes = self.capabilities.answers(problem, Pass::Forward, dtype, &inputs);
        let mut saved = match takes {
            Ok(()) => ask(self, &forward)?,
            Err(_) => Tensors::new(),
        };
        if read.iter().any(|name| !saved.contains_key(*name)) {
            let exact = Reference.run(&forward)?;
            exact.into_iter().for_each(|(name, x)| _ = saved.entry(name).or_insert(x));
        }
        saved.retain(|name, _| read.contains(&name.as_str()));
        Ok(saved)
    }
}

impl Tier for Candidate<'_> {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn offers(&self, algorithm: Algorithm, pass: Pass, dtype: Dtype) -> Result<(), String> {
        let has = |kernel: &Kernel| kernel.has_pass(pass) && kernel.stores(dtype);
        match algorithm == self.algorithm && self.kernels().any(has) {
            true => Ok(()),
            false => Err(format!("its capabilities lack {algorithm} {pass} in {dtype}")),
        }
    }

    fn takes(&self, problem: &Problem, pass: Pass, dtype: Dtype) -> bool {
        self.capabilities.takes(problem, pass, dtype).is_ok()
    }

    fn is_meant_for(&self, algorithm: Algorithm, pass: Pass) -> bool {
        algorithm == self.algorithm && self.kernels().any(|kernel| kernel.has_pass(pass))
    }

    fn profile(&self, dtype: Dtype) -> Profile {
        self.profile.unwrap_or_else(|| Profile::flash(dtype))
    }

    fn returns(&self, output: &str) -> bool {
        !self.kernels().any(|kernel| kernel.omits.iter().any(|name| name == output))
    }

    fn is_slow(&self) -> bool {
        self.slow
    }

    fn lost(&self) -> Option<String> {
        self.lost.and_then(|lost| lost())
    }

    /// Nobody promises that: results that a NaN does not reach must lie within the bound.
    fn gives_the_bits_beside_nan(&self) -> bool {
        false
    }

    fn run(&self, request: &Request<'_>) -> Result<Tensors, Refusal> {
        let &Request { problem, pass, dtype, inputs, .. } = request;
        self.capabilities.answers(problem, pass, dtype, inputs).map_err(Refusal::Unsupported)?;
        let mut all = self.saved(request)?;
        all.extend(inputs.clone());
        (self.answer)(&Request { inputs: &all, ..*request })
    }
}
