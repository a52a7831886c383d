//! Problems in files.

use super::{Error, json, read_text};
use crate::tensor::{Data, Tensor, Tensors};
use etalon_problem::{
    Algorithm, Attention, AttentionLse, Error as ProblemError, LazyAttention, LinearAttention,
    LinearCrossEntropy, Mask, NamedArray, Problem,
};
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, IntoDeserializer, MapAccess, Visitor};
use serde::{Deserialize, de};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// Reads a problem. The arrays that its mask names, and the lengths and offsets of sequences that it names,
/// come from `tensors`, which were read from `tensors_path`.
pub fn read_problem(path: &Path, tensors_path: &Path, tensors: &Tensors) -> Result<Problem, Error> {
    parse_problem(path, &read_text(path)?, tensors_path, tensors)
}

/// As [`read_problem`], of a text that was read from `path`.
pub fn parse_problem(
    path: &Path,
    text: &str,
    tensors_path: &Path,
    tensors: &Tensors,
) -> Result<Problem, Error> {
    let wrong = |reason: String| Error::format(path, format!("not a valid problem file: {reason}"));
    let members: Map<String, Value> = json::parse(text).map_err(wrong)?;
    let keyed = objects_by_key("the problem", &Value::Object(members)).map_err(|(key, reason)| {
        wrong(match json::line_of(text, &key) {
            Some(line) => format!("line {line}: {reason}"),
            None => reason,
        })
    });
    let with_lists =
        with_sequences(text, tensors).map_err(|error| Error::content(tensors_path, error))?;
    // A key that no problem has is reported before the form of its value.
    let mut problem = typed(&with_lists).map_err(wrong)?;
    keyed?;
    let ids = |data: &Data| if let Data::I64(x) = data { Some(x.clone()) } else { None };
    let flags = |data: &Data| if let Data::Bool(x) = data { Some(x.clone()) } else { None };
    problem
        .bind(
            |name| named(tensors, name, "i64 or i32", ids),
            |name| named(tensors, name, "bool", flags),
        )
        .map_err(|error| Error::content(tensors_path, error))?;
    problem.check().map_err(|error| match &error {
        // The arrays' extents are the tensors' fault, all else the problem's.
        ProblemError::Shape { .. } => Error::content(tensors_path, error),
        _ => Error::meaning(path, text, error),
    })?;
    Ok(problem)
}

/// Tensors with the arrays that the mask of a problem names. Fails where two of one name differ: a file holds one.
pub fn with_arrays(problem: &Problem, mut tensors: Tensors) -> Result<Tensors, ProblemError> {
    let Some(scores) = problem.scores() else { return Ok(tensors) };
    let mut result = Ok(());
    let mut add = |name: &str, shape: &[usize], data: Data| {
        let own = Tensor { shape: shape.to_vec(), data };
        if tensors.get(name).is_some_and(|other| *other != own) {
            result = Err(ProblemError::value(name, "one tensor of that name", "two that differ"));
        }
        tensors.insert(name.to_string(), own);
    };
    scores.mask.clone().visit_mut(&mut |mask| match mask {
        Mask::Segments { query, key } => {
            for ids in [query, key] {
                add(&ids.name, &ids.shape, Data::I64(ids.data.to_vec()));
            }
        }
        Mask::Array(flags) => add(&flags.name, &flags.shape, Data::Bool(flags.data.to_vec())),
        _ => {}
    });
    result.map(|()| tensors)
}

/// The problem of a text, by its algorithm; what is wrong with it otherwise, with key and line.
fn typed(text: &str) -> Result<Problem, String> {
    #[derive(Deserialize)]
    struct Tagged {
        algorithm: Option<String>,
    }
    let name = json::parse::<Tagged>(text)?.algorithm;
    let names = Algorithm::ALL.map(Algorithm::name);
    let known = |name: &str| Algorithm::ALL.into_iter().find(|x| x.name() == name);
    let algorithm = match name.as_deref().map(|name| (name, known(name))) {
        Some((_, Some(algorithm))) => algorithm,
        Some((name, None)) => {
            let line = json::line_of(text, "algorithm").unwrap_or(1);
            let names = names.join("`, `");
            return Err(format!(
                "line {line}: unknown value `{name}` of `algorithm`, expected one of `{names}`"
            ));
        }
        None => {
            return Err(format!("the key `algorithm` is missing, one of {}", names.join(", ")));
        }
    };
    match algorithm {
        Algorithm::Attention => untagged::<Attention>(text).map(Problem::from),
        Algorithm::AttentionLse => untagged::<AttentionLse>(text).map(Problem::from),
        Algorithm::LazyAttention => untagged::<LazyAttention>(text).map(Problem::from),
        Algorithm::LinearAttention => untagged::<LinearAttention>(text).map(Problem::from),
        Algorithm::LinearCrossEntropy => untagged::<LinearCrossEntropy>(text).map(Problem::from),
    }
}

