//! Unit tests of `src/linear_cross_entropy/plan.rs`.

use super::*;

const ALL: PassSpec = PassSpec {
    dh: true,
    dw: true,
    dbias: true,
    wide: false,
    second: false,
    tokens: 8192,
    dim: 2304,
    vocab: 256_000,
    budget: 512 << 20,
    tensor: false,
    side_by_side: 66,
};

fn bytes(plan: &Plan, planes: usize) -> usize {
    planes * plan.plane + plan.nodes + plan.hidden + plan.head + plan.head_bias
}

#[test]
fn a_small_problem_is_one_chunk() {
    let plan = Plan::new(PassSpec { tokens: 5, dim: 7, vocab: 300, ..ALL }).unwrap();
    assert_eq!((plan.rows, plan.columns), (128, 512));
    assert!(plan.keeps && !plan.apart && plan.head == 0);
}

#[test]
fn chunks_stay_within_the_budget() {
    for (budget, second, wide) in [(64, false, false), (64, true, false), (256, false, true), (1024, true, true)] {
        let budget = budget << 20;
        let plan = Plan::new(PassSpec { second, wide, budget, ..ALL }).unwrap();
        assert!(bytes(&plan, 1 + usize::from(second)) <= budget, "{plan:?}");
        assert!(plan.columns >= WIDE, "{plan:?}");
        assert_eq!(plan.apart, !wide);
    }
}

#[test]
fn chunks_on_tensor_cores_end_with_a_whole_round_of_tiles() {
    // 66 tiles of classes are 32 rounds of 32 × 66 tiles, and 9 of 66 × 9.
    let spec = PassSpec { tensor: true, dbias: false, ..ALL };
    let plan = Plan::new(spec).unwrap();
    assert_eq!((plan.rows, plan.columns), (8192, 66 * TILE));
    assert_eq!(spec.columns_of_hidden(8192), 192);
    assert_eq!(PassSpec { dim: 4096, ..spec }.columns_of_hidden(8192), TILE);
}

#[test]
fn a_shard_has_the_rows_of_the_whole() {
    for (tensor, budget) in [(true, 512), (true, 32), (false, 64)] {
        let spec = PassSpec { tensor, budget: budget << 20, ..ALL };
        let whole = Plan::new(spec).unwrap();
        for classes in [0, 1, 1000, 128_000] {
            let walked = Walked { classes, widest: classes, nodes: true };
            let plan = Plan::of_shard(spec, walked).unwrap();
            assert_eq!((plan.rows, plan.apart, plan.keeps), (whole.rows, whole.apart, false));
            assert!(plan.columns <= classes.max(1).next_multiple_of(TILE));
        }
    }
}

#[test]
fn sums_of_dh_wait_for_others_of_a_tree_of_four_blocks() {
    assert_eq!([1, 256, 257, 1000, 1025, 256_000].map(block), [256, 256, 256, 256, 512, 65_536]);
    // One after the other, the first two, the third beside them, and the fourth.
    assert_eq!([1, 512, 513, 1024, 1025, 2048].map(|x| sums(x, 512)), [1, 1, 2, 2, 2, 3]);
    assert_eq!(sums(8 * 512, 512), 4);
}

#[test]
fn the_smallest_chunk_is_a_tile() {
    let plan = Plan::new(PassSpec { tokens: 1000, dim: 64, vocab: 10_000, budget: 0, ..ALL }).unwrap();
    assert_eq!((plan.rows, plan.columns), (SIDE, TILE));
    assert!(plan.apart && !plan.keeps);
}
