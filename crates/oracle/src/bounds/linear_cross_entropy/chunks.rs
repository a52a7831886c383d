//! The roundings of dw and dbias where a kernel adds them up over chunks of tokens and stores every sum (N95).

use super::operands::Operands;

/// The exact sums so far, of all classes: dw, and dbias as a column more.
pub(super) struct Chunks {
    /// Elements of a class.
    width: usize,
    tokens: usize,
    /// Σ of dw over tokens so far, the largest size that it had, and what it was at the end of the last chunk.
    sums: Vec<f64>,
    largest: Vec<f64>,
    last: Vec<f64>,
    /// Σ over chunks of the size of what the chunk added.
    added: Vec<f64>,
    /// The chunk that is being added, of each class.
    chunk: Vec<usize>,
    /// dh, which is multiplied by dloss after it was stored.
    dh: Vec<f64>,
}

impl Chunks {
    /// None where a profile does not store such sums.
    pub fn new(operands: &Operands<'_>) -> Option<Self> {
        let (problem, model) = (operands.problem, operands.model);
        if model.chunk.u == 0.0 {
            return None;
        }
        let width = problem.dim + 1;
        let zeros = || vec![0.0; problem.vocab * width];
        Some(Chunks {
            width,
            tokens: model.profile.chunk(problem.tokens, problem.dim, problem.vocab),
            sums: zeros(),
            largest: zeros(),
            last: zeros(),
            added: zeros(),
            chunk: vec![0; problem.vocab],
            dh: vec![0.0; problem.tokens * problem.dim],
        })
    }

    /// Adds da of a token and a class; of each class tokens come in order.
    pub fn add(&mut self, operands: &Operands<'_>, i: usize, v: usize, da: f64) {
        let dim = operands.problem.dim;
        if i / self.tokens != self.chunk[v] {
            self.chunk[v] = i / self.tokens;
            self.close(v);
        }
        let h = operands.h[i * dim..][..dim].iter().copied().chain([1.0]);
        let at = v * self.width..(v + 1) * self.width;
        let places = self.sums[at.clone()].iter_mut().zip(&mut self.largest[at]);
        for ((sum, largest), h) in places.zip(h) {
            *sum += da * h;
            *largest = largest.max(sum.abs());
        }
        let w = &operands.w[v * dim..][..dim];
        self.dh[i * dim..][..dim].iter_mut().zip(w).for_each(|(dh, w)| *dh += da * w);
    }

    /// Ends a chunk of a class.
    fn close(&mut self, v: usize) {
        for at in v * self.width..(v + 1) * self.width {
            self.added[at] += (self.sums[at] - self.last[at]).abs();
            self.last[at] = self.sums[at];
        }
    }

    /// Adds what storing costs to the errors of dh, dw and dbias. A gradient that was made in a forward pass is
    /// multiplied by a dloss that is not 1, and stored again.
    pub fn finish(mut self, operands: &Operands<'_>, [dh, dw, dbias]: [&mut [f64]; 3]) {
        let (problem, kept) = (operands.problem, operands.model.chunk);
        let scaled = operands.cotangent("dloss", 0) != 1.0;
        let again = if scaled { 1.0 } else { 0.0 };
        let chunks = problem.tokens.div_ceil(self.tokens) as f64;
        (0..problem.vocab).for_each(|v| self.close(v));
        for v in 0..problem.vocab {
            for c in 0..self.width {
                let at = v * self.width + c;
                // The part that a chunk adds may be stored by itself, and the sum with it is.
                let error = kept.u * ((chunks + again) * self.largest[at] + self.added[at])
                    + (2.0 * chunks + again) * kept.eta;
                match c < problem.dim {
                    true => dw[v * problem.dim + c] += error,
                    false => dbias[v] += error,
                }
            }
        }
        dh.iter_mut().zip(&self.dh).for_each(|(error, dh)| *error += again * kept.error(dh.abs()));
    }
}
