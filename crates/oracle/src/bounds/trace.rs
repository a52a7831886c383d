//! The bounds of a trace: equations (N115) to (N119). What a kernel holds after a tile is what it would return of
//! the pairs or tokens so far, so that the derivations of the passes are used again, row by row.

use super::Bound;
use super::attention::{Delta, output};
use super::inputs::Inputs;
use super::linear_attention::measured;
use super::model::{Model, NoBound, floor, spread};
use super::scores::{Operands, Pair, Place, Row};
use super::sum::{Sum, accumulate};
use crate::profile::Profile;
use crate::tensor::{Stored, Tensors, Values, values};
use crate::types::Types;
use etalon_problem::{Dtype, Error, Operand, Pass, Problem, Sequence, SinkPlace, Walk};
use etalon_reference::trace::{self, Piece, Pieces, Traced, wanted};
use etalon_reference::{Arithmetic, evaluate_in, linear_attention};
use ndarray::{ArrayD, IxDyn};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;

/// A tensor of a trace with its bounds.
#[derive(Debug, Clone)]
pub struct TraceBound {
    /// Its name, axes and shape.
    pub operand: Operand,
    /// Its exact values and their bounds. Elements that are not compared have the value NaN.
    pub bound: Bound,
    /// The elements that are compared, in row-major order.
    pub compared: Vec<bool>,
}

/// Evaluates those tensors of the trace of `pass` that `stored` names, and derives their bounds for a kernel of the
/// profile that holds each in this type when it is written down. `types` are those in which its passes store results,
/// `inputs` the operands of the pass.
///
/// Fails where the walk does not fit the problem, and where an operand is missing.
pub fn bounds(
    problem: &Problem,
    pass: Pass,
    types: &Types,
    profile: &Profile,
    inputs: &Tensors,
    walk: &Walk,
    stored: &[(&str, Dtype)],
) -> Result<Vec<TraceBound>, Error> {
    let names: Vec<&str> = stored.iter().map(|(name, _)| *name).collect();
    let wanted = wanted(problem, pass, walk, &names)?;
    let operands = values(problem, pass, inputs)?;
    let types = stored.iter().fold(types.clone(), |types, (name, own)| {
        types.with(&format!("trace.{name}"), *own) // no result of a pass has that name
    });
    // A kernel rescales after each tile of keys, which may have fewer than the profile says.
    let keys = walk.tile.map_or(usize::MAX, |tile| tile.keys);
    let profile = Profile { rescale_keys: profile.rescale_keys.min(keys), ..*profile };
    let model = Model::new(&profile, &types);
    // The bounds of o and lse so far are made from both.
    let both = names.iter().any(|name| matches!(*name, "o" | "lse"));
    let also = ["lse", "o"].into_iter().filter(|name| both && !names.contains(name));
    let traced = trace::trace(
        problem,
        pass,
        &operands,
        walk,
        &names.iter().copied().chain(also).collect::<Vec<_>>(),
    )?;
    let errors = match problem {
        // (N119)
        Problem::LinearAttention(own) => {
            let inputs =
                Inputs { pass, model: &model, operands: &operands, forward: &Values::new() };
            measured(own, &inputs, |positive, number, error| {
                let mut x = etalon_reference::Tensors::new();
                for (name, own) in &operands {
                    x.insert(name.clone(), own.mapv(|own| number(name, own)));
                }
                let traced = linear_attention::trace(positive, pass, &x, walk, &names)?;
                let errors =
                    |x: Traced<_>| x.values.iter().map(|own| error(x.operand.name, own)).collect();
                Ok(traced.into_iter().map(errors).collect::<Vec<Vec<f64>>>())
            })?
        }
        _ => {
            let forward = values(problem, Pass::Forward, inputs)?;
            let forward = evaluate_in(Arithmetic::F64, problem, Pass::Forward, &forward)?;
            let inputs = Inputs { pass, model: &model, operands: &operands, forward: &forward };
            attention(problem, &inputs, walk, (&wanted, &traced))
        }
    };
    let traced = traced.into_iter().filter(|x| names.contains(&x.operand.name));
    let dtype = |name| stored.iter().find(|own| own.0 == name).map_or(Dtype::F64, |own| own.1);
    let finish = |(traced, errors): (Traced<f64>, Vec<f64>)| {
        let dtype = dtype(traced.operand.name);
        finish(&model, traced, &errors, dtype)
    };
    traced.zip(errors).map(finish).collect()
}

