//! The figures of a run, as a table and as JSON, and whether they can be trusted.

use super::subject::{self, Subject};
use super::tune::{self, Best, Tried};
use crate::noise::{SPREAD, Times, busy};
use crate::table::page;
use crate::units::{bytes, counted, digits, marked, time};
use serde::Serialize;

/// One pass of one problem, timed.
#[derive(Debug, Serialize)]
pub struct Figure {
    #[serde(flatten)]
    pub subject: Subject,
    pub mode: &'static str,
    /// Of the pass: two for each multiplication and addition of the products of visible pairs.
    pub flops: u64,
    /// The first call with a workspace, in ns, which fetches scratch memory from the system; of a device none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_ns: Option<u64>,
    /// Calls after it, with the memory that it left.
    #[serde(flatten)]
    pub times: Times,
    pub gflops: f64,
    /// Of the peak: of the simd tier the median over the runs, each beside the peak before and after it.
    pub share: Option<f64>,
    /// GB/s of the states, of a step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gigabytes: Option<Bandwidth>,
    /// The best of the tile sizes that were searched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best: Option<Best>,
    /// The ways of a device that were searched.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tried: Vec<Tried>,
    /// Work and memory of a pass on a device.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub on_device: Option<OnDevice>,
}

impl Figure {
    /// The same with its times.
    pub fn with(self, times: Times) -> Figure {
        let gflops = self.flops as f64 / times.median_ns.max(1) as f64;
        Figure { times, gflops, ..self }
    }
}

/// Work and memory of a pass on a device.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct OnDevice {
    /// The time of the host to enqueue it, the median.
    pub enqueue_ns: u64,
    /// The same once it was recorded as a graph.
    pub recorded_ns: u64,
    /// The kernels, and fills, that it enqueues.
    pub launches: usize,
    pub fills: usize,
    /// Scratch memory.
    pub scratch_bytes: usize,
}

/// Bandwidth of a step over the states, and that of this machine.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Bandwidth {
    /// GB/s of the states, read and written.
    pub states: f64,
    /// GB/s of memory of their size that is read and written and nothing else, in the same run.
    pub memory: f64,
}

/// The figures of a run.
#[derive(Debug, Serialize)]
pub struct Figures {
    pub etalon: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// The tier with its level, and the device.
    pub tier: String,
    pub dtype: &'static str,
    pub threads: usize,
    /// The unit whose peak it is.
    pub unit: &'static str,
    /// GFLOP/s of products on registers alone, before the figures were taken.
    pub peak_gflops: f64,
    /// The same after it.
    pub peak_gflops_after: f64,
    /// Of products of bf16, after it, where the level multiplies it: the peak of passes that do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bf16_peak_gflops: Option<f64>,
    /// Of a device: the host's time to enqueue a kernel that does nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub launch_ns: Option<u64>,
    pub figures: Vec<Figure>,
}

/// Operations that count as a flop, by algorithm.
const FLOPS: [(&str, &str); 5] = [
    (
        "attention",
        "of the products of visible pairs, of which a forward pass has 2, a backward pass 5, a double backward \
         pass 19, a jvp 5",
    ),
    (
        "attention_lse",
        "of the products of visible pairs, of which a forward pass has 1, a backward pass 3, a double backward \
         pass 13, a jvp 3",
    ),
    (
        "lazy_attention",
        "of the products of visible pairs, of which a forward pass has 2, a backward pass 7 and a double \
         backward pass 22; with pv_sum a forward pass has 3 and a backward pass 5",
    ),
    (
        "linear_attention",
        "4 D E + C (D + E) for each token, C the chunk, 2.5 times that backward, and 36 D E + C (8 D + 7 E) in a \
         double backward pass",
    ),
    (
        "linear_cross_entropy",
        "2 D for each token and class, backward three times that, in a double backward pass seven times",
    ),
];

/// The column of first calls.
const FIRST: &str = " First: the call before them, without a kept workspace; it fetches scratch memory from the \
    system.";

/// Mark of a cell that is not to be relied on.
const DOUBTFUL: &str = "!: a share of the peak above 100 %, or a spread above 20 %: the machine was busy or its \
    clock changed, so measure again.";

impl Figures {
    /// Fills in the shares of the peak that are not known yet; of two peaks the higher one is nearer to the
    /// truth.
    pub fn settle(&mut self) {
        let peak = self.peak_gflops.max(self.peak_gflops_after);
        for figure in &mut self.figures {
            figure.share.get_or_insert(figure.gflops / peak);
        }
    }

