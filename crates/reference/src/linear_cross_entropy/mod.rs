#![doc = include_str!("../../../../docs/linear_cross_entropy.md")]
#![doc = include_str!("../../../../docs/assets/katex.html")]
