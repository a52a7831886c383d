//! The shared memory of a block, by the layouts of the sources.

use crate::family::Family::*;
use crate::variant::Variant;

/// The shared memory of a block that the source of a kernel does not declare: tiles, as its constants lay them out,
/// with room to align them. The source asserts these bytes.
pub fn shared_bytes(variant: &Variant, kernel: &str) -> u32 {
    let bytes = match variant.family {
        LazySm80 => lazy_sm80(variant, kernel),
        LinearSm80 => linear_sm80(variant, kernel),
        AttentionSm90aForward | AttentionSm90aBackward => attention_sm90a(variant, kernel),
        AttentionSm90aWide => attention_sm90a_wide(variant, kernel),
        AttentionSm90aSecondOrder => attention_sm90a_second_order(kernel),
        LazySm90aForward | LazySm90aBackward => lazy_sm90a(variant, kernel),
        LinearSm90a => linear_sm90a(variant, kernel),
        CrossEntropySm90a => cross_entropy_sm90a(kernel),
        _ => attention_sm80(variant, kernel), // 0 of portable families
    };
    bytes as u32
}

fn attention_sm80(variant: &Variant, kernel: &str) -> usize {
    let (cd, has_values) = (variant.define("CD"), variant.define("VALUES"));
    let ce = has_values * variant.define("CE");
    let tiles = variant.define("TILES");
    match (variant.family, kernel) {
        // q; k and v in two stages.
        (AttentionSm80, "forward") => {
            let (rows, keys) = match tiles {
                _ if cd > 128 => (64, 32),
                1 => (128, 32),
                2 => (64, 64),
                _ => (128, 64),
            };
            2 * rows * cd + 4 * keys * (cd + ce)
        }
        // The block's own tile, and two stages of those that it walks with two numbers a row.
        (AttentionSm80, "values") => {
            let walked = if (cd, ce) == (64, 64) { 64 } else { 32 };
            2 * 128 * cd + 2 * (2 * walked * (cd + ce) + 8 * walked)
        }
        // q, k, dout and v.
        (AttentionSm80, "dbias") => 4 * 64 * (cd + ce),
        // The block's own tile, and two stages of those that it walks: 64 rows of 64 or 32.
        (AttentionSm80, _) if tiles == 1 => 4 * 64 * (cd + ce) + 16 * 32,
        (AttentionSm80, _) => 6 * 64 * (cd + ce) + 16 * 64,
        // As `keys`, with dS of a tile where no dout has room for it.
        (AttentionSm80Fused, "fused") => 6 * 64 * (cd + ce) + 16 * 64 + (1 - has_values.min(1)) * 2 * 64 * 64,
        // q; k and v, or two stages of k.
        (AttentionSm80F32, "forward") => 4 * 128 * cd + 4 * 32 * if has_values > 0 { cd + ce } else { 2 * cd },
        // q and k, then dout and v in their place.
        (AttentionSm80F32, "dbias") => 2 * 4 * 64 * cd.max(ce),
        // The block's own tile, and those that it walks with two numbers a row.
        (AttentionSm80F32, _) => {
            let stages = if cd + ce > 192 { 1 } else { 2 };
            4 * 64 * (cd + ce) + stages * (4 * 32 * (cd + ce) + 8 * 32)
        }
        (AttentionSm80Wide, _) => 2 * 64 * (cd + ce) + variant.define("STAGES") * (2 * 32 * (cd + ce) + 8 * 32),
        // The block's own tile, and those that it walks: an operand and its tangent.
        (AttentionSm80SecondOrder, "tangents" | "queries" | "keys") => 4 * (64 + 32) * (cd + ce),
        _ => 0,
    }
}

fn lazy_sm80(variant: &Variant, kernel: &str) -> usize {
    let (cd, ce) = (variant.define("CD"), variant.define("CE"));
    match kernel {
        // q; k and its bias in two stages, and v.
        "scores" => 512 * cd + 2 * 768,
        "values" => 512 * cd + 256 * ce + 2 * 768,
        // The block's own tile, and two stages of those that it walks, with its bias and numbers of rows.
        "means" | "queries" => 384 * (cd + ce) + 2 * 512,
        _ => 384 * (cd + ce) + 2 * (512 + 768),
    }
}

