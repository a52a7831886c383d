//! The first device, for tests that need one.

use cudarc::driver::{CudaContext, CudaStream};
use etalon_cuda::{Level, Options, Precision, Workspace, probe};
use std::sync::Arc;

/// A stream of it; none, and a line that says why, where there is no device.
pub fn stream() -> Option<Arc<CudaStream>> {
    if let Err(absent) = probe() {
        println!("skipped: {absent}");
        return None;
    }
    Some(CudaContext::new(0).unwrap().new_stream().unwrap())
}

/// Every level that the device has.
pub fn options(workspace: &Workspace) -> Vec<Options> {
    let flash = Options { precision: Precision::Flash, ..Options::default() };
    let mut all =
        vec![Options { level: Level::Portable, ..Options::default() }, Options { level: Level::Sm80, ..flash }];
    if workspace.capability(0) == Ok((9, 0)) {
        let hopper = Options { level: Level::Sm90a, ..flash };
        all.extend([hopper, Options { assume_finite: true, ..hopper }]); // of linear_attention
    }
    all
}
