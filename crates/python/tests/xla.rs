//! The layout of XLA's types: sizes and places of fields as a C compiler for x86-64 finds them in the header.
#![cfg(target_pointer_width = "64")]

#[allow(dead_code, reason = "most of it is used by the library alone")]
#[path = "../src/xla.rs"]
mod xla;

use std::mem::offset_of;
use xla::*;

#[test]
fn fields_lie_where_the_header_has_them() {
    assert_eq!((size_of::<ExtensionBase>(), offset_of!(ExtensionBase, next)), (24, 16));
    assert_eq!((size_of::<ApiVersion>(), offset_of!(ApiVersion, minor_version)), (24, 20));
    assert_eq!((offset_of!(Metadata, api_version), offset_of!(Metadata, traits)), (8, 32));
    assert_eq!(offset_of!(MetadataExtension, metadata), 24);
    assert_eq!((size_of::<ErrorCreateArgs>(), offset_of!(ErrorCreateArgs, errc)), (32, 24));
    assert_eq!((offset_of!(Api, api_version), offset_of!(Api, internal_api)), (16, 40));
    assert_eq!(offset_of!(Api, error_create), 48);
    assert_eq!((size_of::<Buffer>(), offset_of!(Buffer, dtype)), (48, 16));
    assert_eq!((offset_of!(Buffer, data), offset_of!(Buffer, dims)), (24, 40));
    assert_eq!(size_of::<ByteSpan>(), 16);
    assert_eq!((size_of::<Buffers>(), offset_of!(Buffers, buffers)), (40, 32));
    assert_eq!((size_of::<Attrs>(), offset_of!(Attrs, attrs)), (48, 40));
    assert_eq!((offset_of!(CallFrame, api), offset_of!(CallFrame, stage)), (16, 32));
    assert_eq!((offset_of!(CallFrame, args), offset_of!(CallFrame, rets)), (40, 80));
    // The header's next field, `future`, begins where this type ends.
    assert_eq!((offset_of!(CallFrame, attrs), size_of::<CallFrame>()), (120, 168));
}
