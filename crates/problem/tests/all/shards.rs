//! Shards of the classes of linear cross-entropy: nodes, the order in which they are put together, and refusals.

use etalon_problem::linear_cross_entropy::shard::{
    Dh, Partial, Shard, TILE, check_partials, check_shards, depth, fold, merges, nodes,
};
use etalon_problem::{LinearCrossEntropy, Pass};
use std::ops::Range;

fn in_tiles(vocab: usize, tiles: Range<usize>) -> Vec<Range<usize>> {
    let classes = tiles.start * TILE..vocab.min(tiles.end * TILE);
    nodes(vocab, classes).map(|node| node.start / TILE..node.end.div_ceil(TILE)).collect()
}

fn only(one: Range<usize>) -> Vec<Range<usize>> {
    [one].into()
}

#[test]
fn a_shard_holds_the_largest_nodes_within_it() {
    assert_eq!(in_tiles(7 * TILE, 0..7), only(0..7));
    assert_eq!(in_tiles(100 * TILE, 3..15), [3..4, 4..8, 8..12, 12..14, 14..15]);
    assert_eq!(in_tiles(7 * TILE - 9, 4..7), only(4..7), "a node without its last tile");
    assert_eq!(in_tiles(7 * TILE, 3..6), [3..4, 4..6]);
    assert_eq!(in_tiles(7 * TILE, 5..5), []);
    let all: Vec<_> = nodes(1000, 100..999).collect();
    assert_eq!(all, [100..256, 256..512, 512..768, 768..999], "parts of tiles at both ends");
    assert_eq!(nodes(1000, 300..301).collect::<Vec<_>>(), only(300..301));
    assert_eq!(nodes(usize::MAX, 0..usize::MAX).collect::<Vec<_>>(), only(0..usize::MAX));
}

fn join(x: String, y: String) -> String {
    format!("({x} {y})")
}

/// The order of a sum of parts on a stack, as a text.
fn on_a_stack(parts: &[String], merges: &[u32]) -> String {
    let mut stack: Vec<String> = Vec::new();
    for (part, &count) in parts.iter().zip(merges) {
        stack.push(part.clone());
        for _ in 0..count {
            let (y, x) = (stack.pop().unwrap(), stack.pop().unwrap());
            stack.push(join(x, y));
        }
    }
    assert_eq!(stack.len(), 1);
    stack.remove(0)
}

/// The order in which a kernel puts tiles together that it pushes one after the other.
fn pushed(tiles: Range<usize>) -> String {
    let mut stack: Vec<(usize, String)> = Vec::new();
    for tile in tiles {
        let mut next = (1, tile.to_string());
        while stack.last().is_some_and(|(size, _)| *size == next.0) {
            let (size, x) = stack.pop().unwrap();
            next = (2 * size, join(x, next.1));
        }
        stack.push(next);
    }
    let joined = stack.into_iter().rev().reduce(|y, x| (0, join(x.1, y.1)));
    joined.unwrap().1
}

#[test]
fn nodes_of_shards_are_put_together_as_tiles_are() {
    for tiles in 1..20 {
        let vocab = tiles * TILE - 3;
        for borders in [vec![0, tiles], vec![0, tiles / 3, tiles / 2, tiles], (0..=tiles).collect()]
        {
            let shards = borders.windows(2);
            let parts: Vec<_> =
                shards.flat_map(|b| nodes(vocab, b[0] * TILE..vocab.min(b[1] * TILE))).collect();
            let own = |node: &Range<usize>| pushed(node.start / TILE..node.end.div_ceil(TILE));
            let texts: Vec<String> = parts.iter().map(own).collect();
            let wanted = pushed(0..tiles);
            assert_eq!(on_a_stack(&texts, &merges(&parts)), wanted, "{parts:?}");
            assert_eq!(fold(&parts, &|number| texts[number].clone(), &join), Some(wanted));
        }
    }
}

#[test]
fn parts_of_a_tile_are_put_together_by_halves() {
    let parts = [0..3, 3..5, 5..200, 255..300, 300..900];
    let number = |number: usize| number.to_string();
    assert_eq!(fold(&parts, &number, &join).as_deref(), Some("((0 1) (2 (3 4)))"));
    let numbers: Vec<String> = (0..5).map(number).collect();
    assert_eq!(on_a_stack(&numbers, &merges(&parts)), "((0 1) (2 (3 4)))");
    assert_eq!(fold(&[], &number, &join), None);
    assert!(merges(&[]).is_empty());
    // Parts that overlap have no order, but an end.
    let same = [Range { start: 1, end: 2 }, Range { start: 1, end: 2 }, Range { start: 0, end: 1 }];
    assert_eq!(merges(&same).iter().sum::<u32>(), 2);
}

#[test]
fn few_parts_wait() {
    let classes: Vec<_> = (0..5000).map(|x| x..x + 1).collect();
    assert!(depth(&merges(&classes)) <= 13);
    // The deepest tree that a problem may have, cut at every class of a tile.
    let mut parts: Vec<_> = nodes(1 << 31, 0..(1 << 31) - TILE).collect();
    parts.extend(((1 << 31) - TILE..1 << 31).map(|x| x..x + 1));
    assert!(depth(&merges(&parts)) <= 32, "{}", depth(&merges(&parts)));
    assert_eq!(depth(&[5, 0]), 1, "more merges than there is on the stack");
}

