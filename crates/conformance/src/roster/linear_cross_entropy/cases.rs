//! The grid of linear_cross_entropy.

use crate::capabilities::{Fit, Number};
use crate::cases::axes::{Grid, grid};
use crate::generate::Stream;
use crate::laws::tensors::from_indices;
use etalon_problem::{
    Algorithm, Dtype, LinearCrossEntropy, LseSquareWeight, NothingLeft, Operand, Problem,
    Reduction, TokenOutputs,
};
use ndarray::{ArrayD, IxDyn};

grid! {
    /// Axes of a case of linear_cross_entropy, beside its storage type and seed.
    Point {
        /// Numbers of tokens, elements and classes.
        shape: ShapeKind = "shape" fn draw(stream: &Stream) -> [usize; 3] {
            /// One of each.
            Ones = "ones" => [1, 1, 1],
            /// No tokens.
            NoTokens = "no-tokens" => [0, 3, 40],
            /// A few; fewer classes than any tile has.
            Small = "small" => [5, stream.pick(0, &[1, 2, 7]), stream.pick(1, &[2, 3, 8])],
            /// No multiple of any tile.
            Ragged = "ragged" => [11, 16, 100 + stream.below(2, 60)],
            /// Several tiles of classes, the last with one.
            Wide = "wide" => [4, stream.pick(3, &[3, 8, 33]), 513],
            /// Several blocks of tokens.
            Long = "long" => [67 + stream.below(4, 80), 8, 40],
            /// Large: several tiles of tokens, of columns and of classes.
            Big = "big" => [130 + stream.below(5, 80), 47, 1500 + stream.below(6, 40)],
            /// Large: more elements than a kernel multiplies at a time.
            Deep = "deep" => [9, 300 + stream.below(7, 300), 70],
            /// Large: more tokens than share what is read of w.
            ManyTokens = "many-tokens" => [1060 + stream.below(8, 100), 5, 300],
            /// Large: four blocks of tokens by six tiles of classes.
            Blocks = "blocks" => [290 + stream.below(30, 60), 3, 1290 + stream.below(31, 40)],
            /// Large: a tree of many tiles of classes.
            ManyClasses = "many-classes" => [3, 4, 20_000 + stream.below(9, 500)],
            /// Large: more than 4096 tokens, for few classes.
            MostTokens = "most-tokens" => [4200 + stream.below(11, 100), 3, 20],
            /// Large: with 37 % of the memory of all logits, a sweep of the simd tier makes them again in three chunks
            /// of tokens or more, by several spans of classes.
            Sweeps = "sweeps" => [290 + stream.below(32, 20), 2, 5000 + stream.below(33, 100)],
        },
        /// Operations that make logits of h·w.
        link: LinkKind = "link" fn bias_softcap_scales() -> [bool; 3] {
            /// Nothing.
            Plain = "plain" => [false, false, false],
            /// A bias.
            Bias = "bias" => [true, false, false],
            /// A cap near the logits' size.
            Softcap = "softcap" => [false, true, false],
            /// A scale and a temperature below 1.
            Scales = "scales" => [false, false, true],
            /// All of them.
            Everything = "everything" => [true, true, true],
        },
        /// Operations on logits and targets.
        loss: LossKind = "loss" fn weights_smoothing_square() -> [bool; 3] {
            /// The cross-entropy alone.
            Plain = "plain" => [false, false, false],
            /// Smoothed labels.
            Smoothing = "smoothing" => [false, true, false],
            /// A z-loss.
            LseSquare = "lse-square" => [false, false, true],
            /// Weights of classes and tokens.
            Weights = "weights" => [true, false, false],
            /// Weights, smoothing, and a z-loss with the class weights.
            Everything = "everything" => [true, true, true],
            /// Weights, smoothing, and a z-loss without them.
            Unweighted = "unweighted" => [true, true, true],
        },
        /// Reduction of the losses of the tokens.
        reduction: ReductionKind = "reduction" fn draw(stream: &Stream) -> Reduction {
            /// Their mean.
            Mean = "mean" => Reduction::Mean,
            /// Nothing.
            None = "none" => Reduction::None,
            /// Their sum.
            Sum = "sum" => Reduction::Sum,
            /// Their sum by a number.
            By = "by" => Reduction::By { normaliser: stream.pick(22, &[3.0, 1000.0, 1e6]) },
        },
        /// Ignored tokens.
        ignored: IgnoredKind = "ignored" fn ignores(i: usize, stream: &Stream) -> bool {
            /// One in three, but not the first, so that something is left.
            Some = "some" => i > 0 && stream.below(10_000 + i, 3) == 0,
            /// None.
            None = "none" => false,
            /// Tokens of one class.
            Class = "class" => false,
            /// All of them: a loss of 0.
            All = "all" => true,
            /// All of them: a loss of NaN.
            AllNan = "all-nan" => true,
        },
        /// The outputs, and those of them that have cotangents.
        outputs: OutputKind = "outputs" fn give(name: &str) -> bool {
            /// All, with all cotangents.
            All = "all" => true,
            /// The loss alone.
            Loss = "loss" => true,
            /// All; no cotangent but that of the loss.
            LossCotangent = "loss-cotangent" => !["dlse", "dlogprob", "dentropy"].contains(&name),
            /// All; no cotangent of the loss.
            Others = "others" => name != "dloss",
        },
        /// The kind of elements.
        family: Family = "family" fn few_words() -> &'static str {
            /// Bell-shaped, logits of deviation 1.5.
            Generic = "generic" => "bell-shaped, logits of deviation 1.5",
            /// As generic, with few bits, so that logits are exact.
            Dyadic = "dyadic" => "few bits, so that logits are exact",
            /// Every class alike.
            Uniform = "uniform" => "every class alike",
            /// The target's probability near 1.
            Confident = "confident" => "the target's probability near 1",
            /// Logits of deviation 12.
            Peaked = "peaked" => "logits of deviation 12",
            /// Logits of deviation 60: probabilities underflow.
            Distant = "distant" => "logits of deviation 60",
            /// All logits lowered by 300.
            Lowered = "lowered" => "all logits lowered by 300",
            /// All logits raised by 10,000.
            Raised = "raised" => "all logits raised by 10,000",
            /// Every fifth class impossible, where there is a bias, and without weight.
            Impossible = "impossible" => "every fifth class impossible and without weight",
        },
    }
}