/// (N4) of every element that is compared.
fn finish(
    model: &Model,
    traced: Traced<f64>,
    errors: &[f64],
    dtype: Dtype,
) -> Result<TraceBound, Error> {
    let Traced { operand, values: value, compared } = traced;
    let (stored, mut no_bound) = (Stored::Float(dtype), BTreeMap::new());
    let bound = value.iter().zip(errors).zip(&compared).map(|((&x, &error), &compared)| {
        if !compared {
            return 0.0;
        }
        let bound = model.finish(x, error, stored);
        if bound == f64::INFINITY {
            *no_bound.entry(model.no_bound(error).unwrap_or(NoBound::Sum)).or_default() += 1;
        }
        bound
    });
    let bound = ArrayD::from_shape_vec(IxDyn(&operand.shape), bound.collect());
    let bound = bound.map_err(|_| Error::memory(operand.name, compared.len()))?;
    let as_right = BTreeMap::new();
    let bound = Bound {
        value,
        bound,
        stored: Stored::Float(Dtype::F64),
        largest: dtype.max(),
        no_bound,
        as_right,
    };
    Ok(TraceBound { operand, bound, compared })
}

/// The errors of the tensors of attention that are wanted; of elements that are not compared 0.
fn attention(
    problem: &Problem,
    inputs: &Inputs<'_>,
    walk: &Walk,
    (wanted, traced): (&[Operand], &[Traced<f64>]),
) -> Vec<Vec<f64>> {
    let Some(scores) = problem.scores() else { return Vec::new() };
    let operands = Operands::new(scores, None, inputs);
    let sequences = scores.sequences();
    let heads = walk.heads(problem);
    let tracer = Tracer { operands: &operands, walk, wanted, traced, rows: walk.rows(problem) };
    let places = sequences
        .iter()
        .flat_map(|s| heads.iter().enumerate().map(move |(at, &head)| (s, head, at)));
    let places: Vec<(&Sequence, usize, usize)> = places.collect();
    let pieces = places.into_par_iter().map(|(sequence, head, at)| tracer.head(sequence, head, at));
    let mut errors: Vec<Vec<f64>> = wanted.iter().map(|x| vec![0.0; x.len()]).collect();
    for Piece { tensor, at, elements } in pieces.collect::<Vec<_>>().into_iter().flatten() {
        errors[tensor][at..at + elements.len()].copy_from_slice(&elements);
    }
    errors
}

struct Tracer<'a> {
    operands: &'a Operands<'a>,
    walk: &'a Walk,
    wanted: &'a [Operand],
    traced: &'a [Traced<f64>],
    rows: Range<usize>,
}

/// Errors of the sums over the queries so far, of a tensor that lies as k or v does, element by element: of their
/// terms, and the sizes that roundings multiply.
struct ByKey {
    errors: Vec<f64>,
    sizes: Vec<f64>,
    width: usize,
}

impl ByKey {
    fn new(keys: usize, width: usize) -> Self {
        let zeros = || vec![0.0; keys * width];
        ByKey { errors: zeros(), sizes: zeros(), width }
    }

    fn add(&mut self, key: usize, factor: f64, term: Sum, x: &[f64], tiny: f64) {
        let own = key * self.width..(key + 1) * self.width;
        accumulate(&mut self.errors[own.clone()], factor * term.error, x, tiny);
        accumulate(&mut self.sizes[own], factor * (term.absolute + term.error), x, 0.0);
    }

