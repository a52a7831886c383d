//! Unit tests of `src/target.rs`.

use super::*;
use crate::softmax::most_shared;

#[test]
fn the_shared_memory_is_what_kernels_are_planned_for() {
    for ((major, minor), _, shared) in KNOWN {
        let name = format!("sm_{major}{minor}");
        assert_eq!(most_shared(&name), shared, "{name}");
        assert_eq!(Target::of(&name).unwrap().shared_memory, shared);
    }
    assert_eq!(Target::of("sm_90a").unwrap(), Target::default());
    assert!(Target::of("sm_75").is_err() && Target::of("90").is_err());
}
