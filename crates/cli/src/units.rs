//! Numbers for people: three or four digits and a unit.

/// A number of at least 0 with three digits; from 1000 on all digits before the point.
pub fn digits(x: f64) -> String {
    let decimals = match x {
        0.0 => 0,
        _ if !x.is_finite() || x >= 99.95 => 0,
        _ if x >= 9.995 => 1,
        _ if x >= 0.9995 => 2,
        _ if x >= 0.001 => 3,
        _ => return format!("{x:.1e}"),
    };
    format!("{x:.decimals$}")
}

/// A time in ns, µs, ms or s.
pub fn time(seconds: f64) -> String {
    let (unit, scale) = match seconds {
        _ if seconds >= 0.9995 => ("s", 1.0),
        _ if seconds >= 0.9995e-3 => ("ms", 1e3),
        _ if seconds >= 0.9995e-6 => ("µs", 1e6),
        _ => ("ns", 1e9),
    };
    format!("{} {unit}", digits(seconds * scale))
}

/// An amount of memory in B, KiB, MiB, GiB or TiB.
pub fn bytes(bytes: usize) -> String {
    let (mut size, mut units) = (bytes as f64, ["KiB", "MiB", "GiB", "TiB"].into_iter());
    let mut unit = None;
    while size >= 999.5 {
        let Some(next) = units.next() else { break };
        (size, unit) = (size / 1024.0, Some(next));
    }
    unit.map_or(format!("{bytes} B"), |unit| format!("{} {unit}", digits(size)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_or_four_digits() {
        for (number, text) in [
            (0.0, "0"),
            (0.000_123_4, "1.2e-4"),
            (0.012_34, "0.012"),
            (0.25, "0.250"),
            (0.9996, "1.00"),
            (12.345, "12.3"),
            (99.96, "100"),
            (1234.5, "1234"),
            (f64::INFINITY, "inf"),
        ] {
            assert_eq!(digits(number), text);
        }
    }

    #[test]
    fn times_have_the_unit_of_their_size() {
        for (seconds, text) in [
            (0.0, "0 ns"),
            (999e-9, "999 ns"),
            (12.345e-6, "12.3 µs"),
            (0.000_999_6, "1.00 ms"),
            (0.123_456_789, "123 ms"),
            (61.5, "61.5 s"),
        ] {
            assert_eq!(time(seconds), text);
        }
    }

    #[test]
    fn memory_has_the_unit_of_its_size() {
        for (number, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "0.977 KiB"),
            (12_345, "12.1 KiB"),
            (134_217_728, "128 MiB"),
            (1_073_000_000, "1.00 GiB"),
            (8 << 30, "8.00 GiB"),
            (5000 << 40, "5000 TiB"),
        ] {
            assert_eq!(bytes(number), text);
        }
    }
}
