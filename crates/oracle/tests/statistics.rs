//! Gate G2: it sees what bounds cannot, and is silent about results that err by chance.

use etalon_oracle::bounds::{Bounds, bounds};
use etalon_oracle::gates::{Measure, Part, Statistic, g1, g2};
use etalon_oracle::generate::Stream;
use etalon_oracle::profile::Profile;
use etalon_oracle::tensor::{Stored, Tensor, Tensors};
use etalon_oracle::typical::{KERNELS, Kernels, Typical};
use etalon_problem::{Attention, Dtype, Extents, Mask, Pass, Problem};
use ndarray::{ArrayD, Dimension, IxDyn};

/// A pass of causal attention on generic inputs, and a kernel that is correct.
struct Trial {
    problem: Problem,
    pass: Pass,
    dtype: Dtype,
    profile: Profile,
    exact: Bounds,
    typical: Typical,
    got: Vec<(String, ArrayD<f64>)>,
}

impl Trial {
    fn new(pass: Pass, dtype: Dtype, profile: &str) -> Self {
        let extents =
            Extents { batch: 2, query_heads: 2, key_heads: 2, queries: 100, keys: 100, dim: 32 };
        let problem: Problem = Attention::new(extents).mask(Mask::causal()).into();
        let operands = problem.operands(pass);
        let given = operands.iter().filter(|x| x.role.is_given()).map(|x| {
            let stream = Stream::new(1, x.name);
            let elements = (0..x.len()).map(|at| stream.normal(at)).collect();
            let values = ArrayD::from_shape_vec(x.shape.clone(), elements).unwrap();
            (x.name.to_string(), Tensor::store(&values, Stored::of(x.precision, dtype)))
        });
        let inputs: Tensors = given.collect();
        let profile = Profile::by_name(profile).unwrap();
        let exact = bounds(&problem, pass, dtype, &profile, &inputs).unwrap();
        let kernels = Kernels::new(&problem, pass, dtype, &profile, &inputs, &exact).unwrap();
        let typical = Typical::new(&kernels).unwrap();
        // Of a number that the gate does not compare with.
        let got = kernels.results(KERNELS).unwrap().into_iter().collect();
        Trial { problem, pass, dtype, profile, exact, typical, got }
    }

    /// The results after a change of one output.
    fn outputs(&self, output: &str, change: impl Fn(&[usize], f64) -> f64) -> Tensors {
        let operands = self.problem.operands(self.pass);
        let changed = |(name, got): &(String, ArrayD<f64>)| {
            let mut got = got.clone();
            if name == output {
                got.indexed_iter_mut().for_each(|(at, x)| *x = change(at.slice(), *x));
            }
            let operand = operands.iter().find(|x| x.name == name).unwrap();
            (name.clone(), Tensor::store(&got, Stored::of(operand.precision, self.dtype)))
        };
        self.got.iter().map(changed).collect()
    }

    fn conspicuous(&self, outputs: &Tensors) -> Vec<Statistic> {
        let operands = self.problem.operands(self.pass);
        let all = g2(&operands, &self.profile, &self.exact, &self.typical, outputs);
        all.into_iter().filter(|statistic| statistic.margin() > 1.0).collect()
    }
}

fn trials() -> impl Iterator<Item = Trial> {
    let passes = [Pass::Forward, Pass::Backward].into_iter();
    let kinds =
        [(Dtype::F32, "f32-strict"), (Dtype::Bf16, "bf16-flash"), (Dtype::F16, "f16-flash")];
    passes.flat_map(move |pass| kinds.map(|(dtype, profile)| Trial::new(pass, dtype, profile)))
}

#[test]
fn chance_is_not_conspicuous() {
    for trial in trials() {
        let outputs = trial.outputs("", |_, x| x);
        assert_eq!(trial.conspicuous(&outputs), [], "{} {}", trial.profile, trial.pass);
        assert!(g1(&trial.exact, &outputs).margin <= 1.0);
    }
}

/// Errors of 1e-5 in f32 and of 0.2 % in bf16, of which the bounds know nothing.
#[test]
fn a_uniform_error_is_a_slope() {
    for trial in trials() {
        let least = [("f32-strict", 1e-5), ("bf16-flash", 2e-3), ("f16-flash", 5e-4)];
        let size = least.iter().find(|x| x.0 == trial.profile.name).unwrap().1;
        for name in trial.got.iter().map(|(name, _)| name) {
            let found = trial.conspicuous(&trial.outputs(name, |_, x| x * (1.0 - size)));
            let slope = |x: &Statistic| x.part == Part::All && x.measure == Measure::Slope;
            let found = found.iter().find(|x| slope(x) && &x.output == name);
            let found = found.unwrap_or_else(|| panic!("{} {name}", trial.profile));
            assert!((found.value / -size - 1.0).abs() < 0.5, "{found}");
        }
    }
}

/// The bounds of bf16 are wide enough for a dk that is half a percent too large.
#[test]
fn a_part_that_is_scaled_is_named() {
    let trial = Trial::new(Pass::Backward, Dtype::Bf16, "bf16-flash");
    let head = |at: &[usize]| at[..2] == [1, 0];
    let rows = |at: &[usize]| (32..48).contains(&at[2]);
    let columns = |at: &[usize]| at[3] >= 16;
    type Wrong<'a> = &'a dyn Fn(&[usize]) -> bool;
    let parts: [(Wrong<'_>, Part); 3] = [
        (&head, Part::Head(vec![1, 0])),
        (&rows, Part::Rows(32..48)),
        (&columns, Part::Columns(16..32)),
    ];
    for (wrong, part) in parts {
        // Of a kernel that rounds nothing but its results: others leave less room below the bound.
        let exact = |at: &[usize]| trial.exact.outputs["dk"].value[IxDyn(at)];
        let scale = |at: &[usize]| if wrong(at) { 1.005 } else { 1.0 };
        let outputs = trial.outputs("dk", |at, _| scale(at) * exact(at));
        let dk: Tensors = outputs.into_iter().filter(|(name, _)| name == "dk").collect();
        let mut bounds = trial.exact.clone();
        bounds.outputs.retain(|name, _| name == "dk");
        assert!(g1(&bounds, &dk).margin <= 1.0, "the bounds do not see it");
        let found = trial.conspicuous(&dk);
        assert!(found.iter().any(|x| x.part == part && x.measure == Measure::Slope), "{found:?}");
    }
}

#[test]
fn a_row_that_errs_more_than_its_like_is_named() {
    for trial in trials() {
        let name = if trial.pass == Pass::Forward { "o" } else { "dv" };
        let row = [1, 1, 40];
        // A quarter of its size, with signs of its own.
        let signs = Stream::new(2, "signs");
        let outputs = trial.outputs(name, |at, x| match at[..3] == row {
            true => x * (1.0 + 0.25 * signs.normal(at[3])),
            false => x,
        });
        let found = trial.conspicuous(&outputs);
        let chi = found.iter().find(|x| x.measure == Measure::Chi).unwrap();
        assert_eq!((chi.output.as_str(), &chi.part), (name, &Part::Row(row.to_vec())), "{chi}");
    }
}
