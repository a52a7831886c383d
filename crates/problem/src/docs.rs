//! The pages of `docs/` that are about no single algorithm.
//!
//! * Start here: [`guide`] checks a kernel of your own, also from [`python`] or as a program ([`protocol`],
//!   [`agents`]); [`notation`] defines symbols and words.
//! * The equations, numbered as in the comments of the code, with the tensors of each algorithm:
//!   [`attention`](crate::attention), [`attention_lse`](crate::attention_lse),
//!   [`linear_attention`](crate::linear_attention), [`lazy_attention`](crate::lazy_attention),
//!   [`linear_cross_entropy`](crate::linear_cross_entropy).
//! * [`numerics`]: the error bounds. [`suite`]: the cases of the suite, and what they notice. [`errata`]:
//!   known mistakes in these algorithms. [`conventions`]: in what libraries differ. [`training`]: an example.
//! * [`simd`]: how the CPU kernels work. [`gpu`]: the CUDA kernels. [`benchmarks`] and
//!   [`gpu_results`]: how fast they are. [`gpu_tuning`]: what made CUDA kernels faster, and what did not.
//!   [`peers`]: how to compare them with PyTorch and ggml. [`findings`]: kernels of other libraries, judged.
//!   [`blackwell`]: what runs there, and what a level would need.

// Pages are read by rustdoc alone, in all crates: a change of one would otherwise build the whole workspace again.
macro_rules! page {
    ($name:ident, $file:literal, $title:literal) => {
        #[doc = $title]
        ///
        #[cfg_attr(doc, doc = include_str!("../../../docs/assets/links.md"))]
        #[cfg_attr(doc, doc = include_str!(concat!("../../../", $file)))]
        #[cfg_attr(doc, doc = include_str!("../../../docs/assets/katex.html"))]
        pub mod $name {}
    };
}

page!(guide, "docs/guide.md", "Check your own kernel; all commands and options.");
page!(python, "docs/python.md", "The module `etalon` of Python: judge, oracle and passes.");
page!(protocol, "docs/protocol.md", "The protocol by which a program is asked.");
page!(agents, "docs/agents.md", "Mend a kernel by the verdicts on it.");
page!(training, "docs/training.md", "Train with etalon's PyTorch operators: an example, measured.");
page!(notation, "docs/notation.md", "Symbols, tensors, shapes, conventions and words.");
page!(numerics, "docs/numerics.md", "The error bounds, derived from the arithmetic of a kernel.");
page!(suite, "docs/suite.md", "The cases of the suite, and the planted bugs that they notice.");
page!(simd, "docs/simd.md", "The SIMD kernels: how they work.");
page!(gpu, "docs/gpu.md", "The CUDA kernels: what runs where, and how to use them.");
page!(gpu_results, "docs/gpu_results.md", "Checks of the CUDA kernels, and the times of passes.");
page!(gpu_tuning, "docs/gpu_tuning.md", "Attempts to make CUDA kernels faster, and their gains.");
page!(blackwell, "docs/blackwell.md", "Blackwell: what runs there, and what a level would need.");
page!(benchmarks, "docs/benchmarks.md", "Measured speed of the SIMD kernels.");
page!(peers, "benches/peers/README.md", "Comparison with PyTorch and ggml.");
page!(conventions, "docs/conventions.md", "Conventions in which libraries differ, by name.");
page!(findings, "docs/findings.md", "Kernels of other libraries, judged by the suite.");
page!(errata, "docs/errata.md", "Known mistakes in these algorithms.");
