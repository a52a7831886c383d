//! Plans agree with passes: as many launches, and as much scratch memory.

use crate::enqueue::{Tensors, each_pass, problem};
use crate::fake::{Fake, Part, alone};
use etalon_cuda::{DevicePass, DeviceTensor, DeviceTensors, Level, Options, Precision, Workspace, plan};
use etalon_problem::{
    Algorithm, Attention, AttentionLse, BiasExtents, Dtype, Extents, Mask, Mode, Pass, Problem, Role, Stored,
};
use std::collections::BTreeSet;

fn problems() -> Vec<Problem> {
    let of = |queries, keys, dim, value_dim| {
        let extents = Extents { batch: 2, query_heads: 4, key_heads: 2, queries, keys, dim };
        let bias = Some(BiasExtents { batch: 1, heads: 4 });
        let mut plain = Attention::new(extents).mask(Mask::causal());
        plain.value_dim = value_dim;
        let mut all = plain.clone();
        (all.scores.bias, all.scores.sinks) = (bias, true);
        let lse = AttentionLse { scores: plain.scores.clone() };
        [Problem::from(plain), all.into(), lse.into()]
    };
    let sizes = [(150, 170, 64, 64), (64, 700, 24, 40), (130, 65, 128, 128), (70, 200, 256, 64)];
    sizes.into_iter().flat_map(|(n, m, d, e)| of(n, m, d, e)).collect()
}

fn options() -> Vec<Options> {
    let strict = Options { level: Level::Portable, ..Options::default() };
    let flash = Options { precision: Precision::Flash, ..strict };
    let mut all = Vec::new();
    let levels = [Level::Sm80, Level::Sm90a, Level::Auto];
    let flash = levels.map(|level| Options { level, ..flash });
    for options in std::iter::once(strict).chain(flash) {
        for mode in [Mode::Auto, Mode::Separate, Mode::FusedPartials] {
            // All tiles of keys at once, few, and one.
            let budgets = [256 << 20, 2_000_000, 1];
            all.extend(budgets.map(|partials_budget| Options { mode, partials_budget, ..options }));
        }
    }
    all
}

/// Memory of the fake device: nobody reads or writes there, so that all tensors may share it.
const MEMORY: usize = 1 << 26;

/// The scratch memory of a pass with all its results, and its launches.
fn measured(
    fake: &Fake,
    workspace: &Workspace,
    problem: &Problem,
    (pass, storage): (Pass, Dtype),
    options: &Options,
    at: u64,
) -> (usize, usize) {
    let operands = problem.operands(pass);
    let tensors = |roles: &[Role]| {
        let own = operands.iter().filter(|x| roles.contains(&x.role));
        own.fold(DeviceTensors::new(), |all, x| {
            let stored = Stored::of(x.precision, storage);
            all.with(x.name, DeviceTensor::dense(at, &x.shape, stored))
        })
    };
    let given = [Role::Input, Role::Saved, Role::Cotangent, Role::OptionalCotangent];
    let (inputs, outputs) = (tensors(&given), tensors(&[Role::Output]));
    let prepared = DevicePass::new(workspace, problem, pass, &inputs, &outputs, options).unwrap();
    assert!(prepared.scratch_bytes() <= MEMORY);
    fake.fail(Part::Driver, "cuLaunchKernel", 0, 0);
    // SAFETY: the fake driver's default stream, and memory of it that stays.
    unsafe { prepared.enqueue(std::ptr::null_mut(), &inputs, &outputs, at) }.unwrap();
    (prepared.scratch_bytes(), fake.calls(Part::Driver))
}

#[test]
fn a_plan_tells_what_a_pass_does() {
    alone("plan::a_plan_tells_what_a_pass_does", |fake| {
        let workspace = Workspace::new();
        let target = workspace.target(0).unwrap();
        let memory = fake.memory(0, MEMORY + 256).next_multiple_of(256);
        let (mut fused, mut refused) = (0, 0);
        for (problem, options) in problems().iter().flat_map(|x| options().into_iter().map(move |y| (x, y))) {
            for (pass, storage) in [
                (Pass::Forward, Dtype::Bf16),
                (Pass::Backward, Dtype::Bf16),
                (Pass::Backward, Dtype::F32),
                (Pass::DoubleBackward, Dtype::Bf16),
                (Pass::Jvp, Dtype::F32),
            ] {
                let Ok(plan) = plan(problem, pass, storage, &options, &target) else {
                    refused += 1;
                    continue;
                };
                let what = format!("{problem:?} {pass} {storage} {options:?}: {plan:?}");
                let launches: usize = plan.steps.iter().map(|step| step.launches).sum();
                let found = measured(fake, &workspace, problem, (pass, storage), &options, memory);
                assert_eq!(found, (plan.workspace_bytes(), launches), "{what}");
                fused += usize::from(plan.mode == Some(Mode::FusedPartials));
            }
        }
        // Wide operands have no such mode on sm80, and f32 none of its kernels.
        assert!(fused > 20 && refused > 20, "{fused} {refused}");
    });
}

#[test]
fn every_algorithm_has_a_plan_of_what_it_enqueues() {
    alone("plan::every_algorithm_has_a_plan_of_what_it_enqueues", |fake| {
        let workspace = Workspace::new();
        let target = workspace.target(0).unwrap();
        let mut algorithms = BTreeSet::new();
        each_pass(|name, algorithm, (pass, storage), options| {
            let problem = problem(algorithm, 100);
            let plan = plan(&problem, pass, storage, &options, &target).unwrap();
            let tensors = Tensors::new(fake, problem, (pass, storage), options, None);
            let prepared = tensors.prepare(&workspace).unwrap();
            assert_eq!(prepared.scratch_bytes(), plan.workspace_bytes(), "{name}");
            fake.fail(Part::Driver, "cuLaunchKernel", 0, 0);
            tensors.enqueue(&prepared).unwrap();
            let launches: usize = plan.steps.iter().map(|step| step.launches).sum();
            assert_eq!(fake.calls(Part::Driver), launches, "{name}: {plan:?}");
            algorithms.insert(algorithm.name());
        });
        assert_eq!(algorithms.len(), Algorithm::ALL.len());
    });
}
