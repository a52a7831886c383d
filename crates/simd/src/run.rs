//! The door of the tier: every pass of every algorithm, by name.

use crate::known::Known;
use crate::linear_attention::named as linear_attention;
use crate::linear_cross_entropy::named as linear_cross_entropy;
use crate::memory::zeros;
use crate::{Element, Mode, Options, Workspace, softmax};
use etalon_problem::tensors::{Borrowed, ByPrecision, Operands, Place, Places, Results};
use etalon_problem::{
    Attention, AttentionLse, Error, LazyAttention, Operand, Pass, Precision, Problem, Role, Table,
    Views, ViewsMut, find,
};

/// Computes a pass: reads `inputs` and writes those outputs that have a place in `outputs`, both by
/// name and of any strides.
///
/// The tensors of a pass, with their shapes and types, are those of [`Problem::operands`]. A result of
/// the forward pass that a later pass reads again (o and lse of attention) is an input; with
/// [`Options::recompute`] an absent one is computed anew. A `step` without `initial_state` works in
/// place: the place of `final_state` holds the states before the token.
///
/// On an error nothing has been written. Fails with [`Error::Unsupported`] where the tier has no kernel.
///
/// ```
/// use etalon_problem::{AttentionLse, Extents, Pass, Problem, Views, ViewsMut};
/// use etalon_simd::{Options, run};
/// use ndarray::{Array3, Array4};
///
/// let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 2, keys: 4, dim: 8 };
/// let problem: Problem = AttentionLse::new(extents).into();
/// let (q, k) = (Array4::<f32>::zeros((1, 1, 2, 8)), Array4::<f32>::ones((1, 1, 4, 8)));
/// let mut lse = Array3::<f32>::zeros((1, 1, 2));
///
/// let inputs = Views::new().with("q", &q).with("k", &k);
/// let mut outputs = ViewsMut::new().with("lse", &mut lse);
/// run(&problem, Pass::Forward, &inputs, &mut outputs, &Options::default())?;
/// drop(outputs); // gives lse back
/// assert!((lse[[0, 0, 1]] - 4f32.ln()).abs() < 1e-6);
/// # Ok::<(), etalon_problem::Error>(())
/// ```
pub fn run(
    problem: &Problem,
    pass: Pass,
    inputs: &Views<'_>,
    outputs: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    run_in(&Workspace::new(), problem, pass, inputs, outputs, options)
}

/// As [`run`], with memory of a workspace that the caller keeps.
pub fn run_in(
    workspace: &Workspace,
    problem: &Problem,
    pass: Pass,
    inputs: &Views<'_>,
    outputs: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    let known = Known::of(workspace, problem, pass)?;
    let storage = known.table.check_call(inputs, outputs, options.recompute)?;
    storage.refuse_f64()?;
    match problem {
        Problem::Attention(Attention { scores, .. })
        | Problem::LazyAttention(LazyAttention { scores, .. })
        | Problem::AttentionLse(AttentionLse { scores }) => {
            softmax::run(workspace, &known, scores, inputs, outputs, options)
        }
        Problem::LinearAttention(problem) => {
            linear_attention::run(workspace, &known, problem, inputs, outputs, options)
        }
        Problem::LinearCrossEntropy(problem) => {
            linear_cross_entropy::run(workspace, &known, problem, inputs, outputs, options)
        }
    }
}

