//! Changes of a tensor that are applied as its elements are read, so that a part of a large tensor can be
//! read without the whole.

use crate::laws::tensors::from_indices;
use ndarray::{ArrayD, Axis, IxDyn, Slice};
use std::sync::Arc;

/// A change of a tensor.
#[derive(Clone)]
pub enum Edit {
    /// Every number becomes another.
    Map(Arc<dyn Fn(f64) -> f64 + Send + Sync>),
    /// The entries of an axis are others; beyond the last one stands a number.
    Take {
        /// The axis.
        axis: usize,
        /// The entry that stands at each place.
        order: Arc<[usize]>,
        /// The value in place of an entry that does not exist.
        beyond: f64,
    },
    /// Its axes lie in memory in this order, and it is read as if they did not.
    Layout(Arc<[usize]>),
    /// It is read as if its axes lay in memory in this order, and they do not.
    LayoutBack(Arc<[usize]>),
    /// Rows are multiplied, each by a number of its own: an array of the first axes.
    Rows(Arc<ArrayD<f64>>),
    /// Rows get something more, each a number of its own.
    Plus(Arc<ArrayD<f64>>),
    /// It holds other numbers.
    Replace(Arc<ArrayD<f64>>),
    /// It is not there.
    Drop,
    /// It is there, in this shape, and holds this number.
    Fill(Arc<[usize]>, f64),
}

impl Edit {
    /// Every number becomes another.
    pub fn map(f: impl Fn(f64) -> f64 + Send + Sync + 'static) -> Self {
        Edit::Map(Arc::new(f))
    }

    /// The entries of an axis of so many, moved along it in a circle.
    pub fn roll(axis: usize, extent: usize, by: isize) -> Self {
        let from = |at: usize| (at as isize + by).rem_euclid(extent.max(1) as isize) as usize;
        Edit::Take { axis, order: (0..extent).map(from).collect(), beyond: f64::NAN }
    }
}

/// The entries `picks` of each axis of a changed tensor; `None` where there is no tensor.
pub(crate) fn gather(
    tensor: Option<&ArrayD<f64>>,
    edits: &[&Edit],
    picks: Option<&[Vec<usize>]>,
) -> Option<ArrayD<f64>> {
    if edits.iter().any(|edit| matches!(edit, Edit::Drop)) {
        return None;
    }
    let filled = edits.iter().find_map(|edit| match edit {
        Edit::Fill(shape, number) => Some(ArrayD::from_elem(IxDyn(shape), *number)),
        Edit::Replace(array) => Some(array.as_ref().clone()),
        _ => None,
    });
    let x = match &filled {
        Some(filled) => filled,
        None => tensor?,
    };
    let edits: Vec<Prepared<'_>> =
        edits.iter().filter_map(|edit| Prepared::new(edit, x.shape())).collect();
    let every: Vec<Vec<usize>>;
    let picks = match picks {
        Some(picks) => picks,
        None if edits.is_empty() => return Some(x.clone()),
        None => {
            every = extents(x.shape(), &edits).into_iter().map(|n| (0..n).collect()).collect();
            &every
        }
    };
    if edits.is_empty() {
        return Some(pick(x, picks));
    }
    let shape: Vec<usize> = picks.iter().map(Vec::len).collect();
    let mut own = vec![0; shape.len()];
    Some(from_indices(&shape, |at| {
        own.iter_mut().zip(at).zip(picks).for_each(|((own, &at), picks)| *own = picks[at]);
        read(x, &edits, &mut own)
    }))
}

