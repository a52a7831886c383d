//! Arguments that several subcommands share.

use super::Failure;
use etalon_conformance::profile::Profile;
use etalon_conformance::tier::Tier;
use etalon_conformance::tiers;
use etalon_problem::{Blocking, Error};
use etalon_simd::Level;
use rayon::{ThreadPool, ThreadPoolBuilder};

/// A blocking, written `QUERIESxKEYS`.
pub fn blocking(text: &str) -> Result<Blocking, Error> {
    let wrong = || Error::value("blocking", "QUERIESxKEYS, as in 96x128", text);
    let (queries, keys) = text.split_once('x').ok_or_else(wrong)?;
    let size = |text: &str| text.parse::<usize>().map_err(|_| wrong());
    let blocking = Blocking::new(size(queries)?, size(keys)?);
    blocking.check()?;
    Ok(blocking)
}

/// A profile, by name.
pub fn profile(name: &str) -> Result<Profile, Error> {
    Profile::by_name(name)
}

/// A seed, decimal or hexadecimal with 0x.
pub fn seed(text: &str) -> Result<u64, Error> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| Error::value("seed", "a number below 2⁶⁴, decimal or 0x…", text))
}

/// A pool of `threads` threads; without a number, as many as there are cores.
pub fn pool(threads: Option<usize>) -> Result<ThreadPool, Failure> {
    if threads == Some(0) {
        return Err(Error::value("threads", "at least 1", 0).into());
    }
    Ok(ThreadPoolBuilder::new().num_threads(threads.unwrap_or(0)).build()?)
}

/// The level of the simd tier of that name; without one, the best of this machine.
pub fn level(name: Option<&str>) -> Result<Level, Failure> {
    let Some(name) = name else { return Ok(Level::best()) };
    Level::by_name(name).ok_or_else(|| {
        let names: Vec<&str> = Level::available().iter().map(|level| level.name()).collect();
        Error::value("level", format!("one of {}", names.join(", ")), name).into()
    })
}

/// The tier of that name: `reference`, `simd` (its best level), `simd/LEVEL`, `cuda`.
pub fn tier(name: &str) -> Result<Box<dyn Tier>, Failure> {
    if name == "reference" {
        return Ok(Box::new(tiers::Reference));
    }
    let (present, absent) = tiers::present();
    // The levels of a tier stand in ascending order: the last one is the best.
    let found = present.into_iter().rev().find(|tier| is_named(&tier.name(), name));
    if let Some(tier) = found {
        return Ok(tier);
    }
    if let Some(absent) = absent.iter().find(|absent| is_named(&absent.tier, name)) {
        return Err(Error::Unsupported {
            what: format!("tier {}", absent.tier),
            reason: absent.reason.clone(),
        }
        .into());
    }
    let (present, _) = tiers::present();
    let names: Vec<String> = present.iter().map(|tier| tier.name()).collect();
    let expected = format!("one of reference, {}", names.join(", "));
    Err(Error::value("tier", expected, name).into())
}

/// Whether a tier is the one of this name, or a level of it.
pub fn is_named(tier: &str, name: &str) -> bool {
    tier == name || tier.strip_prefix(name).is_some_and(|level| level.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blockings_are_two_positive_numbers() {
        assert_eq!(blocking("96x128"), Ok(Blocking::new(96, 128)));
        for (text, reason) in [
            ("0x32", "`blocking.queries` must be at least 1, found 0"),
            ("32x0", "`blocking.keys` must be at least 1, found 0"),
            ("32", "`blocking` must be QUERIESxKEYS, as in 96x128, found 32"),
            ("-1x3", "`blocking` must be QUERIESxKEYS, as in 96x128, found -1x3"),
            ("1x2x3", "`blocking` must be QUERIESxKEYS, as in 96x128, found 1x2x3"),
        ] {
            assert_eq!(blocking(text).unwrap_err().to_string(), reason);
        }
    }

    #[test]
    fn seeds_are_decimal_or_hexadecimal() {
        assert_eq!(seed("12"), Ok(12));
        assert_eq!(seed("0xFf"), Ok(255));
        assert!(seed("ff").is_err() && seed("-1").is_err() && seed("").is_err());
    }

    #[test]
    fn a_tier_is_found_by_its_name_or_its_level() {
        assert!(is_named("simd/avx2", "simd") && is_named("simd/avx2", "simd/avx2"));
        assert!(!is_named("simd/avx2", "sim") && !is_named("simd/avx2", "simd/avx"));
        assert_eq!(tier("reference").map(|tier| tier.name()).ok(), Some("reference".to_string()));
        assert!(tier("abacus").is_err());
    }
}
