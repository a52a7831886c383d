//! Unit tests of `src/softmax`: of files of which all of it sees what is tested.

mod modules;
mod rows;
#[path = "../../walks/blocks.rs"]
mod walks;
mod window;
