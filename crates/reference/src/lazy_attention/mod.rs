#![doc = include_str!("../../../../docs/lazy_attention.md")]
#![doc = include_str!("../../../../docs/assets/katex.html")]
