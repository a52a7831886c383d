//! Unit tests of `src/target.rs`.

use crate::target::{Target, shared_memory};

#[test]
fn a_device_has_the_shared_memory_of_its_architecture() {
    for (name, shared) in [
        ("sm_80", 166_912),
        ("sm_86", 101_376),
        ("sm_87", 166_912),
        ("sm_89", 101_376),
        ("sm_90", 232_448),
        ("sm_100", 232_448),
        ("sm_120", 101_376),
    ] {
        assert_eq!(Target::of(name).unwrap().shared_memory, shared, "{name}");
    }
    // No device of these is known, but kernels are archived for it.
    assert_eq!((shared_memory("sm_121"), shared_memory("sm_103")), (101_376, 232_448));
    assert_eq!(Target::of("sm_90a").unwrap(), Target::default());
    assert!(Target::of("sm_75").is_err() && Target::of("90").is_err());
}
