//! The host of attention and attention_lse.

mod backward;
mod forward;

use super::host::{self, Results, Style};
use super::mutant::Mutant;
use crate::tier::Request;
use etalon_problem::{Align, Dtype, Error, Mask, Pass, Problem, Scores, Sequence, Sequences};
use std::collections::BTreeMap;

/// The outputs of a request.
pub(super) fn results(asked: &host::Job<'_>) -> Result<Results, Error> {
    let job = Job::new(asked)?;
    if matches!(asked.request.pass, Pass::DoubleBackward | Pass::Jvp) {
        return job.second_order(asked.request);
    }
    let forward = job.forward();
    let rows = match asked.request.pass {
        Pass::Forward => BTreeMap::from([("o", forward.o), ("lse", forward.lse)]),
        _ => job.backward(&forward),
    };
    Ok(rows.into_iter().map(|(name, rows)| (name, rows.data)).collect())
}

/// An array of rows: `[batch, head, row, column]`.
#[derive(Debug, Clone, Default)]
pub(super) struct Rows {
    pub data: Vec<f32>,
    shape: [usize; 4],
}

impl Rows {
    pub fn filled(shape: [usize; 4], value: f32) -> Self {
        Rows { data: vec![value; shape.iter().product()], shape }
    }

    /// One number per head.
    pub fn scalars(data: Vec<f32>) -> Self {
        Rows { shape: [1, 1, 1, data.len()], data }
    }

    fn start(&self, b: usize, h: usize, i: usize) -> usize {
        ((b * self.shape[1] + h) * self.shape[2] + i) * self.shape[3]
    }

    pub fn row_len(&self) -> usize {
        self.shape[3]
    }

    /// A row of an array whose outer axes may be shared.
    pub fn shared_row_mut(&mut self, b: usize, h: usize, i: usize) -> &mut [f32] {
        let b = if self.shape[0] == 1 { 0 } else { b };
        let h = if self.shape[1] == 1 { 0 } else { h };
        self.row_mut(b, h, i)
    }

    pub fn row(&self, b: usize, h: usize, i: usize) -> &[f32] {
        &self.data[self.start(b, h, i)..][..self.shape[3]]
    }

    pub fn row_mut(&mut self, b: usize, h: usize, i: usize) -> &mut [f32] {
        let start = self.start(b, h, i);
        &mut self.data[start..][..self.shape[3]]
    }
}

/// One request in f32.
pub(super) struct Job {
    pub scores: Scores,
    pub style: Style,
    pub mutant: Option<Mutant>,
    pub run: usize,
    pub dtype: Dtype,
    pub value_dim: usize,
    pub q: Rows,
    pub k: Rows,
    pub v: Rows,
    pub bias: Option<Rows>,
    pub sinks: Option<Vec<f32>>,
    pub dout: Option<Rows>,
    pub dlse: Option<Rows>,
    /// ddq and ddk, which stand for q and k where dS is multiplied by them: what is left of a
    /// second derivative if P is taken for a constant.
    direction: Option<[Rows; 2]>,
}

/// What a pair gives: its score after softcap and bias, and the softcap's derivative.
pub(super) struct Score {
    pub s: f32,
    pub slope: f32,
}

impl Job {
    fn new(asked: &host::Job<'_>) -> Result<Self, Error> {
        let &host::Job { style, mutant, run, request } = asked;
        let (scores, value_dim) = match request.problem {
            Problem::Attention(problem) => (&problem.scores, problem.value_dim),
            Problem::AttentionLse(problem) => (&problem.scores, 0),
            other => return Err(host::no_host(other.algorithm())),
        };
        let rows = |name: &str| -> Result<Option<Rows>, Error> {
            let Some(tensor) = request.inputs.get(name) else { return Ok(None) };
            let data = tensor.to_f64(name)?.iter().map(|&x| x as f32).collect();
            let mut shape = [1; 4];
            shape[..tensor.shape.len()].copy_from_slice(&tensor.shape);
            Ok(Some(Rows { data, shape }))
        };
        let mut job = Job {
            scores: scores.clone(),
            style,
            mutant,
            run,
            dtype: request.dtype,
            value_dim,
            q: rows("q")?.unwrap_or_default(),
            k: rows("k")?.unwrap_or_default(),
            v: rows("v")?.unwrap_or_default(),
            bias: rows("bias")?,
            sinks: rows("sinks")?.map(|sinks| sinks.data),
            dout: rows("dout")?,
            dlse: rows("dlse")?,
            direction: None,
        };
        job.misread_mask();
        Ok(job)
    }

    pub fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    pub fn scores(&self) -> &Scores {
        &self.scores
    }

    /// The second order and the tangents are the reference's, in f32, except where P is taken for a
    /// constant.
    fn second_order(mut self, request: &Request<'_>) -> Result<Results, Error> {
        let (problem, pass) = (request.problem, request.pass);
        let values = crate::bounds::values(problem, pass, request.inputs)?;
        let outputs = crate::tiers::softmax_in::<f32>(problem, pass, &values)?;
        let operands = problem.operands(pass);
        let named = operands.iter().filter_map(|x| Some((x.name, outputs.get(x.name)?)));
        let mut results: Results =
            named.map(|(name, x)| (name, x.iter().copied().collect())).collect();
        if self.is(Mutant::ConstantWeights) && pass == Pass::DoubleBackward {
            let like = |rows: &Rows, name: &str| Rows {
                data: match values.get(name) {
                    Some(values) => values.iter().map(|&x| x as f32).collect(),
                    None => vec![0.0; rows.data.len()],
                },
                shape: rows.shape,
            };
            self.direction = Some([like(&self.q, "ddq"), like(&self.k, "ddk")]);
            let mut first = self.backward(&self.forward());
            results.insert("gq", first.remove("dq").unwrap_or_default().data);
            results.insert("gk", first.remove("dk").unwrap_or_default().data);
        }
        Ok(results)
    }

