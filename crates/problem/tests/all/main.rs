//! What a problem is, refuses and lists; how it is written; and that no two files of the workspace
//! import each other in a circle.

mod check;
mod common;
mod cover;
mod docs;
mod file;
mod imports;
mod lazy_attention;
mod linear_attention;
mod linear_cross_entropy;
mod shards;
mod spans;
