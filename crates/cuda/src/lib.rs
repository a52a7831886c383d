//! The CUDA tier. It builds everywhere, with no CUDA installed, and loads driver and compiler at
//! run time. It has no kernels yet: today it can only say, without a panic, whether a device
//! could run them.
//!
//! ```
//! match etalon_cuda::probe() {
//!     Ok(devices) => println!("{devices} device(s)"),
//!     Err(absent) => println!("no CUDA: {absent}"),
//! }
//! ```

mod device;

pub use device::{Absent, probe};
