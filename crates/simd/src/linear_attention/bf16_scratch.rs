//! Scratch of a thread for a chunk of the backward pass in bf16, and the operands and states in it.

use super::decays::Decays;
use super::schedule::Schedule;
use super::words::{Forms, Grow, Round, Words};
use crate::Level;
use crate::element::Tensor;
use crate::lanes::matrix::BLOCK;
use crate::pack::Form;
use crate::tile::STRIDE;
use crate::workspace::Parts;
use ndarray::Ix2;

/// The memory of one thread, beside that of sums and states.
pub struct TileScratch<'m> {
    pub q: Words<'m>,
    pub k: Words<'m>,
    pub v: Words<'m>,
    pub dout: Words<'m>,
    /// q·k and dout·v of 32 queries, and P of two.
    pub products: [&'m mut [f32]; 2],
    pub p: &'m mut [f32],
    /// A and B of 32 queries in pairs of queries, B in pairs of keys; and A and B of all, transposed.
    pub pairs: [&'m mut [f32]; 2],
    pub of_keys: &'m mut [f32],
    pub turned: [&'m mut [f32]; 2],
    /// Numbers of bf16 as whose sum these are multiplied, and states.
    pub pieces: usize,
    /// S across, D along and across.
    pub front: &'m mut [f32],
    pub back: [&'m mut [f32]; 2],
    /// v Dᵀ and k D.
    pub of_back: [&'m mut [f32]; 2],
}

impl<'m> TileScratch<'m> {
    /// Rows of what is as wide as k, and as v, lie so far apart.
    pub fn new(parts: &mut Parts<'m>, schedule: &Schedule<'_>, strides: [usize; 2]) -> Self {
        let Schedule { cut, shape, .. } = *schedule;
        let (dim, width) = (shape.dim, shape.width);
        let room = |len: usize| if cut.bf16 { len } else { 0 };
        let rows = cut.chunk.next_multiple_of(BLOCK);
        let [band, all, state] = [(BLOCK, cut.chunk), (cut.chunk, cut.chunk), (dim, width)]
            .map(|(len, dim)| Form::len(len, dim).saturating_mul(cut.pieces));
        let state = room(state);
        TileScratch {
            q: Words::new(parts, &cut, dim, [false, true, false, true]),
            k: Words::new(parts, &cut, dim, [true, true, false, true]),
            v: Words::new(parts, &cut, width, [true, true, true, false]),
            dout: Words::new(parts, &cut, width, [false, true, true, false]),
            products: [room(BLOCK * STRIDE); 2].map(|len| parts.room(len)),
            p: parts.room(room(2 * STRIDE)),
            pairs: [room(band); 2].map(|len| parts.room(len)),
            of_keys: parts.room(room(band)),
            turned: [room(all); 2].map(|len| parts.room(len)),
            pieces: cut.pieces,
            front: parts.room(state),
            back: [state; 2].map(|len| parts.room(len)),
            of_back: strides.map(|stride| parts.room(room(rows.saturating_mul(stride)))),
        }
    }
}

impl TileScratch<'_> {
    /// Packs the keys and values of a chunk: for the state alone, or for gradients.
    pub fn read_keys(
        &mut self,
        level: Level,
        decays: &Decays<'_>,
        [k, v]: [Option<Tensor<'_, Ix2>>; 2],
        len: usize,
        gradients: bool,
    ) {
        let tokens = decays.first..len;
        let weights = (!decays.none && !gradients).then_some((&*decays.omega, 1.0));
        let of_k = Forms { across: gradients, along: true, columns: !gradients, weights: None };
        let of_v = Forms { across: gradients, along: !gradients, columns: false, weights };
        self.k.pack(level, k, of_k, tokens.clone());
        self.v.pack(level, v, of_v, tokens);
    }

    /// Packs the queries and cotangents of a query head in a chunk: for gradients, and with `state` for D.
    pub fn read_head(
        &mut self,
        level: Level,
        decays: &Decays<'_>,
        [q, dout]: [Option<Tensor<'_, Ix2>>; 2],
        len: usize,
        scale: f32,
        state: bool,
    ) {
        let tokens = 0..decays.reset.min(len);
        let weights = (state && !is_plain(decays, scale)).then_some((&*decays.alpha, scale));
        let of_q = Forms { along: true, columns: state, ..Forms::default() };
        let of_dout = Forms { along: true, weights, ..Forms::default() };
        self.q.pack(level, q, of_q, tokens.clone());
        self.dout.pack(level, dout, of_dout, tokens);
    }

    /// (R28) for one query head, D having decayed.
    pub fn advance_back(
        &self,
        schedule: &Schedule<'_>,
        state: &mut [f32],
        decays: &Decays<'_>,
        len: usize,
    ) {
        let plain = is_plain(decays, schedule.problem.scale as f32);
        let (right, shape) = (self.dout.summed_rows(plain), schedule.shape);
        let left = &*self.q.columns;
        // Tokens from a reset on do not see what is before the chunk.
        let blocks = 0..decays.reset.min(len).div_ceil(BLOCK);
        let grow = Grow { shape, state, decay: 1.0, left, right, blocks };
        schedule.options.level.run_tiles(grow).unwrap_or_default();
    }

    /// Rounds S and D.
    pub fn round(&mut self, schedule: &Schedule<'_>, [front, back]: [&[f32]; 2]) {
        let (level, shape, pieces) = (schedule.options.level, schedule.shape, self.pieces);
        let across = Some(&mut *self.front);
        let front = Round { shape, state: front, along: None, across, pieces };
        level.run_tiles(front).unwrap_or_default();
        let [along, across] = self.back.each_mut().map(|words| Some(&mut **words));
        level.run_tiles(Round { shape, state: back, along, across, pieces }).unwrap_or_default();
    }
}

/// True if cotangents enter D without a weight.
fn is_plain(decays: &Decays<'_>, scale: f32) -> bool {
    decays.none && scale == 1.0
}
