//! The figures of a run as a table, and whether they can be trusted.

use super::timing::{Bandwidth, Figure};
use crate::table::{Table, fold};
use crate::units::{digits, time};
use serde::Serialize;

/// The figures of a run.
#[derive(Debug, Serialize)]
pub struct Figures {
    pub etalon: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    pub level: &'static str,
    pub dtype: &'static str,
    pub threads: usize,
    /// GFLOP/s of fused multiply-adds on registers alone, before the figures were taken.
    pub peak_gflops: f64,
    /// The same after it.
    pub peak_gflops_after: f64,
    pub figures: Vec<Figure>,
}

/// What varies by more, as a share, varies because the machine does something else beside.
const BUSY: f64 = 0.05;

const FLOPS: &str = "\
Flops: two for each term of the products of visible pairs, of which a forward pass has 2, a backward \
pass 5, a double backward pass 19, a jvp 5 (attention_lse: 1, 3, 13 and 3); of linear_attention \
4 D E + C (D + E) for each token, C the chunk, 2.5 times that backward, and 36 D E + C (8 D + 7 E) in a \
double backward pass. What is computed twice or masked away is not counted.";

impl Figures {
    /// Fills in the shares of the peak, of which the higher one is nearer to the truth.
    pub fn settle(&mut self) {
        let peak = self.peak_gflops.max(self.peak_gflops_after);
        self.figures.iter_mut().for_each(|figure| figure.share = figure.gflops / peak);
    }

    /// What is printed, paragraph by paragraph.
    pub fn lines(&self) -> Vec<String> {
        let peak = digits(self.peak_gflops.max(self.peak_gflops_after));
        let mut lines = vec![
            format!(
                "simd/{}, {}, {} thread(s); peak of fused multiply-adds in this run: {peak} GFLOP/s",
                self.level, self.dtype, self.threads
            ),
            self.table(),
        ];
        if let Some(Figure { subject, .. }) = self.figures.first() {
            lines.push(format!(
                "{} heads ({} of keys), {} batch element(s). Time: the median of the runs, the middle \
                 half of which\nlies within ± the spread.",
                subject.heads, subject.key_heads, subject.batch
            ));
        }
        lines.push(fold(FLOPS, 100).join("\n"));
        for Figure { subject, pass, mode, gigabytes, best, .. } in &self.figures {
            let what = format!("{} {pass} ({mode}), {}", subject.algorithm, subject.mask);
            let (length, dim) = (subject.length, subject.dim);
            if let Some(Bandwidth { states, memory }) = gigabytes {
                lines.push(format!(
                    "{what}, {dim}: {} GB/s of the states, read and written; memory of their size: {}",
                    digits(*states),
                    digits(*memory)
                ));
            }
            lines.extend(best.as_ref().map(|best| format!("{what}, {length} × {dim}: {best}")));
        }
        lines.extend(self.busy().into_iter().map(|reason| format!("warning: {reason}")));
        lines
    }

    fn table(&self) -> String {
        let header = [
            "pass", "mode", "mask", "length", "dim", "time", "spread", "runs", "GFLOP/s", "of peak",
        ];
        let mut table = Table::new(header);
        let mut figures: Vec<&Figure> = self.figures.iter().collect();
        figures.sort_by_key(|figure| figure.subject.algorithm);
        let mut last = "";
        for figure in figures {
            let subject = &figure.subject;
            if subject.algorithm != last {
                table.add_title(subject.algorithm);
                last = subject.algorithm;
            }
            table.add_row([
                figure.pass.to_string(),
                figure.mode.to_string(),
                subject.mask.clone(),
                subject.length.to_string(),
                subject.dim.to_string(),
                time(figure.times.median_ns as f64 * 1e-9),
                format!("{:.1} %", 100.0 * figure.times.spread()),
                figure.times.runs.to_string(),
                digits(figure.gflops),
                format!("{:.0} %", 100.0 * figure.share),
            ]);
        }
        table.to_string()
    }

    /// Signs that the machine did something else beside: its peak moved, or times spread.
    fn busy(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        let (before, after) = (self.peak_gflops, self.peak_gflops_after);
        let limit = 100.0 * BUSY;
        if (before - after).abs() > BUSY * before.max(after) {
            reasons.push(format!(
                "the machine is busy: its peak was {} GFLOP/s before the runs and {} after them, \
                 more than {limit} % apart",
                digits(before),
                digits(after)
            ));
        }
        let wide = self.figures.iter().filter(|figure| figure.times.spread() > BUSY).count();
        if wide > 0 {
            reasons.push(format!(
                "{wide} of {} times spread by more than ± {limit} %: the machine is busy, or --seconds \
                 is too short",
                self.figures.len()
            ));
        }
        reasons
    }
}

#[cfg(test)]
mod tests {
    use super::super::timing::{Subject, Times};
    use super::*;

    fn figure(times: Vec<u64>) -> Figure {
        Figure {
            subject: Subject {
                algorithm: "linear_attention",
                mask: "decay per token".to_string(),
                batch: 1,
                length: 65_536,
                dim: 128,
                heads: 8,
                key_heads: 8,
            },
            pass: "double_backward",
            mode: "separate",
            flops: 1_234_000,
            times: Times::new(times),
            gflops: 1234.5,
            share: 0.0,
            gigabytes: None,
            best: None,
        }
    }

    fn figures(after: f64, times: Vec<u64>) -> Figures {
        let mut figures = Figures {
            etalon: "",
            commit: None,
            cpu: None,
            level: "avx2",
            dtype: "f32",
            threads: 1,
            peak_gflops: 2000.0,
            peak_gflops_after: after,
            figures: vec![figure(times)],
        };
        figures.settle();
        figures
    }

    #[test]
    fn a_figure_shows_its_spread_on_a_line_of_the_page() {
        let lines = figures(1990.0, vec![980, 990, 1000, 1010, 1500]).lines().join("\n");
        assert!(lines.contains("1.00 µs   1.0 %     5     1234     62 %"), "{lines}");
        assert!(lines.lines().all(|line| line.chars().count() <= 100), "{lines}");
        assert!(!lines.contains("warning"), "{lines}");
    }

    #[test]
    fn a_busy_machine_is_told_by_its_peak_and_by_its_spread() {
        let reasons = figures(1800.0, vec![1000; 3]).busy();
        assert!(reasons.len() == 1 && reasons[0].contains("2000 GFLOP/s before"), "{reasons:?}");
        let reasons = figures(2000.0, vec![800, 1000, 1200]).busy();
        assert!(reasons.len() == 1 && reasons[0].starts_with("1 of 1 times"), "{reasons:?}");
        assert_eq!(figures(2000.0, vec![]).busy(), [""; 0]);
    }
}