/// The class that [`IgnoredKind::Class`] ignores.
const IGNORED_CLASS: i64 = 0;

impl Grid for Point {
    const LARGE: &'static [&'static str] =
        &["big", "deep", "many-tokens", "blocks", "many-classes", "most-tokens", "sweeps"];
    const THIN: &'static [&'static str] = &["most-tokens"];
    const ONCE: &'static [&'static str] = &["sweeps", "blocks", "many-classes", "many-tokens"];

    const TOGETHER: &'static [&'static [(&'static str, &'static str)]] = &[
        // dw of each span in 16 bits, once all chunks of tokens have met it.
        &[
            ("shape", "sweeps"),
            ("family", "generic"),
            ("link", "plain"),
            ("loss", "plain"),
            ("ignored", "none"),
            ("outputs", "all"),
            ("storage", "bf16"),
        ],
        // Smoothing by the weights of all classes, of nodes that have several tiles; almost every probability is
        // small, so that tiles are left out.
        &[
            ("shape", "many-classes"),
            ("family", "confident"),
            ("link", "scales"),
            ("loss", "everything"),
            ("reduction", "mean"),
            ("ignored", "none"),
            ("outputs", "loss-cotangent"),
            ("storage", "f32"),
        ],
    ];

    fn problem(&self, _: Algorithm, seed: u64, fit: Fit<'_>) -> Problem {
        let stream = Stream::new(seed, "problem");
        let [mut tokens, mut dim, mut vocab] = self.shape.draw(&stream);
        fit(&mut [
            (Number::Tokens, &mut tokens),
            (Number::Dim, &mut dim),
            (Number::Vocab, &mut vocab),
        ]);
        let mut problem = LinearCrossEntropy::new(tokens, dim, vocab);
        self.link(&mut problem, &stream);
        self.loss_options(&mut problem, &stream);
        problem.reduction = self.reduction.draw(&stream);
        let all = self.outputs != OutputKind::Loss;
        problem.outputs = TokenOutputs { lse: all, logprob: all, entropy: all, argmax: all };
        problem.wide_gradients = self.shape != ShapeKind::Sweeps && stream.below(23, 3) == 0;
        match self.ignored {
            IgnoredKind::Class => problem.ignore_index = IGNORED_CLASS,
            IgnoredKind::AllNan => problem.nothing_left = NothingLeft::Nan,
            _ => {}
        }
        problem.into()
    }

    fn values(&self, problem: &Problem, operand: &Operand, _: Dtype, seed: u64) -> ArrayD<f64> {
        let Problem::LinearCrossEntropy(problem) = problem else {
            return ArrayD::zeros(IxDyn(&operand.shape));
        };
        let elements = Elements { point: self, problem, seed };
        from_indices(&operand.shape, |index| elements.at(operand.name, index))
    }

    fn given(&self, operand: &Operand) -> bool {
        self.outputs.give(operand.name)
    }

    fn is_rich(&self, _: &Problem) -> bool {
        let many = matches!(self.shape, ShapeKind::Ragged | ShapeKind::Long);
        let some = matches!(self.ignored, IgnoredKind::Some | IgnoredKind::None);
        many && some && self.family == Family::Generic
    }

    fn is_generic(&self) -> bool {
        self.family == Family::Generic
    }

    fn is_smooth(&self) -> bool {
        // No gradient passes where nothing is left; −∞ does not move by an eighth.
        self.family != Family::Impossible && self.ignored != IgnoredKind::AllNan
    }
}