fn linear_sm80(variant: &Variant, kernel: &str) -> usize {
    let (inner, outer) = (variant.define("KW"), variant.define("CW"));
    match kernel {
        // y; b and x of one tile; the state, or b and x of the next tile.
        "attend" => {
            let pair = 128 * (inner + outer);
            128 * inner + pair + pair.max(2 * inner * outer)
        }
        // Both factors of a chunk.
        "sums" => 256 * (inner + outer),
        // q, k, dout and v of a micro-chunk; w.
        _ => 256 * (inner + outer) + 4 * 64 * 65,
    }
}

fn attention_sm90a(variant: &Variant, kernel: &str) -> usize {
    let (width, groups) = (variant.define("D"), variant.define("GROUPS"));
    if kernel == "forward" && width > 128 {
        // q; k and v in two stages; barriers.
        let values = variant.define("VALUES") * variant.find("E").unwrap_or(width);
        let keys = if values > 128 { 80 } else { 128 };
        return 1024 + 2 * 64 * groups * width + 4 * keys * (width + values) + 256;
    }
    let rows = |rows: usize| 2 * rows * width; // bytes of so many rows
    let is_boxed = variant.define("OPTIONS") == 2;
    // Of spans, what the walk by keys does with the block of each stage.
    let visits = if variant.define("WINDOW") == 2 { 16 } else { 0 };
    match kernel {
        // q; k, v and boxes of the bias in two stages; barriers.
        "forward" if is_boxed => 1024 + rows(64 * groups) + 4 * rows(128) + 2 * (2 * 64 * groups * 128) + 256,
        // q; k and v in two stages; o of each warpgroup; barriers.
        "forward" => 1024 + 2 * rows(64 * groups) + 4 * rows(128) + 256,
        // Operands of two tiles; of walked ones, with their numbers, in four stages, or two of dout beside; barriers.
        "keys" | "queries" if variant.define("RESULTS") == 0 => 1024 + 6 * rows(128) + 4 * (1024 + 32) + 56 + visits,
        "values" => 1024 + 6 * rows(128) + 2 * (1024 + 32) + 56 + visits,
        // k and v of two tiles; q, dout and their numbers in three stages; barriers.
        "keys" => 1024 + 4 * rows(128) + 3 * (2 * rows(64) + 512) + 104 + visits,
        // k and v of two tiles; q, dout and their numbers in four stages; dS of two blocks, dq of three; barriers.
        "fused" if width == 64 => {
            1024 + 4 * rows(128) + 4 * (2 * rows(64) + 512) + 2 * (2 * 128 * 64) + 3 * 2 * rows(64) + 200
        }
        // The same of a bias in boxes, with dout in two stages and dS, in place of its bias, of three query blocks.
        "fused" if is_boxed => {
            1024 + 2 * rows(128) + 3 * (rows(64) + 512) + 2 * rows(64) + 3 * (2 * 128 * 64) + 2 * rows(64) + 232
        }
        // k and v; q, dout and their numbers in three stages; dS of two query blocks and dq of one; barriers.
        "fused" => 1024 + 2 * rows(128) + 3 * (2 * rows(64) + 512) + 2 * (2 * 128 * 64) + 2 * rows(64) + 136,
        // q, dout, dq; k and v in two stages; barriers.
        "queries" => 1024 + 7 * rows(128) + 104,
        _ => 0,
    }
}

/// The second order: the block's own tiles, and two stages of four tiles that it walks, of queries with their numbers.
fn attention_sm90a_second_order(kernel: &str) -> usize {
    let tile = 2 * 64 * 64;
    match kernel {
        "tangents" => 1024 + 10 * tile,
        "queries" => 1024 + 12 * tile,
        _ => 1024 + 12 * tile + 2 * 64 * (16 + 4 + 8),
    }
}

/// The backward pass where D or E is above 128.
fn attention_sm90a_wide(variant: &Variant, kernel: &str) -> usize {
    let dim = variant.define("D");
    let values = variant.find("E").unwrap_or(dim);
    let visits = if variant.define("WINDOW") == 2 { 16 } else { 0 };
    // Stages of 64 rows of one operand, and of the other.
    let [y, x] = match kernel {
        _ if values == 128 => [3, 3],
        "values" => [2, 2],
        _ => [2, 1],
    };
    let walked = y * 2 * 64 * dim + x * 2 * 64 * values;
    let (own, numbers) = match kernel {
        "keys" => (dim + values, y * 512 + visits),
        "values" => (dim, y * 256 + visits),
        "queries" => (dim + values, 0),
        _ => return 0,
    };
    // 128 rows of the tile; numbers of queries and barriers.
    1024 + 2 * 128 * own + walked + numbers + 16 * (1 + y + x) + 8
}

