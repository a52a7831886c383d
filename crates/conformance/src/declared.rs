//! Profiles that an author declares, in a JSON file.

use crate::profile::Profile;
use crate::vectors::{Error, json, read_text};
use etalon_problem::{Dtype, Error as ProblemError};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::path::Path;

/// A profile's figures: what the file leaves out is as in `base`, or as in f32-strict.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Declared {
    base: Option<String>,
    accumulator: Option<String>,
    factor: Option<f64>,
    p_store: Option<String>,
    ds_store: Option<String>,
    pieces: Option<usize>,
    group_store: Option<String>,
    score_store: Option<String>,
    dp_store: Option<String>,
    weight_store: Option<String>,
    residual_store: Option<String>,
    chunk_store: Option<String>,
    chunk_tokens: Option<usize>,
    exp_constant: Option<f64>,
    exp_slope: Option<f64>,
    exp_slope_exact: Option<f64>,
    tanh: Option<f64>,
    log: Option<f64>,
    lse: Option<f64>,
    rescale_keys: Option<usize>,
    rescale_lag: Option<f64>,
}

/// Reads a profile. Its name is `custom`.
pub fn read_profile(path: &Path) -> Result<Profile, Error> {
    let text = read_text(path)?;
    let wrong = |reason: String| Error::Format {
        path: path.to_path_buf(),
        reason: format!("not a valid profile file: {reason}"),
    };
    // By way of a map first: serde would take the values of a struct from an array, too.
    json::parse::<Map<String, Value>>(&text).map_err(wrong)?;
    let declared: Declared = json::parse(&text).map_err(wrong)?;
    profile(&declared).map_err(|error| Error::meaning(path, &text, error))
}

fn profile(declared: &Declared) -> Result<Profile, ProblemError> {
    let base = Profile::by_name(declared.base.as_deref().unwrap_or("f32-strict"));
    let base = base.map_err(|error| match error {
        ProblemError::Value { expected, found, .. } => ProblemError::value("base", expected, found),
        other => other,
    })?;
    // A profile that declares one slope declares it for every argument.
    let exact = declared.exp_slope.unwrap_or(base.exp_slope_exact);
    Ok(Profile {
        name: "custom",
        accumulator: dtype("accumulator", &declared.accumulator, base.accumulator)?,
        // From a tenth on nothing is left to be said of a product.
        factor: number("factor", declared.factor, base.factor, 0.1)?,
        p_store: dtype("p_store", &declared.p_store, base.p_store)?,
        ds_store: dtype("ds_store", &declared.ds_store, base.ds_store)?,
        pieces: match declared.pieces.unwrap_or(base.pieces) {
            pieces @ 1..=3 => pieces,
            pieces => return Err(ProblemError::value("pieces", "from 1 to 3", pieces)),
        },
        group_store: dtype("group_store", &declared.group_store, base.group_store)?,
        score_store: dtype("score_store", &declared.score_store, base.score_store)?,
        dp_store: dtype("dp_store", &declared.dp_store, base.dp_store)?,
        weight_store: dtype("weight_store", &declared.weight_store, base.weight_store)?,
        residual_store: dtype("residual_store", &declared.residual_store, base.residual_store)?,
        chunk_store: dtype("chunk_store", &declared.chunk_store, base.chunk_store)?,
        chunk_tokens: match declared.chunk_tokens {
            Some(0) => return Err(ProblemError::value("chunk_tokens", "at least 1", 0)),
            tokens => tokens.unwrap_or(base.chunk_tokens),
        },
        exp_constant: number("exp_constant", declared.exp_constant, base.exp_constant, MOST)?,
        exp_slope: number("exp_slope", declared.exp_slope, base.exp_slope, MOST)?,
        exp_slope_exact: number("exp_slope_exact", declared.exp_slope_exact, exact, MOST)?,
        tanh: number("tanh", declared.tanh, base.tanh, MOST)?,
        log: number("log", declared.log, base.log, MOST)?,
        lse: number("lse", declared.lse, base.lse, MOST)?,
        rescale_keys: match declared.rescale_keys.unwrap_or(base.rescale_keys) {
            0 => return Err(ProblemError::value("rescale_keys", "at least 1", 0)),
            keys => keys,
        },
        rescale_lag: number("rescale_lag", declared.rescale_lag, base.rescale_lag, MOST)?,
    })
}