    fn misread_mask(&mut self) {
        let mutant = self.mutant;
        self.scores.mask.visit_mut(&mut |mask| match (mutant, mask) {
            (
                Some(Mutant::TopLeft),
                Mask::Causal { align }
                | Mask::Window { align, .. }
                | Mask::ChunkedCausal { align, .. },
            ) => *align = Align::TopLeft,
            (Some(Mutant::WindowLeftPlusOne), Mask::Window { left: Some(left), .. }) => *left += 1,
            (Some(Mutant::WindowLeftMinusOne), Mask::Window { left: Some(left), .. }) => {
                *left = left.saturating_sub(1);
            }
            (Some(Mutant::WindowRightPlusOne), Mask::Window { right: Some(right), .. }) => {
                *right += 1;
            }
            _ => {}
        });
    }

    pub fn sequences(&self, pass: Pass) -> Vec<Sequence> {
        let scores = self.scores();
        let mut list = scores.sequences();
        if self.is(Mutant::PaddingRead) && pass == Pass::Backward {
            let dense = Scores { sequences: Sequences::Dense, ..scores.clone() };
            if matches!(scores.sequences, Sequences::Lengths { .. }) {
                list = dense.sequences();
            }
        }
        if self.is(Mutant::PackedLeak) && matches!(scores.sequences, Sequences::Packed { .. }) {
            for sequence in &mut list {
                let next = sequence.key_start + sequence.keys < scores.extents.keys;
                sequence.keys += usize::from(next);
            }
        }
        list
    }

    /// The key tiles of a sequence.
    pub fn tiles(&self, sequence: &Sequence) -> Vec<std::ops::Range<usize>> {
        let (m, tile) = (sequence.keys, self.style.tile);
        let end = if self.is(Mutant::KeyTailDropped) && m > tile { m - m % tile } else { m };
        (0..end).step_by(tile).map(|start| start..(start + tile).min(end)).collect()
    }

    pub fn visible(&self, sequence: &Sequence, h: usize, i: usize, j: usize, pass: Pass) -> bool {
        let mask = &self.scores().mask;
        if self.is(Mutant::OneRowShifted) && i == sequence.queries / 2 && j > 0 {
            return mask.allows(sequence, h, i, j - 1);
        }
        let windowed = matches!(mask, Mask::Window { .. });
        if self.is(Mutant::BackwardWithoutWindow) && pass == Pass::Backward && windowed {
            return true;
        }
        mask.allows(sequence, h, i, j)
    }

    pub fn key_head(&self, h: usize) -> usize {
        let scores = self.scores();
        match self.is(Mutant::HeadModulo) {
            true => h % scores.extents.key_heads,
            false => h / scores.group(),
        }
    }

    pub fn scale(&self) -> f32 {
        let scores = self.scores();
        let width = match self.mutant {
            Some(Mutant::ScaleOfValues) if self.value_dim > 0 => self.value_dim,
            Some(Mutant::ScaleOffByOne) => scores.extents.dim + 1,
            _ => scores.extents.dim,
        };
        scores.softmax_scale.unwrap_or_else(|| 1.0 / (width as f64).sqrt()) as f32
    }

    pub fn bias_row<'a>(&self, bias: &'a Rows, b: usize, h: usize, i: usize) -> &'a [f32] {
        let b = if bias.shape[0] == 1 || self.is(Mutant::BiasOfFirstBatch) { 0 } else { b };
        bias.row(b, if bias.shape[1] == 1 { 0 } else { h }, i)
    }

    /// (F1), (F2).
    pub fn score(&self, sequence: &Sequence, h: usize, i: usize, j: usize) -> Score {
        let &Sequence { batch, query_start, key_start, .. } = sequence;
        let q = self.q.row(batch, h, query_start + i);
        let k = self.k.row(batch, self.key_head(h), key_start + j);
        let used = if self.is(Mutant::First64OfHead) { q.len().min(64) } else { q.len() };
        let dot: f32 = q.iter().zip(k).take(used).map(|(a, b)| a * b).sum();
        let bias = self
            .bias
            .as_ref()
            .map_or(0.0, |bias| self.bias_row(bias, batch, h, query_start + i)[key_start + j]);
        let s = self.scale() * dot;
        let cap = self.scores().softcap.filter(|_| !self.is(Mutant::SoftcapIgnored));
        let Some(cap) = cap.map(|cap| cap as f32) else { return Score { s: s + bias, slope: 1.0 } };
        let bent = |s: f32| (s / cap).tanh();
        let derivative = 1.0 - bent(s) * bent(s);
        let slope = if self.is(Mutant::NoSoftcapDerivative) { 1.0 } else { derivative };
        match self.is(Mutant::SoftcapAfterBias) {
            true => Score { s: cap * bent(s + bias), slope },
            false => Score { s: cap * bent(s) + bias, slope },
        }
    }

    pub fn exp(&self, x: f32) -> f32 {
        if self.style.base2 { (x * std::f32::consts::LOG2_E).exp2() } else { x.exp() }
    }
}
