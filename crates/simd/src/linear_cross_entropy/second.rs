//! The second order's part of the sweeps of the backward pass: motions of logits, (C21), of the totals of
//! tokens that follow, (C22) and (C24), and of the gradients of logits, (C27).

pub mod gradient;
pub mod motion;
pub mod output;
pub mod rows;
