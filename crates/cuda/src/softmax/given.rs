//! Tables that the device makes of lengths, offsets and arrays of masks that lie there: `kernels/pairs/tables.cu`.

use super::Steps;
use super::counts::{Counts, is_shared};
use super::hopper_args::Int2;
use super::pair_args::{Sequence, Span, Task, Tile};
use super::rows::{Tables, bytes};
use crate::args::{Arguments, Byte, ConstPtr, Ptr, Untyped, filled, int, kernel_args};
use crate::device_tensor::{DeviceTensor, DeviceTensors, Element, GivenArray};
use crate::memory::{Layout, MemoryRange};
use crate::options::Level;
use crate::pass::TableImage;
use crate::variant::Variant;
use etalon_problem::{
    Align, Error, Mask, MaskNode, NamedArray, NodeArrays, Problem, Result, Scores, Sequences, Stored, Table, find,
};

#[derive(Debug, Clone, PartialEq)]
struct Array {
    name: String,
    shape: Vec<usize>,
    /// True if its elements are flags, not integers.
    flags: bool,
}

/// The arrays of a problem: lengths or offsets of sequences, and those of its mask by their names.
fn arrays(problem: &Problem) -> Vec<Array> {
    let Some(scores) = problem.scores() else { return Vec::new() };
    let mut list = Vec::new();
    let mut add = |name: &str, shape: &[usize], flags| {
        list.push(Array { name: name.to_string(), shape: shape.to_vec(), flags });
    };
    of_sequences(scores).into_iter().flatten().for_each(|(name, own)| add(name, &[own.len()], false));
    scores.mask.clone().visit_mut(&mut |mask| match mask {
        Mask::Segments { query, key } => [query, key].into_iter().for_each(|x| add(&x.name, &x.shape, false)),
        Mask::Array(array) => add(&array.name, &array.shape, true),
        _ => {}
    });
    list
}

/// Lengths or offsets of sequences by their names; none of a dense batch.
fn of_sequences(scores: &Scores) -> Option<[(&'static str, &[usize]); 2]> {
    match &scores.sequences {
        Sequences::Dense => None,
        Sequences::Lengths { query, key } => Some([("sequences.query", query), ("sequences.key", key)]),
        Sequences::Packed { cu_query, cu_key } => {
            Some([("sequences.cu_query", cu_query), ("sequences.cu_key", cu_key)])
        }
    }
}

/// The operands among some tensors, and arrays of the problem, which must be dense and of its shape.
pub(crate) fn split<'t>(
    problem: &Problem,
    table: &Table,
    inputs: &DeviceTensors<'t>,
) -> Result<(DeviceTensors<'t>, Vec<GivenArray>)> {
    let arrays = arrays(problem);
    let is_array = |name: &str| find(&table.operands, name).is_none() && arrays.iter().any(|array| array.name == name);
    let (given, list): (Vec<_>, Vec<_>) = inputs.list.iter().cloned().partition(|(name, _)| is_array(name));
    let is_other = |(name, x): &&(&str, DeviceTensor)| {
        !matches!(x.element, Element::Stored(_)) && find(&table.operands, name).is_none()
    };
    if let Some((name, _)) = list.iter().find(is_other) {
        return Err(Error::unexpected(name, None));
    }
    for (at, (name, tensor)) in given.iter().enumerate() {
        if given[..at].iter().any(|(other, _)| other == name) {
            return Err(Error::value(*name, "one tensor", "two"));
        }
        arrays.iter().filter(|x| x.name == *name).try_for_each(|x| check_array(x, tensor))?;
    }
    let given = given.into_iter().map(|(name, tensor)| GivenArray { name: name.into(), tensor });
    Ok((DeviceTensors { list }, given.collect()))
}

fn check_array(array: &Array, tensor: &DeviceTensor) -> Result<()> {
    let name = array.name.as_str();
    let is_integer = matches!(tensor.element, Element::I32 | Element::Stored(Stored::Integer));
    let (expected, fits) = match array.flags {
        true => ("bool", tensor.element == Element::Bool),
        false => ("i32 or i64", is_integer),
    };
    if !fits {
        return Err(Error::value(name, expected, tensor.element));
    }
    Error::expect_shape(name, &array.shape, &tensor.shape)?;
    if !tensor.is_dense() {
        let expected = "elements that lie one after the other";
        return Err(Error::value(name, expected, format!("strides {:?}", tensor.strides)));
    }
    tensor.check_whole(name)
}

/// The most arrays that kernels take.
const ARRAYS: usize = 16;

