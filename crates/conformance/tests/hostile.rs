//! Damaged and hostile files: whatever stands in a problem file or a safetensors file, it is refused
//! with an error or computed; nothing panics, aborts or runs without end.
//!
//! `PROPTEST_CASES` sets how many inputs each test tries: `PROPTEST_CASES=1000000 cargo test --release -p
//! etalon-conformance --test hostile` tries a million.

use etalon_conformance::bounds;
use etalon_conformance::generate::Stream;
use etalon_conformance::profile::Profile;
use etalon_conformance::tensor::{Data, Stored, Tensor, Tensors, values};
use etalon_conformance::tier::{Hints, Refusal, Request};
use etalon_conformance::tiers::{self, Simd};
use etalon_conformance::vectors::{parse_problem, read_tensors, to_bytes};
use etalon_problem::{Dtype, Operand, Pass, Problem};
use etalon_simd::{Level, Options, attention, attention_lse, linear_attention};
use ndarray::ArrayD;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::Path;
use std::sync::LazyLock;
use tempfile::tempdir;

fn config() -> ProptestConfig {
    ProptestConfig {
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        ..ProptestConfig::default()
    }
}

/// The published schema of problem files.
static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    let text = include_str!("../../../docs/schema/problem.schema.json");
    serde_json::from_str(text).expect("the published schema is JSON")
});

/// The draws of an instance, one after the other.
struct Draws {
    stream: Stream,
    next: usize,
}

impl Draws {
    fn new(seed: u64) -> Self {
        Draws { stream: Stream::new(seed, "hostile"), next: 0 }
    }

    fn below(&mut self, n: usize) -> usize {
        self.next += 1;
        self.stream.below(self.next, n)
    }

    fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }
}

/// Mostly small extents, and such as overflow, exceed memory, or cost time where nothing vouches for them.
const EXTENTS: [u64; 20] =
    [0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 4, 5, 8, 17, 1000, 1 << 16, 1 << 31, 1 << 40, 1 << 58, u64::MAX];

/// Numbers of options.
const NUMBERS: [f64; 12] =
    [0.0, -0.0, 1.0, 0.5, -1.0, 1e-3, 30.0, 1e300, -1e300, 5e-324, 1e-310, f64::MAX];

/// A value that the schema allows, drawn; now and then one that it does not.
fn instance(schema: &Value, draws: &mut Draws, depth: usize) -> Value {
    if draws.below(200) == 0 {
        return match draws.below(4) {
            0 => Value::Null,
            1 => json!([]),
            2 => json!({}),
            _ => json!("q"),
        };
    }
    if let Some(name) = schema["$ref"].as_str() {
        let name = name.rsplit('/').next().unwrap_or_default();
        return instance(&SCHEMA["$defs"][name], draws, depth);
    }
    if let Some(value) = schema.get("const") {
        return value.clone();
    }
    for key in ["oneOf", "anyOf", "enum"] {
        let Some(list) = schema[key].as_array().filter(|list| !list.is_empty()) else { continue };
        // Deep down the first, so that the tree ends.
        let at = if depth > 6 { 0 } else { draws.below(list.len()) };
        return if key == "enum" {
            list[at].clone()
        } else {
            instance(&list[at], draws, depth + 1)
        };
    }
    let kind = match &schema["type"] {
        Value::Array(kinds) => kinds[draws.below(kinds.len())].as_str(),
        kind => kind.as_str(),
    };
    match kind {
        Some("object") => object(schema, draws, depth),
        Some("array") => {
            let items = draws.below(4);
            (0..items).map(|_| instance(&schema["items"], draws, depth + 1)).collect()
        }
        Some("integer") => draws.pick(&EXTENTS).into(),
        Some("number") => draws.pick(&NUMBERS).into(),
        Some("boolean") => (draws.below(2) == 0).into(),
        Some("string") => draws.pick(&["allowed", "ids", "q"]).into(),
        _ => Value::Null,
    }
}

fn object(schema: &Value, draws: &mut Draws, depth: usize) -> Value {
    let required: Vec<&str> =
        schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let mut members = Map::new();
    for (key, value) in schema["properties"].as_object().into_iter().flatten() {
        if required.contains(&key.as_str()) || draws.below(4) == 0 {
            members.insert(key.clone(), instance(value, draws, depth + 1));
        }
    }
    // Lengths and offsets mostly fit small extents, and heads divide.
    if draws.below(2) == 0
        && let Some(heads) = members.get("query_heads").cloned()
    {
        members.insert("key_heads".to_string(), heads);
    }
    Value::Object(members)
}

