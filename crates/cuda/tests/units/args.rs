//! Unit tests of `src/args.rs`.

use crate::args::{Arguments, ConstPtr, Definitions, Element, Field, Ptr, kernel_args};
use crate::tensor_map::TensorMap;

kernel_args! {
    /// A part.
    struct Part as "Part" {
        first: i32,
        at: ConstPtr<f32>,
    }
}

kernel_args! {
    /// A whole.
    struct Whole as "Call" {
        map: TensorMap,
        count: i32,
        parts: [Part; 2],
        scales: [f32; 3],
        out: Ptr<Element>,
        next: ConstPtr<Part>,
    }
}

#[test]
fn fields_lie_as_c_lays_them_out() {
    // The map at 0, an int at 128, parts of 16 bytes from 136 on, floats behind them, addresses at multiples of 8.
    assert_eq!(Whole::LAYOUT, ([0, 128, 136, 168, 184, 192], 256, 128));
    assert_eq!(Part::LAYOUT, ([0, 8], 16, 8));
}

#[test]
fn a_struct_is_defined_once_and_behind_its_parts() {
    let mut definitions = Definitions::default();
    <Whole as Field>::define(&mut definitions);
    <Whole as Field>::define(&mut definitions);
    let part = "struct Part {\n  int first;\n  const float* at;\n};\n";
    let whole = "struct Call {\n  TensorMap map;\n  int count;\n  Part parts[2];\n  float scales[3];\n  \
                 element* out;\n  const Part* next;\n};\n";
    let text = format!(
        "{part}static_assert(sizeof(Part) == 16, \"Part\");\n{whole}static_assert(sizeof(Call) == 256, \"Call\");\n"
    );
    assert_eq!(definitions.text, text);
}

#[test]
fn values_stand_at_their_offsets_and_addresses_are_listed() {
    let part = |first, at: u64| Part { first, at: at.into() };
    let whole = Whole { parts: [part(3, 0), part(4, 7)], out: 9.into(), ..Whole::default() };
    let Arguments { bytes, symbols, maps } = Arguments::of(&[whole]);
    assert_eq!(bytes.len(), 256);
    assert_eq!([bytes[136], bytes[152], bytes[160], bytes[184]], [3, 4, 7, 9]);
    // The address of the first part is 0: nothing is there.
    assert_eq!(symbols, [160, 184]);
    assert!(maps.is_empty());
}