impl Point {
    /// Sets what makes logits of h·w.
    fn link(&self, problem: &mut LinearCrossEntropy, stream: &Stream) {
        let [bias, softcap, scales] = self.link.bias_softcap_scales();
        problem.bias = bias;
        problem.softcap = softcap.then(|| stream.pick(10, &[0.5, 1.0, 2.0, 5.0]));
        if scales {
            problem.logit_scale = stream.pick(11, &[0.6, 1.3, -0.8]);
            problem.temperature = stream.pick(12, &[0.1, 0.5, 0.7, 2.0]);
        }
    }

    /// Sets the options of the loss of a token.
    fn loss_options(&self, problem: &mut LinearCrossEntropy, stream: &Stream) {
        let [weights, smoothing, square] = self.loss.weights_smoothing_square();
        (problem.class_weights, problem.token_weights) = (weights, weights);
        if smoothing {
            // 1: the target has no part in it.
            problem.label_smoothing = stream.pick(20, &[0.1, 0.3, 1.0]);
        }
        if square {
            problem.lse_square_scale = stream.pick(21, &[1e-2, 0.2]);
        }
        if self.loss == LossKind::Everything {
            problem.lse_square_weight = LseSquareWeight::ClassWeight;
        }
    }
}

/// The elements of the operands of a case.
struct Elements<'a> {
    point: &'a Point,
    problem: &'a LinearCrossEntropy,
    seed: u64,
}

impl Elements<'_> {
    fn stream(&self, name: &str) -> Stream {
        Stream::new(self.seed, name)
    }

    fn at(&self, name: &str, index: &[usize]) -> f64 {
        let place = index.iter().fold(0, |place, &i| place * 1024 + i);
        let stream = self.stream(name);
        let normal = || stream.normal(place);
        match (name, index) {
            ("targets", &[i]) => self.target(i) as f64,
            ("h", &[i, c]) => self.hidden(i, c),
            ("w", &[v, c]) => self.head(v, c),
            ("bias", &[v]) => self.bias(v, normal()),
            ("class_weights", &[v]) if self.impossible(v) => 0.0,
            ("class_weights" | "token_weights", _) => 0.25 + 1.5 * stream.uniform(place),
            // Some tokens have no part in the gradients.
            ("dloss", &[i]) if stream.below(10_000 + i, 4) == 0 => 0.0,
            _ => normal(),
        }
    }

    fn target(&self, i: usize) -> i64 {
        let stream = self.stream("targets");
        match self.point.ignored.ignores(i, &stream) {
            true => self.problem.ignore_index,
            false => stream.below(i, self.problem.vocab) as i64,
        }
    }

    /// A constant that is added to all logits.
    fn shift(&self) -> f64 {
        match self.point.family {
            Family::Lowered => -300.0,
            Family::Raised => 1e4,
            _ => 0.0,
        }
    }

    /// True if an element of h or w is there to shift the logits, which no bias does.
    fn shifts(&self, c: usize) -> bool {
        self.shift() != 0.0 && !self.problem.bias && c == 0 && self.problem.dim > 1
    }

    fn hidden(&self, i: usize, c: usize) -> f64 {
        let normal = self.stream("h").normal(i * 1024 + c);
        match self.point.family {
            _ if self.shifts(c) => 1.0,
            Family::Dyadic => (normal * 2.0).round() / 2.0,
            Family::Confident => {
                // 18 along the target's row: p is about 1 − V·10⁻⁸.
                let target = self.target(i).max(0) as usize;
                let row = (0..self.problem.dim).map(|c| self.head(target, c).powi(2));
                18.0 * self.head(target, c) / row.sum::<f64>().max(0.1) + 0.1 * normal
            }
            _ => normal,
        }
    }

    fn head(&self, v: usize, c: usize) -> f64 {
        let width = (self.problem.dim as f64).sqrt();
        let normal = |v: usize| self.stream("w").normal(v * 1024 + c) * 1.5 / width;
        match self.point.family {
            _ if self.shifts(c) => self.shift(),
            Family::Dyadic => (normal(v) * 8.0).round() / 8.0,
            Family::Uniform => normal(0),
            Family::Peaked => 8.0 * normal(v),
            Family::Distant => 40.0 * normal(v),
            _ => normal(v),
        }
    }

    fn bias(&self, v: usize, normal: f64) -> f64 {
        match self.point.family {
            Family::Uniform => 0.5,
            Family::Dyadic => (normal * 4.0).round() / 4.0,
            Family::Lowered | Family::Raised => 0.5 * normal + self.shift(),
            Family::Impossible if self.impossible(v) => f64::NEG_INFINITY,
            _ => 0.5 * normal,
        }
    }

    /// True if a class is there to have no probability. Class 0 is not.
    fn impossible(&self, v: usize) -> bool {
        self.point.family == Family::Impossible && v % 5 == 3
    }
}
