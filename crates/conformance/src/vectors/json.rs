//! JSON that people write: what is wrong with it in words, with the key and the line.

use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::error::Category;
use serde_json::value::RawValue;
use std::collections::BTreeMap;

/// Reads a value of JSON; what is wrong with it otherwise, without the file.
pub fn parse<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let mut from = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut from)
        .map_err(|error| no_choice(text, &error).unwrap_or_else(|| described(&error)))?;
    from.end().map_err(|error| wrong(&error, ""))?;
    Ok(value)
}

/// An error of a value that JSON has where names are to choose from: the parser says there is no value. Otherwise
/// `None`.
fn no_choice(text: &str, error: &serde_path_to_error::Error<serde_json::Error>) -> Option<String> {
    let inner = error.inner();
    if !inner.is_syntax() {
        return None;
    }
    let whole: Value = serde_json::from_str(text).ok()?;
    let path = error.path().to_string();
    let mut found = &whole;
    for part in path.split(['.', '[', ']']).filter(|part| !part.is_empty()) {
        found = found.get(part).or_else(|| found.get(part.parse::<usize>().ok()?))?;
    }
    let subject = if path == "." { "the file".to_string() } else { format!("`{path}`") };
    Some(format!("line {}: {subject} must be {CHOICE}, found {found}", inner.line()))
}

/// The kind of value that stands for one of several names.
const CHOICE: &str = "a name, or an object with one key";

/// An error with its key and its line, in words.
pub fn described(error: &serde_path_to_error::Error<serde_json::Error>) -> String {
    let path = error.path().to_string();
    wrong(error.inner(), if path == "." { "" } else { &path })
}

/// An error at a key, or at none.
fn wrong(error: &serde_json::Error, path: &str) -> String {
    let (line, column) = (error.line(), error.column());
    let said = error.to_string();
    let said = said.strip_suffix(&format!(" at line {line} column {column}")).unwrap_or(&said);
    match error.classify() {
        Category::Data => format!("line {line}: {}", of_data(said, path)),
        Category::Eof if (line, column) == (1, 0) => "the file is empty".to_string(),
        Category::Eof => format!("line {line}: the text ends before all that it opens is closed"),
        Category::Syntax | Category::Io => {
            format!("line {line}, column {column}: {}", of_syntax(said))
        }
    }
}

/// The parser's words for text that is no JSON, and ours.
const SYNTAX: [(&str, &str); 9] = [
    ("trailing comma", "a comma stands before a closing bracket"),
    ("trailing characters", "something follows the end of the object"),
    ("key must be a string", "a key must be a string in double quotes"),
    ("expected `:`", "a colon is missing after a key"),
    ("expected `,` or `}`", "a comma, or the closing }, is missing"),
    ("expected `,` or `]`", "a comma, or the closing ], is missing"),
    ("recursion limit", "brackets are nested too deeply"),
    ("number", "no number that JSON or f64 has"),
    ("string", "no string that JSON has"),
];

fn of_syntax(said: &str) -> String {
    let known = SYNTAX.iter().find(|(part, _)| said.contains(part));
    let other = "no JSON value: it has numbers, true, false, null and strings in double quotes, and no comments";
    known.map_or(other, |(_, words)| words).to_string()
}

/// Of a key that is unknown or a value that does not fit.
fn of_data(said: &str, path: &str) -> String {
    let (parent, own) = path.rsplit_once('.').unwrap_or(("", path));
    let within = |path: &str| match path {
        "" => String::new(),
        path => format!(" of `{path}`"),
    };
    if let Some((name, expected)) = unknown(said, "field") {
        return format!(
            "unknown key `{name}`{}{expected}",
            within(if own == name { parent } else { path })
        );
    }
    if let Some((name, expected)) = unknown(said, "variant") {
        // The key of a map is a variant without a name in the path.
        if own == "?" {
            return format!("unknown key `{name}`{}{expected}", within(parent));
        }
        return format!(
            "unknown value `{name}`{}{expected}",
            within(if own == name { parent } else { path })
        );
    }
    if let Some(name) = said.strip_prefix("missing field ") {
        let of = if path.is_empty() { String::new() } else { format!(" in `{path}`") };
        return format!("the key {name} is missing{of}");
    }
    if let Some(name) = said.strip_prefix("duplicate field ") {
        return format!("the key {name} stands twice{}", within(parent));
    }
    let subject = if path.is_empty() { "the file".to_string() } else { format!("`{path}`") };
    let kinds = ["invalid type: ", "invalid value: ", "invalid length "];
    let rest = kinds.iter().find_map(|kind| said.strip_prefix(kind));
    match rest.and_then(|rest| rest.split_once(", expected ")) {
        Some((_, expected)) if said.starts_with(kinds[2]) && expected.starts_with("struct ") => {
            format!("{subject} must be {}, found an array", kind(expected))
        }
        Some((found, expected)) => {
            format!("{subject} must be {}, found {}", kind(expected), kind(found))
        }
        None => format!("{subject}: {said}"),
    }
}

