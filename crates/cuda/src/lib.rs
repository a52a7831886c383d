//! The CUDA tier: every algorithm on GPUs. It builds with no CUDA installed, and loads the driver and the compiler
//! (NVRTC) when it runs. Where one of them is absent or too old, [`run()`] fails with the reason; nothing panics.
//!
//! ```
//! match etalon_cuda::probe() {
//!     Ok(devices) => println!("{devices} device(s)"),
//!     Err(absent) => println!("no CUDA: {absent}"),
//! }
//! ```
//!
//! [`run()`] takes and fills arrays of the host, by name; [`run_in`] keeps devices, compiled kernels and
//! device memory between calls in a [`Workspace`].

mod absent;
mod archive;
mod args;
mod cache;
mod call;
mod compiler;
mod device;
mod device_id;
mod device_pass;
mod device_tensor;
mod family;
mod gpu;
mod host;
mod images;
pub mod kernels;
pub mod lazy_attention;
mod level_table;
pub mod levels;
mod linear_attention;
pub mod linear_cross_entropy;
mod lock;
mod matrix;
mod memory;
mod options;
mod parts;
mod pass;
mod peak;
mod plan;
mod queue;
mod read_as;
mod recorded;
mod run;
mod shared;
mod softmax;
mod source;
mod step;
mod strided;
mod target;
mod tensor_map;
mod timing;
mod variant;
mod workspace;

pub use absent::Absent;
pub use cache::Cache;
pub use device::probe;
pub use device_id::DeviceId;
pub use device_pass::DevicePass;
pub use device_tensor::{DeviceTensor, DeviceTensors, Element};
pub use options::{Level, Options, Precision, Settings};
pub use plan::{Plan, plan};
pub use recorded::RecordedPass;
pub use run::{run, run_in};
pub use target::Target;
pub use timing::{Timing, time};
pub use workspace::Workspace;

#[cfg(test)]
#[path = "../tests/units/lib.rs"]
mod tests;