/// Damage to a text or a file: bytes are replaced, left out, put in, or the end is cut off.
fn damage(bytes: &mut Vec<u8>, damages: &[(u8, usize, u8)]) {
    for &(kind, at, byte) in damages {
        let at = at % (bytes.len() + 1);
        match kind {
            0 if at < bytes.len() => bytes[at] = byte,
            1 if at < bytes.len() => drop(bytes.remove(at)),
            2 => bytes.insert(at, byte),
            3 => bytes.truncate(at),
            4 => {
                // A piece of the file once more, elsewhere.
                let piece: Vec<u8> =
                    bytes.iter().copied().skip(at).take(usize::from(byte)).collect();
                bytes.extend(piece);
            }
            _ => {}
        }
    }
}

fn damages() -> impl Strategy<Value = Vec<(u8, usize, u8)>> {
    let one = (0..5u8, any::<usize>(), prop_oneof![any::<u8>(), b'0'..=b'9', b' '..=b'~']);
    prop_oneof![2 => Just(Vec::new()), 1 => prop::collection::vec(one, 1..4)]
}

/// Elements that break what is not careful with them.
const ELEMENTS: [f64; 10] =
    [0.0, -0.0, 1.0, -1.0, 0.5, 1e30, -1e-30, f64::NAN, f64::INFINITY, f64::NEG_INFINITY];

/// As many elements are computed with: what is larger is only planned.
const FEW: usize = 3000;

fn tensors(operands: &[Operand], dtype: Dtype, draws: &mut Draws) -> Tensors {
    let hostile = draws.below(3) == 0;
    let tensor = |operand: &Operand| {
        let mut element = || match hostile {
            true => draws.pick(&ELEMENTS),
            false => draws.below(5) as f64 / -4.0,
        };
        let shape = operand.shape.as_slice();
        let x = ArrayD::from_shape_simple_fn(shape, &mut element);
        let mut x = Tensor::store(&x, Stored::of(operand.precision, dtype));
        if let Data::I64(targets) = &mut x.data {
            targets.iter_mut().for_each(|target| *target = draws.pick(&[0, 0, 0, 1, 2, -100]));
        }
        (operand.name.to_string(), x)
    };
    operands.iter().filter(|operand| operand.role.is_given()).map(tensor).collect()
}

/// Arrays of ids and flags for every shape that a small problem's mask may have.
fn bound(problem: &str, draws: &mut Draws) -> Tensors {
    let value: Value = serde_json::from_str(problem).unwrap_or_default();
    let extent = |key: &str| value[key].as_u64().filter(|&x| x < 64).unwrap_or(1) as usize;
    let [batch, heads, queries, keys] = ["batch", "query_heads", "queries", "keys"].map(extent);
    let flags = vec![draws.pick(&[1, batch]), draws.pick(&[1, heads]), queries, keys];
    let ids = vec![batch, draws.pick(&[queries, keys])];
    let [of_flags, of_ids] = [&flags, &ids].map(|shape| shape.iter().product::<usize>());
    let data = Data::Bool((0..of_flags).map(|_| draws.below(3) > 0).collect());
    let allowed = Tensor { shape: flags, data };
    let data = Data::I64((0..of_ids).map(|_| draws.below(3) as i64 - 1).collect());
    let ids = Tensor { shape: ids, data };
    Tensors::from([("allowed".to_string(), allowed), ("ids".to_string(), ids)])
}

/// Plans a problem that has passed its check, and computes it if it is small.
fn use_up(problem: &Problem, draws: &mut Draws) -> Result<(), TestCaseError> {
    let passes = problem.algorithm().passes();
    let _ = (problem.families(), problem.arrays(), problem.scores().map(|x| x.visible_pairs()));
    let lists = [Pass::Forward, Pass::Backward].map(|pass| problem.operands(pass));
    let elements = passes.iter().flat_map(|&pass| problem.operands(pass)).map(|x| x.len());
    let elements = elements.fold(0, usize::saturating_add);
    prop_assert!(lists.iter().all(|list| !list.is_empty()));
    for &pass in passes {
        let options = Options::default();
        // Whatever they say, they say it soon.
        let _ = match problem {
            Problem::Attention(problem) => {
                attention::plan::<f32>(problem, pass, &options).map(drop)
            }
            Problem::AttentionLse(problem) => {
                attention_lse::plan::<f32>(problem, pass, &options).map(drop)
            }
            Problem::LinearAttention(problem) => {
                let _ = linear_attention::shared_memory(problem, 99 << 10);
                linear_attention::plan::<f32>(problem, pass, &options).map(drop)
            }
            _ => Ok(()),
        };
        if elements <= FEW {
            compute(problem, pass, draws)?;
        }
    }
    Ok(())
}

