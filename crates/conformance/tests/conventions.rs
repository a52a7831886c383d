//! Kernels that make the decays of the heads themselves, as libraries do, are reported by the name of their
//! convention; those that are wrong are called wrong.

use etalon_conformance::cases::Depth;
use etalon_conformance::laws::Kind;
use etalon_conformance::report::{Record, Verdict};
use etalon_conformance::suite::{SuiteOptions, run};
use etalon_conformance::tensor::{Stored, Tensor, Tensors};
use etalon_conformance::tier::{Choice, Refusal, Request, Tier};
use etalon_conformance::tiers::Simd;
use etalon_problem::{Algorithm, Dtype, Error, Pass, slopes};
use etalon_simd::Level;
use ndarray::Array1;
use std::sync::LazyLock;

/// A kernel that never reads `g_gamma`.
struct OwnSlopes {
    kernel: Simd,
    name: &'static str,
    of: fn(usize) -> Result<Vec<f64>, Error>,
}

impl Tier for OwnSlopes {
    fn name(&self) -> String {
        self.name.to_string()
    }

    fn offers(&self, algorithm: Algorithm, pass: Pass, dtype: Dtype) -> Result<(), String> {
        self.kernel.offers(algorithm, pass, dtype)
    }

    fn has(&self, choice: Choice) -> bool {
        self.kernel.has(choice)
    }

    fn run(&self, request: &Request<'_>) -> Result<Tensors, Refusal> {
        let mut inputs = request.inputs.clone();
        if let Some(g_gamma) = inputs.get_mut("g_gamma") {
            let own = Array1::from((self.of)(g_gamma.shape[0]).unwrap()).into_dyn();
            *g_gamma = Tensor::store(&own, Stored::Float(g_gamma.dtype().unwrap()));
        }
        self.kernel.run(&Request { inputs: &inputs, ..*request })
    }
}

/// The kernels, with what the suite says of each where heads have decays. In one run, which computes
/// the exact results once.
fn judged() -> &'static [(OwnSlopes, Vec<Record>)] {
    static JUDGED: LazyLock<Vec<(OwnSlopes, Vec<Record>)>> = LazyLock::new(judge);
    &JUDGED
}

fn judge() -> Vec<(OwnSlopes, Vec<Record>)> {
    let tiers = [
        kernel("slopes::linear(2, 0, 1)", |heads| slopes::linear(heads, 0, 1)),
        kernel("slopes::geometric(2, 0, 1)", |heads| slopes::geometric(heads, 0, 1)),
        kernel("no decay", |heads| Ok(vec![0.0; heads])),
    ];
    let options = SuiteOptions {
        algorithms: vec![Algorithm::LinearAttention],
        depth: Depth::Core,
        kinds: vec![Kind::Gate],
        ..SuiteOptions::own(tiers.iter().map(|tier| tier as &dyn Tier).collect())
    };
    let report = run(&options, &|_, _, _| {});
    assert!(!report.simplest.is_empty(), "not every failing case is the simplest one");
    for simplest in &report.simplest {
        // Nothing is wrong where there is no decay.
        assert!(simplest.case.contains("/per_head/"), "{simplest:?}");
        assert_ne!(simplest.case, simplest.of.case);
    }
    let of = |tier: OwnSlopes| {
        let meant =
            |record: &&Record| record.tier == tier.name && record.case.contains("/per_head/");
        let records: Vec<Record> = report.records.iter().filter(meant).cloned().collect();
        let wrong = records.iter().any(|record| record.verdict.is_negative());
        assert!(wrong, "the problem asked for other decays");
        (tier, records)
    };
    tiers.into_iter().map(of).collect()
}

fn kernel(name: &'static str, of: fn(usize) -> Result<Vec<f64>, Error>) -> OwnSlopes {
    OwnSlopes { kernel: Simd::new(*Level::available().last().unwrap()), name, of }
}

#[test]
fn another_convention_has_a_name() {
    for (OwnSlopes { name, .. }, records) in &judged()[..2] {
        // The kernel is right as far as it can be seen where no decay shows, in one token or in zeros.
        let place = |record: &Record| (record.pass, record.case.clone());
        let right = |record: &&Record| record.check == "bound" && record.verdict == Verdict::Pass;
        let right: Vec<(Pass, String)> = records.iter().filter(right).map(place).collect();
        let mut named = 0;
        for record in records {
            match &record.verdict {
                Verdict::Convention(text) => {
                    assert!(text.starts_with("another convention: "), "{text}");
                    named += usize::from(text.contains(name));
                }
                // Linear slopes of one head are no decay at all, as if it had been forgotten.
                Verdict::Fail(text) if text.contains("taken to be slopes::linear(1, 0, 1)") => {}
                Verdict::Fail(_) => assert!(right.contains(&place(record)), "{record:?}"),
                _ => {}
            }
        }
        assert!(named > 20, "{named} verdicts name {name}");
    }
}

#[test]
fn what_ignores_decays_is_wrong() {
    let mut wrong = 0;
    for record in &judged()[2].1 {
        assert!(!matches!(record.verdict, Verdict::Convention(_)), "{record:?}");
        wrong += usize::from(matches!(record.verdict, Verdict::Fail(_)));
    }
    assert!(wrong > 20, "{wrong}");
}
