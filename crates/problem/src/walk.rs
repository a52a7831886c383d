//! Traces: intermediate results of a kernel, after each tile of a walk over the pairs or the tokens.

use crate::{Axis, Blocking, Error, Operand, Pass, Precision, Problem, Role, named};
use std::ops::Range;

named! {
    /// The order in which a kernel visits tiles.
    #[derive(Default)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    #[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
    Order, "order" {
        /// From the first to the last.
        #[default]
        Ascending = "ascending",
        /// From the last to the first.
        Descending = "descending",
    }
}

impl Order {
    /// The numbers of so many tiles, in this order.
    pub fn tiles(self, tiles: usize) -> impl Iterator<Item = usize> {
        (0..tiles).map(move |n| match self {
            Order::Ascending => n,
            Order::Descending => tiles - 1 - n,
        })
    }

    /// True if the walk has visited `tile` once it is done with the tile `after`.
    pub fn has_seen(self, tile: usize, after: usize) -> bool {
        match self {
            Order::Ascending => tile <= after,
            Order::Descending => tile >= after,
        }
    }
}

named! {
    /// The place of the sink in a walk over keys.
    #[derive(Default)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    #[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
    SinkPlace, "sinks" {
        /// Before the first tile: every lse and o so far holds it.
        First = "first",
        /// After the last tile: none does.
        #[default]
        Last = "last",
    }
}

/// The walk of a kernel, and the part of its intermediate results that a trace holds. Tiles and chunks are counted
/// within each sequence, from its first row.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields, default))]
pub struct Walk {
    /// Of attention: queries and keys of a tile.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub tile: Option<Blocking>,
    /// Of linear attention: tokens of a chunk.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub chunk: Option<usize>,
    /// The order of key tiles for a tile of queries.
    pub keys: Order,
    /// The order of query tiles for a tile of keys.
    pub queries: Order,
    /// The place of the sink.
    pub sinks: SinkPlace,
    /// The query heads of attention, or the key heads of linear attention, that it holds; all if absent.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub heads: Option<Vec<usize>>,
    /// The rows of q in the arrays that it holds, the first and the one behind the last; all if absent.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub rows: Option<[usize; 2]>,
}

/// Tensors of a trace: name, axes, and whether the forward pass has it.
type Row = (&'static str, &'static [Axis], bool);

const ATTENTION: [Row; 7] = {
    use Axis::{Batch, Dim, Keys, Queries, QueryHeads, Tiles, ValueDim};
    [
        ("lse", &[Tiles, Batch, QueryHeads, Queries], true),
        ("o", &[Tiles, Batch, QueryHeads, Queries, ValueDim], true),
        ("p", &[Batch, QueryHeads, Queries, Keys], true),
        ("dS", &[Batch, QueryHeads, Queries, Keys], false),
        ("dq", &[Tiles, Batch, QueryHeads, Queries, Dim], false),
        ("dk", &[Tiles, Batch, QueryHeads, Keys, Dim], false),
        ("dv", &[Tiles, Batch, QueryHeads, Keys, ValueDim], false),
    ]
};

const LINEAR_ATTENTION: [Row; 2] = {
    use Axis::{Dim, KeyHeads, Sequences, Tiles, ValueDim};
    [
        ("state", &[Tiles, Sequences, KeyHeads, Dim, ValueDim], true),
        ("dstate", &[Tiles, Sequences, KeyHeads, Dim, ValueDim], false),
    ]
};

impl Walk {
    /// The heads that the trace holds.
    pub fn heads(&self, problem: &Problem) -> Vec<usize> {
        self.heads.clone().unwrap_or_else(|| (0..problem.extent(head_axis(problem))).collect())
    }

    /// The rows of q that the trace holds.
    pub fn rows(&self, problem: &Problem) -> Range<usize> {
        self.rows.map_or(0..problem.extent(Axis::Queries), |[start, end]| start..end)
    }

