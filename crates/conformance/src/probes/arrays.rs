//! Exact arrays by name: the inputs of a probe, and the results that it must have.

use crate::laws::flaw::Judgement;
use crate::laws::tensors::{each_element, exceeds};
use crate::profile::Profile;
use crate::tensor::{Tensor, Tensors, Values};
use etalon_problem::{Dtype, Error, Operand, Pass, Problem, Role};
use ndarray::{ArrayD, ArrayView1, IxDyn};

/// Arrays by name. An absent one reads as 0, and what is added to it is lost.
#[derive(Debug, Clone, Default)]
pub(super) struct Arrays(Values);

impl Arrays {
    /// The elements of tensors.
    pub fn of(tensors: &Tensors) -> Result<Self, Error> {
        let array = |(name, x): (&String, &Tensor)| Ok((name.clone(), x.to_f64(name)?));
        tensors.iter().map(array).collect::<Result<_, _>>().map(Arrays)
    }

    /// Every result of a pass as it is where nothing is seen: 0, but an lse −∞.
    pub fn results(problem: &Problem, pass: Pass) -> Self {
        let operands = problem.operands(pass).into_iter().filter(|x| x.role == Role::Output);
        let nothing = |name| if name == "lse" { f64::NEG_INFINITY } else { 0.0 };
        let array =
            |x: Operand| (x.name.to_string(), ArrayD::from_elem(IxDyn(&x.shape), nothing(x.name)));
        Arrays(operands.map(array).collect())
    }

    /// As many zeros.
    pub fn zeros(&self) -> Self {
        Arrays(self.iter().map(|(name, x)| (name.to_string(), x.mapv(|_| 0.0))).collect())
    }

    /// An element.
    pub fn at(&self, name: &str, place: &[usize]) -> f64 {
        self.0.get(name).map_or(0.0, |array| array[place])
    }

    /// Adds to an element.
    pub fn add(&mut self, name: &str, place: &[usize], term: f64) {
        if let Some(array) = self.0.get_mut(name) {
            array[place] += term;
        }
    }

    /// Sets an element.
    pub fn set(&mut self, name: &str, place: &[usize], x: f64) {
        if let Some(array) = self.0.get_mut(name) {
            array[place] = x;
        }
    }

    /// ⟨x, y⟩ of two rows; 0 where an array is absent.
    pub fn product(&self, x: (&str, [usize; 3]), y: (&str, [usize; 3])) -> f64 {
        self.row(x.0, x.1).iter().zip(self.row(y.0, y.1)).map(|(x, y)| x * y).sum()
    }

    /// A row of an array of rows; an empty one of an absent array.
    fn row(&self, name: &str, [b, h, i]: [usize; 3]) -> ArrayView1<'_, f64> {
        match self.0.get(name) {
            Some(array) => array.slice(ndarray::s![b, h, i, ..]),
            None => ArrayView1::from(&[]),
        }
    }

    fn add_row(&mut self, name: &str, [b, h, i]: [usize; 3], x: ArrayView1<'_, f64>, factor: f64) {
        if let Some(array) = self.0.get_mut(name) {
            array.slice_mut(ndarray::s![b, h, i, ..]).scaled_add(factor, &x);
        }
    }

    /// Adds what a pair gives by its score: dq and dk, where `ds` is the gradient of q·k.
    pub fn add_score(&mut self, x: &Arrays, row: [usize; 3], key: [usize; 3], ds: f64) {
        self.add_row("dq", row, x.row("k", key), ds);
        self.add_row("dk", key, x.row("q", row), ds);
    }

    /// Adds what a pair gives by its value: its weight times o and dv.
    pub fn add_value(&mut self, x: &Arrays, row: [usize; 3], key: [usize; 3], weight: f64) {
        self.add_row("o", row, x.row("v", key), weight);
        self.add_row("dv", key, x.row("dout", row), weight);
    }

    /// Adds what a pair gives by its score S = σ q·k + bias, where `ds` is the gradient of S: dq, dk, and dbias,
    /// of which axes of extent 1 are shared.
    pub fn add_ds(&mut self, x: &Arrays, row: [usize; 3], key: [usize; 3], sigma: f64, ds: f64) {
        self.add_score(x, row, key, sigma * ds);
        let ([b, h, i], [.., j]) = (row, key);
        if let Some(dbias) = self.0.get_mut("dbias").filter(|dbias| dbias.ndim() == 4) {
            let (batch, heads) = (dbias.shape()[0], dbias.shape()[1]);
            dbias[[b.min(batch - 1), h.min(heads - 1), i, j]] += ds;
        }
    }

    /// Adds the sizes of what rounds where a row has one key with a weight of 1, made again from a
    /// score of this size (N82), or perhaps only streamed; `self` has the sizes of results, `x` those of
    /// inputs.
    pub fn add_sizes(
        &mut self,
        x: &Arrays,
        row: [usize; 3],
        key: [usize; 3],
        (sigma, weight): (f64, f64),
    ) {
        let dp = x.product(("dout", row), ("v", key));
        self.add_value(x, row, key, weight);
        self.add_ds(x, row, key, sigma, (x.at("dlse", &row) + dp) * weight);
    }

    /// The same of a key that is next to the one of weight 1, whose dP has the size `dp`.
    pub fn add_neighbour(
        &mut self,
        x: &Arrays,
        row: [usize; 3],
        key: [usize; 3],
        (sigma, dp): (f64, f64),
    ) {
        self.add_sizes(x, row, key, (sigma, NEIGHBOUR));
        self.add_ds(x, row, key, sigma, dp * NEIGHBOUR);
    }

    /// Every element without its sign.
    pub fn sizes(&self) -> Self {
        Arrays(self.0.iter().map(|(name, array)| (name.clone(), array.mapv(f64::abs))).collect())
    }

    /// The same, but for log-decays, which are 0 or −∞ and no factors.
    pub fn magnitudes(&self) -> Self {
        let mut sizes = self.sizes();
        for name in ["g", "g_gamma"] {
            let own = self.0.get(name).map(|own| (name.to_string(), own.clone()));
            sizes.0.extend(own);
        }
        sizes
    }

    /// Names and arrays.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &ArrayD<f64>)> {
        self.0.iter().map(|(name, array)| (name.as_str(), array))
    }
}

