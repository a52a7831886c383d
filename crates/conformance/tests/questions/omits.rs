//! Kernels that do not return some result: a law that needs it is not asked.

use etalon_conformance::candidate::Candidate;
use etalon_conformance::capabilities::{Capabilities, Kernel};
use etalon_conformance::cases::Spec;
use etalon_conformance::laws::Kind;
use etalon_conformance::report::{Record, Verdict};
use etalon_conformance::suite::{self, SuiteOptions};
use etalon_conformance::tier::{Request, Tier};
use etalon_conformance::tiers::Simd;
use etalon_problem::{Pass, Role};

/// The records of some laws of a case, of the simd tier that leaves out some results.
fn records(case: &str, omits: &[&str], laws: &[&str]) -> Vec<Record> {
    let spec: Spec = case.parse().expect("a case");
    let algorithm = spec.algorithm;
    let omits: Vec<String> = omits.iter().map(|name| name.to_string()).collect();
    let kernel = Kernel { omits: omits.clone(), ..Kernel::of(algorithm) };
    let capabilities = &Capabilities { kernels: vec![kernel] };
    let simd = Simd::levels().0.remove(0);
    let answer = |request: &Request<'_>| {
        // It computes again what the forward pass has saved.
        let mut inputs = request.inputs.clone();
        let operands = request.problem.operands(request.pass);
        operands.iter().filter(|x| x.role == Role::Saved).for_each(|x| _ = inputs.remove(x.name));
        let mut outputs = simd.run(&Request { inputs: &inputs, ..*request })?;
        outputs.retain(|name, _| !omits.contains(name));
        Ok(outputs)
    };
    let (name, profile, answer, slow) = ("omits".to_string(), None, &answer as _, true);
    let candidate = Candidate { name, algorithm, capabilities, profile, answer, slow, lost: None };
    let options = SuiteOptions {
        algorithms: vec![algorithm],
        kinds: vec![Kind::Probe, Kind::Meaning],
        cases: vec![spec],
        laws: laws.iter().map(|name| name.to_string()).collect(),
        capabilities: Some(capabilities),
        ..SuiteOptions::own(vec![&candidate])
    };
    suite::run(&options, &|_, _, _| {}).records
}

const ATTENTION: &str = "attention/bf16/full/plain/square/dense/generic/no_dlse/0";
const LINEAR: &str = "linear_attention/bf16/none/weak/no_dfinal/lattice/dense/root/generic/0";

#[test]
fn what_needs_an_omitted_result_is_not_asked() {
    for (case, omits, laws) in [
        (ATTENTION, &["o", "dq", "dv"][..], &["value_probe", "euler_vo", "euler_qk", "sum_dv"][..]),
        // The forward pass of this case has no other result than o.
        (LINEAR, &["dv"], &["value_probe"]),
    ] {
        for law in laws {
            let whole = records(case, &[], &[law]);
            let passes = |x: &Record| x.verdict == Verdict::Pass;
            assert!(!whole.is_empty() && whole.iter().all(passes), "{law}: {whole:?}");
            let part = records(case, omits, &[law]);
            let needs = |x: &Record| omits.contains(&"o") || x.pass == Pass::Backward;
            let is_right = |x: &Record| match needs(x) {
                true => matches!(x.verdict, Verdict::NotAsked(_)),
                false => passes(x),
            };
            assert_eq!(part.len(), whole.len(), "{law}: {part:?}");
            assert!(part.iter().all(is_right), "{law}: {part:?}");
        }
    }
}
