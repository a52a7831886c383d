//! Operands of a pass on arrays of the host, bf16 or f32, by name.

use etalon_cuda::{Options, Workspace, run_in};
use etalon_problem::{Dtype, Operand, Pass, Problem, Role, Stored, Views, ViewsMut};
use half::bf16;
use ndarray::{ArrayD, IxDyn};
use std::collections::BTreeMap;

/// Operands of 16 bits, and those of f32.
#[derive(Clone, Default)]
pub struct Operands {
    pub narrow: BTreeMap<&'static str, ArrayD<bf16>>,
    pub wide: BTreeMap<&'static str, ArrayD<f32>>,
}

/// Small numbers that no rule repeats.
pub fn numbers(shape: &[usize], seed: usize) -> ArrayD<bf16> {
    let mut at = seed;
    ArrayD::from_shape_simple_fn(IxDyn(shape), || {
        at = at.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        bf16::from_f32(((at >> 40) % 257) as f32 / 128.0 - 1.0)
    })
}

impl Operands {
    /// Such numbers for each input and cotangent of a pass.
    pub fn inputs(problem: &Problem, pass: Pass) -> Operands {
        let mut all = Operands::default();
        for (seed, x) in problem.operands(pass).iter().enumerate() {
            if matches!(x.role, Role::Input | Role::Cotangent | Role::OptionalCotangent) {
                all.put(x, numbers(&x.shape, seed + 1));
            }
        }
        all
    }

    /// Results of a pass by their names, as the options compute them.
    pub fn results(
        &self,
        workspace: &Workspace,
        problem: &Problem,
        pass: Pass,
        names: &[&str],
        options: &Options,
    ) -> Operands {
        let (mut found, operands) = (Operands::default(), problem.operands(pass));
        for x in operands.iter().filter(|x| x.role == Role::Output && names.contains(&x.name)) {
            found.put(x, ArrayD::from_elem(x.shape.clone(), bf16::NAN));
        }
        let is_read = |name: &&'static str| operands.iter().any(|x| x.name == *name && x.role != Role::Output);
        let mut views = Views::new();
        for (name, x) in self.narrow.iter().filter(|(name, _)| is_read(name)) {
            views = views.with(name, x);
        }
        for (name, x) in self.wide.iter().filter(|(name, _)| is_read(name)) {
            views = views.with(name, x);
        }
        let mut places = ViewsMut::new();
        for (name, x) in &mut found.narrow {
            places = places.with(name, x);
        }
        for (name, x) in &mut found.wide {
            places = places.with(name, x);
        }
        run_in(workspace, problem, pass, &views, &mut places, options).unwrap();
        drop(places);
        found
    }

    /// All of them in f32.
    pub fn in_f32(self) -> BTreeMap<&'static str, ArrayD<f32>> {
        let narrow = self.narrow.into_iter().map(|(name, x)| (name, x.mapv(bf16::to_f32)));
        narrow.chain(self.wide).collect()
    }

    pub fn extend(&mut self, more: Operands) {
        self.narrow.extend(more.narrow);
        self.wide.extend(more.wide);
    }

    fn put(&mut self, operand: &Operand, values: ArrayD<bf16>) {
        match Stored::of(operand.precision, Dtype::Bf16) {
            Stored::Float(Dtype::F32) => drop(self.wide.insert(operand.name, values.mapv(bf16::to_f32))),
            _ => drop(self.narrow.insert(operand.name, values)),
        }
    }
}