/// From one score to the next in the probes whose weights are one-hot: what a neighbour weighs is a
/// quarter of a roundoff of f32, and its weight times the largest score is still far from 1.
pub(super) const STEP: f64 = 18.0;

/// e⁻¹⁸, the weight of a neighbour, in the 64 roundings of [`compare`].
pub(super) const NEIGHBOUR: f64 = 4e-3;

/// Contribution of keys beyond the neighbour, of weights of e⁻³⁶ and less, to the largest sums of a probe.
const NOTHING: f64 = 3.814_697_265_625e-6; // 2⁻¹⁸

/// The room of results whose terms are exact until they are added.
pub(super) struct Room<'a> {
    /// The sizes of the terms of sums that a kernel may round on the way: they have 64 roundings of room, and what
    /// the factors of a product lose.
    pub sizes: &'a Arrays,
    /// Given if σ is no power of two, so that scores and dS round when they are multiplied with it: the sizes of the
    /// terms σ dS, which may then be stored in less than the accumulator's type.
    pub scaled: Option<&'a Arrays>,
}

/// Fails unless every result that there is is the expected one, rounded once to its storage type, where
/// `counts(name, index)` holds.
pub(super) fn compare(
    (outputs, profile): (&Tensors, &Profile),
    expected: &Arrays,
    room: Room<'_>,
    counts: impl Fn(&str, &[usize]) -> bool,
) -> Judgement {
    let Room { sizes, scaled } = room;
    for (name, expected) in expected.iter() {
        let Some(tensor) = outputs.get(name) else { continue };
        let (got, dtype) = (tensor.to_f64(name)?, tensor.dtype().unwrap_or(Dtype::F64));
        // Scores are exact, unless q is multiplied with σ before it loses digits.
        let exact_scores = name == "lse" && scaled.is_none();
        let factors = if exact_scores { 0.0 } else { 2.0 * profile.factor };
        let stored_ds = profile.ds_roundoff();
        each_element(name, &got, |at, got| {
            let exact = expected[at];
            let room = (64.0 * Dtype::F32.unit_roundoff() + factors) * sizes.at(name, at)
                + stored_ds * scaled.map_or(0.0, |scaled| scaled.at(name, at));
            let room = if exact == 0.0 { room + NOTHING } else { room };
            // Storing either of two numbers that lie so near to each other.
            let stored = dtype.unit_roundoff() * (exact.abs() + room) + dtype.underflow();
            let room = if room > 0.0 { room + 2.0 * stored } else { room };
            let rounded = dtype.round(exact);
            let wrong = got != rounded && exceeds((got - rounded).abs(), room);
            (wrong && counts(name, at)).then(|| format!(", expected {rounded:e}"))
        })?;
    }
    Ok(None)
}
