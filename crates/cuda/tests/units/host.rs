//! Unit tests of `src/host.rs`.

use crate::host::{with_bytes, write_bytes};
use half::bf16;
use ndarray::{Array2, s};

#[test]
fn bytes_have_the_order_of_the_shape_whatever_the_strides() {
    let array = Array2::from_shape_fn((3, 4), |(i, j)| bf16::from_f32((4 * i + j) as f32));
    let turned = array.slice(s![..;-1, 1..;2]);
    let wanted: Vec<u8> =
        [9.0f32, 11.0, 5.0, 7.0, 1.0, 3.0].iter().flat_map(|&x| bf16::from_f32(x).to_ne_bytes()).collect();
    let check = |bytes: &[u8]| {
        assert_eq!(bytes, wanted);
        Ok(())
    };
    with_bytes("x", &turned.into(), check).unwrap();

    let mut back = Array2::from_elem((3, 4), bf16::ZERO);
    let place = back.slice_mut(s![..;-1, 1..;2]);
    let write = |bytes: &mut [u8]| {
        bytes.copy_from_slice(&wanted);
        Ok(())
    };
    write_bytes("x", place.into(), write).unwrap();
    assert_eq!(back.slice(s![.., 1..;2]), array.slice(s![.., 1..;2]));
    assert_eq!(back[[1, 0]], bf16::ZERO);
}
