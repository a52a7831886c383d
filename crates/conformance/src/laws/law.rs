//! Laws, and the algorithms and passes that they speak of.

use super::flaw::Judgement;
use super::trial::Trial;
use crate::cases::linear_attention::GateKind;
use crate::cases::{Case, Point};
use crate::tier::{Choice, Tier};
use etalon_problem::{Algorithm, Pass, Problem, Scores, Sequences};

/// The assumption of a law.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The result lies within its proven bound.
    Gate,
    /// The right answer is known to the last bit.
    Probe,
    /// It follows from the definition.
    Meaning,
    /// Etalon's own tiers promise it.
    Contract,
}

/// A property that every tier must satisfy.
#[derive(Debug, Clone, Copy)]
pub struct Law {
    /// Its name: in reports, in tests and on the command line.
    pub name: &'static str,
    /// Its statement, in one sentence.
    pub statement: &'static str,
    /// Its assumption.
    pub kind: Kind,
    /// The algorithms that it speaks of.
    pub of: &'static [Algorithm],
    /// The passes that it speaks of.
    pub passes: &'static [Pass],
    /// The choice that a tier must offer to be asked.
    pub asks: Option<Choice>,
    /// True if it says anything about this case, of an algorithm and a pass that it speaks of.
    pub applies: fn(&Case, Pass) -> bool,
    /// True if it could well be broken by this case: where it looks at a few cases alone, at such.
    pub favours: fn(&Case, Pass) -> bool,
    /// At how many cases of a pass it looks at the most, at every depth: what it asks is hardly that of the
    /// case, or shows in few. `None`: there is no most.
    pub looks: Option<usize>,
    /// At how many cases of an algorithm and a pass it looks at core depth, spread over those that it applies to.
    pub at_core: usize,
    /// Judges a tier.
    pub check: Check,
}

