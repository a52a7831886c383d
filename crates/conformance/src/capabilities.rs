//! Capabilities, as the author of kernels declares them in a JSON file: a list of kernels, each with the problems
//! that it takes. Whatever asks a kernel asks [`Capabilities::takes`] first.
//!
//! A key that is left out limits nothing, so that `{"kernels": [{"algorithm": "attention"}]}` takes all of
//! attention. A problem is taken if one kernel of the list takes it.

mod facts;
mod file;
mod fit;
#[cfg(test)]
mod tests;

use crate::tensor::Tensors;
use etalon_problem::{Algorithm, Align, Dtype, Error as ProblemError, Pass, Problem, Role, named};
use facts::Facts;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Display;

pub use facts::with_every_tensor;
pub(crate) use facts::{options_of, tensors_of};
pub use file::{parse_capabilities, read_capabilities};
pub(crate) use fit::Fit;

/// The cotangent of a loss: without it there is no gradient, and it is 1 where nobody gives another.
pub(crate) const LOSS: &str = "dloss";

/// The problems that the kernels of somebody take.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Capabilities {
    /// The kernels: a problem is taken if one of them takes it.
    pub kernels: Vec<Kernel>,
}

/// The problems that one kernel takes. A key that is left out limits nothing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Kernel {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The passes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passes: Option<Vec<Pass>>,
    /// The storage types.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtypes: Option<Vec<Dtype>>,
    /// The numbers of a problem, by name: which values of each.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<Number, Limit>,
    /// Numbers that must be equal, as in `[["queries", "keys"], ["dim", "value_dim"]]`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub equal: Vec<Vec<Number>>,
    /// The kinds of mask; of a mask made of others each kind in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub masks: Option<Vec<MaskKind>>,
    /// The places of the diagonal of a mask. They make no difference where all sequences have as many queries
    /// as keys: there every kernel takes both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub align: Option<Vec<Align>>,
    /// The ways in which rows may divide into sequences.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequences: Option<Vec<SequenceKind>>,
    /// The options that may be set, by their keys in problem files, and their values. All others must be absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub options: Option<BTreeMap<String, Values>>,
    /// The optional cotangents that it reads, as `dlse`. Others are never handed in.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cotangents: Vec<String>,
    /// The results that it does not return, as `lse`. They are not judged.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub omits: Vec<String>,
}

/// The values of a number. A key that is left out limits nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    /// These values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub one_of: Option<Vec<usize>>,
    /// At least this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_least: Option<usize>,
    /// At most this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_most: Option<usize>,
    /// Multiples of this, which is at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multiple_of: Option<usize>,
}

/// The values of an option; `{}` takes any.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Values {
    /// These values, as problem files write them; `null` stands for an absent key. Without `null` the problem
    /// must set the option.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub one_of: Option<Vec<Value>>,
}

named! {
    /// A number of a problem that a kernel may limit.
    #[derive(Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "snake_case")]
    Number, "number" {
        /// B.
        Batch = "batch",
        /// Hq.
        QueryHeads = "query_heads",
        /// Hk.
        KeyHeads = "key_heads",
        /// Hq/Hk: query heads for each key head.
        Group = "group",
        /// N of scores.
        Queries = "queries",
        /// M.
        Keys = "keys",
        /// N of linear attention, T of linear cross-entropy.
        Tokens = "tokens",
        /// D.
        Dim = "dim",
        /// E.
        ValueDim = "value_dim",
        /// V.
        Vocab = "vocab",
        /// Keys to the left in a window; an open end is not limited.
        WindowLeft = "window_left",
        /// Keys to the right in a window; an open end is not limited.
        WindowRight = "window_right",
        /// Keys of a chunk of a chunked causal mask.
        Chunk = "chunk",
    }
}

named! {
    /// A kind of mask.
    #[derive(Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "snake_case")]
    MaskKind, "mask" {
        /// Every pair.
        Full = "full",
        /// Keys up to the aligned one.
        Causal = "causal",
        /// Keys around the aligned one.
        Window = "window",
        /// Causal within chunks.
        ChunkedCausal = "chunked_causal",
        /// Equal ids.
        Segments = "segments",
        /// An array of flags.
        Array = "array",
        /// Allowed by all of several.
        And = "and",
        /// Allowed by one of several.
        Or = "or",
    }
}

named! {
    /// A way in which rows divide into sequences.
    #[derive(Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "snake_case")]
    SequenceKind, "sequences" {
        /// One for each batch element.
        Dense = "dense",
        /// One for each batch element, padded.
        Lengths = "lengths",
        /// Laid end to end.
        Packed = "packed",
    }
}

impl Capabilities {
    /// Fails where a key names what its algorithm does not have.
    pub fn check(&self) -> Result<(), ProblemError> {
        if self.kernels.is_empty() {
            return Err(ProblemError::value("kernels", "at least one kernel", 0));
        }
        self.kernels.iter().enumerate().try_for_each(|(at, kernel)| kernel.check(at))
    }

