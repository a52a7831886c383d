//! Problems: their checks, refusals, lists and written form; and the files of the workspace, no two of which
//! import each other in a circle.

mod check;
mod comments;
mod common;
mod cover;
mod docs;
mod file;
mod files;
mod imports;
mod lazy_attention;
mod linear_attention;
mod linear_cross_entropy;
mod recipes;
mod shards;
mod spans;