/// The most roundoffs that a function may err by, and the most that a maximum may lag: beyond, bounds
/// leave what f64 can tell.
const MOST: f64 = 1e6;

fn dtype(key: &str, name: &Option<String>, base: Dtype) -> Result<Dtype, ProblemError> {
    let Some(name) = name else { return Ok(base) };
    let names = Dtype::ALL.map(Dtype::name).join(", ");
    name.parse().map_err(|_| ProblemError::value(key, format!("one of {names}"), name))
}

fn number(name: &str, x: Option<f64>, base: f64, most: f64) -> Result<f64, ProblemError> {
    match x.unwrap_or(base) {
        x if (0.0..=most).contains(&x) => Ok(x),
        x => Err(ProblemError::value(name, format!("from 0 to {most}"), x)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use tempfile::tempdir;

    fn read(text: &str) -> Result<Profile, String> {
        let folder = tempdir().unwrap();
        let path = folder.path().join("mine.json");
        fs::write(&path, text).unwrap();
        read_profile(&path).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_left_out_is_the_base() {
        let named = |profile: Profile| Profile { name: "custom", ..profile };
        assert_eq!(read("{}"), Ok(named(Profile::by_name("f32-strict").unwrap())));
        let flash = Profile::by_name("bf16-flash").unwrap();
        assert_eq!(read(r#"{ "base": "bf16-flash" }"#), Ok(named(flash)));
        let text = r#"{ "base": "bf16-flash", "group_store": "f32", "exp_slope": 40 }"#;
        let own =
            Profile { group_store: Dtype::F32, exp_slope: 40.0, exp_slope_exact: 40.0, ..flash };
        assert_eq!(read(text), Ok(named(own)));
        let text = r#"{ "score_store": "f16", "dp_store": "bf16", "weight_store": "f16",
            "residual_store": "bf16", "chunk_store": "bf16", "chunk_tokens": 64 }"#;
        let own = Profile {
            score_store: Dtype::F16,
            dp_store: Dtype::Bf16,
            weight_store: Dtype::F16,
            residual_store: Dtype::Bf16,
            chunk_store: Dtype::Bf16,
            chunk_tokens: 64,
            ..Profile::by_name("f32-strict").unwrap()
        };
        assert_eq!(read(text), Ok(named(own)));
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, part) in [
            (
                "[]",
                "not a valid profile file: line 1: the file must be an object with keys, found an array",
            ),
            (r#"{ "acumulator": "f32" }"#, "line 1: unknown key `acumulator`, expected one of"),
            (r#"{ "base": "f8-flash" }"#, "one of f64, f32-strict"),
            (r#"{ "pieces": 4 }"#, "`pieces` must be from 1 to 3, found 4"),
            (r#"{ "p_store": "f8" }"#, "`p_store` must be one of f64, f32, bf16, f16, found f8"),
            (r#"{ "factor": 0.5 }"#, "`factor` must be from 0 to 0.1, found 0.5"),
            (r#"{ "tanh": -1 }"#, "`tanh` must be from 0 to 1000000, found -1"),
            (r#"{ "score_store": "f8" }"#, "bf16"),
            (r#"{ "chunk_tokens": 0 }"#, "`chunk_tokens` must be at least 1, found 0"),
            (r#"{ "rescale_keys": 0 }"#, "`rescale_keys` must be at least 1, found 0"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(part) && error.contains("mine.json"), "{error}");
        }
    }
}
