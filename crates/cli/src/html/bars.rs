//! Margins as bars.

use super::entities;
use crate::page::Counted;
use crate::units::margin;
use etalon_conformance::check::Spread;

/// Pixels of a bar, and of the highest one.
const WIDE: usize = 8;
const HIGH: usize = 30;

/// The end of a table of bars.
pub const FOOT: &str = "</table></div>\n<p>Bars: how many margins are 0, lie between powers of two from 2⁻¹³ to 2¹², \
    and are infinite, on a logarithmic scale. The line is at 1: what stands right of it is off.</p>\n";

/// The header of a table of bars, with these first columns.
pub fn head(names: &[String]) -> String {
    let names: String = names.iter().map(|name| format!("<th>{}</th>", entities(name))).collect();
    format!(
        "<div class=\"wide\"><table>\n<tr>{names}<th>number</th><th>off</th><th>worst</th><th>margins</th></tr>\n"
    )
}

/// A row of it.
pub fn row(row: &Counted) -> String {
    let Counted { names, spread, worst } = row;
    let names: String = names.iter().map(|name| format!("<td>{}</td>", entities(name))).collect();
    let (all, off) = (spread.all(), spread.off());
    let class = if off == 0 { "short" } else { "failed" };
    format!(
        "<tr>{names}<td>{all}</td><td class=\"{class}\">{off}</td><td>{}</td><td>{}</td></tr>\n",
        margin(*worst),
        svg(spread)
    )
}

fn svg(spread: &Spread) -> String {
    // The bar of 0 stands before the others.
    let one = (1 + Spread::WITHIN) * WIDE;
    let width = spread.bars().count() * WIDE;
    let mut bars = [String::new(), String::new()];
    for (at, (_, share)) in spread.bars().enumerate().filter(|(_, (count, _))| *count > 0) {
        let high = ((HIGH as f64 * share).round() as usize).max(1);
        let (x, y, w) = (at * WIDE + 1, HIGH - high, WIDE - 2);
        bars[usize::from(at > Spread::WITHIN)] += &format!("M{x} {y}h{w}v{high}h-{w}z");
    }
    let paths = bars.iter().zip(["in", "out"]).filter(|(bars, _)| !bars.is_empty());
    let paths: String =
        paths.map(|(bars, class)| format!("<path class=\"{class}\" d=\"{bars}\"/>")).collect();
    format!(
        "<svg width=\"{width}\" height=\"{HIGH}\" viewBox=\"0 0 {width} {HIGH}\" role=\"img\"><title>{} within, {} \
         off</title>{paths}<path class=\"edge\" d=\"M0 {HIGH}h{width}M{one} 0v{HIGH}\"/></svg>",
        spread.all() - spread.off(),
        spread.off()
    )
}
