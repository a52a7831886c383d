//! Memory of the caller: where operands and results lie, and what lies there before, decides no bit.

use super::flaw::{Flaw, Judgement};
use super::law::{DEAR, laws, many_ways};
use super::tensors::{Equality, everywhere, same};
use super::trial::Trial;
use crate::cases::Case;
use crate::generate::Stream;
use crate::tensor::{Tensor, Tensors};
use crate::tier::{Hints, Layout, Wrong};
use etalon_problem::{Pass, Role};
use ndarray::{ArrayD, IxDyn};

laws! {
    EVERY;
    /// Operands and results that lie in memory as columns, backwards, with gaps, each in its own way, or
    /// operands that share memory give the same bits, and nothing is written beside results.
    Contract layouts on Any asks Places, favour many_ways, core DEAR;
    /// Prior contents of the memory of results change no bit.
    Contract filled_places on Any asks Places, favour many_ways;
    /// A result that is asked for alone has the bits that it has with the others.
    Contract each_alone on Any asks Places if |case, pass| results(case, pass) > 1,
        favour many_ways, core DEAR;
    /// A step that writes states in place of those before it gives the same bits, wherever they lie.
    Contract step_in_place of LINEAR_ATTENTION on Step asks Places;
    /// An operand or a result that is given twice is refused, so is a step in no place, and nothing is written.
    Contract refused on Any asks Places;
}

fn layouts(trial: &Trial<'_>) -> Judgement {
    let large = trial.case.spec.is_large();
    // Each operand in its own way, and all of them in two of four ways, in the next case the others.
    let all = [Layout::Strided, Layout::Transposed, Layout::Padded, Layout::Reversed];
    let first = Stream::new(trial.case.spec.seed, &trial.case.name).below(2000, 2);
    for layout in [Layout::Mixed, all[first], all[first + 2]] {
        let outputs = trial.ask_hinted(Hints { layout, ..Hints::default() })?;
        same(&outputs, trial.clean()?, Equality::Bits, everywhere)
            .map_err(|flaw| flaw.of(layout.name()))?;
    }
    if large {
        return Ok(None); // overlaps need no size
    }
    let inputs = shared(trial)?;
    let ask = |layout| trial.ask_hinted_with(&inputs, Hints { layout, ..Hints::default() });
    same(&ask(Layout::Overlapping)?, &ask(Layout::RowMajor)?, Equality::Bits, everywhere)
        .map_err(|flaw| flaw.of(Layout::Overlapping.name()))
}

/// Inputs that may share memory, of the elements of the case: some that are equal, of equal heads or batch
/// elements, or of rows that are windows of one list.
fn shared(trial: &Trial<'_>) -> Result<Tensors, Flaw> {
    let stream = Stream::new(trial.case.spec.seed, &trial.case.name);
    let inputs = trial.inputs().iter().enumerate().map(|(number, (name, tensor))| {
        let (stored, axes) = (tensor.stored(), tensor.shape.len());
        let (Some(stored), 3.., false) = (stored, axes, tensor.is_empty()) else {
            return Ok((name.clone(), tensor.clone()));
        };
        let values = tensor.numbers(name)?;
        let (rows, cols) = (tensor.shape[axes - 2], tensor.shape[axes - 1]);
        let way = stream.below(number, 4);
        let element = |mut at: IxDyn| {
            match way {
                0 => at[1] = 0,
                1 => at[0] = 0,
                2 => {}
                _ => {
                    let place = (at[axes - 2] + at[axes - 1]) % (rows * cols);
                    (at[axes - 2], at[axes - 1]) = (place / cols, place % cols);
                }
            }
            values[at]
        };
        let values = ArrayD::from_shape_fn(values.raw_dim(), element);
        Ok((name.clone(), Tensor::store(&values, stored)))
    });
    Ok(alike(&inputs.collect::<Result<Tensors, Flaw>>()?, &stream))
}

/// Three of four tensors as the one before of their shape and type, as q, k and v of one projection may be.
/// Log-decays are no numbers like others.
fn alike(inputs: &Tensors, stream: &Stream) -> Tensors {
    let mut list: Vec<(String, Tensor)> = Vec::new();
    for (number, (name, tensor)) in inputs.iter().enumerate() {
        let same = |(other, x): &&(String, Tensor)| {
            other != "g" && (&x.shape, x.stored()) == (&tensor.shape, tensor.stored())
        };
        let shares = name != "g" && tensor.shape.len() > 1 && stream.below(1000 + number, 4) > 0;
        let before = list.iter().rev().find(same).map(|(_, x)| x).filter(|_| shares);
        let own = before.unwrap_or(tensor).clone();
        list.push((name.clone(), own));
    }
    list.into_iter().collect()
}

fn filled_places(trial: &Trial<'_>) -> Judgement {
    let filled = Some(1e30);
    let outputs = trial.ask_hinted(Hints { filled, ..Hints::default() })?;
    same(&outputs, trial.clean()?, Equality::Bits, everywhere).map_err(|flaw| flaw.of("1e30"))
}

/// The number of results of a pass.
fn results(case: &Case, pass: Pass) -> usize {
    case.problem.operands(pass).iter().filter(|x| x.role == Role::Output).count()
}

fn each_alone(trial: &Trial<'_>) -> Judgement {
    let outputs = trial.ask_hinted(Hints { alone: true, ..Hints::default() })?;
    same(&outputs, trial.clean()?, Equality::Bits, everywhere)
}

fn step_in_place(trial: &Trial<'_>) -> Judgement {
    let ways = [
        Layout::RowMajor,
        Layout::Padded,
        Layout::Strided,
        Layout::Transposed,
        Layout::Reversed,
        Layout::Mixed,
    ];
    for layout in ways {
        let outputs = trial.ask_hinted(Hints { layout, in_place: true, ..Hints::default() })?;
        same(&outputs, trial.clean()?, Equality::Bits, everywhere)
            .map_err(|flaw| flaw.of(&format!("in place, {layout}")))?;
    }
    Ok(None)
}

fn refused(trial: &Trial<'_>) -> Judgement {
    let is_step = trial.pass == Pass::Step;
    for wrong in Wrong::ALL.into_iter().filter(|wrong| is_step || *wrong != Wrong::NoState) {
        match trial.ask_hinted(Hints { wrong: Some(wrong), ..Hints::default() }) {
            Err(Flaw::Fail(text)) if text.starts_with("failed") => {}
            Err(flaw) => return Err(flaw.of(wrong.name())),
            Ok(_) => return Err(Flaw::Fail(format!("{wrong}: it was taken"))),
        }
    }
    Ok(None)
}