    /// Definition of a flop for the algorithms that ran.
    fn flops(&self) -> String {
        let ran = |name: &str| self.figures.iter().any(|figure| figure.subject.algorithm == name);
        let parts = FLOPS.iter().filter(|(name, _)| ran(name));
        let parts = parts.map(|(name, flops)| format!("{name}: {flops}")).collect::<Vec<_>>();
        format!(
            "Flops: two for each term. {}. What is computed twice or masked away is not counted.",
            parts.join(". ")
        )
    }

    /// The printed paragraphs.
    pub fn lines(&self) -> Vec<String> {
        let peak = digits(self.peak_gflops.max(self.peak_gflops_after));
        let mut lines = vec![
            format!(
                "{}, {}, {}; peak of {} in this run: {peak} GFLOP/s",
                self.tier,
                self.dtype,
                counted(self.threads, "thread"),
                self.unit
            ),
            self.table(),
        ];
        lines.extend(self.bf16_peak_gflops.map(|peak| {
            page(&format!(
                "Of peak: passes that multiply bf16 (docs/simd.md says which) are compared with the peak of such \
                 products, {} GFLOP/s.",
                digits(peak)
            ))
        }));
        lines.extend(self.launch_ns.map(|ns| {
            let own = time(ns as f64 * 1e-9);
            page(&format!(
                "Enqueued in: by the host; recorded: likewise, as a graph. A kernel that does nothing is \
                 enqueued in {own}."
            ))
        }));
        if let Some(figure) = self.figures.first() {
            lines.push(page(&format!(
                "{}. Time: the median of the runs, the middle half of which lies within ± the spread.{}",
                figure.subject.heads(),
                figure.first_ns.map_or("", |_| FIRST)
            )));
        }
        if self.figures.iter().any(Figure::is_doubtful) {
            lines.push(page(DOUBTFUL));
        }
        lines.push(page(&self.flops()));
        for Figure { subject, mode, gigabytes, best, tried, .. } in &self.figures {
            let Subject { algorithm, mask, length, dim, pass, .. } = subject;
            let what = format!("{algorithm} {pass} ({mode}), {mask}");
            if let Some(Bandwidth { states, memory }) = gigabytes {
                lines.push(page(&format!(
                    "{what}, {dim}: {} GB/s of the states, read and written; memory of their size: {}",
                    digits(*states),
                    digits(*memory)
                )));
            }
            if !tried.is_empty() {
                lines.push(format!("{what}, {length} × {dim}:\n{}", tune::table(tried)));
            }
            lines.extend(best.as_ref().map(|best| format!("{what}, {length} × {dim}: {best}")));
        }
        let times: Vec<Times> = self.figures.iter().map(|figure| figure.times).collect();
        let signs = busy([self.peak_gflops, self.peak_gflops_after], &times);
        lines.extend(signs.into_iter().map(|sign| page(&format!("warning: {sign}"))));
        lines
    }

    fn table(&self) -> String {
        let on_device = self.figures.iter().any(|figure| figure.on_device.is_some());
        let runs = if on_device { "rounds" } else { "runs" };
        let common = ["pass", "mode", "mask", "length", "dim"].into_iter();
        let common = common.chain((!on_device).then_some("first"));
        let common = common.chain(["time", "spread", runs, "GFLOP/s", "of peak"]);
        let further = ["enqueued in", "recorded", "kernels + fills", "scratch"]
            .into_iter()
            .filter(|_| on_device);
        let header = common.chain(further);
        subject::table(header, self.figures.iter().map(|figure| (&figure.subject, figure.row())))
    }
}

impl Figure {
    /// True if its time or its share of the peak is not to be relied on.
    fn is_doubtful(&self) -> bool {
        self.times.spread() > SPREAD || self.share > Some(1.0)
    }

    /// Its row of the table.
    fn row(&self) -> Vec<String> {
        let Subject { mask, length, dim, pass, .. } = &self.subject;
        let in_seconds = |ns: u64| time(ns as f64 * 1e-9);
        let mut row = [pass, self.mode, mask].map(String::from).to_vec();
        row.extend([length.to_string(), dim.to_string()]);
        row.extend(self.first_ns.map(in_seconds));
        row.extend([
            in_seconds(self.times.median_ns),
            marked(self.times.spread(), 1, SPREAD),
            self.times.runs.to_string(),
            digits(self.gflops),
            self.share.map_or(String::new(), |share| marked(share, 0, 1.0)),
        ]);
        row.extend(self.on_device.into_iter().flat_map(|x| {
            let enqueued = format!("{} + {}", x.launches, x.fills);
            let [each, recorded] = [x.enqueue_ns, x.recorded_ns].map(in_seconds);
            [each, recorded, enqueued, bytes(x.scratch_bytes)]
        }));
        row
    }
}
