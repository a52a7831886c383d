//! What the second order adds to the sweeps of the backward pass: how logits move, (C21), what follows for
//! the totals of tokens, (C22) and (C24), and how the gradients of logits move, (C27).

pub mod gradient;
pub mod motion;
pub mod output;
pub mod rows;
