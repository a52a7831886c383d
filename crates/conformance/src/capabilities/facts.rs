//! The demands of a problem on a kernel: its numbers, the kinds of its mask, the options that it sets. They come from
//! its JSON, so that a new option is known here by itself.

use super::{MaskKind, Number, SequenceKind};
use etalon_problem::{
    Algorithm, Align, Attention, AttentionLse, Decay, Extents, LazyAttention, LinearAttention,
    LinearCrossEntropy, LinearExtents, Mask, Problem, Role, TokenOutputs,
};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

/// Keys of a problem file that are neither extents nor options.
const STRUCTURE: [&str; 4] = ["algorithm", "value_dim", "mask", "sequences"];

/// The demands of a problem on a kernel.
pub(super) struct Facts {
    numbers: BTreeMap<Number, Vec<usize>>,
    /// The kinds of masks in it, outermost first.
    pub masks: Vec<MaskKind>,
    /// The places of diagonals, of masks that have one, in problems where it makes a difference.
    pub aligns: Vec<Align>,
    /// The way in which rows divide.
    pub sequences: SequenceKind,
    /// The options that it sets, as its file has them.
    pub options: Map<String, Value>,
}

impl Facts {
    /// Finds those of a problem that has passed its check.
    pub fn of(problem: &Problem) -> Result<Self, String> {
        let file = serde_json::to_value(problem).map_err(|error| error.to_string())?;
        let Value::Object(file) = file else { return Err("a problem is an object".to_string()) };
        let sequences = match file.get("sequences") {
            Some(Value::Object(kind)) if kind.contains_key("lengths") => SequenceKind::Lengths,
            Some(Value::Object(kind)) if kind.contains_key("packed") => SequenceKind::Packed,
            _ => SequenceKind::Dense,
        };
        let known = options_of(problem.algorithm());
        let options = file.iter().filter(|(key, _)| known.contains(key));
        let options = options.map(|(key, value)| (key.clone(), value.clone())).collect();
        let mut facts = Facts {
            numbers: BTreeMap::new(),
            masks: Vec::new(),
            aligns: Vec::new(),
            sequences,
            options,
        };
        facts.add_extents(problem, &file);
        if let Some(scores) = problem.scores() {
            facts.add_mask(&scores.mask);
            if scores.sequences().iter().all(|sequence| sequence.queries == sequence.keys) {
                facts.aligns.clear();
            }
        }
        Ok(facts)
    }

    /// The values of a number: none where the problem does not have it.
    pub fn numbers(&self, name: Number) -> &[usize] {
        self.numbers.get(&name).map_or(&[], Vec::as_slice)
    }

    fn add_extents(&mut self, problem: &Problem, file: &Map<String, Value>) {
        for number in Number::ALL {
            let found = file.get(number.name()).and_then(Value::as_u64);
            self.numbers.extend(found.map(|x| (number, vec![x as usize])));
        }
        let value_dim = match problem {
            Problem::Attention(problem) => problem.value_dim,
            Problem::LazyAttention(problem) => problem.value_dim,
            Problem::LinearAttention(problem) => problem.value_dim,
            Problem::AttentionLse(_) | Problem::LinearCrossEntropy(_) => 0,
        };
        if value_dim > 0 {
            self.numbers.insert(Number::ValueDim, vec![value_dim]);
        }
        if let (&[query], &[key]) =
            (self.numbers(Number::QueryHeads), self.numbers(Number::KeyHeads))
        {
            self.numbers.insert(Number::Group, vec![query / key.max(1)]);
        }
    }

