//! A pass of attention or attention_lse, its operands in the memory of a device.

use crate::gpu::Device;
use crate::lane::{Lane, Layout, Room};
use crate::rows::Rows;
use crate::tensors::{with_bytes, write_bytes};
use bytemuck::NoUninit;
use etalon_problem::{
    Dtype, Error, Operand, Pass, Precision, Role, Scores, Table, Views, ViewsMut,
};

/// A pass of a problem with its operands, in the memory of a lane.
pub(crate) struct Job<'a> {
    pub scores: &'a Scores,
    /// E; `None` of attention_lse.
    pub value_dim: Option<usize>,
    pub storage: Dtype,
    pub rows: Rows,
    pub tables: Tables,
    /// δ of every row, in the backward pass.
    pub delta: Room,
    operands: Vec<Held>,
    pub device: &'a Device,
    pub lane: Lane,
}

/// An operand that lies on the device: what the caller gave, what the caller wants, or what is computed
/// on the way.
struct Held {
    operand: Operand,
    room: Room,
    /// Whether its elements come from the caller.
    given: bool,
}

/// Where the tables of the rows lie.
#[derive(Default)]
pub(crate) struct Tables {
    pub sequences: Room,
    pub spans: Room,
    pub tiles: Room,
    pub by_queries: Room,
    pub by_keys: Room,
    pub by_pairs: Room,
    pub allowed: Room,
}

impl<'a> Job<'a> {
    #[allow(clippy::too_many_arguments)] // what a call consists of
    pub fn new(
        device: &'a Device,
        (scores, value_dim): (&'a Scores, Option<usize>),
        (pass, storage): (Pass, Dtype),
        table: &Table,
        inputs: &Views<'_>,
        outputs: &ViewsMut<'_>,
        mut lane: Lane,
        mut layout: Layout,
    ) -> Result<Self, Error> {
        if value_dim.is_some_and(|extent| extent > i32::MAX as usize) {
            return Err(Error::Unsupported {
                what: "value_dim".to_string(),
                reason: "the cuda tier counts in 32 bits".to_string(),
            });
        }
        let mut operands = Vec::new();
        for operand in &table.operands {
            let given = inputs.get(operand.name).is_some();
            // lse is written with o in any case, and what was saved is made again where it is absent.
            let made = operand.role == Role::Saved || operand.name == "lse";
            if given || made || outputs.get(operand.name).is_some() {
                let room = layout.room(bytes_of(operand, storage)?)?;
                operands.push(Held { operand: operand.clone(), room, given });
            }
        }
        let rows = Rows::new(scores)?;
        let numbers = scores.row_shape().iter().product::<usize>();
        let delta = layout.room(if pass == Pass::Backward { 4 * numbers } else { 0 })?;
        let tables = Tables::new(&rows, &mut layout)?;
        lane.reserve(device, &layout)?;
        Ok(Job { scores, value_dim, storage, rows, tables, delta, operands, device, lane })
    }

    /// Copies what is given to the device, and fills what is not: rows of no sequence get 0, and −∞ as
    /// their lse.
    pub fn fill(&mut self, inputs: &Views<'_>) -> Result<(), Error> {
        let Job { operands, lane, device, rows, tables, .. } = self;
        for Held { operand, room, given } in operands {
            match inputs.get(operand.name).filter(|_| *given) {
                Some(view) => with_bytes(operand.name, view, |x| lane.upload(device, *room, x))?,
                None => {
                    let nothing = if operand.name == "lse" { f32::NEG_INFINITY } else { 0.0 };
                    lane.fill(device, *room, nothing.to_bits())?;
                }
            }
        }
        tables.upload(rows, lane, device)
    }

    fn held(&self, name: &str) -> Option<&Held> {
        self.operands.iter().find(|held| held.operand.name == name)
    }

    /// Where an operand lies on the device; 0 if it is not there.
    pub fn address(&self, name: &str) -> u64 {
        self.held(name).map_or(0, |held| self.lane.address(held.room))
    }

    /// Where an operand lies in the memory of the lane.
    pub fn room(&self, name: &str) -> Room {
        self.held(name).map_or(Room::default(), |held| held.room)
    }

    /// Whether the caller gave an operand, or the pass has none of this name.
    pub fn is_given(&self, name: &str) -> bool {
        self.held(name).is_none_or(|held| held.given)
    }

    /// The shape of an operand; that of a tensor without elements if it is not there.
    pub fn shape(&self, name: &str) -> &[usize] {
        self.held(name).map_or(&[0; 4], |held| &held.operand.shape)
    }

    /// Copies the results to their places.
    pub fn results(&self, outputs: &mut ViewsMut<'_>) -> Result<(), Error> {
        let is_result =
            |held: &&Held| matches!(held.operand.role, Role::Output | Role::OptionalOutput);
        for Held { operand, room, .. } in self.operands.iter().filter(is_result) {
            if let Some(place) = outputs.take(operand.name) {
                write_bytes(operand.name, place, |x| self.lane.download(self.device, *room, x))?;
            }
        }
        self.lane.finish(self.device)
    }
}

fn bytes_of(operand: &Operand, storage: Dtype) -> Result<usize, Error> {
    let element = if operand.precision == Precision::Storage { storage.bytes() } else { 4 };
    let bytes = operand.shape.iter().try_fold(element, |n, &extent| n.checked_mul(extent));
    bytes.ok_or_else(|| Error::Memory { what: operand.name.to_string(), bytes: usize::MAX })
}

impl Tables {
    fn new(rows: &Rows, layout: &mut Layout) -> Result<Tables, Error> {
        let flags = rows.allowed.as_ref().map_or(0, |allowed| allowed.flags.len());
        Ok(Tables {
            sequences: layout.room(size_of_val(&rows.sequences[..]))?,
            spans: layout.room(size_of_val(&rows.spans[..]))?,
            tiles: layout.room(size_of_val(&rows.tiles[..]))?,
            by_queries: layout.room(size_of_val(&rows.by_queries[..]))?,
            by_keys: layout.room(size_of_val(&rows.by_keys[..]))?,
            by_pairs: layout.room(size_of_val(&rows.by_pairs[..]))?,
            allowed: layout.room(flags)?,
        })
    }

    fn upload(&self, rows: &Rows, lane: &mut Lane, device: &Device) -> Result<(), Error> {
        let mut put = |room, bytes| lane.upload(device, room, bytes);
        put(self.sequences, bytes(&rows.sequences))?;
        put(self.spans, bytes(&rows.spans))?;
        put(self.tiles, bytes(&rows.tiles))?;
        put(self.by_queries, bytes(&rows.by_queries))?;
        put(self.by_keys, bytes(&rows.by_keys))?;
        put(self.by_pairs, bytes(&rows.by_pairs))?;
        put(self.allowed, rows.allowed.as_ref().map_or(&[], |allowed| &allowed.flags))
    }
}

fn bytes<T: NoUninit>(list: &[T]) -> &[u8] {
    bytemuck::cast_slice(list)
}
