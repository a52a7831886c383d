//! Operands that follow from their place alone, and what is computed from them in f64.

use crate::results::{Results, distance, numbers};
use etalon_problem::{Dtype, LinearCrossEntropy};
use half::bf16;
use std::ops::Range;
use std::thread;

/// The operands of a problem.
pub struct Host {
    pub problem: LinearCrossEntropy,
    pub storage: Dtype,
    h: Vec<u8>,
    w: Vec<u8>,
    pub targets: Vec<i64>,
}

/// A number between −1 and 1 that depends on its place.
fn element(tensor: u64, place: usize) -> f32 {
    let mut x = tensor << 60 ^ place as u64;
    for _ in 0..2 {
        x = (x ^ x >> 32).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
    (x >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// So many of them times a size, in a storage type.
fn elements(tensor: u64, count: usize, storage: Dtype, size: f32) -> Vec<u8> {
    let bytes = storage.bytes();
    let mut list = vec![0; count * bytes];
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let each = count.div_ceil(threads).max(1);
    thread::scope(|scope| {
        for (number, part) in list.chunks_mut(each * bytes).enumerate() {
            scope.spawn(move || {
                for (at, to) in part.chunks_mut(bytes).enumerate() {
                    let x = size * element(tensor, number * each + at);
                    match storage {
                        Dtype::Bf16 => to.copy_from_slice(&bf16::from_f32(x).to_ne_bytes()),
                        _ => to.copy_from_slice(&x.to_ne_bytes()),
                    }
                }
            });
        }
    });
    list
}

impl Host {
    /// In f32 or bf16. Every eleventh token is ignored if some are.
    pub fn new(problem: LinearCrossEntropy, storage: Dtype, some_ignored: bool) -> Host {
        let LinearCrossEntropy { tokens, dim, vocab, .. } = problem;
        let target = |i: usize| if some_ignored && i % 11 == 5 { -100 } else { (i * 389 % vocab) as i64 };
        // Logits of a standard deviation of 1.
        let size = 3.0 / (dim as f32).sqrt();
        Host {
            h: elements(1, tokens * dim, storage, 1.0),
            w: elements(2, vocab * dim, storage, size),
            targets: (0..tokens).map(target).collect(),
            problem,
            storage,
        }
    }

    pub fn h(&self) -> &[u8] {
        &self.h
    }

    pub fn w(&self, classes: &Range<usize>) -> &[u8] {
        let row = self.problem.dim * self.storage.bytes();
        &self.w[classes.start * row..classes.end * row]
    }

    /// The largest distance of a mean loss, lse, dh and dw from those in f64, as a part of the largest of each.
    pub fn distances(&self, results: &Results) -> Vec<(&'static str, f64)> {
        let exact = self.in_f64();
        let of = |(name, exact): &(&'static str, Vec<f64>)| {
            let storage = if ["dh", "dw"].contains(name) { self.storage } else { Dtype::F32 };
            (*name, distance(&numbers(&results[name], storage), exact))
        };
        exact.iter().map(of).collect()
    }

    fn in_f64(&self) -> Vec<(&'static str, Vec<f64>)> {
        let LinearCrossEntropy { tokens, dim, vocab, .. } = self.problem;
        let [h, w] = [&self.h, &self.w].map(|x| numbers(x, self.storage));
        let counted = self.targets.iter().filter(|&&y| y >= 0).count() as f64;
        let (mut loss, mut all) = (0.0, vec![0.0; tokens]);
        let (mut dh, mut dw) = (vec![0.0; tokens * dim], vec![0.0; vocab * dim]);
        for (i, &target) in self.targets.iter().enumerate().filter(|(_, y)| **y >= 0) {
            let h = &h[i * dim..][..dim];
            let dot = |v: usize| h.iter().zip(&w[v * dim..]).map(|(x, y)| x * y).sum::<f64>();
            let z: Vec<f64> = (0..vocab).map(dot).collect();
            let m = z.iter().fold(f64::NEG_INFINITY, |m, &z| m.max(z));
            let lse = m + z.iter().map(|z| (z - m).exp()).sum::<f64>().ln();
            loss += (lse - z[target as usize]) / counted;
            all[i] = lse;
            for (v, z) in z.iter().enumerate() {
                let own = if v as i64 == target { 1.0 } else { 0.0 };
                let da = ((z - lse).exp() - own) / counted;
                for c in 0..dim {
                    dh[i * dim + c] += da * w[v * dim + c];
                    dw[v * dim + c] += da * h[c];
                }
            }
        }
        vec![("loss", vec![loss]), ("lse", all), ("dh", dh), ("dw", dw)]
    }
}
