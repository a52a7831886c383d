//! Numbers for people: three or four digits and a unit.

/// A number with three digits; from 1000 on with all digits before the point.
pub fn digits(x: f64) -> String {
    let decimals = match x.abs() {
        0.0 => 0,
        x if !x.is_finite() || x >= 99.95 => 0,
        x if x >= 9.995 => 1,
        x if x >= 0.9995 => 2,
        x if x >= 0.099_95 => 3,
        x if x >= 0.009_995 => 4,
        _ => return format!("{x:.2e}"),
    };
    format!("{x:.decimals$}")
}

/// A margin with three digits, however large.
pub fn margin(x: f64) -> String {
    if x.is_finite() && x >= 999.5 { format!("{x:.2e}") } else { digits(x) }
}

/// A number of things, in the singular or the plural.
pub fn counted(n: usize, what: &str) -> String {
    format!("{n} {}", plural(n, what))
}

/// The word for so many things.
pub fn plural(n: usize, what: &str) -> String {
    match what.strip_suffix("ry") {
        _ if n == 1 => what.to_string(),
        Some(stem) => format!("{stem}ries"),
        None => format!("{what}s"),
    }
}

/// A share in percent, with a mark where it is above a limit.
pub fn marked(share: f64, decimals: usize, limit: f64) -> String {
    let mark = if share > limit { " !" } else { "" };
    format!("{:.decimals$} %{mark}", 100.0 * share)
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