    /// Fails unless a pass of a problem is taken in a storage type: the error names what is not taken.
    pub fn takes(&self, problem: &Problem, pass: Pass, dtype: Dtype) -> Result<(), String> {
        self.kernel(problem, pass, dtype).map(drop)
    }

    /// Fails unless a pass of a problem is taken with these inputs: an optional cotangent is handed to a kernel that
    /// reads it alone. A loss has a cotangent always.
    pub fn answers(
        &self,
        problem: &Problem,
        pass: Pass,
        dtype: Dtype,
        inputs: &Tensors,
    ) -> Result<(), String> {
        let kernel = self.kernel(problem, pass, dtype)?;
        kernel.reads(problem, pass, &|name| inputs.contains_key(name), &[])
    }

    /// The first kernel that takes a pass of a problem in a storage type; else what is not taken.
    pub fn kernel(&self, problem: &Problem, pass: Pass, dtype: Dtype) -> Result<&Kernel, String> {
        let facts = Facts::of(problem)?;
        let mut reasons: Vec<String> = Vec::new();
        for kernel in self.kernels.iter().filter(|x| x.algorithm == problem.algorithm()) {
            match kernel.against(&facts, problem, pass, dtype).into_iter().next() {
                None => return Ok(kernel),
                Some(reason) if reasons.contains(&reason) => {}
                Some(reason) => reasons.push(reason),
            }
        }
        if reasons.is_empty() {
            let known = self.kernels.iter().map(|kernel| kernel.algorithm.name());
            return Err(refused("algorithm", problem.algorithm(), known));
        }
        Err(reasons.join("; another: "))
    }

    /// The results of a pass of an algorithm that some kernel omits.
    pub fn omitted(&self, algorithm: Algorithm, pass: Pass) -> Vec<String> {
        let has = |kernel: &&Kernel| {
            kernel.algorithm == algorithm
                && kernel.passes.as_ref().is_none_or(|passes| passes.contains(&pass))
        };
        self.kernels.iter().filter(has).flat_map(|kernel| kernel.omits.clone()).collect()
    }
}

impl Kernel {
    /// One that takes all of an algorithm, and no optional cotangents.
    pub fn of(algorithm: Algorithm) -> Self {
        Kernel {
            algorithm,
            passes: None,
            dtypes: None,
            limits: BTreeMap::new(),
            equal: Vec::new(),
            masks: None,
            align: None,
            sequences: None,
            options: None,
            cotangents: Vec::new(),
            omits: Vec::new(),
        }
    }

    /// Fails where a pass is given an optional cotangent that the kernel does not read, and that is none of `others`.
    pub(crate) fn reads(
        &self,
        problem: &Problem,
        pass: Pass,
        given: &dyn Fn(&str) -> bool,
        others: &[String],
    ) -> Result<(), String> {
        let reads = |name: &str| self.cotangents.iter().chain(others).any(|x| x == name);
        let operands = problem.operands(pass).into_iter();
        let mut optional = operands.filter(|x| x.role == Role::OptionalCotangent);
        match optional.find(|x| given(x.name) && x.name != LOSS && !reads(x.name)) {
            Some(operand) => Err(format!("it does not read {}", operand.name)),
            None => Ok(()),
        }
    }

    fn check(&self, at: usize) -> Result<(), ProblemError> {
        let key = |key: &str| format!("kernels[{at}].{key}");
        let algorithm = self.algorithm;
        if let Some(pass) = self.passes.iter().flatten().find(|x| !algorithm.passes().contains(x)) {
            let names = algorithm.passes().iter().map(|pass| pass.name()).collect::<Vec<_>>();
            return Err(ProblemError::value(
                key("passes"),
                format!("of {}", names.join(", ")),
                pass,
            ));
        }
        let known = options_of(algorithm);
        let options = self.options.iter().flatten().map(|(name, _)| name);
        if let Some(name) = options.into_iter().find(|name| !known.contains(name)) {
            let expected = format!("options of {algorithm}: {}", known.join(", "));
            return Err(ProblemError::value(key("options"), expected, name));
        }
        if let Some((number, _)) = self.limits.iter().find(|(_, x)| x.multiple_of == Some(0)) {
            let key = key(&format!("limits.{number}.multiple_of"));
            return Err(ProblemError::value(key, "at least 1", 0));
        }
        for (what, names, role) in [
            ("cotangents", &self.cotangents, Role::OptionalCotangent),
            ("omits", &self.omits, Role::Output),
        ] {
            let known = tensors_of(algorithm, role);
            if let Some(name) = names.iter().find(|name| !known.contains(&name.as_str())) {
                let expected = format!("of {}", known.join(", "));
                return Err(ProblemError::value(key(what), expected, name));
            }
        }
        Ok(())
    }

