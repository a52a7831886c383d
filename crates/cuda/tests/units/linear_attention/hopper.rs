//! Unit tests of `src/linear_attention/hopper.rs`.

use super::*;

#[test]
fn a_segment_depends_on_the_length_of_its_sequence() {
    let of = |n| segment(n);
    assert_eq!([1, 8192, 8193, 131_072].map(of), [1, 8192, 2048, 2048]);
    assert_eq!([131_073, 262_144, 262_145, 1 << 20].map(of), [4096, 4096, 8192, 8192]);
    assert_eq!([0, 128, 513, 1501].map(short_segment), [128, 128, 256, 512]);
    assert_eq!(short_segment(usize::MAX), 1 << (usize::BITS - 2));
}
