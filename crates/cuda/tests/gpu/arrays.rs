//! Tensors of a pass in the memory of a device, and its inputs.

use super::tensors::{Tensor, Tensors, random, results};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use etalon_cuda::{DeviceTensor, Element, Options, Workspace};
use etalon_problem::{Dtype, Error, Pass, Problem, Role};
use std::sync::Arc;

impl Tensor {
    pub fn bytes(&self) -> Vec<u8> {
        match self {
            Tensor::Bf16(x) => x.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect(),
            Tensor::F32(x) => x.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect(),
        }
    }

    pub fn element(&self) -> Element {
        match self {
            Tensor::Bf16(_) => Dtype::Bf16.into(),
            Tensor::F32(_) => Dtype::F32.into(),
        }
    }

    pub fn shape(&self) -> &[usize] {
        match self {
            Tensor::Bf16(x) => x.shape(),
            Tensor::F32(x) => x.shape(),
        }
    }
}

/// Inputs of a pass: random numbers, and the tensors that the forward pass of the problem saves.
pub fn inputs(workspace: &Workspace, problem: &Problem, pass: Pass, options: &Options) -> Result<Tensors, Error> {
    let random = |pass| random(problem, pass, &[Role::Input, Role::Cotangent]);
    let mut all = random(pass);
    let saved: Vec<_> = problem.operands(pass).into_iter().filter(|x| x.role == Role::Saved).collect();
    if !saved.is_empty() {
        let own = random(Pass::Forward).into_keys().map(|name| (name, all[name].clone()));
        let own = own.collect();
        let made = results(workspace, problem, Pass::Forward, &own, |_| true, options)?;
        all.extend(saved.iter().map(|x| (x.name, made[x.name].clone())));
    }
    Ok(all)
}

/// A tensor on the device, and what keeps its memory.
pub struct DeviceArray {
    pub memory: CudaSlice<u8>,
    bytes: usize,
    shape: Vec<usize>,
    element: Element,
}

impl DeviceArray {
    pub fn new(stream: &Arc<CudaStream>, bytes: &[u8], shape: &[usize], element: Element) -> DeviceArray {
        let mut memory = stream.alloc_zeros::<u8>(bytes.len().max(16)).unwrap();
        stream.memcpy_htod(bytes, &mut memory).unwrap();
        DeviceArray { memory, bytes: bytes.len(), shape: shape.to_vec(), element }
    }

    pub fn put(&mut self, stream: &Arc<CudaStream>, bytes: &[u8]) {
        stream.memcpy_htod(bytes, &mut self.memory).unwrap();
    }

    pub fn tensor(&self, stream: &CudaStream) -> DeviceTensor {
        DeviceTensor::dense(self.memory.device_ptr(stream).0, &self.shape, self.element)
    }

    pub fn get(&self, stream: &Arc<CudaStream>) -> Vec<u8> {
        let mut all = stream.clone_dtoh(&self.memory).unwrap();
        all.truncate(self.bytes);
        all
    }
}