/// A problem of one algorithm, of an object that has the key `algorithm` besides. (serde would read that into
/// memory first, and then know no line of any other key.)
fn untagged<T: for<'a> Deserialize<'a>>(text: &str) -> Result<T, String> {
    struct Untagged<T>(T);
    struct Members<T>(std::marker::PhantomData<T>);
    impl<'de, T: Deserialize<'de>> Visitor<'de> for Members<T> {
        type Value = Untagged<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object with keys")
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Untagged<T>, A::Error> {
            T::deserialize(MapAccessDeserializer::new(WithoutTag(map))).map(Untagged)
        }
    }
    impl<'de, T: Deserialize<'de>> Deserialize<'de> for Untagged<T> {
        fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
            from.deserialize_map(Members(std::marker::PhantomData))
        }
    }
    json::parse::<Untagged<T>>(text).map(|Untagged(problem)| problem)
}

/// The members of an object without `algorithm`.
struct WithoutTag<A>(A);

impl<'de, A: MapAccess<'de>> MapAccess<'de> for WithoutTag<A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        while let Some(key) = self.0.next_key::<String>()? {
            if key != "algorithm" {
                let key: de::value::StringDeserializer<A::Error> = key.into_deserializer();
                return seed.deserialize(key).map(Some);
            }
            self.0.next_value::<IgnoredAny>()?;
        }
        Ok(None)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        self.0.next_value_seed(seed)
    }
}

/// The lists of sequences, which may also be tensors.
const SEQUENCES: [(&str, &[&str]); 2] =
    [("lengths", &["query", "key", "tokens"]), ("packed", &["cu_query", "cu_key", "cu_tokens"])];

/// The text with the numbers of a tensor where lengths or offsets of sequences are given by its name. No line
/// of it moves.
fn with_sequences(text: &str, tensors: &Tensors) -> Result<String, ProblemError> {
    type Members<'a> = BTreeMap<String, &'a RawValue>;
    let members = |text| serde_json::from_str::<Members<'_>>(text).unwrap_or_default();
    let mut lists = Vec::new();
    let kinds = members(text).get("sequences").map(|x| members(x.get())).unwrap_or_default();
    for (kind, names) in SEQUENCES {
        let of_kind = kinds.get(kind).map(|x| members(x.get())).unwrap_or_default();
        let raw = of_kind.into_iter().filter(|(name, _)| names.contains(&name.as_str()));
        lists.extend(raw.map(|(_, raw)| raw.get()));
    }
    let mut changed = text.to_string();
    // From the last to the first, so that no place moves before it is needed.
    lists.sort_by_key(|raw| std::cmp::Reverse(raw.as_ptr()));
    for raw in lists {
        let Ok(name) = serde_json::from_str::<String>(raw) else { continue };
        let numbers = |data: &Data| if let Data::I64(x) = data { Some(x.clone()) } else { None };
        let missing = || ProblemError::Missing {
            operand: name.clone(),
            reason: "`sequences` names it".to_string(),
        };
        let list = named(tensors, &name, "i64 or i32", numbers)?.ok_or_else(missing)?;
        if list.shape.len() != 1 {
            let (operand, found) = (name.clone(), list.shape.clone());
            return Err(ProblemError::Shape { operand, expected: vec![list.data.len()], found });
        }
        let numbers = serde_json::to_string(&list.data[..]).unwrap_or_default();
        let start = raw.as_ptr() as usize - text.as_ptr() as usize;
        changed.replace_range(start..start + raw.len(), &numbers);
    }
    Ok(changed)
}

/// The names of the tensors that hold lengths or offsets of sequences of the problem in a text.
pub fn sequence_tensors(text: &str) -> Vec<String> {
    let Ok(value) = serde_json::from_str::<Value>(text) else { return Vec::new() };
    let lists = SEQUENCES.iter().flat_map(|(kind, names)| names.iter().map(move |x| (*kind, *x)));
    let name = |(kind, list)| value["sequences"][kind][list].as_str().map(str::to_string);
    lists.filter_map(name).collect()
}

/// The keys whose values are lists.
const LISTS: [&str; 8] = ["and", "or", "query", "key", "cu_query", "cu_key", "tokens", "cu_tokens"];

/// Fails where an array stands for an object, with its key: serde takes the values of a struct in their order,
/// too, but the schema does not, and a file that omits a key would mean another one.
fn objects_by_key(name: &str, value: &Value) -> Result<(), (String, String)> {
    let wrong = |reason: String| (name.to_string(), reason);
    match value {
        Value::Object(members) => {
            members.iter().try_for_each(|(key, value)| objects_by_key(key, value))
        }
        Value::Array(_) if !LISTS.contains(&name) => {
            Err(wrong(format!("`{name}` must be an object with keys, found an array")))
        }
        Value::Array(items) => items.iter().try_for_each(|item| match item {
            Value::Array(_) => Err(wrong(format!("an item of `{name}` must be no array"))),
            item => objects_by_key(name, item),
        }),
        _ => Ok(()),
    }
}

fn named<T>(
    tensors: &Tensors,
    name: &str,
    expected: &str,
    elements: impl Fn(&Data) -> Option<Vec<T>>,
) -> Result<Option<NamedArray<T>>, ProblemError> {
    let Some(tensor) = tensors.get(name) else { return Ok(None) };
    match elements(&tensor.data) {
        Some(elements) => Ok(Some(NamedArray::new(name, &tensor.shape, elements))),
        None => Err(ProblemError::Dtype {
            operand: name.to_string(),
            expected: expected.to_string(),
            found: tensor.type_name().to_string(),
        }),
    }
}