/// The judgement of a tier by a law.
pub type Check = fn(&Trial<'_>) -> Judgement;

/// Cases of an algorithm and a pass that a law looks at, at core depth.
pub(crate) const CASES_PER_LAW: usize = 40;

/// The same of laws that ask a tier several times for large cases: they took a third of a run with as many cases as
/// others, and notice the planted bugs with these.
pub(crate) const DEAR: usize = 20;

/// The same of such laws that noticed no planted bug before another did.
pub(crate) const DEAREST: usize = 10;

/// Laws that speak of no formula.
pub(crate) const EVERY: &[Algorithm] = &Algorithm::ALL;

/// Laws of attention and attention_lse.
pub(crate) const ATTENTION: &[Algorithm] = &[Algorithm::Attention, Algorithm::AttentionLse];

/// Laws of scores: attention, attention_lse and lazy_attention.
pub(crate) const SCORES: &[Algorithm] =
    &[Algorithm::Attention, Algorithm::AttentionLse, Algorithm::LazyAttention];

/// Laws of softcaps.
pub(crate) const CAPPED: &[Algorithm] =
    &[Algorithm::Attention, Algorithm::AttentionLse, Algorithm::LinearCrossEntropy];

/// Laws whose bounds of second order are carried along by the reference itself.
pub(crate) const SOFTMAX: &[Algorithm] = &[
    Algorithm::Attention,
    Algorithm::AttentionLse,
    Algorithm::LazyAttention,
    Algorithm::LinearCrossEntropy,
];

/// Laws of values, of which a result is a weighted sum.
pub(crate) const VALUES: &[Algorithm] =
    &[Algorithm::Attention, Algorithm::LazyAttention, Algorithm::LinearAttention];

/// Laws of sequences, into which rows divide.
pub(crate) const SEQUENCES: &[Algorithm] = &[
    Algorithm::Attention,
    Algorithm::AttentionLse,
    Algorithm::LazyAttention,
    Algorithm::LinearAttention,
];

/// Laws of linear_attention.
pub(crate) const LINEAR_ATTENTION: &[Algorithm] = &[Algorithm::LinearAttention];

/// Laws of lazy_attention.
pub(crate) const LAZY_ATTENTION: &[Algorithm] = &[Algorithm::LazyAttention];

/// Laws of linear_cross_entropy.
pub(crate) const LINEAR_CROSS_ENTROPY: &[Algorithm] = &[Algorithm::LinearCrossEntropy];

/// True if the scores of a case, if it has any, are so.
pub(crate) fn scores_are(case: &Case, so: impl Fn(&Scores) -> bool) -> bool {
    case.problem.scores().is_some_and(so)
}

impl Law {
    /// Why a tier is not asked, if so: it lacks what the law is about.
    pub fn not_asked(&self, tier: &dyn Tier) -> Option<String> {
        let lacking = self.asks.filter(|choice| !tier.has(*choice))?;
        Some(format!("`{}` is not asked of a tier without {lacking}", self.name))
    }

    /// True if it says anything about this pass of this case.
    pub fn concerns(&self, case: &Case, pass: Pass) -> bool {
        self.of.contains(&case.spec.algorithm)
            && self.passes.contains(&pass)
            && case.spec.algorithm.passes().contains(&pass)
            && (self.judges_large() || !case.spec.is_large())
            && (self.kind == Kind::Probe || !case.is_given())
            && (self.applies)(case, pass)
    }

    /// True if it looks at large cases: those laws that evaluate the reference once, or not at all, and
    /// need no list of all pairs.
    fn judges_large(&self) -> bool {
        matches!(self.kind, Kind::Gate | Kind::Contract)
    }
}

/// Packed or padded sequences with groups of query heads, resets with a final state, or several default
/// tiles: what the ways through a kernel differ in.
pub(crate) fn many_ways(case: &Case, _: Pass) -> bool {
    case.spec.is_large()
        || scores_are(case, |s| s.group() > 1 && s.sequences != Sequences::Dense)
        || matches!((&case.problem, &case.spec.point),
            (Problem::LinearAttention(x), Point::LinearAttention(point))
                if x.final_state && (x.group() > 1 || point.gates == GateKind::Resets))
}

/// The passes of a row: one, or any; the forward pass and the gradients where it names none.
macro_rules! passes {
    () => {
        &[etalon_problem::Pass::Forward, etalon_problem::Pass::Backward]
    };
    (Any) => {
        &etalon_problem::Pass::ALL
    };
    ($pass:ident) => {
        &[etalon_problem::Pass::$pass]
    };
}
pub(crate) use passes;

/// The value of a row, or else the usual one.
macro_rules! or_else {
    ($most:expr;) => {
        $most
    };
    ($most:expr; $own:expr) => {
        $own
    };
}
pub(crate) use or_else;

/// A table of laws, after the algorithms of which most of them speak. A row is what the law says, what
/// it presupposes, and the function that judges, whose name is the law's or stands after it, with
/// what it gets beside the trial. Then, where it is so, `of` which other algorithms it speaks, `on`
/// which other passes, which choice of a tier it `asks` about, `if` a case must be so, which cases it
/// would `favour`, and at how many it `looks`: at every depth, or at `core` depth alone.
macro_rules! laws {
    ($most:ident; $(
        $(#[doc = $statement:literal])+
        $kind:ident $check:ident $(= $function:ident)? $(($($argument:expr),+))?
            $(of $of:ident)? $(on $passes:ident)? $(asks $choice:ident)? $(if $applies:expr)? $(, favour $favours:expr)?
            $(, looks $looks:expr)? $(, core $core:expr)?;
    )*) => {
        pub(crate) const LAWS: &[$crate::laws::Law] = &[$($crate::laws::Law {
            name: stringify!($check),
            statement: concat!($($statement),+).trim_ascii(),
            kind: $crate::laws::Kind::$kind,
            of: $crate::laws::law::or_else!($crate::laws::law::$most; $($crate::laws::law::$of)?),
            passes: $crate::laws::law::passes!($($passes)?),
            asks: $crate::laws::law::or_else!(None; $(Some($crate::tier::Choice::$choice))?),
            applies: $crate::laws::law::or_else!(|_, _| true; $($applies)?),
            favours: $crate::laws::law::or_else!(|_, _| false; $($favours)?),
            looks: $crate::laws::law::or_else!(None; $(Some($looks))?),
            at_core: $crate::laws::law::or_else!($crate::laws::law::CASES_PER_LAW; $($looks)? $($core)?),
            check: |trial| $crate::laws::law::or_else!($check; $($function)?)(trial $($(, $argument)+)?),
        }),*];
    };
}
pub(crate) use laws;