    fn add_mask(&mut self, mask: &Mask) {
        let mut add = |number, x: Option<usize>| {
            self.numbers.entry(number).or_default().extend(x);
        };
        let (kind, align) = match mask {
            Mask::Full => (MaskKind::Full, None),
            Mask::Causal { align } => (MaskKind::Causal, Some(*align)),
            Mask::Window { left, right, align } => {
                add(Number::WindowLeft, *left);
                add(Number::WindowRight, *right);
                (MaskKind::Window, Some(*align))
            }
            Mask::ChunkedCausal { chunk, align } => {
                add(Number::Chunk, Some(*chunk));
                (MaskKind::ChunkedCausal, Some(*align))
            }
            Mask::Segments { .. } => (MaskKind::Segments, None),
            Mask::Array(_) => (MaskKind::Array, None),
            Mask::And(_) => (MaskKind::And, None),
            Mask::Or(_) => (MaskKind::Or, None),
        };
        self.masks.push(kind);
        self.aligns.extend(align);
        if let Mask::And(masks) | Mask::Or(masks) = mask {
            masks.iter().for_each(|mask| self.add_mask(mask));
        }
    }
}

/// The name of an alignment in files.
pub(super) fn align_name(align: Align) -> &'static str {
    match align {
        Align::TopLeft => "top_left",
        Align::BottomRight => "bottom_right",
    }
}

/// Keys of a problem file of an algorithm that are options. The schema takes longer than most cases, each of which
/// asks: it is made once.
pub(crate) fn options_of(algorithm: Algorithm) -> &'static [String] {
    static OPTIONS: LazyLock<BTreeMap<Algorithm, Vec<String>>> = LazyLock::new(options_in_schema);
    OPTIONS.get(&algorithm).map_or(&[], Vec::as_slice)
}

/// Keys that the schema of each algorithm has beside the extents.
fn options_in_schema() -> BTreeMap<Algorithm, Vec<String>> {
    let schema = schemars::schema_for!(Problem);
    let kinds = schema.as_value()["oneOf"].as_array();
    let options = |algorithm: Algorithm| {
        let own = |kind: &&Value| kind["properties"]["algorithm"]["const"] == algorithm.name();
        let kind = kinds.into_iter().flatten().find(own)?;
        let required = kind["required"].as_array().into_iter().flatten();
        let required: Vec<&str> = required.filter_map(Value::as_str).collect();
        let keys = kind["properties"].as_object()?.keys();
        let is_option =
            |key: &&String| !required.contains(&key.as_str()) && !STRUCTURE.contains(&key.as_str());
        Some((algorithm, keys.filter(is_option).cloned().collect()))
    };
    Algorithm::ALL.into_iter().filter_map(options).collect()
}

/// Problems of every algorithm with every option set that brings a tensor.
pub fn with_every_tensor() -> Vec<Problem> {
    let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 1, keys: 1, dim: 1 };
    let linear = LinearExtents { batch: 1, query_heads: 1, key_heads: 1, tokens: 1, dim: 1 };
    let linear = LinearAttention::new(linear).initial_state().final_state();
    let outputs = TokenOutputs { lse: true, logprob: true, entropy: true, argmax: true };
    let loss = LinearCrossEntropy::new(1, 1, 1).outputs(outputs);
    vec![
        Attention::new(extents).sinks().bias(1, 1).into(),
        AttentionLse::new(extents).sinks().bias(1, 1).into(),
        linear.clone().decay(Decay::PerHead).into(),
        linear.decay(Decay::PerToken).into(),
        LazyAttention::new(extents).bias(1).into(),
        loss.bias().class_weights().token_weights().into(),
    ]
}

/// The names of the tensors that have a part in any pass of an algorithm.
pub(crate) fn tensors_of(algorithm: Algorithm, role: Role) -> Vec<&'static str> {
    let own = with_every_tensor().into_iter().filter(|problem| problem.algorithm() == algorithm);
    let passes =
        |problem: Problem| algorithm.passes().iter().flat_map(move |&x| problem.operands(x));
    let operands = own.flat_map(passes).filter(|operand| operand.role == role);
    let names: BTreeSet<&str> = operands.map(|operand| operand.name).collect();
    names.into_iter().collect()
}
