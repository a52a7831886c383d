//! What the references must satisfy. One binary: what is generic over the number type is compiled
//! once for all of them.

mod attention;
mod common;
mod lazy_attention;
mod linear_attention;
mod linear_cross_entropy;
