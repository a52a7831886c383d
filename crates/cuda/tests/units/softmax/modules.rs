//! Unit tests of `src/softmax/modules.rs`.

use crate::softmax::chosen;
use etalon_problem::Blocking;

fn tile(queries: usize, keys: usize) -> Blocking {
    Blocking { queries, keys }
}

#[test]
fn a_hint_is_rounded_up_to_a_tile_that_exists() {
    let list = [tile(128, 64), tile(128, 32), tile(64, 64)];
    let of = |queries, keys| chosen(&list, Some(tile(queries, keys)));
    assert_eq!(chosen(&list, None), tile(128, 64));
    assert_eq!(of(1, 1), tile(64, 64));
    assert_eq!(of(96, 16), tile(128, 32));
    assert_eq!(of(128, 33), tile(128, 64));
    assert_eq!(of(33, 65), tile(128, 64));
    assert_eq!(of(1 << 20, 1 << 20), tile(128, 64));
}