kernel_args! {
    /// Integers, or flags of 8 bits.
    struct Numbers as "GivenArray" {
        data: ConstPtr<Untyped>,
        /// True if integers have 64 bits, not 32.
        wide: i64,
    }

    /// A node of the mask: Window and Chunk look at positions, Segments and Flags at arrays; End ends a list that All
    /// or Any begins.
    struct Node as "Node" {
        kind: i32,
        /// True if the last query is aligned with the last key.
        bottom: i32,
        /// Of a window, −1: open; `left` of a chunk is its length, which fits 32 bits.
        left: i64,
        right: i64,
        /// Arrays, by their numbers.
        query, key: i32,
        /// Strides of flags.
        batch, head: i64,
    }

    pub(super) struct TableArgs as "TableArgs" {
        /// Lengths or offsets; nowhere: all have all rows.
        query, key: Numbers,
        arrays: [Numbers; ARRAYS],
        nodes: ConstPtr<Node>,
        /// `count` of them, and one without rows.
        sequences: Ptr<Sequence>,
        /// `[3][count + 1]`: the tiles of queries, of keys and of pairs before each sequence, and of all.
        firsts: Ptr<i32>,
        /// `[batch, queries]`; −1 at first.
        spans: Ptr<Span>,
        /// One more than `query_tiles`.
        tiles: Ptr<Tile>,
        by_queries, by_keys, by_pairs: Ptr<Task>,
        /// `[batch, heads, queries, keys]`.
        allowed: Ptr<Byte>,
        /// Queries and keys of each batch element.
        lengths: Ptr<Int2>,
        batch, queries, keys, count, packed: i32,
        /// Of flags; 0: spans tell all.
        heads: i32,
        node_count: i32,
        /// True if batch elements share a bias.
        shared: i32,
        /// The most.
        query_tiles, key_tiles, pair_tiles: i32,
        /// Of `intervals`, as many as `tiles` and as `key_tiles`.
        common, seen_by: Ptr<Tile>,
    }
}

/// An array that the call gives, or the range of a copy that the pass keeps.
#[derive(Debug, Clone, Copy)]
enum Source {
    Call(usize, Element),
    Copy(MemoryRange, Element),
}

#[derive(Debug)]
pub(crate) struct Given {
    sequences: Option<[Source; 2]>,
    arrays: Vec<Source>,
    nodes: usize,
    nodes_at: MemoryRange,
    /// Tables in scratch memory, and numbers of tiles between kernels.
    made: MemoryRange,
    firsts: MemoryRange,
}

impl Given {
    /// Takes the arrays that calls give; the pass keeps the others.
    pub fn new(
        scores: &Scores,
        given: &[GivenArray],
        (counts, tables): (&Counts, &Tables),
        layout: &mut Layout,
    ) -> Result<(Given, TableImage)> {
        let mut sources = Sources { given, ..Sources::default() };
        let sequences = match of_sequences(scores) {
            Some([query, key]) => Some([sources.numbers(query)?, sources.numbers(key)?]),
            None => None,
        };
        scores.mask.nodes().iter().try_for_each(|node| sources.add(node))?;
        let Sources { layout: mut own, copies, arrays, nodes, .. } = sources;
        if arrays.len() > ARRAYS {
            let what = format!("a mask of {} arrays, some of them on the device", arrays.len());
            return Err(Error::unsupported(what, format!("kernels take at most {ARRAYS}")));
        }
        let list = Arguments::of(&nodes).bytes;
        let nodes_at = own.range(list.len())?;
        let mut image = TableImage::new(own.bytes());
        image.put(nodes_at, list);
        copies.into_iter().for_each(|(range, own)| image.put(range, own));
        let given = Given {
            sequences,
            arrays,
            nodes: nodes.len(),
            nodes_at,
            made: layout.range(tables.bytes)?,
            firsts: layout.range(3 * 4 * counts.sequences)?,
        };
        Ok((given, image))
    }

