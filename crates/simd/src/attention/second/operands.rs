//! The operands of a second order, packed once for all sweeps.

use super::Second;
use crate::Element;
use crate::aligned::Aligned;
use crate::heads::{Cut, either, key_rows, query_rows, rows_of};
use crate::pack::{NonFinite, Packed, Source};
use crate::parallel::reserve;
use etalon_problem::{Error, Sequence};
use ndarray::ArrayView4;
use rayon::prelude::*;
use std::ops::Range;

/// A matrix, packed for both sides of a product.
#[derive(Debug, Default)]
pub struct Both {
    /// Where its rows are summed against.
    pub across: Packed,
    /// Where its rows are what is summed.
    pub along: Packed,
}

/// The queries of one sequence and head. A row that saw no key reads as zeros, with lse = +∞: its
/// weights are then 0.
#[derive(Debug, Default)]
pub struct Queries {
    pub q: Both,
    pub ddq: Option<Both>,
    pub dout: Option<Both>,
    pub cot_o: Option<Both>,
    /// Queries that are not finite in any of these.
    pub non_finite: NonFinite,
    /// lse, padded to register blocks with +∞.
    pub lse: Vec<f32>,
}

/// The keys of one sequence and key head.
#[derive(Debug, Default)]
pub struct Keys {
    pub k: Both,
    pub ddk: Option<Both>,
    pub v: Option<Both>,
    pub ddv: Option<Both>,
    /// Keys that are not finite in any of these.
    pub non_finite: NonFinite,
}

/// The operands of all sequences and heads.
pub struct Operands {
    /// Those of sequence s and query head h are at s·Hq + h.
    pub queries: Vec<Queries>,
    /// Those of sequence s and key head h are at s·Hk + h.
    pub keys: Vec<Keys>,
}

/// What sweeps of one head learn of its rows; padded with zeros to register blocks.
#[derive(Debug, Default)]
pub struct Statistics {
    /// (B1)
    pub delta: Aligned,
    /// (D4)
    pub u: Aligned,
    /// (D6)
    pub z: Aligned,
}

/// The rows of one sequence and head, of which operand so ever.
struct Rows<'a> {
    batch: usize,
    head: usize,
    rows: Range<usize>,
    dead: Option<&'a [bool]>,
    /// The width of a panel across, and along.
    widths: (usize, usize),
}

impl Rows<'_> {
    fn pack<T: Element>(
        &self,
        operand: &ArrayView4<'_, T>,
        non_finite: &mut NonFinite,
    ) -> Result<Both, Error> {
        let rows = rows_of(operand, self.batch, self.head, self.rows.clone());
        let source = Source { rows, dead: self.dead };
        *non_finite = either(non_finite.take(), source.non_finite());
        Ok(Both { across: source.across(self.widths.0)?, along: source.along(self.widths.1)? })
    }

    fn pack_any<T: Element>(
        &self,
        operand: Option<&ArrayView4<'_, T>>,
        non_finite: &mut NonFinite,
    ) -> Result<Option<Both>, Error> {
        operand.map(|operand| self.pack(operand, non_finite)).transpose()
    }
}

impl Operands {
    /// Packs the operands of every sequence and head.
    pub fn new<T: Element>(
        pass: &Second<'_, T>,
        sequences: &[Sequence],
        cut: &Cut,
    ) -> Result<Self, Error> {
        let e = &pass.scores.extents;
        let heads = |number: usize| {
            let heads = sequences.iter().flat_map(move |s| (0..number).map(move |head| (s, head)));
            heads.collect::<Vec<_>>().into_par_iter()
        };
        let queries = heads(e.query_heads).map(|(s, head)| Queries::new(pass, s, head, cut));
        let keys = heads(e.key_heads).map(|(s, head)| Keys::new(pass, s, head, cut));
        Ok(Operands {
            queries: queries.collect::<Result<_, Error>>()?,
            keys: keys.collect::<Result<_, Error>>()?,
        })
    }

    /// Room for what the sweeps learn; at s·Hq + h, in tiles of queries.
    pub fn statistics(&self, cut: &Cut) -> Result<Vec<Statistics>, Error> {
        let room = |queries: &Queries| {
            let rows = queries.lse.len().next_multiple_of(cut.queries);
            let zeros = || Aligned::zeros(rows, "numbers of rows");
            Ok(Statistics { delta: zeros()?, u: zeros()?, z: zeros()? })
        };
        self.queries.iter().map(room).collect()
    }
}

impl Queries {
    fn new<T: Element>(
        pass: &Second<'_, T>,
        sequence: &Sequence,
        head: usize,
        cut: &Cut,
    ) -> Result<Self, Error> {
        let padded = sequence.queries.next_multiple_of(cut.rows);
        let mut lse = reserve(padded, "lse")?;
        let mut dead = None;
        for (i, row) in query_rows(sequence).enumerate() {
            let here = pass.lse[[sequence.batch, head, row]];
            if here == f32::NEG_INFINITY {
                dead.get_or_insert_with(|| vec![false; sequence.queries])[i] = true;
            }
            lse.push(if here == f32::NEG_INFINITY { f32::INFINITY } else { here });
        }
        lse.resize(padded, f32::INFINITY);
        let rows = Rows {
            batch: sequence.batch,
            head,
            rows: query_rows(sequence),
            dead: dead.as_deref(),
            widths: (cut.rows, cut.cols),
        };
        let mut non_finite = None;
        let values = pass.values.as_ref();
        Ok(Queries {
            q: rows.pack(pass.q, &mut non_finite)?,
            ddq: rows.pack_any(pass.direction.q, &mut non_finite)?,
            dout: rows.pack_any(values.and_then(|values| values.dout), &mut non_finite)?,
            cot_o: rows.pack_any(values.and_then(|values| values.cot_o), &mut non_finite)?,
            non_finite,
            lse,
        })
    }
}

impl Keys {
    fn new<T: Element>(
        pass: &Second<'_, T>,
        sequence: &Sequence,
        head: usize,
        cut: &Cut,
    ) -> Result<Self, Error> {
        let rows = Rows {
            batch: sequence.batch,
            head,
            rows: key_rows(sequence),
            dead: None,
            widths: (cut.cols, cut.cols),
        };
        let mut non_finite = None;
        let values = pass.values.as_ref();
        Ok(Keys {
            k: rows.pack(pass.k, &mut non_finite)?,
            ddk: rows.pack_any(pass.direction.k, &mut non_finite)?,
            v: rows.pack_any(values.map(|values| values.v), &mut non_finite)?,
            ddv: rows.pack_any(values.and_then(|values| values.ddv), &mut non_finite)?,
            non_finite,
        })
    }
}