#[test]
fn words_and_bytes_are_read_as_they_were_written() {
    let some = Partial {
        m: -1.5,
        l: 2.0,
        u: -0.25,
        s: 3.0,
        weight: 4.0,
        classes: 300,
        target: Some(-0.0),
        argmax: Some(u32::MAX - 1),
        largest: -1.25,
    };
    for partial in [some, Partial { target: None, ..some }, Partial::identity()] {
        assert_eq!(Partial::from_bytes(&partial.to_bytes()), Ok(partial));
        assert_eq!(Partial::from_words(partial.words()), Ok(partial));
    }
    let bytes = some.to_bytes();
    assert_eq!(bytes[20..24], 300u32.to_le_bytes());
    assert_eq!(bytes[28..32], 1u32.to_le_bytes());
    let mut two = bytes;
    two[28] = 2;
    let error = Partial::from_bytes(&two).unwrap_err().to_string();
    assert_eq!(error, "`bytes of a partial` must be with 0 or 1 as eighth word, found 2");
}

fn complaint<X: std::fmt::Debug>(result: Result<X, etalon_problem::Error>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn a_shard_has_classes_of_its_problem() {
    let problem = LinearCrossEntropy::new(5, 3, 600).bias();
    let reversed = Range { start: 3, end: 2 };
    for (classes, found) in [(0..601, "0..601"), (601..601, "601..601"), (reversed, "3..2")] {
        let wanted = format!("`classes` must be a range within 0..600, found {found}");
        assert_eq!(complaint(Shard::new(&problem, classes)), wanted);
    }
    let wide = LinearCrossEntropy::new(1, 1, 1 << 33);
    let wanted = "`vocab` must be at most 4294967295 in shards, found 8589934592";
    assert_eq!(complaint(Shard::new(&wide, 0..0)), wanted);
    assert_eq!(complaint(check_shards(&wide, &[])), wanted);
    let shard = Shard::new(&problem, 100..300).unwrap();
    assert_eq!(shard.nodes().collect::<Vec<_>>(), [100..256, 256..300]);
    let table = shard.table(Pass::Backward);
    let of = |name: &str| &table.operands.iter().find(|x| x.name == name).unwrap().shape;
    assert_eq!((of("w"), of("bias"), of("dw")), (&vec![200, 3], &vec![200], &vec![200, 3]));
    assert_eq!((of("h"), of("targets"), of("dh")), (&vec![5, 3], &vec![5], &vec![5, 3]));
    // A sum is one matrix, even of no classes, which then adds nothing.
    let none = Shard::new(&problem, 7..7).unwrap();
    assert_eq!([Dh::Sum, Dh::Nodes].map(|dh| dh.matrices(&none)), [1, 0]);
    assert_eq!([Dh::Sum, Dh::Nodes].map(|dh| dh.matrices(&shard)), [1, 2]);
    assert_eq!([Dh::Sum, Dh::Nodes].map(|dh| dh.parts(&none).len()), [0, 0]);
    assert_eq!(Dh::Sum.parts(&shard), only(100..300));
    assert_eq!(Dh::Nodes.parts(&shard), [100..256, 256..300]);
    assert_eq!([0, 1, 2].map(Dh::of), [Dh::Nodes, Dh::Sum, Dh::Nodes]);
}

#[test]
fn shards_are_all_classes_each_once() {
    let problem = LinearCrossEntropy::new(5, 3, 600);
    let check = |shards: &[Range<usize>]| check_shards(&problem, shards);
    assert_eq!(check(&[0..256, 256..256, 256..600]), Ok(()));
    let wanted = "`shards[1]` must be classes from 256 on, of 600, found 200..600";
    assert_eq!(complaint(check(&[0..256, 200..600])), wanted);
    assert_eq!(complaint(check(&[0..256, 300..600])), wanted.replace("200..", "300.."));
    assert_eq!(complaint(check(&[0..256, 256..601])), wanted.replace("200..600", "256..601"));
    let wanted = "`shards` must be all 600 classes together, found 0..512";
    assert_eq!(complaint(check(&[0..256, 256..512])), wanted);
}

#[test]
fn partials_have_the_classes_of_their_node_and_one_owner() {
    let nodes = [0..256, 256..600];
    let of = |classes: u32, target| Partial { classes, target, ..Partial::identity() };
    let check = |second: [Partial; 2]| {
        let rows = [[of(256, Some(0.5)), Partial::identity()], second];
        check_partials(&nodes, 2, |node, token| rows[node][token])
    };
    assert_eq!(check([of(344, None), Partial::identity()]), Ok(()));
    let wanted = "`partial of token 0 and classes 256..600` must be of 344 classes, found 7";
    assert_eq!(complaint(check([of(7, None), Partial::identity()])), wanted);
    let wanted =
        "`owner of targets[0]` must be one shard, found one with 0..256 and one with 256..600";
    assert_eq!(complaint(check([of(344, Some(0.5)), Partial::identity()])), wanted);
}

#[test]
fn a_total_has_all_classes_and_a_target() {
    let problem = LinearCrossEntropy::new(2, 1, 512);
    let total = Partial { classes: 512, target: Some(0.0), ..Partial::identity() };
    assert_eq!(total.check_total(&problem, 1, 7), Ok(()));
    let fewer = Partial { classes: 256, ..total };
    let wanted = "`totals[1]` must be of all 512 classes, found 256";
    assert_eq!(complaint(fewer.check_total(&problem, 1, 7)), wanted);
    let wanted = "`targets[1]` must be a class of one of the shards, found 7";
    assert_eq!(complaint(Partial { target: None, ..total }.check_total(&problem, 1, 7)), wanted);
}