/// The two typed functions of a pass over structs of tensors: one has results of its own, one writes into
/// places of the caller, `of` an element type of their own where a problem may ask for another. In brackets:
/// what the forward pass gave, anything that becomes an `OutputRef`.
macro_rules! typed {
    (
        $Problem:ident, $Pass:ident: ($inputs:ident: $Inputs:ident
        $(, [$out:ident])? $(, $given:ident: $Given:ident)*);
        $(#[$doc:meta])*
        $function:ident -> $Results:ident;
        $(#[$into:meta])*
        $function_into:ident, $places:ident: $Places:ident $(of $G:ident)?;
    ) => {
        $(#[$doc])*
        #[allow(clippy::extra_unused_lifetimes)] // of a pass without `out`
        pub fn $function<'a, T: $crate::Element>(
            problem: &$Problem,
            $inputs: &$Inputs<'_, T>,
            $($out: impl Into<OutputRef<'a, T>>,)?
            $($given: &$Given<'_, T>,)*
            options: &$crate::Options,
        ) -> Result<$Results<T>, etalon_problem::Error> {
            let call = $crate::run::Call::new(problem, etalon_problem::Pass::$Pass).with($inputs);
            $(let $out = $out.into();
            let call = call.with(&$out);)?
            call$(.with($given))*.results(options)
        }

        $(#[$into])*
        #[allow(clippy::extra_unused_lifetimes, clippy::too_many_arguments)]
        pub fn $function_into<'a, T: $crate::Element $(, $G: $crate::Element)?>(
            workspace: &$crate::Workspace,
            problem: &$Problem,
            $inputs: &$Inputs<'_, T>,
            $($out: impl Into<OutputRef<'a, T>>,)?
            $($given: &$Given<'_, T>,)*
            $places: $Places<'_, $crate::run::element!(T $($G)?)>,
            options: &$crate::Options,
        ) -> Result<(), etalon_problem::Error> {
            let call = $crate::run::Call::new(problem, etalon_problem::Pass::$Pass).with($inputs);
            $(let $out = $out.into();
            let call = call.with(&$out);)?
            call$(.with($given))*.write(workspace, $places, options)
        }
    };
}
pub(crate) use typed;

/// The element type of places: that of the inputs, or one of their own.
macro_rules! element {
    ($T:ident) => {
        $T
    };
    ($T:ident $G:ident) => {
        $G
    };
}
pub(crate) use element;

/// A typed call: structs of tensors in, a struct of results or of places out, through the door.
pub(crate) struct Call<'s> {
    pub problem: Problem,
    pub pass: Pass,
    pub inputs: Views<'s>,
}

impl<'s> Call<'s> {
    pub fn new(problem: &(impl Clone + Into<Problem>), pass: Pass) -> Self {
        Call { problem: problem.clone().into(), pass, inputs: Views::new() }
    }

    /// Adds the tensors of a struct.
    pub fn with<'a: 's, T: Element>(mut self, operands: &'s impl Operands<'a, T>) -> Self {
        add_operands(&mut self.inputs, operands);
        self
    }

    /// Runs the pass, with results of its own. Those that a tier may leave out are computed under
    /// [`Mode::ForwardGradient`] alone.
    pub fn results<T: Element, R: Results<T>>(self, options: &Options) -> Result<R, Error> {
        self.results_by(options, |call, workspace, outputs| {
            run_in(workspace, &call.problem, call.pass, &call.inputs, outputs, options)
        })
    }

    /// As [`Call::results`], of another function than [`run_in`].
    pub fn results_by<T: Element, R: Results<T>>(
        self,
        options: &Options,
        run: impl FnOnce(&Self, &Workspace, &mut ViewsMut<'_>) -> Result<(), Error>,
    ) -> Result<R, Error> {
        let workspace = Workspace::new();
        let table = &Known::of(&workspace, &self.problem, self.pass)?.table;
        // Errors of the operands are reported before memory is asked for.
        table.check_call(&self.inputs, &ViewsMut::new(), options.recompute)?;
        let mut results: R = zero_results(table, options.mode == Mode::ForwardGradient)?;
        run(&self, &workspace, &mut places_of(&mut results))?;
        Ok(results)
    }

    /// Runs the pass, with results in places of the caller.
    pub fn write<'o, T: Element>(
        self,
        workspace: &Workspace,
        places: impl Places<'o, T>,
        options: &Options,
    ) -> Result<(), Error> {
        self.write_by(places, |call, outputs| {
            run_in(workspace, &call.problem, call.pass, &call.inputs, outputs, options)
        })
    }

    /// As [`Call::write`], of another function than [`run_in`].
    pub fn write_by<'o, T: Element>(
        self,
        places: impl Places<'o, T>,
        run: impl FnOnce(&Self, &mut ViewsMut<'o>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        run(&self, &mut named_places(places))
    }
}

/// Adds the tensors of a struct, by name.
pub(crate) fn add_operands<'s, 'a: 's, T: Element>(
    inputs: &mut Views<'s>,
    operands: &'s impl Operands<'a, T>,
) {
    operands.each(&mut |name, x| {
        if let Some(view) = x.and_then(Borrowed::into_view) {
            inputs.push(name, view);
        }
    });
}

/// The results of a pass, all 0; with those that a tier may leave out, if `optional`.
pub(crate) fn zero_results<T: Element, R: Results<T>>(
    table: &Table,
    optional: bool,
) -> Result<R, Error> {
    R::collect(&mut |name, precision| {
        let operand = find(&table.operands, name);
        let operand = operand.filter(|operand| operand.role == Role::Output || optional);
        let Some(Operand { shape, .. }) = operand else { return Ok(None) };
        Ok(Some(match precision {
            Precision::Storage => ByPrecision::Storage(zeros(&shape[..], name)?),
            Precision::Wide => ByPrecision::Wide(zeros(&shape[..], name)?),
            Precision::Integer => ByPrecision::Integer(zeros(&shape[..], name)?),
        }))
    })
}

/// The places of results, by name.
pub(crate) fn places_of<T: Element, R: Results<T>>(results: &mut R) -> ViewsMut<'_> {
    let mut outputs = ViewsMut::new();
    results.places(&mut |name, place| add(&mut outputs, name, place));
    outputs
}

/// The places of a struct, by name.
pub(crate) fn named_places<'o, T: Element>(places: impl Places<'o, T>) -> ViewsMut<'o> {
    let mut outputs = ViewsMut::new();
    places.each(&mut |name, place| add(&mut outputs, name, place));
    outputs
}

/// Adds a place.
pub(crate) fn add<'o, T: Element>(
    outputs: &mut ViewsMut<'o>,
    name: &'static str,
    place: Place<'o, T>,
) {
    if let Some(view) = place.into_view() {
        outputs.push(name, view);
    }
}