/// The name that is unknown, and the rest of the sentence.
fn unknown<'a>(said: &'a str, what: &str) -> Option<(&'a str, String)> {
    let rest = said.strip_prefix("unknown ")?.strip_prefix(what)?.strip_prefix(" `")?;
    // The name may be any text; the list of those that are known is not.
    let at = rest.rfind("`, expected ").or_else(|| rest.rfind("`, there are no "));
    let split = rest.find("`, expected ").or(at)?;
    let expected = &rest[split + 1..];
    Some((&rest[..split], expected.replace("there are no fields", "which has no keys")))
}

/// A kind of value in words.
fn kind(name: &str) -> String {
    match name {
        "usize" | "u64" | "u32" => "a whole number of at least 0".to_string(),
        "i64" | "isize" => "a whole number".to_string(),
        "f64" => "a number".to_string(),
        "a string" | "string" | "str" => "a string".to_string(),
        "a boolean" | "bool" => "true or false".to_string(),
        "map" => "an object".to_string(),
        "sequence" => "an array".to_string(),
        "unit value" | "unit" | "null" => "null".to_string(),
        "a sequence" => "an array".to_string(),
        "a map" => "an object with keys".to_string(),
        "unit variant" => "a name alone".to_string(),
        name if name.starts_with("struct ") || name.ends_with(" variant") => {
            "an object with keys".to_string()
        }
        name if name.starts_with("enum ") || name.contains("enum") => CHOICE.to_string(),
        name => {
            let plain = ["string ", "integer ", "floating point ", "boolean "];
            let value = plain.iter().find_map(|kind| name.strip_prefix(kind));
            value.unwrap_or(name).replace("floating point number", "number")
        }
    }
}

/// The number of the line on which the value of a key begins. Behind its first part the key may leave out what stands
/// between, as in `mask.chunk` of `mask.and[0].chunked_causal.chunk`; of several that fit it is the one with the value
/// that was found, if one alone has it.
pub fn line_of_value(text: &str, key: &str, found: &str) -> Option<usize> {
    let parts: Vec<&str> = key.split(['.', '[', ']']).filter(|part| !part.is_empty()).collect();
    let (first, rest) = parts.split_first()?;
    let mut values = Vec::new();
    let own = members(text).into_iter().filter(|(name, _)| name == first);
    own.for_each(|(_, value)| find(value, rest, &mut values));
    if values.len() > 1 {
        values.retain(|value| value.trim_matches('"') == found);
    }
    let [value] = values[..] else { return None };
    let start = value.as_ptr() as usize - text.as_ptr() as usize;
    Some(1 + text[..start].matches('\n').count())
}

/// The values in a text whose keys have these parts in this order and the last one at their end.
fn find<'a>(text: &'a str, parts: &[&str], to: &mut Vec<&'a str>) {
    let Some((first, rest)) = parts.split_first() else { return to.push(text) };
    for (name, value) in members(text) {
        find(value, if name == *first { rest } else { parts }, to);
    }
}

/// The members of an object by name, and of an array by number; of other values none.
fn members(text: &str) -> Vec<(String, &str)> {
    type Object<'a> = BTreeMap<String, &'a RawValue>;
    if let Ok(object) = serde_json::from_str::<Object<'_>>(text) {
        return object.into_iter().map(|(name, value)| (name, value.get())).collect();
    }
    let items = serde_json::from_str::<Vec<&RawValue>>(text).unwrap_or_default();
    items.into_iter().enumerate().map(|(at, value)| (at.to_string(), value.get())).collect()
}