    /// Adds the kernels that make the tables.
    pub fn make<'a>(&self, steps: Steps<'a>) -> Result<Steps<'a>> {
        let steps = steps.with_tables(self.made);
        let (counts, tables) = (&steps.prepared.spec.counts, &steps.prepared.tables);
        steps.fill(steps.table(tables.spans), tables.spans.bytes, u32::MAX);
        let (args, variant) = (self.args(&steps), Variant::tables());
        steps.launch((&variant, "sequences"), (1, 1024), &args)?;
        let tiles = counts.tiles.max(counts.by_keys);
        steps.launch((&variant, "rows"), (tiles, 512), &args)?;
        if counts.by_spans && steps.prepared.choice.level == Level::Sm90a {
            steps.launch((&variant, "intervals"), (tiles, 128), &args)?;
        }
        Ok(steps)
    }

    fn args(&self, steps: &Steps<'_>) -> TableArgs {
        let prepared = steps.prepared;
        let (scores, counts, tables) = (steps.scores(), &prepared.spec.counts, &prepared.tables);
        let e = &scores.extents;
        let numbers = |source: &Source| {
            let (data, element) = match *source {
                Source::Call(number, element) => (steps.beside(number), element),
                Source::Copy(range, element) => (steps.kept(range), element),
            };
            Numbers { data: data.into(), wide: (element.bytes() == 8).into() }
        };
        let arrays = std::array::from_fn(|at| self.arrays.get(at).map(numbers).unwrap_or_default());
        let [query, key] = self.sequences.as_ref().map_or([Numbers::default(); 2], |own| own.each_ref().map(numbers));
        let table = |range| steps.table(range);
        TableArgs {
            query,
            key,
            arrays,
            nodes: steps.kept(self.nodes_at).into(),
            firsts: steps.at(self.firsts).into(),
            lengths: if tables.lengths.bytes > 0 { table(tables.lengths) } else { 0 }.into(),
            count: int(counts.sequences) - 1,
            packed: matches!(scores.sequences, Sequences::Packed { .. }).into(),
            heads: int(counts.flags.unwrap_or(0)),
            node_count: int(self.nodes),
            shared: scores.bias.is_some_and(|bias| is_shared(scores, bias)).into(),
            query_tiles: int(counts.by_queries),
            key_tiles: int(counts.by_keys),
            pair_tiles: int(counts.by_pairs),
            ..filled!(TableArgs:
                fields(tables, table) [sequences spans tiles by_queries by_keys by_pairs allowed common seen_by]
                fields(e, int) [batch queries keys]
            )
        }
    }
}

#[derive(Default)]
struct Sources<'a> {
    given: &'a [GivenArray],
    layout: Layout,
    copies: Vec<(MemoryRange, Vec<u8>)>,
    arrays: Vec<Source>,
    nodes: Vec<Node>,
}

impl Sources<'_> {
    /// The array of this name, or a copy of the problem's.
    fn find(&mut self, name: &str, element: Element, own: impl FnOnce() -> Vec<u8>) -> Result<Source> {
        if let Some(number) = self.given.iter().position(|given| given.name == name) {
            return Ok(Source::Call(number, self.given[number].tensor.element));
        }
        let own = own();
        let range = self.layout.range(own.len())?;
        self.copies.push((range, own));
        Ok(Source::Copy(range, element))
    }

    fn numbers(&mut self, (name, own): (&str, &[usize])) -> Result<Source> {
        // Extents fit 32 bits.
        let own = || bytes(&own.iter().map(|&x| x as i32).collect::<Vec<_>>()).to_vec();
        self.find(name, Element::I32, own)
    }

    /// Adds an array; the place of the first is the number by which a node knows it.
    fn array(&mut self, source: Source) -> i32 {
        self.arrays.push(source);
        self.arrays.len() as i32 - 1
    }

    fn ids(&mut self, array: &NamedArray<i64>) -> Result<i32> {
        let integers = Element::Stored(Stored::Integer);
        let source = self.find(&array.name, integers, || bytes(&array.data).to_vec())?;
        Ok(self.array(source))
    }

    fn add(&mut self, node: &MaskNode<'_>) -> Result<()> {
        // A reach or a length: all beyond any sequence do the same.
        let distance = |x: Option<usize>| x.map_or(-1, |x| x.min(i32::MAX as usize) as i64);
        let mut own = Node {
            kind: node.kind as i32,
            bottom: (node.align == Align::BottomRight).into(),
            left: distance(node.left),
            right: distance(node.right),
            ..Node::default()
        };
        match node.arrays {
            NodeArrays::None => {}
            NodeArrays::Ids { query, key } => (own.query, own.key) = (self.ids(query)?, self.ids(key)?),
            NodeArrays::Flags(array) => {
                let flags = || array.data.iter().map(|&x| x.into()).collect();
                let source = self.find(&array.name, Element::Bool, flags)?;
                own.query = self.array(source);
                let extent = |axis: usize| array.shape.get(axis).map_or(0, |&x| x as i64);
                let [batches, heads, pairs] = [extent(0), extent(1), extent(2) * extent(3)];
                own.batch = if batches == 1 { 0 } else { heads * pairs };
                own.head = if heads == 1 { 0 } else { pairs };
            }
        }
        self.nodes.push(own);
        Ok(())
    }
}
