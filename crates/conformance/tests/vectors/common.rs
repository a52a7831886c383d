//! Helpers of the tests of the set.

use etalon_conformance::bounds::bounds;
use etalon_conformance::gates::g1;
use etalon_conformance::profile::Profile;
use etalon_conformance::questions::Question;
use etalon_conformance::report::Verdict;
use etalon_conformance::tier::{Hints, Request, Tier};
use etalon_conformance::tiers::ask;
use etalon_conformance::vector_set::Id;
use etalon_conformance::zoo::{Host, Mutant};
use etalon_problem::Role;

/// About as many bytes as the tensors of a vector take.
pub fn size(question: &Question) -> usize {
    let operands = question.problem.operands(question.pass);
    let own = operands.iter().map(|x| match x.role {
        Role::Output => 14 * x.len(),
        _ if question.inputs.contains_key(x.name) => question.dtype.bytes() * x.len(),
        _ => 0,
    });
    let arrays = question.problem.arrays().into_iter().map(|x| x.1.iter().product::<usize>());
    own.chain(arrays).sum()
}

/// The request of a question.
pub fn request(question: &Question) -> Request<'_> {
    let Question { problem, pass, dtype, inputs } = question;
    Request { problem, pass: *pass, dtype: *dtype, inputs, hints: Hints::default() }
}

/// The names of those of some bugs whose results lie beyond the bounds of a vector.
pub fn notices(id: &Id, bugs: &[Mutant]) -> Vec<&'static str> {
    let Ok(question) = id.question() else { return Vec::new() };
    let request = request(&question);
    let Request { problem, pass, dtype, inputs, .. } = request;
    let own = bugs.iter().filter(|bug| bug.of.contains(&problem.algorithm()));
    let hosts: Vec<Host> = own.map(|bug| Host::mutant(*bug)).collect();
    let offers = |host: &Host| host.offers(problem.algorithm(), pass, dtype).is_ok();
    if !hosts.iter().any(offers) {
        return Vec::new();
    }
    let Ok(exact) = bounds(problem, pass, dtype, &Profile::flash(dtype), inputs) else {
        return Vec::new();
    };
    let noticed = |host: &Host| match ask(host, &request) {
        Ok(outputs) => matches!(g1(&exact, &outputs).verdict, Verdict::Fail(_)),
        Err(_) => false,
    };
    let name = |host: &Host| {
        let name = host.name();
        bugs.iter().find(|bug| name == format!("zoo/{}", bug.name)).map(|bug| bug.name)
    };
    hosts.iter().filter(|host| offers(host) && noticed(host)).filter_map(name).collect()
}
