//! Tensors of a pass on arrays of the host, by name.

use super::numbers::numbers;
use etalon_cuda::{Options, Workspace, run_in};
use etalon_problem::{Dtype, Error, Operand, Pass, Problem, Role, Stored, Views, ViewsMut};
use half::bf16;
use ndarray::ArrayD;
use std::collections::BTreeMap;

/// A tensor of bf16, or of f32.
#[derive(Debug, Clone)]
pub enum Tensor {
    Bf16(ArrayD<bf16>),
    F32(ArrayD<f32>),
}

pub type Tensors = BTreeMap<&'static str, Tensor>;

impl Tensor {
    /// Small numbers that no rule repeats.
    pub fn random(operand: &Operand, seed: usize) -> Tensor {
        let x = numbers(&operand.shape, seed);
        match Stored::of(operand.precision, Dtype::Bf16) {
            Stored::Float(Dtype::Bf16) => Tensor::Bf16(x),
            _ => Tensor::F32(x.mapv(bf16::to_f32)),
        }
    }

    /// Contents that no pass leaves.
    pub fn blank(operand: &Operand) -> Tensor {
        match Tensor::random(operand, 0) {
            Tensor::Bf16(x) => Tensor::Bf16(x.mapv(|_| bf16::NAN)),
            Tensor::F32(x) => Tensor::F32(x.mapv(|_| f32::NAN)),
        }
    }
}

/// Random tensors for the operands of a pass that have one of these roles.
pub fn random(problem: &Problem, pass: Pass, roles: &[Role]) -> Tensors {
    let operands = problem.operands(pass).into_iter().enumerate();
    let own = operands.filter(|(_, x)| roles.contains(&x.role));
    own.map(|(seed, x)| (x.name, Tensor::random(&x, seed + 1))).collect()
}

/// The results of a pass that are wanted, by the host's door. Inputs that it does not read are left out.
pub fn results(
    workspace: &Workspace,
    problem: &Problem,
    pass: Pass,
    inputs: &Tensors,
    is_wanted: impl Fn(&str) -> bool,
    options: &Options,
) -> Result<Tensors, Error> {
    let (written, read): (Vec<_>, Vec<_>) = problem.operands(pass).into_iter().partition(|x| x.role == Role::Output);
    let written = written.iter().filter(|x| is_wanted(x.name));
    let mut outputs: Tensors = written.map(|x| (x.name, Tensor::blank(x))).collect();
    let mut places = ViewsMut::new();
    for (name, x) in &mut outputs {
        places = match x {
            Tensor::Bf16(x) => places.with(name, x),
            Tensor::F32(x) => places.with(name, x),
        };
    }
    let given = read.iter().filter_map(|x| inputs.get_key_value(x.name));
    let views = given.fold(Views::new(), |all, (name, x)| match x {
        Tensor::Bf16(x) => all.with(name, x),
        Tensor::F32(x) => all.with(name, x),
    });
    run_in(workspace, problem, pass, &views, &mut places, options)?;
    drop((places, views));
    Ok(outputs)
}
