//! The figures of `docs/errata.md`.

mod attention;
mod lazy_attention;
mod linear_attention;
mod linear_cross_entropy;
