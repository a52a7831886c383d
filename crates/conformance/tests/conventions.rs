//! Kernels that make the decays of the heads themselves, as libraries do, are told by the name of their
//! convention; those that are wrong are called wrong.

use etalon_conformance::cases::Depth;
use etalon_conformance::report::{Record, Verdict};
use etalon_conformance::suite::{SuiteOptions, run};
use etalon_conformance::tensor::{Stored, Tensor, Tensors};
use etalon_conformance::tier::{Refusal, Request, Tier};
use etalon_conformance::tiers::Simd;
use etalon_problem::{Algorithm, Dtype, Error, Pass, slopes};
use etalon_simd::Level;
use ndarray::Array1;

/// A kernel that never reads `g_gamma`.
struct OwnSlopes {
    kernel: Simd,
    of: fn(usize) -> Result<Vec<f64>, Error>,
}

impl Tier for OwnSlopes {
    fn name(&self) -> String {
        "own slopes".to_string()
    }

    fn offers(&self, algorithm: Algorithm, pass: Pass, dtype: Dtype) -> Result<(), String> {
        self.kernel.offers(algorithm, pass, dtype)
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

/// What the suite says of it where heads have decays.
fn judged(of: fn(usize) -> Result<Vec<f64>, Error>) -> Vec<Record> {
    let kernel = Simd::new(*Level::available().last().unwrap());
    let tier = OwnSlopes { kernel, of };
    let options = SuiteOptions {
        algorithms: vec![Algorithm::LinearAttention],
        depth: Depth::Core,
        ..SuiteOptions::own(vec![&tier])
    };
    let report = run(&options, &|_, _, _| {});
    assert!(!report.passed(), "the problem asked for other decays");
    let per_head = |record: &Record| record.case.contains("/per_head/");
    report.records.into_iter().filter(per_head).collect()
}

#[test]
fn another_convention_has_a_name() {
    let linear: fn(usize) -> Result<Vec<f64>, Error> = |heads| slopes::linear(heads, 0, 1);
    let geometric: fn(usize) -> Result<Vec<f64>, Error> = |heads| slopes::geometric(heads, 0, 1);
    for (of, name) in
        [(linear, "slopes::linear(2, 0, 1)"), (geometric, "slopes::geometric(2, 0, 1)")]
    {
        let records = judged(of);
        // Where no decay shows, in one token or in zeros, the kernel is right as far as it can be seen.
        let place = |record: &Record| (record.pass, record.case.clone());
        let right = |record: &&Record| record.check == "bound" && record.verdict == Verdict::Pass;
        let right: Vec<(Pass, String)> = records.iter().filter(right).map(place).collect();
        let mut named = 0;
        for record in &records {
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
    for record in judged(|heads| Ok(vec![0.0; heads])) {
        assert!(!matches!(record.verdict, Verdict::Convention(_)), "{record:?}");
        wrong += usize::from(matches!(record.verdict, Verdict::Fail(_)));
    }
    assert!(wrong > 20, "{wrong}");
}