    /// True if it has a pass.
    pub(crate) fn has_pass(&self, pass: Pass) -> bool {
        self.passes.as_ref().is_none_or(|passes| passes.contains(&pass))
    }

    /// True if it has a storage type.
    pub(crate) fn stores(&self, dtype: Dtype) -> bool {
        self.dtypes.as_ref().is_none_or(|dtypes| dtypes.contains(&dtype))
    }

    /// Why it does not take a pass of a problem of its algorithm: nothing if it does.
    pub(crate) fn reasons(&self, problem: &Problem, pass: Pass, dtype: Dtype) -> Vec<String> {
        let facts = Facts::of(problem).map_err(|reason| vec![reason]);
        facts.map_or_else(|reason| reason, |facts| self.against(&facts, problem, pass, dtype))
    }

    fn against(&self, facts: &Facts, problem: &Problem, pass: Pass, dtype: Dtype) -> Vec<String> {
        let mut reasons = Vec::new();
        let mut add = |result: Result<(), String>| reasons.extend(result.err());
        add(listed("pass", self.passes.as_deref(), &pass));
        add(listed("dtype", self.dtypes.as_deref(), &dtype));
        for (number, limit) in &self.limits {
            for &x in facts.numbers(*number) {
                let taken = limit.takes(x);
                add(taken.map_err(|taken| format!("{number} = {x}: it takes {taken}")));
            }
        }
        self.equal.iter().for_each(|numbers| add(equal(facts, numbers)));
        for kind in &facts.masks {
            add(listed("mask", self.masks.as_deref(), kind));
        }
        for align in &facts.aligns {
            let names = self.align.iter().flatten().map(|align| facts::align_name(*align));
            if self.align.as_ref().is_some_and(|taken| !taken.contains(align)) {
                add(Err(refused("align", facts::align_name(*align), names)));
            }
        }
        add(listed("sequences", self.sequences.as_deref(), &facts.sequences));
        self.against_options(facts, &mut add);
        let mut outputs = problem.operands(pass).into_iter().filter(|x| x.role == Role::Output);
        if !outputs.any(|x| !self.omits.iter().any(|name| name == x.name)) {
            add(Err(format!("{pass}: it omits every result of the pass")));
        }
        reasons
    }

    fn against_options(&self, facts: &Facts, add: &mut impl FnMut(Result<(), String>)) {
        let Some(taken) = &self.options else { return };
        for (name, value) in facts.options.iter().filter(|x| !taken.contains_key(x.0)) {
            add(Err(format!("{name} = {value}: it does not take the option")));
        }
        for (name, Values { one_of }) in taken {
            let value = facts.options.get(name).unwrap_or(&Value::Null);
            let Some(values) = one_of else { continue };
            if !values.iter().any(|x| same(x, value)) {
                let values = values
                    .iter()
                    .map(|x| if x.is_null() { "absent".into() } else { x.to_string() });
                let value = if value.is_null() { "absent".to_string() } else { value.to_string() };
                add(Err(refused(name, value, values)));
            }
        }
    }
}

/// Fails unless numbers are equal.
fn equal(facts: &Facts, numbers: &[Number]) -> Result<(), String> {
    let values = |&name: &Number| facts.numbers(name).iter().map(move |x| (name, x));
    let mut all = numbers.iter().flat_map(values);
    let Some((first, x)) = all.next() else { return Ok(()) };
    match all.find(|(_, y)| *y != x) {
        Some((other, y)) => Err(format!("{first} = {x}, {other} = {y}: it takes equal ones")),
        None => Ok(()),
    }
}

impl Limit {
    /// Fails with what it takes unless it takes a number.
    fn takes(&self, x: usize) -> Result<(), String> {
        if self.one_of.as_ref().is_some_and(|values| !values.contains(&x)) {
            return Err(join(self.one_of.iter().flatten()));
        }
        match *self {
            Limit { at_least: Some(least), .. } if x < least => Err(format!("at least {least}")),
            Limit { at_most: Some(most), .. } if x > most => Err(format!("at most {most}")),
            Limit { multiple_of: Some(n), .. } if !x.is_multiple_of(n) => {
                Err(format!("multiples of {n}"))
            }
            _ => Ok(()),
        }
    }
}

/// Compares two values of an option: 50 and 50.0 are the same.
fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

/// Fails unless what was found is one of these, if there are any.
fn listed<T: PartialEq + Display>(
    what: &str,
    taken: Option<&[T]>,
    found: &T,
) -> Result<(), String> {
    match taken {
        Some(taken) if !taken.contains(found) => Err(refused(what, found, taken)),
        _ => Ok(()),
    }
}

fn refused<T: Display>(
    what: &str,
    found: impl Display,
    taken: impl IntoIterator<Item = T>,
) -> String {
    format!("{what} {found}: it takes {}", join(taken))
}

fn join<T: Display>(items: impl IntoIterator<Item = T>) -> String {
    let items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    if items.is_empty() { "none".to_string() } else { items.join(", ") }
}
