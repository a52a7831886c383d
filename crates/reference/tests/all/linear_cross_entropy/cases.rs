//! The problems that every law is run over: each option alone, and combinations in which they
//! meet.

use etalon_problem::{LinearCrossEntropy, LseSquareWeight, NothingLeft, Reduction, TokenOutputs};

pub const EVERY_OUTPUT: TokenOutputs =
    TokenOutputs { lse: true, logprob: true, entropy: true, argmax: true };

/// Extents of unlike size, so that no axis can stand in for another; every output.
pub fn small() -> LinearCrossEntropy {
    LinearCrossEntropy::new(6, 3, 5).outputs(EVERY_OUTPUT)
}

/// Every option at once.
pub fn everything() -> LinearCrossEntropy {
    small()
        .bias()
        .class_weights()
        .token_weights()
        .logit_scale(1.3)
        .softcap(1.5)
        .temperature(0.7)
        .label_smoothing(0.2)
        .lse_square_scale(0.3)
}

pub fn cases() -> Vec<(&'static str, LinearCrossEntropy)> {
    let by = Reduction::By { normaliser: -2.5 };
    let several_tiles = LinearCrossEntropy { tokens: 3, dim: 2, vocab: 600, ..everything() };
    // More tokens than a block holds, of which every fourth is ignored.
    let several_blocks = LinearCrossEntropy { tokens: 90, dim: 2, vocab: 3, ..everything() };
    let long_rows = LinearCrossEntropy { tokens: 3, dim: 37, vocab: 4, ..everything() };
    vec![
        ("plain", small()),
        ("loss alone", LinearCrossEntropy::new(6, 3, 5)),
        ("bias", small().bias()),
        ("class weights", small().class_weights()),
        ("token weights", small().token_weights()),
        ("logit scale", small().bias().logit_scale(-0.6)),
        ("softcap", small().bias().softcap(0.8)),
        ("temperature", small().temperature(0.5)),
        ("scale, cap, temperature", small().logit_scale(2.0).softcap(1.1).temperature(1.7)),
        ("smoothing", small().label_smoothing(0.1)),
        ("smoothing, class weights", small().label_smoothing(0.3).class_weights()),
        ("nothing but smoothing", small().label_smoothing(1.0).class_weights()),
        ("z-loss", small().lse_square_scale(0.2).class_weights()),
        (
            "z-loss by class weight",
            small()
                .lse_square_scale(-0.2)
                .lse_square_weight(LseSquareWeight::ClassWeight)
                .class_weights()
                .token_weights(),
        ),
        ("sum", everything().reduction(Reduction::Sum)),
        ("by a number", everything().reduction(by)),
        ("no reduction", everything().reduction(Reduction::None)),
        ("everything", everything()),
        ("everything, NaN", everything().nothing_left(NothingLeft::Nan)),
        ("another index", everything().ignore_index(7)),
        ("a class is ignored", everything().ignore_index(2)),
        ("one class", LinearCrossEntropy { vocab: 1, ..everything() }),
        ("one of each", LinearCrossEntropy { tokens: 1, dim: 1, vocab: 1, ..everything() }),
        ("one token", LinearCrossEntropy { tokens: 1, ..everything() }),
        ("no tokens", LinearCrossEntropy { tokens: 0, ..everything() }),
        (
            "no tokens, no reduction",
            LinearCrossEntropy { tokens: 0, ..everything() }.reduction(Reduction::None),
        ),
        ("several tiles", several_tiles),
        ("several blocks", several_blocks.reduction(Reduction::None)),
        ("long rows", long_rows),
    ]
}
