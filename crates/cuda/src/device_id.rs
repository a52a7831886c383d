//! Names of a device: its ordinal or its UUID.

use etalon_problem::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// A device of this machine. Written as its ordinal (`0`), or as its UUID as `nvidia-smi -L` prints it
/// (`GPU-` or `MIG-`, then 32 hexadecimal digits in five groups).
///
/// ```
/// use etalon_cuda::DeviceId;
/// let device: DeviceId = "GPU-00112233-4455-6677-8899-aabbccddeeff".parse()?;
/// assert_eq!(device.to_string(), "GPU-00112233-4455-6677-8899-aabbccddeeff");
/// assert_eq!("1".parse(), Ok(DeviceId::Ordinal(1)));
/// # Ok::<(), etalon_problem::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeviceId {
    /// Its place in the driver's order, from 0.
    Ordinal(usize),
    /// Its UUID, which it keeps in any order and on any machine.
    Uuid([u8; 16]),
}

impl Default for DeviceId {
    fn default() -> Self {
        DeviceId::Ordinal(0)
    }
}

impl From<usize> for DeviceId {
    fn from(ordinal: usize) -> Self {
        DeviceId::Ordinal(ordinal)
    }
}

/// The digits of the groups of a UUID.
const GROUPS: [usize; 5] = [8, 4, 4, 4, 12];

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = match self {
            DeviceId::Ordinal(ordinal) => return ordinal.fmt(f),
            DeviceId::Uuid(bytes) => bytes,
        };
        let mut digits = bytes.iter().map(|byte| format!("{byte:02x}"));
        let groups = GROUPS.map(|length| digits.by_ref().take(length / 2).collect::<String>());
        f.pad(&format!("GPU-{}", groups.join("-")))
    }
}

impl FromStr for DeviceId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if let Ok(ordinal) = text.parse() {
            return Ok(DeviceId::Ordinal(ordinal));
        }
        uuid(text).map(DeviceId::Uuid).ok_or_else(|| {
            let expected = "an ordinal, or a UUID such as GPU-00112233-4455-6677-8899-aabbccddeeff";
            Error::value("device", expected, text)
        })
    }
}

fn uuid(text: &str) -> Option<[u8; 16]> {
    let groups = text.strip_prefix("GPU-").or_else(|| text.strip_prefix("MIG-"))?;
    if !groups.split('-').map(str::len).eq(GROUPS) {
        return None;
    }
    let digits: Vec<u32> = groups.chars().filter(|&c| c != '-').map(|c| c.to_digit(16)).collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits.chunks(2).map(|pair| (16 * pair[0] + pair[1]) as u8).collect();
    bytes.try_into().ok()
}
