//! Types of XLA's foreign function interface, version 0.3 (`xla/ffi/api/c_api.h` of jaxlib 0.10).
//!
//! Types and fields have the header's names without `XLA_FFI_`. Fields at the end that nobody reads here are left out:
//! whoever made a struct says in `struct_size` how much of it there is.

use std::ffi::{c_char, c_int, c_void};

/// The version of the interface that a handler reports. Others have other layouts: 0.0 had no `stage`.
pub const MAJOR: c_int = 0;
pub const MINOR: c_int = 3;

/// `XLA_FFI_Extension_Metadata`.
pub const METADATA: u32 = 1;
/// `XLA_FFI_ExecutionStage_EXECUTE`.
pub const EXECUTE: u32 = 3;
/// `XLA_FFI_AttrType_STRING`.
pub const STRING: u32 = 4;
/// `XLA_FFI_ArgType_BUFFER` and `XLA_FFI_RetType_BUFFER`.
pub const BUFFER: u32 = 1;

/// Values of `XLA_FFI_DataType`.
pub mod data_type {
    pub const PRED: u32 = 1;
    pub const S32: u32 = 4;
    pub const S64: u32 = 5;
    pub const F16: u32 = 10;
    pub const F32: u32 = 11;
    pub const F64: u32 = 12;
    pub const BF16: u32 = 16;
}

/// Values of `XLA_FFI_Error_Code`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Code {
    InvalidArgument = 3,
    ResourceExhausted = 8,
    Unimplemented = 12,
    Internal = 13,
}

/// An error that XLA has made; opaque.
pub type Failed = *mut c_void;

#[repr(C)]
pub struct ExtensionBase {
    pub struct_size: usize,
    pub kind: u32,
    pub next: *mut ExtensionBase,
}

#[repr(C)]
pub struct ApiVersion {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub major_version: c_int,
    pub minor_version: c_int,
}

#[repr(C)]
pub struct Metadata {
    pub struct_size: usize,
    pub api_version: ApiVersion,
    pub traits: u32,
}

#[repr(C)]
pub struct MetadataExtension {
    pub extension_base: ExtensionBase,
    pub metadata: *mut Metadata,
}

#[repr(C)]
pub struct ErrorCreateArgs {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub message: *const c_char,
    pub errc: Code,
}

pub type ErrorCreate = unsafe extern "C" fn(*mut ErrorCreateArgs) -> Failed;

#[repr(C)]
pub struct Api {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub api_version: ApiVersion,
    pub internal_api: *const c_void,
    pub error_create: Option<ErrorCreate>,
}

#[repr(C)]
pub struct Buffer {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub dtype: u32,
    pub data: *mut c_void,
    pub rank: i64,
    pub dims: *const i64,
}

#[repr(C)]
pub struct ByteSpan {
    pub ptr: *const u8,
    pub len: usize,
}

/// `XLA_FFI_Args` and `XLA_FFI_Rets`.
#[repr(C)]
pub struct Buffers {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub size: i64,
    pub types: *const u32,
    pub buffers: *const *const c_void,
}

#[repr(C)]
pub struct Attrs {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub size: i64,
    pub types: *const u32,
    pub names: *const *const ByteSpan,
    pub attrs: *const *const c_void,
}

#[repr(C)]
pub struct CallFrame {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub api: *const Api,
    pub ctx: *mut c_void,
    pub stage: u32,
    pub args: Buffers,
    pub rets: Buffers,
    pub attrs: Attrs,
}