    /// The tensors of the trace of a pass, in the order of the steps of a kernel. Each holds what there is after a
    /// tile: of dk and dv that is a tile of queries, of all others one of keys or a chunk of tokens.
    ///
    /// Fails unless the problem is sound, is one of attention or linear attention, and the walk fits it.
    pub fn tensors(&self, problem: &Problem, pass: Pass) -> Result<Vec<Operand>, Error> {
        problem.check()?;
        let algorithm = problem.algorithm();
        if !matches!(pass, Pass::Forward | Pass::Backward) {
            let reason = "traces are those of the forward and of the backward pass";
            return Err(Error::unsupported(format!("a trace of {algorithm} {pass}"), reason));
        }
        let (tables, tiles): (&[Row], [usize; 2]) = match problem {
            Problem::Attention(own) => {
                let tile = self.tile.ok_or_else(|| absent("tile", "queries and keys", problem))?;
                tile.check()?;
                refuse("chunk", self.chunk.is_some(), problem)?;
                let sequences = own.scores.sequences();
                let longest =
                    |rows: fn(&crate::Sequence) -> usize| sequences.iter().map(rows).max();
                let [queries, keys] = [longest(|s| s.queries), longest(|s| s.keys)];
                let of = |rows: Option<usize>, tile: usize| rows.unwrap_or(0).div_ceil(tile);
                (&ATTENTION, [of(queries, tile.queries), of(keys, tile.keys)])
            }
            Problem::LinearAttention(own) => {
                let chunk = self.chunk.ok_or_else(|| absent("chunk", "tokens", problem))?;
                Error::expect_extents(&[("chunk", chunk)])?;
                refuse("tile", self.tile.is_some(), problem)?;
                refuse("rows", self.rows.is_some(), problem)?;
                let longest = own.list_sequences().iter().map(|s| s.tokens).max();
                (&LINEAR_ATTENTION, [0, longest.unwrap_or(0).div_ceil(chunk)])
            }
            _ => {
                let reason = "traces are those of attention and linear_attention";
                return Err(Error::unsupported(format!("a trace of {algorithm}"), reason));
            }
        };
        self.check_part(problem)?;
        let has = |row: &&Row| {
            (row.2 || pass == Pass::Backward) && !(by_query(row.0) && self.rows.is_some())
        };
        Ok(tables.iter().filter(has).map(|row| self.operand(problem, row, tiles)).collect())
    }

    /// Fails unless heads and rows are there.
    fn check_part(&self, problem: &Problem) -> Result<(), Error> {
        let all = problem.extent(head_axis(problem));
        let heads = self.heads(problem);
        let ascend = heads.windows(2).all(|pair| pair[0] < pair[1]);
        if self.heads.is_some()
            && (heads.is_empty() || !ascend || heads.iter().any(|&head| head >= all))
        {
            let found = heads.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
            return Err(Error::value("heads", format!("ascending numbers below {all}"), found));
        }
        match self.rows {
            Some([start, end]) if start >= end || end > problem.extent(Axis::Queries) => {
                let most = problem.extent(Axis::Queries);
                Err(Error::value(
                    "rows",
                    format!("START..END, up to {most}"),
                    format!("{start}..{end}"),
                ))
            }
            _ => Ok(()),
        }
    }

    fn operand(&self, problem: &Problem, row: &Row, [by_queries, by_keys]: [usize; 2]) -> Operand {
        let &(name, axes, _) = row;
        let extent = |axis: &Axis| match axis {
            Axis::Tiles if by_query(name) => by_queries,
            Axis::Tiles => by_keys,
            axis if *axis == head_axis(problem) => self.heads(problem).len(),
            Axis::Queries => self.rows(problem).len(),
            axis => problem.extent(*axis),
        };
        Operand {
            name,
            primal: name,
            axes: axes.to_vec(),
            shape: axes.iter().map(extent).collect(),
            role: Role::Output,
            precision: Precision::Wide,
            option: None,
            becomes: None,
        }
    }
}

/// True for a tensor of which each tile is one of queries: it needs all of them.
fn by_query(name: &str) -> bool {
    matches!(name, "dk" | "dv")
}

fn head_axis(problem: &Problem) -> Axis {
    match problem {
        Problem::LinearAttention(_) => Axis::KeyHeads,
        _ => Axis::QueryHeads,
    }
}

fn absent(name: &str, what: &str, problem: &Problem) -> Error {
    let reason = format!("a trace of {} is one after each {name} of {what}", problem.algorithm());
    Error::Missing { operand: name.to_string(), reason }
}

fn refuse(name: &str, given: bool, problem: &Problem) -> Result<(), Error> {
    let reason = format!("a trace of {} has none", problem.algorithm());
    match given {
        true => Err(Error::Unexpected { operand: name.to_string(), reason }),
        false => Ok(()),
    }
}
