//! Laws of the references. One binary: code that is generic over the number type is compiled once for all of
//! them.

mod attention;
mod common;
mod lazy_attention;
mod linear_attention;
mod linear_cross_entropy;
