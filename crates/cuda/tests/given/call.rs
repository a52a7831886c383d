//! Operands and arrays of a problem, on the host and on the device.

use super::arrays::{DeviceArray, inputs};
use super::tensors::{Tensor, Tensors, results};
use cudarc::driver::CudaStream;
use etalon_cuda::{DeviceTensors, Element, Options, Workspace};
use etalon_problem::{Error, Mask, Pass, Problem, Role, Sequences, Stored};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Inputs and results of a pass.
pub fn computed(
    workspace: &Workspace,
    problem: &Problem,
    pass: Pass,
    options: &Options,
) -> Result<[Tensors; 2], Error> {
    let inputs = inputs(workspace, problem, pass, options)?;
    let outputs = results(workspace, problem, pass, &inputs, |_| true, options)?;
    Ok([inputs, outputs])
}

/// An array of a problem as a call gives it.
pub struct Given {
    pub name: String,
    pub shape: Vec<usize>,
    pub element: Element,
    pub bytes: Vec<u8>,
}

/// Integers of 32 bits, or of 64.
pub fn integers(name: &str, shape: &[usize], list: &[i64], wide: bool) -> Given {
    let bytes = |x: &i64| match wide {
        true => x.to_le_bytes().to_vec(),
        false => (*x as i32).to_le_bytes().to_vec(),
    };
    let element = if wide { Stored::Integer.into() } else { Element::I32 };
    let (name, bytes) = (name.to_string(), list.iter().flat_map(bytes).collect());
    Given { name, shape: shape.to_vec(), element, bytes }
}

/// The arrays of a problem.
pub fn arrays(problem: &Problem, wide: bool) -> Vec<Given> {
    let mut all = Vec::new();
    let mut lengths = |name: &str, list: &[usize]| {
        let list: Vec<i64> = list.iter().map(|&x| x as i64).collect();
        all.push(integers(name, &[list.len()], &list, wide));
    };
    match &problem.scores().unwrap().sequences {
        Sequences::Dense => {}
        Sequences::Lengths { query, key } => {
            lengths("sequences.query", query);
            lengths("sequences.key", key);
        }
        Sequences::Packed { cu_query, cu_key } => {
            lengths("sequences.cu_query", cu_query);
            lengths("sequences.cu_key", cu_key);
        }
    }
    problem.scores().unwrap().mask.clone().visit_mut(&mut |mask| match mask {
        Mask::Segments { query, key } => {
            for ids in [query, key] {
                all.push(integers(&ids.name, &ids.shape, &ids.data, wide));
            }
        }
        Mask::Array(array) => all.push(Given {
            name: array.name.clone(),
            shape: array.shape.clone(),
            element: Element::Bool,
            bytes: array.data.iter().map(|&x| x.into()).collect(),
        }),
        _ => {}
    });
    all
}

/// The tensors of a call on the device, each with what keeps its memory.
pub struct Call<'a> {
    pub stream: &'a Arc<CudaStream>,
    inputs: BTreeMap<&'static str, DeviceArray>,
    arrays: Vec<(String, DeviceArray)>,
    outputs: BTreeMap<&'static str, DeviceArray>,
    blank: Tensors,
}

impl<'a> Call<'a> {
    /// Of the operands of a pass; the arrays hold numbers that no problem has, until they are put there.
    pub fn new(stream: &'a Arc<CudaStream>, problem: &Problem, pass: Pass, inputs: &Tensors, arrays: &[Given]) -> Self {
        let hold =
            |(name, x): (&&'static str, &Tensor)| (*name, DeviceArray::new(stream, &x.bytes(), x.shape(), x.element()));
        let outputs = problem.operands(pass).into_iter().filter(|x| x.role == Role::Output);
        let blank: Tensors = outputs.map(|x| (x.name, Tensor::blank(&x))).collect();
        let array = |x: &Given| {
            let memory = vec![0x55; x.bytes.len()];
            (x.name.clone(), DeviceArray::new(stream, &memory, &x.shape, x.element))
        };
        Call {
            stream,
            inputs: inputs.iter().map(hold).collect(),
            arrays: arrays.iter().map(array).collect(),
            outputs: blank.iter().map(hold).collect(),
            blank,
        }
    }

    /// Descriptions of the tensors for a pass.
    pub fn tensors(&self) -> [DeviceTensors<'_>; 2] {
        let inputs = self.inputs.iter().map(|(name, x)| (*name, x));
        let arrays = self.arrays.iter().map(|(name, x)| (&name[..], x));
        let outputs = self.outputs.iter().map(|(name, x)| (*name, x));
        let list = [inputs.chain(arrays).collect::<Vec<_>>(), outputs.collect()];
        list.map(|list| {
            list.into_iter().fold(DeviceTensors::new(), |all, (name, x)| all.with(name, x.tensor(self.stream)))
        })
    }

    pub fn put(&mut self, inputs: &Tensors, arrays: &[Given]) {
        for (name, x) in inputs {
            self.inputs.get_mut(name).unwrap().put(self.stream, &x.bytes());
        }
        for (x, (name, held)) in arrays.iter().zip(&mut self.arrays) {
            assert_eq!(&x.name, name);
            held.put(self.stream, &x.bytes);
        }
    }

    /// Writes to every result what no pass leaves there.
    pub fn blank(&mut self) {
        for (name, x) in &mut self.outputs {
            x.put(self.stream, &self.blank[name].bytes());
        }
    }

    /// Fails unless the results have these bits.
    pub fn check(&self, wanted: &Tensors, what: &str) {
        self.stream.synchronize().unwrap();
        for (name, wanted) in wanted {
            let found = self.outputs[name].get(self.stream);
            assert!(found == wanted.bytes(), "{name} {what}");
        }
    }
}
