//! Capabilities as a file.

use super::Capabilities;
use crate::vectors::{self, Error};
use etalon_problem::Error as ProblemError;
use serde_json::Value;
use std::path::Path;

/// Reads a capabilities file. Errors name the key and the line.
pub fn read_capabilities(path: &Path) -> Result<Capabilities, Error> {
    parse_capabilities(path, &vectors::read_text(path)?)
}

/// Reads capabilities from the text of a file, or from another text, which errors call by this path.
pub fn parse_capabilities(path: &Path, text: &str) -> Result<Capabilities, Error> {
    let wrong = |error| Error::meaning(path, text, error);
    objects_by_key(&vectors::parse_json(path, WHAT, text)?).map_err(wrong)?;
    let capabilities: Capabilities = vectors::parse_json(path, WHAT, text)?;
    capabilities.check().map_err(wrong)?;
    Ok(capabilities)
}

/// The name of such a file in errors.
const WHAT: &str = "capabilities file";

/// Fails where an array stands for an object: serde takes the values of a struct in their order, too.
fn objects_by_key(file: &Value) -> Result<(), ProblemError> {
    let object = |key: String, value: &Value| match value {
        Value::Object(_) => Ok(()),
        _ => Err(ProblemError::value(key, "an object with keys", "another value")),
    };
    object("the file".to_string(), file)?;
    for (at, kernel) in file["kernels"].as_array().into_iter().flatten().enumerate() {
        object(format!("kernels[{at}]"), kernel)?;
        for part in ["limits", "options"] {
            for (key, value) in kernel[part].as_object().into_iter().flatten() {
                object(format!("kernels[{at}].{part}.{key}"), value)?;
            }
        }
    }
    Ok(())
}
