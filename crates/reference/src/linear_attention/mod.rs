#![doc = include_str!("../../../../docs/linear_attention.md")]
#![doc = include_str!("../../../../docs/assets/katex.html")]