    /// (N118): the errors of the keys of a tile, each with its γ.
    fn errors(&self, keys: Range<usize>, gamma: impl Fn(usize) -> f64) -> Vec<f64> {
        let of = |key: usize| {
            let own = key * self.width..(key + 1) * self.width;
            let gamma = gamma(key);
            let errors = self.errors[own.clone()].iter().zip(&self.sizes[own]);
            errors.map(move |(error, &size)| error + spread(gamma, size))
        };
        keys.flat_map(of).collect()
    }
}

impl Tracer<'_> {
    fn wants(&self, name: &str) -> Option<usize> {
        self.wanted.iter().position(|operand| operand.name == name)
    }

    fn head(&self, sequence: &Sequence, head: usize, at: usize) -> Vec<Piece<f64>> {
        let Some(tile) = self.walk.tile else { return Vec::new() };
        let Operands { model, k, v, .. } = *self.operands;
        let (mut dk, mut dv) =
            (ByKey::new(sequence.keys, k.width), ByKey::new(sequence.keys, v.width));
        let (mut pieces, mut seen) = (Pieces::new(self.wanted), vec![0; sequence.keys]);
        for r in self.walk.queries.tiles(sequence.queries.div_ceil(tile.queries)) {
            let mut visited = vec![false; sequence.keys.div_ceil(tile.keys)];
            let queries = r * tile.queries..sequence.queries.min((r + 1) * tile.queries);
            let row = |i| Place { operands: self.operands, sequence, head, i };
            let rows: Vec<(Place<'_>, Vec<Pair>)> =
                queries.map(row).map(|place| (place, place.pairs())).collect();
            for pair in rows.iter().flat_map(|(_, pairs)| pairs) {
                visited[(pair.key - sequence.key_start) / tile.keys] = true;
            }
            let visited: Vec<usize> = (0..visited.len()).filter(|&t| visited[t]).collect();
            for (place, pairs) in rows {
                if self.rows.contains(&place.query()) {
                    self.so_far(place, &pairs, &visited, at, &mut pieces);
                    let row = Row::of(place, pairs, place.sink(), place.lse());
                    self.row(&row, &visited, at, &mut pieces, (&mut dk, &mut dv, &mut seen));
                }
            }
            for &t in &visited {
                let keys = t * tile.keys..sequence.keys.min((t + 1) * tile.keys);
                let index = [r, sequence.batch, at, sequence.key_start + keys.start];
                let gamma = |key: usize| model.gamma_by_parts(seen[key], 4);
                pieces.push("dk", &index, || dk.errors(keys.clone(), gamma));
                let gamma = |key: usize| gamma(key) + model.u_p;
                pieces.push("dv", &index, || dv.errors(keys.clone(), gamma));
            }
        }
        pieces.finish()
    }

    /// (N115): lse and o of the keys that a row has seen after each tile.
    fn so_far(
        &self,
        place: Place<'_>,
        pairs: &[Pair],
        visited: &[usize],
        head: usize,
        pieces: &mut Pieces<'_, f64>,
    ) {
        let of = |name: &str| self.traced.iter().find(|x| x.operand.name == name);
        let (Some(lse), Some(o)) = (of("lse"), of("o")) else { return };
        let early = place.sink().filter(|_| self.walk.sinks == SinkPlace::First);
        for &t in visited {
            let pairs: Vec<Pair> = self.seen(place, pairs, t).copied().collect();
            if pairs.is_empty() {
                continue;
            }
            let index = [t, place.sequence.batch, head, place.query() - self.rows.start];
            let exact = |x: &Traced<f64>, width: usize| {
                let at = trace::place(&x.operand, &index);
                x.values.as_slice().map_or(Vec::new(), |x| x[at..at + width].to_vec())
            };
            let value = exact(lse, 1).first().copied().unwrap_or(f64::NAN);
            let row = Row::of(place, pairs, early, value);
            pieces.push("lse", &index, || vec![row.lse_error]);
            pieces.push("o", &index, || {
                let o = exact(o, self.operands.v.width);
                let mut errors = vec![0.0; o.len()];
                output(&row, &o, &mut errors);
                errors
            });
        }
    }

    /// The pairs that the walk over keys has seen after a tile.
    fn seen<'p>(
        &self,
        place: Place<'_>,
        pairs: &'p [Pair],
        t: usize,
    ) -> impl Iterator<Item = &'p Pair> {
        let tile = self.walk.tile.map_or(1, |tile| tile.keys);
        let (first, order) = (place.sequence.key_start, self.walk.keys);
        pairs.iter().filter(move |pair| order.has_seen((pair.key - first) / tile, t))
    }

    /// Errors of the pairs of a row in a tile of keys: 0 of those that are not visible.
    fn of_pairs(&self, row: &Row<'_>, t: usize, error: impl Fn(usize, &Pair) -> f64) -> Vec<f64> {
        let (sequence, tile) = (row.place.sequence, self.walk.tile.map_or(1, |tile| tile.keys));
        let keys = t * tile..sequence.keys.min((t + 1) * tile);
        let mut errors = vec![0.0; keys.len()];
        for (n, pair) in row.pairs.iter().enumerate() {
            let j = pair.key - sequence.key_start;
            if keys.contains(&j) {
                errors[j - keys.start] = error(n, pair);
            }
        }
        errors
    }

    /// (N116) and (N117): p, dS and dq of a row; adds its terms of dk and dv.
    fn row(
        &self,
        row: &Row<'_>,
        visited: &[usize],
        head: usize,
        pieces: &mut Pieces<'_, f64>,
        (dk, dv, seen): (&mut ByKey, &mut ByKey, &mut [usize]),
    ) {
        let (place, operands) = (row.place, self.operands);
        let (model, sequence) = (operands.model, place.sequence);
        let tile = self.walk.tile.map_or(1, |tile| tile.keys);
        let i = place.query() - self.rows.start;
        let weight = |_: usize, pair: &Pair| {
            let error = row.recomputed(model, pair, row.streamed(model, pair));
            error + model.u_p * (pair.p + error) + floor(pair.p, model.eta_p)
        };
        let index = |t: usize| [sequence.batch, head, i, sequence.key_start + t * tile];
        for &t in visited {
            pieces.push("p", &index(t), || self.of_pairs(row, t, weight));
        }
        if !["dS", "dq", "dk", "dv"].into_iter().any(|name| self.wants(name).is_some()) {
            return;
        }
        let delta = Delta::new(row);
        let again = |pair: &Pair| row.recomputed(model, pair, 0.0);
        let terms = row.pairs.iter().enumerate();
        let terms = terms.map(|(n, pair)| delta.products(pair, n, again(pair)));
        let terms: Vec<(Sum, Sum)> = terms.collect();
        let d_score = |n: usize, _: &Pair| {
            let Sum { error, absolute, .. } = terms[n].0;
            error + model.u_ds * (absolute + error) + floor(absolute, model.eta_ds)
        };
        let sigma = operands.scores.scale().abs();
        for &t in visited {
            pieces.push("dS", &index(t), || self.of_pairs(row, t, d_score));
            pieces.push("dq", &[t, sequence.batch, head, i], || {
                let gamma = model.gamma_by_parts(self.seen(place, &row.pairs, t).count(), 3);
                let mut errors = vec![0.0; operands.k.width];
                for (pair, (_, ds)) in row.pairs.iter().zip(&terms) {
                    let j = pair.key - sequence.key_start;
                    if self.walk.keys.has_seen(j / tile, t) {
                        let k = place.shared(operands.k, pair.key);
                        accumulate(&mut errors, sigma * ds.summed(gamma), k, model.eta);
                    }
                }
                errors
            });
        }
        for (pair, (_, ds)) in row.pairs.iter().zip(&terms) {
            let j = pair.key - sequence.key_start;
            seen[j] += 1;
            dk.add(j, sigma, *ds, place.row(operands.q), model.eta);
            let stored = floor(pair.p, model.eta_p);
            let weight = Sum::term(again(pair) + stored, pair.p);
            dv.add(j, 1.0, weight, place.row(operands.dout), model.eta);
        }
    }
}
