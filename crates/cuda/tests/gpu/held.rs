//! A backward pass on the device: operands, results and scratch memory of one stream.

use crate::arrays::DeviceArray;
use crate::tensors::{Tensor, Tensors};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use etalon_cuda::{DevicePass, DeviceTensors};
use etalon_problem::{Pass, Problem, Role};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Operands of a pass on the device, its results and its scratch memory.
pub struct Held {
    pub stream: Arc<CudaStream>,
    pub inputs: BTreeMap<&'static str, DeviceArray>,
    pub outputs: BTreeMap<&'static str, DeviceArray>,
    scratch: Option<CudaSlice<u8>>,
}

impl Held {
    pub fn new(stream: Arc<CudaStream>, problem: &Problem, inputs: &Tensors) -> Held {
        let put = |x: &Tensor| DeviceArray::new(&stream, &x.bytes(), x.shape(), x.element());
        let operands = problem.operands(Pass::Backward);
        let written = operands.iter().filter(|x| x.role == Role::Output);
        Held {
            inputs: inputs.iter().map(|(name, x)| (*name, put(x))).collect(),
            outputs: written.map(|x| (x.name, put(&Tensor::blank(x)))).collect(),
            scratch: None,
            stream,
        }
    }

    pub fn tensors(&self) -> [DeviceTensors<'static>; 2] {
        let of = |all: &BTreeMap<&'static str, DeviceArray>| {
            all.iter().fold(DeviceTensors::new(), |all, (name, x)| all.with(name, x.tensor(&self.stream)))
        };
        [of(&self.inputs), of(&self.outputs)]
    }

    /// The address of the scratch memory, in which at first there may be flags of a call before.
    pub fn scratch(&mut self, pass: &DevicePass) -> u64 {
        let fresh = || self.stream.clone_htod(&vec![0xff_u8; pass.scratch_bytes().max(256)]).unwrap();
        self.scratch.get_or_insert_with(fresh).device_ptr(&self.stream).0
    }

    pub fn enqueue(&mut self, pass: &DevicePass) {
        let scratch = self.scratch(pass);
        let [inputs, outputs] = self.tensors();
        // SAFETY: all tensors and the scratch memory live until the stream has been waited for, no two of them
        // overlap, and the stream is of the primary context.
        unsafe { pass.enqueue(self.stream.cu_stream(), &inputs, &outputs, scratch) }.unwrap();
    }

    pub fn get(&self) -> Vec<u8> {
        self.outputs.values().flat_map(|x| x.get(&self.stream)).collect()
    }
}
