//! A pass as a graph: however many kernels it launches, one call of the driver enqueues it.

use crate::device_pass::DevicePass;
use crate::device_tensor::DeviceTensors;
use cudarc::driver::CudaGraph;
use cudarc::driver::result::graph;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstream, CUstreamCaptureMode};
use etalon_problem::{Error, Result};
use std::fmt;

/// A prepared pass whose tensors and scratch memory lie where they lay when it was recorded. What it enqueues is
/// what [`DevicePass::enqueue`] does, with the same bits.
///
/// The driver runs what is enqueued so one after the other, also on several streams, since it has one scratch memory.
/// Until it is dropped, it holds a little memory of the host and of the device.
pub struct RecordedPass<'p> {
    pass: &'p DevicePass,
    graph: CudaGraph,
}

// SAFETY: the driver lets any thread use a graph, one at a time: what uses it here borrows it exclusively or owns it.
// The rest may be shared.
unsafe impl Send for RecordedPass<'_> {}

/// The driver takes its memory when a pass is recorded.
const FLAGS: CUgraphInstantiate_flags = CUgraphInstantiate_flags(0);

impl DevicePass {
    /// Records the pass for these tensors and this scratch memory, on a stream of its own. Nothing is computed.
    /// Fails as [`DevicePass::enqueue`] does.
    ///
    /// # Safety
    /// As [`DevicePass::enqueue`], for every time that what was recorded is enqueued.
    pub unsafe fn record(
        &self,
        inputs: &DeviceTensors<'_>,
        outputs: &DeviceTensors<'_>,
        scratch: u64,
    ) -> Result<RecordedPass<'_>> {
        let device = self.device();
        device.check_alive()?;
        device.bind()?;
        let stream = device.check(WHAT, device.context.new_stream())?;
        // Calls of other threads meanwhile are of no account.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        device.check(WHAT, stream.begin_capture(mode))?;
        // SAFETY: the caller's promise; the stream is of the context, and runs nothing while it is captured.
        let enqueued = unsafe { self.enqueue(stream.cu_stream(), inputs, outputs, scratch) };
        // The capture ends, whatever fails.
        let graph = stream.end_capture(FLAGS);
        enqueued?;
        let none = || Error::Device { what: WHAT.to_string(), reason: "there is no graph".to_string() };
        Ok(RecordedPass { pass: self, graph: device.check(WHAT, graph)?.ok_or_else(none)? })
    }
}

const WHAT: &str = "recording a pass";

impl RecordedPass<'_> {
    /// Enqueues the pass on a stream of the device's primary context: nothing has been computed when this returns.
    ///
    /// # Safety
    /// As [`DevicePass::enqueue`], with the tensors and the scratch memory that were recorded.
    pub unsafe fn enqueue(&mut self, stream: CUstream) -> Result<()> {
        let device = self.pass.device();
        device.check_alive()?;
        device.bind()?;
        // SAFETY: the graph lives, nobody else uses it now, and the stream is of its context by the caller's promise.
        let launched = unsafe { graph::launch(self.graph.cu_graph_exec(), stream) };
        device.check("launching a recorded pass", launched)
    }
}

impl fmt::Debug for RecordedPass<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordedPass").field("pass", self.pass).finish_non_exhaustive()
    }
}
