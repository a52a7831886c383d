//! After the chunk c of a walk over tokens, with H and D of the recurrences:
//!
//! ```text
//! (W6)  state^c  = H_t            of the last token t of the chunk
//! (W7)  dstate^c = e^{g_t} D_t    of its first token t: the gradient by the state before it, H_{t−1}
//! ```

use super::heads::{Head, Operands, each_head, width_of_states};
use super::state::State;
use super::{Cotangents, Inputs, check_g_gamma};
use crate::named::{ByName, Tensors};
use crate::scalar::Real;
use crate::tensor::{HeadsMut, Rows, full};
use crate::traced::{Piece, Traced, joined, place, wanted};
use etalon_problem::{Error, LinearAttention, Operand, Pass, Walk};

/// [`crate::trace::trace`] of this algorithm alone, for those who bring a type of number of their own.
pub fn trace<T: Real>(
    problem: &LinearAttention,
    pass: Pass,
    x: &Tensors<T>,
    walk: &Walk,
    only: &[&str],
) -> Result<Vec<Traced<T>>, Error> {
    let whole = problem.clone().into();
    let wanted = wanted(&whole, pass, walk, only)?;
    let pieces = pieces(problem, &ByName::checked(&whole, pass, x)?, walk, &wanted)?;
    joined(wanted, pieces)
}

/// The pieces of the tensors that are wanted.
fn pieces<T: Real>(
    problem: &LinearAttention,
    x: &ByName<'_, T>,
    walk: &Walk,
    wanted: &[Operand],
) -> Result<Vec<Piece<T>>, Error> {
    let inputs: Inputs<'_, T> = x.get()?;
    check_g_gamma(&inputs.g_gamma)?;
    let operands = Operands::new(problem, T::from_f64(problem.scale), &inputs)?;
    let heads = walk.heads(&problem.clone().into());
    let chunk = walk.chunk.unwrap_or(1);
    let mut pieces = Vec::new();
    for (tensor, operand) in wanted.iter().enumerate() {
        let mut last = full("state", problem.state_shape(), T::ZERO)?;
        let last = Some(HeadsMut::new(&mut last));
        // The states of a head, as pieces of the tensor.
        let held = |head: &Head<'_, T>, states: &mut dyn FnMut() -> Vec<(usize, Vec<T>)>| {
            let Some(at) = heads.iter().position(|own| *own == head.key_head) else {
                return Vec::new();
            };
            let piece = |(c, elements)| {
                let at = place(operand, &[c, head.index(), at]);
                Piece { tensor, at, elements }
            };
            states().into_iter().map(piece).collect::<Vec<_>>()
        };
        let found = if operand.name == "state" {
            let first = &operands.initial_state;
            each_head(&operands, first, [], [], last, |head, h, _| {
                Ok(held(head, &mut || forward(head, h, chunk)))
            })?
        } else {
            let cotangents: Cotangents<'_, T> = x.get()?;
            let (dout, group) = (Rows::new("dout", cotangents.dout.view())?, problem.group());
            let width = width_of_states(problem);
            let first = Rows::or_zero("dfinal_state", &cotangents.dfinal_state, width)?;
            each_head(&operands, &first, [], [], last, |head, d, _| {
                Ok(held(head, &mut || backward(head, group, &dout, d, chunk)))
            })?
        };
        pieces.extend(found.into_iter().flatten());
    }
    Ok(pieces)
}

/// (W6): the state after each chunk.
fn forward<T: Real>(head: &Head<'_, T>, h: &mut State<T>, chunk: usize) -> Vec<(usize, Vec<T>)> {
    let mut states = Vec::new();
    for t in 0..head.tokens {
        head.advance(t, h); // (R1)
        if (t + 1) % chunk == 0 || t + 1 == head.tokens {
            states.push((t / chunk, h.elements().to_vec()));
        }
    }
    states
}

/// (W7): the gradient by the state before each chunk.
fn backward<T: Real>(
    head: &Head<'_, T>,
    group: usize,
    dout: &Rows<'_, T>,
    d: &mut State<T>,
    chunk: usize,
) -> Vec<(usize, Vec<T>)> {
    let mut states = Vec::new();
    for t in (0..head.tokens).rev() {
        for member in 0..group {
            d.add_outer(head.scale, head.q(member, t), dout.row(head.query(member, t))); // (R3)
        }
        d.decay(head.decay(t));
        if t.is_multiple_of(chunk) {
            states.push((t / chunk, d.elements().to_vec()));
        }
    }
    states
}