/// The number of the first line that has this key.
pub fn line_of(text: &str, key: &str) -> Option<usize> {
    let quoted = format!("\"{key}\"");
    text.lines().position(|line| line.contains(&quoted)).map(|at| at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code, reason = "only its errors are of interest")]
    struct Whole {
        a: Option<f64>,
        inner: Option<Inner>,
        list: Option<Vec<usize>>,
        word: Option<Word>,
        counts: Option<BTreeMap<Word, usize>>,
        shape: Option<Shape>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code, reason = "only its errors are of interest")]
    struct Inner {
        size: usize,
        on: Option<bool>,
    }

    #[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Word {
        One,
        Two,
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "snake_case")]
    #[allow(dead_code, reason = "only its errors are of interest")]
    enum Shape {
        Round { size: usize },
    }

    #[test]
    fn values_have_their_lines() {
        let text = "{ \"batch\": 1,\n\"bias\":\n{ \"batch\": 3, \"heads\": 2 },\n\"mask\": { \"and\": [\n\
            { \"chunked_causal\": { \"chunk\": 8 } },\n{ \"chunked_causal\": { \"chunk\": 0 } } ] },\n\
            \"kernels\": [ { \"limits\": { \"dim\": {} } },\n{ \"limits\": { \"dim\": { \"at_most\": 3 } } } ] }";
        for (key, found, line) in [
            ("batch", "0", Some(1)),
            ("bias.batch", "3", Some(3)),
            ("bias", "3", Some(3)),
            ("mask.chunk", "0", Some(6)),
            ("mask.chunk", "7", None),
            ("kernels[1].limits.dim", "", Some(8)),
            ("heads", "2", None),
            ("", "", None),
        ] {
            assert_eq!(line_of_value(text, key, found), line, "{key} {found}");
        }
        assert_eq!(line_of_value("[1", "batch", "1"), None);
    }

    #[test]
    fn every_kind_of_mistake_has_its_key_and_line() {
        for (text, words) in [
            (
                "{\n\"b\": 1}",
                "line 2: unknown key `b`, expected one of `a`, `inner`, `list`, `word`, `counts`, `shape`",
            ),
            (
                "{\"inner\":\n{\"sise\": 1}}",
                "line 2: unknown key `sise` of `inner`, expected `size` or `on`",
            ),
            (
                "{\"word\": \"three\"}",
                "line 1: unknown value `three` of `word`, expected `one` or `two`",
            ),
            (
                "{\"counts\": {\"three\": 1}}",
                "line 1: unknown key `three` of `counts`, expected `one` or `two`",
            ),
            ("{\"inner\": {}}", "line 1: the key `size` is missing in `inner`"),
            ("{\"a\": 1,\n\"a\": 2}", "line 2: the key `a` stands twice"),
            (
                "{\"inner\":\n{\"size\":\n-1}}",
                "line 3: `inner.size` must be a whole number of at least 0, found `-1`",
            ),
            (
                "{\"inner\": {\"size\": \"8\"}}",
                "line 1: `inner.size` must be a whole number of at least 0, found \"8\"",
            ),
            (
                "{\"inner\": {\"size\": 1, \"on\": 1}}",
                "line 1: `inner.on` must be true or false, found `1`",
            ),
            (
                "{\"list\": [1, 2.5]}",
                "line 1: `list[1]` must be a whole number of at least 0, found `2.5`",
            ),
            ("{\"list\": {}}", "line 1: `list` must be an array, found an object"),
            (
                "{\"a\": null, \"inner\": 3}",
                "line 1: `inner` must be an object with keys, found `3`",
            ),
            (
                "{\"shape\": \"round\"}",
                "line 1: `shape.round` must be an object with keys, found a name alone",
            ),
            (
                "{\"shape\": true}",
                "line 1: `shape` must be a name, or an object with one key, found true",
            ),
            (
                "{\"shape\":\n false}",
                "line 2: `shape` must be a name, or an object with one key, found false",
            ),
            ("[]", "line 1: the file must be an object with keys, found an array"),
            ("", "the file is empty"),
            ("{\"a\": 1,}", "line 1, column 9: a comma stands before a closing bracket"),
            ("{\"a\": 1", "line 1: the text ends before all that it opens is closed"),
            ("{\"a\" 1}", "line 1, column 6: a colon is missing after a key"),
            ("{'a': 1}", "line 1, column 2: a key must be a string in double quotes"),
            ("{\"a\": 1} 2", "line 1, column 10: something follows the end of the object"),
            (
                "{\"a\": True}",
                "line 1, column 7: no JSON value: it has numbers, true, false, null and \
                strings in double quotes, and no comments",
            ),
        ] {
            assert_eq!(parse::<Whole>(text).unwrap_err(), words, "{text}");
        }
        assert!(parse::<Whole>("{\"a\": 1, \"word\": \"one\"}").is_ok());
    }
}