/// The shape of a changed tensor: what is taken of an axis may be more or less than it has.
fn extents(shape: &[usize], edits: &[Prepared<'_>]) -> Vec<usize> {
    let mut shape = shape.to_vec();
    for edit in edits {
        if let Prepared::Edit(Edit::Take { axis, order, .. }) = edit {
            shape[*axis] = order.len();
        }
    }
    shape
}

/// The entries `picks` of each axis. Ranges are cut out first, which copies nothing.
pub(crate) fn pick(x: &ArrayD<f64>, picks: &[Vec<usize>]) -> ArrayD<f64> {
    let mut view = x.view();
    let mut rest = Vec::new();
    for (axis, picks) in picks.iter().enumerate() {
        let range = picks.first().map(|first| *first..first + picks.len());
        match range.filter(|range| range.clone().eq(picks.iter().copied())) {
            Some(range) => view.slice_axis_inplace(Axis(axis), Slice::from(range)),
            None => rest.push((Axis(axis), picks)),
        }
    }
    let mut rest = rest.into_iter();
    let Some((axis, picks)) = rest.next() else { return view.as_standard_layout().into_owned() };
    rest.fold(view.select(axis, picks), |x, (axis, picks)| x.select(axis, picks))
}

/// An edit that can be applied to one element.
enum Prepared<'a> {
    Edit(&'a Edit),
    Layout(Layout, Vec<usize>),
}

impl<'a> Prepared<'a> {
    fn new(edit: &'a Edit, shape: &[usize]) -> Option<Self> {
        match edit {
            Edit::Drop | Edit::Fill(..) | Edit::Replace(_) => None,
            Edit::Layout(order) => {
                Some(Prepared::Layout(Layout::new(shape, order), shape.to_vec()))
            }
            Edit::LayoutBack(order) => {
                let inner: Vec<usize> = order.iter().map(|&axis| shape[axis]).collect();
                let mut back = vec![0; order.len()];
                order.iter().enumerate().for_each(|(at, &axis)| back[axis] = at);
                Some(Prepared::Layout(Layout::new(&inner, &back), shape.to_vec()))
            }
            edit => Some(Prepared::Edit(edit)),
        }
    }
}

/// One element of a changed tensor.
fn read(x: &ArrayD<f64>, edits: &[Prepared<'_>], at: &mut [usize]) -> f64 {
    let Some((last, rest)) = edits.split_last() else { return x[&*at] };
    match last {
        Prepared::Edit(Edit::Map(f)) => f(read(x, rest, at)),
        Prepared::Edit(Edit::Take { axis, order, beyond }) => {
            let own = at[*axis];
            let Some(&from) = order.get(own).filter(|&&from| from < x.shape()[*axis]) else {
                return *beyond;
            };
            at[*axis] = from;
            let value = read(x, rest, at);
            at[*axis] = own;
            value
        }
        Prepared::Edit(Edit::Rows(factor)) => factor[&at[..factor.ndim()]] * read(x, rest, at),
        Prepared::Edit(Edit::Plus(more)) => more[&at[..more.ndim()]] + read(x, rest, at),
        Prepared::Edit(_) => read(x, rest, at),
        Prepared::Layout(layout, shape) => {
            let place = layout.source(number(shape, at));
            let mut from = index(shape, place);
            read(x, rest, &mut from)
        }
    }
}

/// The number of an element in row-major order.
fn number(shape: &[usize], at: &[usize]) -> usize {
    shape.iter().zip(at).fold(0, |number, (extent, at)| number * extent + at)
}

/// The index of an element.
fn index(shape: &[usize], mut number: usize) -> Vec<usize> {
    let mut at = vec![0; shape.len()];
    for (at, &extent) in at.iter_mut().zip(shape).rev() {
        *at = number % extent.max(1);
        number /= extent.max(1);
    }
    at
}

/// Axes that lie in memory in another order.
pub(crate) struct Layout {
    /// Extents in the order of memory.
    shape: Vec<usize>,
    /// Strides of these axes in the tensor.
    strides: Vec<usize>,
}

impl Layout {
    pub fn new(shape: &[usize], order: &[usize]) -> Self {
        let stride = |axis: usize| shape[axis + 1..].iter().product();
        Layout {
            shape: order.iter().map(|&axis| shape[axis]).collect(),
            strides: order.iter().map(|&axis| stride(axis)).collect(),
        }
    }

    /// Every other order of the axes of a shape that moves an element.
    pub fn orders(shape: &[usize]) -> Vec<Vec<usize>> {
        let many: Vec<usize> = (0..shape.len()).filter(|&at| shape[at] > 1).collect();
        let mut orders: Vec<Vec<usize>> = vec![Vec::new()];
        for _ in &many {
            let longer = orders.iter().flat_map(|order| {
                let rest = many.iter().filter(|axis| !order.contains(*axis));
                rest.map(|&axis| [order.as_slice(), &[axis]].concat())
            });
            orders = longer.collect();
        }
        orders.retain(|order| *order != many);
        let whole = |order: Vec<usize>| {
            let mut order = order.into_iter();
            let place = |axis: usize| if shape[axis] > 1 { order.next() } else { Some(axis) };
            (0..shape.len()).filter_map(place).collect()
        };
        orders.into_iter().map(whole).collect()
    }

    /// The element of the tensor that lies at this place of the memory.
    pub fn source(&self, mut at: usize) -> usize {
        let mut source = 0;
        for (&extent, &stride) in self.shape.iter().zip(&self.strides).rev() {
            source += at % extent * stride;
            at /= extent;
        }
        source
    }
}

impl std::fmt::Debug for Edit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Edit::Map(_) => "Map",
            Edit::Take { .. } => "Take",
            Edit::Layout(_) => "Layout",
            Edit::LayoutBack(_) => "LayoutBack",
            Edit::Rows(_) => "Rows",
            Edit::Plus(_) => "Plus",
            Edit::Replace(_) => "Replace",
            Edit::Drop => "Drop",
            Edit::Fill(..) => "Fill",
        })
    }
}