fn lazy_sm90a(variant: &Variant, kernel: &str) -> usize {
    let width = variant.define("D");
    let rows = |rows: usize| 2 * rows * width; // bytes of so many rows
    // k and v; q, dout, their numbers and bias in three stages; sums of diagonals; barriers.
    if kernel == "keys" {
        return 1024 + 2 * rows(128) + 3 * (2 * rows(64) + 1024 + 768) + 16 * (32 * 72 + 64) + 84;
    }
    // q of some tiles, with dout; in stages k, its bias and v; the largest scores of rows by stripe, or o; barriers.
    let queries = 64 * variant.lazy_groups(kernel);
    let (tiles, stages) = if width == 64 { (2, 4) } else { (1, 2) };
    let (own, walked, out) = match kernel {
        "scores" => (rows(queries), rows(128), 128 * queries),
        "queries" => (2 * rows(queries), 2 * rows(128), 0),
        _ => (rows(queries), 2 * rows(128), rows(queries)),
    };
    let near = 4 * (queries + 128);
    1024 + tiles * (own + 32) + stages * (walked + near + 32) + out
}

fn linear_sm90a(variant: &Variant, kernel: &str) -> usize {
    let (inner, by_token) = (variant.define("KW"), variant.define("BY_TOKEN") == 1);
    match kernel {
        "scan" => 0,
        // q and k, or dout and v, three times or six; two tables of decays; sums of columns and rows, w of blocks;
        // barriers.
        "flow" => 196_608 + 2 * 8464 + 4608 + 8704 + 64 + 16 * (384 / inner) + 32,
        // b and x in two stages; x weighted; the state; decays; barriers.
        "states" => 5 * 256 * inner + 2 * inner * inner + if by_token { 2 * 8464 } else { 2568 } + 64,
        // Operands, of 64 columns in two stages; both states; pairs; decays; barriers.
        "gradients" | "gradients_dots" | "gradients_grouped" => {
            let stages = 128 / inner;
            let (pairs, decays) = if by_token { (3 * 8192, 8464) } else { (4 * 8192, 1024) };
            stages * (4 * 256 * inner + 64) + 4 * inner * inner + pairs + decays + 32
        }
        // y and b, and x, in two stages; x weighted; the state in two; out; decays and barriers.
        _ => 4 * 256 * inner + 3 * 16384 + 2 * 128 * inner + 16384 + 2568 + 80,
    }
}

fn cross_entropy_sm90a(kernel: &str) -> usize {
    match kernel {
        // Four stages of a and five of b; barriers.
        "leaves" => 1024 + 4 * 16384 + 5 * 32768 + 4 * 32 + 5 * 16,
        // Panels of both operands in four stages or five, and of what is stored; barriers.
        "hidden" => 1024 + 4 * 49152 + 64,
        "hidden_192" => 1024 + 5 * 40960 + 80,
        "gradient" | "head" => 1024 + 4 * 49152 + 32768 + 64,
        _ => 0,
    }
}

/// The shared memory of a block that the source of a kernel declares; `None` where nobody asks.
pub fn declared_bytes(variant: &Variant, kernel: &str) -> Option<u32> {
    // `Shared` of `tile/ffma.cuh`; `flow` keeps numbers of a chunk beside it, and one of each thread.
    const SLABS: u32 = 34_816;
    let rows = variant.define("R");
    match (variant.family, kernel) {
        (AttentionPortable, "delta" | "scale") => Some(0),
        (AttentionPortableSecondOrder, "rows") => Some(0),
        (AttentionPortable | AttentionPortableSecondOrder, kernel) => match kernel {
            "collect" => Some(0),
            "dsinks" | "gsinks" => Some(if rows == 8 { 512 } else { 1024 }),
            _ => Some(SLABS),
        },
        (AttentionFallback, _) => Some(SLABS),
        (LinearPortable, "attend" | "sums") => Some(SLABS),
        (LinearPortable, "flow") => Some(SLABS + if rows == 8 { 2576 } else { 3088 }),
        (LinearSm80, "flow") => Some(2688),
        (LinearSm80, "attend" | "sums") => Some(0),
        (AttentionSm80Fused, _) => Some(0),
        _ => None,
    }
}
