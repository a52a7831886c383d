//! The double backward pass and the tangents: who writes which tile.
//!
//! A tangent is one sweep over the scores, a double backward pass three (the numbers of products are
//! those of one pair of tiles, every cotangent but `cot_o` and `cot_lse` given):
//!
//! * rows: u and gdout (D4), (D5), which are the tangents of lse and o (J1), (J2): 5 products;
//! * rows again, from memory still warm: gq (D10): 7 products;
//! * columns: gk and gv (D11), (D12): 8 products.
//!
//! Between them pass four numbers per row, lse, δ, u and z, so that memory is O(N). Where o is
//! stored in less than f32, its rounding would be multiplied by u and dout: it is computed anew, for
//! one product more.
//!
//! Every element has one writer and one order of summation: results are bitwise reproducible.

mod kernels;
mod sweeps;
mod tiles;

use super::SecondGradientsMut;
use crate::aligned::Aligned;
use crate::heads::Cut;
use crate::mask::Sight;
use crate::packs::{Operand, Packing};
use crate::plan::{Buffer, Plan};
use crate::waves::Waves;
use crate::{Element, Options};
use etalon_problem::{Blocking, Dtype, Error, Scores, Sequence};
use kernels::Scratch;
use ndarray::{ArrayView1, ArrayView3, ArrayView4};
use std::sync::Mutex;
use sweeps::{Sweep, column_tasks, row_tasks};

/// The blocking where none is asked for: four tiles of weights stay in the L2 cache.
const DEFAULT: Blocking = Blocking { queries: 96, keys: 192 };

/// How the operands of the scores move.
#[derive(Clone, Copy)]
pub(crate) struct Direction<'a, T> {
    pub q: Option<&'a ArrayView4<'a, T>>,
    pub k: Option<&'a ArrayView4<'a, T>>,
    pub sinks: Option<&'a ArrayView1<'a, f32>>,
    pub bias: Option<&'a ArrayView4<'a, T>>,
}

/// What attention has beyond attention_lse.
#[derive(Clone, Copy)]
pub(crate) struct Values<'a, T> {
    pub v: &'a ArrayView4<'a, T>,
    pub o: ArrayView4<'a, T>,
    /// How v moves.
    pub ddv: Option<&'a ArrayView4<'a, T>>,
    pub dout: Option<&'a ArrayView4<'a, T>>,
    pub cot_o: Option<&'a ArrayView4<'a, T>>,
}

/// A double backward pass or tangents of attention or of attention_lse, the operands checked.
pub(crate) struct Second<'a, T> {
    pub scores: &'a Scores,
    pub q: &'a ArrayView4<'a, T>,
    pub k: &'a ArrayView4<'a, T>,
    pub sinks: Option<&'a ArrayView1<'a, f32>>,
    pub bias: Option<&'a ArrayView4<'a, T>>,
    pub lse: ArrayView3<'a, f32>,
    pub direction: Direction<'a, T>,
    pub values: Option<Values<'a, T>>,
    pub dlse: Option<&'a ArrayView3<'a, f32>>,
    pub cot_lse: Option<&'a ArrayView3<'a, f32>>,
}

impl<T> Direction<'_, T> {
    /// Fails unless it fits the problem; its tensors are called `names`.
    pub fn check(&self, scores: &Scores, names: [&str; 4]) -> Result<(), Error> {
        let shapes = [
            self.q.map(|x| x.shape()),
            self.k.map(|x| x.shape()),
            self.sinks.map(|x| x.shape()),
            self.bias.map(|x| x.shape()),
        ];
        check_moving(scores, names, shapes)
    }
}

/// How a pass is cut, and what it works on together.
#[derive(Debug, Clone, Copy)]
struct Course {
    cut: Cut,
    /// Whether gbias is wanted.
    gbias: bool,
    waves: Waves,
}

/// What sweeps of one head learn of its rows; in whole tiles of queries, padded with zeros.
#[derive(Debug, Default)]
struct Statistics {
    /// (B1)
    delta: Aligned,
    /// (D4)
    u: Aligned,
    /// (D6)
    z: Aligned,
}

