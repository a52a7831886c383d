//! A command line in words.

use crate::outcome::Failure;
use std::ffi::OsString;

/// The words of a command line: `'…'` and `"…"` keep blanks. No shell reads it, so that `$` is a character as others.
pub fn words(line: &str) -> Result<Vec<OsString>, Failure> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None::<char>);
    for c in line.chars() {
        match quote {
            Some(open) if c == open => quote = None,
            Some(_) => word.get_or_insert_default().push(c),
            None if c == '\'' || c == '"' => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            None if c.is_whitespace() => words.extend(word.take()),
            None => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    match quote {
        Some(open) => Err(Failure(format!("--candidate: {open} is open, expected a second one"))),
        None if words.is_empty() => {
            Err(Failure("--candidate: it must be a command line, found nothing".to_string()))
        }
        None => Ok(words.into_iter().map(OsString::from).collect()),
    }
}
