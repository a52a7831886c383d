//! The schema of lengths and offsets in problem files.

/// The schema of lengths or offsets of sequences: a list, or the name of a tensor.
pub(crate) struct Offsets;

impl schemars::JsonSchema for Offsets {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Offsets".into()
    }
    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "anyOf": [
                { "type": "array", "items": { "type": "integer", "format": "uint", "minimum": 0 } },
                { "type": "string" }
            ],
            "description": "Whole numbers, or the name of a tensor of int64 or int32 in the safetensors file \
                beside the problem."
        })
    }
}