fn compute(problem: &Problem, pass: Pass, draws: &mut Draws) -> Result<(), TestCaseError> {
    let dtype = draws.pick(&[Dtype::F32, Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::F64]);
    let inputs = tensors(&problem.operands(pass), dtype, draws);
    let request = Request { problem, pass, dtype, inputs: &inputs, hints: Hints::default() };
    // An error is an answer: a target that is no class, a decay that grows.
    let exact = tiers::oracle(&request);
    let profile = draws.pick(&Profile::ALL);
    let bounds = bounds::bounds(problem, pass, dtype, &profile, &inputs);
    prop_assert!(exact.is_ok() || bounds.is_err(), "{:?}", exact.err());
    if let Err(Refusal::Fault(fault)) = tiers::ask(&Simd::new(Level::best()), &request) {
        prop_assert!(!fault.starts_with("panicked"), "{pass}: {fault}");
    }
    Ok(())
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn problem_files_are_refused_or_computed(seed in any::<u64>(), damages in damages()) {
        let mut draws = Draws::new(seed);
        let mut text = instance(&SCHEMA, &mut draws, 0).to_string().into_bytes();
        damage(&mut text, &damages);
        let text = String::from_utf8_lossy(&text);
        let (path, tensors) = (Path::new("p.json"), bound(&text, &mut draws));
        match parse_problem(path, &text, Path::new("in.safetensors"), &tensors) {
            Ok(problem) => use_up(&problem, &mut draws)?,
            Err(error) => {
                let line = error.to_string();
                prop_assert!(line.chars().count() < 2000, "{line}");
                prop_assert!(!line.contains(char::is_control), "{line:?}");
            }
        }
    }

    #[test]
    fn files_of_tensors_are_refused_or_read(seed in any::<u64>(), damages in damages(), inside in 0..4usize) {
        let mut draws = Draws::new(seed);
        let folder = tempdir()?;
        let path = folder.path().join("x.safetensors");
        let data = [
            Data::F64(vec![0.5; 6]), Data::F32(vec![0.5; 6]), Data::I64(vec![1; 6]),
            Data::Bool(vec![true; 6]),
        ];
        let shapes = [vec![6], vec![1, 2, 3], vec![3, 2, 1, 1], vec![6, 1]];
        let tensors: Tensors = ["q", "k", "\u{1b}v", "allowed"].iter().zip(data).map(|(name, data)| {
            (name.to_string(), Tensor { shape: shapes[draws.below(4)].clone(), data })
        }).collect();
        let mut bytes = to_bytes(&path, &tensors)?;
        damage_header(&mut bytes, &mut draws, inside);
        damage(&mut bytes, &damages);
        fs::write(&path, &bytes)?;
        match read_tensors(&path, 1 << 20) {
            Ok(read) => {
                for (name, tensor) in &read {
                    let elements = tensor.shape.iter().product::<usize>();
                    prop_assert_eq!(elements, tensor.len(), "{}", name);
                    let _ = tensor.numbers(name);
                }
                let extents = etalon_problem::Extents {
                    batch: 1, query_heads: 1, key_heads: 1, queries: 1, keys: 2, dim: 3,
                };
                let problem: Problem = etalon_problem::AttentionLse::new(extents).into();
                let _ = values(&problem, Pass::Forward, &read);
            }
            Err(error) => {
                let line = error.to_string();
                prop_assert!(line.chars().count() < 2000, "{line}");
            }
        }
    }
}

/// Replaces numbers of the header, or its length, by such as overflow.
fn damage_header(bytes: &mut Vec<u8>, draws: &mut Draws, times: usize) {
    const HOSTILE: [&str; 7] =
        ["0", "7", "99", "4294967296", "9223372036854775808", "18446744073709551615", "-1"];
    for _ in 0..times {
        let Some(length) = bytes.first_chunk().map(|&length| u64::from_le_bytes(length)) else {
            return;
        };
        if draws.below(8) == 0 {
            let length = draws.pick(&[0, 1, length + 1, 100_000_001, u64::MAX, 1 << 32]);
            bytes[..8].copy_from_slice(&length.to_le_bytes());
            return;
        }
        let header = usize::try_from(length).ok().and_then(|n| bytes.get(8..8 + n));
        let Some(text) = header.and_then(|header| str::from_utf8(header).ok()) else { return };
        let runs: Vec<(usize, &str)> = text.match_indices(|c: char| c.is_ascii_digit()).collect();
        let Some(&(at, _)) = runs.get(draws.below(runs.len().max(1))) else { return };
        let text = format!("{}{}{}", &text[..at], draws.pick(&HOSTILE), &text[at + 1..]);
        let rest = bytes[8 + length as usize..].to_vec();
        *bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend(text.into_bytes());
        bytes.extend(rest);
    }
}