impl<T: Element> Second<'_, T> {
    /// Writes what is asked for.
    pub fn run(&self, out: SecondGradientsMut<'_, T>, options: &Options) -> Result<(), Error> {
        let sequences = self.scores.sequences();
        let cut = self.cut(options)?;
        let SecondGradientsMut { gq, gk, gv, gdout, gdlse, gsinks, mut gbias } = out;
        let tangent = gq.is_none() && gk.is_none() && gv.is_none() && gbias.is_none();
        let packing = self.packing(&sequences, cut, tangent);
        let course = self.course(&packing, gbias.is_some());
        let sight = Sight::new(&self.scores.mask)?;
        let (mut slots, mut statistics) = (Vec::new(), Vec::new());
        for _ in 0..course.waves.size {
            slots.push(packing.room()?);
            statistics.push(self.statistics(&packing)?);
        }
        // Trial allocation: on an error nothing has been written yet.
        let idle = Mutex::new(vec![self.scratch(&course)?]);
        let mut rows = row_tasks(self.scores, &sequences, &course, [gq, gdout], gdlse);
        let mut columns = column_tasks(self.scores, &sequences, &course, [gk, gv]);
        let mut sinks = vec![0.0; self.scores.extents.query_heads];
        for wave in course.waves.iter() {
            let (slots, statistics) = (&mut slots[..wave.len()], &mut statistics[..wave.len()]);
            packing.pack(slots, wave.start);
            let (pass, packing, sight, idle) = (self, &packing, &sight, &idle);
            let first = wave.start;
            let sweep = Sweep { pass, packing, sight, course, options, slots, first, idle };
            sweep.rows(rows.next().unwrap_or_default(), statistics)?;
            sweep.columns(columns.next().unwrap_or_default(), statistics)?;
            if gsinks.is_some() {
                sweep.gsinks(&mut sinks, statistics);
            }
            if let Some(gbias) = gbias.take() {
                sweep.biases(gbias, statistics)?;
            }
        }
        // Where there are no slots at all.
        gbias.into_iter().for_each(|mut gbias| gbias.fill(T::ZERO));
        if let Some(mut gsinks) = gsinks {
            gsinks.iter_mut().zip(sinks).for_each(|(gsink, sum)| *gsink = sum as f32);
        }
        Ok(())
    }

    /// E, or 0 without values.
    fn value_dim(&self) -> usize {
        self.values.as_ref().map_or(0, |values| values.v.dim().3)
    }

    /// Whether o is computed anew: its rounding would be multiplied by u and dout.
    fn o_anew(&self) -> bool {
        T::DTYPE != Dtype::F32
    }

    /// The memory of one thread.
    fn scratch(&self, course: &Course) -> Result<Scratch, Error> {
        let (dim, value_dim) = (self.scores.extents.dim, self.value_dim());
        Scratch::new(&course.cut, dim, value_dim, self.o_anew(), course.gbias)
    }

    /// `tangent`: the first sweep alone, which sums q, k and how they move only across, and v along.
    fn packing<'s>(&'s self, sequences: &'s [Sequence], cut: Cut, tangent: bool) -> Packing<'s, T> {
        let (of, values) = (&self.direction, self.values.as_ref());
        let [v, ddv] = [values.map(|values| values.v), values.and_then(|values| values.ddv)];
        let dout = values.and_then(|values| values.dout);
        let cot_o = values.and_then(|values| values.cot_o);
        let keys = [Some(self.k), v, of.k, ddv];
        let queries = [Some(self.q), dout, of.q, cot_o];
        let (keys, queries) = if tangent {
            let [k, v, ddk, ddv] = keys;
            let keys =
                [Operand::across(k), Operand::along(v), Operand::across(ddk), Operand::along(ddv)];
            let [q, _, ddq, _] = queries.map(Operand::across);
            (keys, [q, Operand::NONE, ddq, Operand::NONE])
        } else {
            (keys.map(Operand::both), queries.map(Operand::both))
        };
        let queries = Some((queries, self.lse.view()));
        Packing { scores: self.scores, sequences, cut, keys, queries }
    }

    fn course(&self, packing: &Packing<'_, T>, gbias: bool) -> Course {
        let cut = packing.cut;
        let waves = match gbias {
            // Heads and sequences that share a bias are summed in one order.
            true => Waves::one(packing.slots()),
            false => {
                let threads = rayon::current_num_threads();
                Waves::new(packing.slots(), packing.bytes(), packing.tiles().1, threads)
            }
        };
        Course { cut, gbias, waves }
    }

    /// What [`Second::run`] will do, all results being wanted, or those of a tangent alone.
    pub fn plan(&self, tangent: bool, options: &Options) -> Result<Plan, Error> {
        let sequences = self.scores.sequences();
        let cut = self.cut(options)?;
        let packing = self.packing(&sequences, cut, tangent);
        let course = self.course(&packing, self.bias.is_some() && !tangent);
        let together = course.waves.size;
        let scratch = self.scratch(&course)?.bytes();
        let mut buffers = packing.buffers(together, scratch);
        let rows = Self::rows(&packing).saturating_mul(3 * size_of::<f32>());
        let slots = together.saturating_mul(self.scores.group());
        buffers.push(Buffer::parts("numbers of rows", slots, rows));
        let products = self.products(tangent, course.gbias);
        Ok(Plan {
            blocking: cut.blocking(),
            mode: None,
            products,
            interval: None,
            together,
            buffers,
        })
    }

    /// The products of a pair of tiles, over all sweeps.
    fn products(&self, tangent: bool, gbias: bool) -> usize {
        let one = |operand: Option<&ArrayView4<'_, T>>| usize::from(operand.is_some());
        let (ddq, ddk) = (one(self.direction.q), one(self.direction.k));
        let values = self.values.as_ref();
        let v = usize::from(values.is_some());
        let ddv = one(values.and_then(|values| values.ddv));
        let dout = one(values.and_then(|values| values.dout));
        let cot_o = one(values.and_then(|values| values.cot_o));
        // S and U; then u and gdout, o perhaps anew; then dP and T, which the other sweeps need.
        let scores = 1 + ddq + ddk;
        let first = scores + v + ddv + if self.o_anew() { v } else { 0 };
        let weights = scores + dout * (v + ddv) + cot_o * v;
        let rows = weights + 1 + ddk;
        let columns = weights + 1 + ddq + dout + cot_o;
        match tangent {
            true => first,
            false => first + rows + columns + if gbias { weights } else { 0 },
        }
    }

    fn cut(&self, options: &Options) -> Result<Cut, Error> {
        let blocking = Some(options.blocking.unwrap_or(DEFAULT));
        Cut::new(self.scores, &Options { blocking, ..*options })
    }

    /// Rows of the longest sequence, in whole tiles.
    fn rows(packing: &Packing<'_, T>) -> usize {
        packing.padded(packing.longest().0).next_multiple_of(packing.cut.queries)
    }

    /// Room for what the sweeps learn of the heads of any slot.
    fn statistics(&self, packing: &Packing<'_, T>) -> Result<Vec<Statistics>, Error> {
        let rows = Self::rows(packing);
        let zeros = || Aligned::zeros(rows, "numbers of rows");
        let room = |_| Ok(Statistics { delta: zeros()?, u: zeros()?, z: zeros()? });
        (0..self.scores.group()).map(room).collect()
    }
}

/// Fails unless an operand that may be absent fits.
pub(crate) fn check_shape(
    name: &str,
    expected: &[usize],
    found: Option<&[usize]>,
) -> Result<(), Error> {
    found.map_or(Ok(()), |found| Error::expect_shape(name, expected, found))
}

/// Fails unless operands that move with q, k, sinks and bias, or results for these, fit.
pub(crate) fn check_moving(
    scores: &Scores,
    names: [&str; 4],
    [q, k, sinks, bias]: [Option<&[usize]>; 4],
) -> Result<(), Error> {
    check_shape(names[0], &scores.q_shape(), q)?;
    check_shape(names[1], &scores.k_shape(), k)?;
    if sinks.is_some() {
        Error::expect_presence(names[2], "sinks", scores.sinks, true)?;
        check_shape(names[2], &[scores.extents.query_heads], sinks)?;
    }
    match (bias, scores.bias_shape()) {
        (Some(bias), Some(shape)) => Error::expect_shape(names[3], &shape, bias),
        (Some(_), None) => Error::expect_presence(names[3], "bias", false, true),
        (None, _) => Ok(()),
    }
}
