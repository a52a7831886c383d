//! Errors of a request, as facts in the caller's words.

use std::fmt::Write;

/// A result whose error is [`Error`] unless another is named.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Reasons for which a problem or its operands cannot be used. Each names the operand or option, what was
/// expected and what was found.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor that the pass needs was not given.
    #[error("`{}` is missing: {reason}", name(operand))]
    Missing {
        /// The tensor's name.
        operand: String,
        /// The reason why it is needed.
        reason: String,
    },
    /// A tensor was given that the problem does not have.
    #[error("`{}` was given, but {reason}", name(operand))]
    Unexpected {
        /// The tensor's name.
        operand: String,
        /// The reason why it has no place here.
        reason: String,
    },
    /// A tensor has the wrong shape.
    #[error("`{}` must have shape {expected:?}, found {}", name(operand), shape(found))]
    Shape {
        /// The tensor's name.
        operand: String,
        /// The shape that follows from the problem.
        expected: Vec<usize>,
        /// The shape that it has.
        found: Vec<usize>,
    },
    /// A tensor has the wrong element type.
    #[error("`{}` must hold {expected}, found {found}", name(operand))]
    Dtype {
        /// The tensor's name.
        operand: String,
        /// The element types that are accepted.
        expected: String,
        /// The element type that it has.
        found: String,
    },
    /// An option or extent has a value outside its domain.
    #[error(
        "`{}` must be {expected}, found {}",
        crate::error::name(name),
        crate::error::name(found)
    )]
    Value {
        /// The option's name.
        name: String,
        /// Its domain.
        expected: String,
        /// Its value.
        found: String,
    },
    /// The tier does not offer this.
    #[error("{what} is not supported: {reason}")]
    Unsupported {
        /// The request.
        what: String,
        /// The reason why it is not offered.
        reason: String,
    },
    /// The memory for a result or a workspace cannot be had.
    #[error("{what} needs {bytes} bytes, which cannot be allocated")]
    Memory {
        /// The purpose of the memory.
        what: String,
        /// Its size in bytes.
        bytes: usize,
    },
    /// It would take too long.
    #[error("{what} takes more than {steps} steps")]
    Work {
        /// The task that would take too long.
        what: String,
        /// The most steps that are taken for it.
        steps: u64,
    },
    /// A device, its driver or its compiler failed.
    #[error("{what} failed: {reason}")]
    Device {
        /// The operation that failed.
        what: String,
        /// Message of the driver or the compiler.
        reason: String,
    },
    /// A fault ended the context that the process has on a device: the call that met it and all later
    /// ones fail with this, until the process ends.
    #[error(
        "the context of device {device} was lost ({fault}); another process can use the device"
    )]
    ContextLost {
        /// The device's ordinal.
        device: usize,
        /// The operation that met it, and the driver's message.
        fault: String,
    },
}

/// The most characters of a name, and of a value, that an error repeats: those of every table and every
/// option have fewer.
const NAME: usize = 100;

/// A name or value of a file as errors repeat it.
fn name(text: &str) -> String {
    shortened(text, NAME)
}

/// A shape as errors repeat it: of very many axes, the first.
fn shape(extents: &[usize]) -> String {
    const AXES: usize = 16;
    if extents.len() <= AXES {
        return format!("{extents:?}");
    }
    format!("{:?} and {} more axes", &extents[..AXES], extents.len() - AXES)
}

/// A text of a file or an argument as a message may repeat it: characters that do not print (controls,
/// line ends, marks that turn the direction of writing) are written as `\u{…}`, and of a text that is
/// longer than `most` characters the middle is left out.
///
/// ```
/// use etalon_problem::shortened;
/// assert_eq!(shortened("a\u{1b}[31m", 20), "a\\u{1b}[31m");
/// assert_eq!(shortened(&"k".repeat(1000), 8), "kkkkkk … (992 characters) … kk");
/// ```
pub fn shortened(text: &str, most: usize) -> String {
    let length = text.chars().count();
    let (head, tail) = if length <= most { (length, 0) } else { (most - most / 4, most / 4) };
    let mut short = String::new();
    text.chars().take(head).for_each(|c| print(c, &mut short));
    if head + tail < length {
        // Writing to a string does not fail.
        let _ = write!(short, " … ({} characters) … ", length - head - tail);
    }
    text.chars().skip(length - tail).for_each(|c| print(c, &mut short));
    short
}

/// Adds a character, or its escape if it does not print.
fn print(c: char, to: &mut String) {
    let prints = matches!(c, '"' | '\'' | '\\') || c.escape_debug().len() == 1;
    if prints { to.push(c) } else { to.extend(c.escape_unicode()) }
}

impl Error {
    /// A value outside its domain.
    pub fn value(
        name: impl Into<String>,
        expected: impl Into<String>,
        found: impl ToString,
    ) -> Self {
        Error::Value { name: name.into(), expected: expected.into(), found: found.to_string() }
    }

    /// A request that the tier does not offer.
    pub fn unsupported(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Error::Unsupported { what: what.into(), reason: reason.into() }
    }

    /// Memory for a purpose that cannot be had.
    pub fn memory(what: impl Into<String>, bytes: usize) -> Self {
        Error::Memory { what: what.into(), bytes }
    }

    /// Fails unless `found` is the shape that `operand` must have.
    pub fn expect_shape(operand: &str, expected: &[usize], found: &[usize]) -> Result<(), Self> {
        if expected == found {
            return Ok(());
        }
        Err(Error::Shape {
            operand: operand.to_string(),
            expected: expected.to_vec(),
            found: found.to_vec(),
        })
    }

    /// A tensor that the pass needs, or that an option of the problem asks for.
    pub fn missing(operand: &str, option: Option<&str>) -> Self {
        let reason = match option {
            Some(option) => format!("the problem sets `{option}`"),
            None => "the pass needs it".to_string(),
        };
        Error::Missing { operand: operand.to_string(), reason }
    }

    /// A tensor that the pass does not have, perhaps because an option of the problem is not set.
    pub fn unexpected(operand: &str, option: Option<&str>) -> Self {
        let reason = match option {
            Some(option) => format!("the problem does not set `{option}`"),
            None => "the pass has no such tensor".to_string(),
        };
        Error::Unexpected { operand: operand.to_string(), reason }
    }

    /// Fails unless each of these extents, with their names, is at least 1.
    pub(crate) fn expect_extents(extents: &[(&str, usize)]) -> Result<(), Self> {
        match extents.iter().find(|(_, extent)| *extent == 0) {
            Some((name, _)) => Err(Error::value(*name, "at least 1", 0)),
            None => Ok(()),
        }
    }

    /// Fails unless every key head has as many query heads.
    pub(crate) fn expect_groups(query_heads: usize, key_heads: usize) -> Result<(), Self> {
        if query_heads.is_multiple_of(key_heads) {
            return Ok(());
        }
        let expected = format!("a multiple of key_heads ({key_heads})");
        Err(Error::value("query_heads", expected, query_heads))
    }

    /// Fails unless an option is finite.
    pub(crate) fn expect_finite(name: &str, value: f64) -> Result<(), Self> {
        if value.is_finite() { Ok(()) } else { Err(Error::value(name, "finite", value)) }
    }

    /// Fails unless an option is finite and above 0.
    pub(crate) fn expect_positive(name: &str, value: f64) -> Result<(), Self> {
        if value.is_finite() && value > 0.0 {
            return Ok(());
        }
        Err(Error::value(name, "finite and above 0", value))
    }
}
