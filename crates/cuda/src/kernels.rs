//! Kernels, for programs that compile, count or measure them: a [`Variant`] of a [`Family`] is a source of kernels,
//! each of which a [`Compiler`] compiles and an [`ArchiveWriter`] keeps; a [`Step`] of a [`Plan`](crate::Plan) is a
//! kernel over its blocks, in the arithmetic of a [`Unit`].

pub use crate::archive::ArchiveWriter;
pub use crate::compiler::{Compiled, Compiler};
pub use crate::family::{Family, Unit};
pub use crate::matrix::every_variant;
pub use crate::peak::{launch_ns, peak_gflops};
pub use crate::plan::Step;
pub use crate::shared::{declared_bytes, shared_bytes};
pub use crate::variant::Variant;

/// The tokens of a chunk of linear_attention, on every level.
pub const LINEAR_CHUNK: usize = crate::linear_attention::CHUNK;
