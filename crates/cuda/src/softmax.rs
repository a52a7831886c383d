//! attention and attention_lse: the operands of a pass on the device, and its launches.

use crate::lane::{Lane, Layout, Room};
use crate::options::{Level, Options, Precision};
use crate::rows::Rows;
use crate::second::{self, Between};
use crate::tensors::{with_bytes, write_bytes};
use crate::workspace::Device;
use crate::{hopper, portable};
use bytemuck::NoUninit;
use etalon_problem::{
    Dtype, Error, Operand, Pass, Precision as Stored, Problem, Role, Scores, Table, Views, ViewsMut,
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
    /// What the second order keeps between its kernels.
    between: Option<Between>,
    /// How the tensor cores compute it, if they do.
    hopper: Option<hopper::Plan>,
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

/// Computes a pass. The call has passed [`Table::check_call`].
pub(crate) fn run(
    device: &Device,
    problem: &Problem,
    (pass, storage): (Pass, Dtype),
    table: &Table,
    inputs: &Views<'_>,
    outputs: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    let (scores, value_dim) = parts(problem)?;
    let hopper = choose(device, (scores, value_dim), (pass, storage), options)?;
    let mut job =
        Job::new(device, (scores, value_dim), (pass, storage), table, inputs, outputs, hopper)?;
    job.fill(inputs)?;
    if pass == Pass::Forward || !job.is_given("lse") || !job.is_given("o") {
        match &job.hopper {
            Some(plan) => hopper::forward(&job, plan)?,
            None => portable::forward(&job)?,
        }
    }
    match (pass, &job.hopper) {
        (Pass::Forward, _) if job.address("gradient") != 0 => portable::gradient_of_lse(&job)?,
        (Pass::Backward, Some(plan)) => hopper::backward(&job, plan)?,
        (Pass::Backward, None) => portable::backward(&job)?,
        (Pass::DoubleBackward | Pass::Jvp, _) => {
            if let Some(between) = &job.between {
                second::run(&job, between, pass)?;
            }
        }
        _ => {}
    }
    job.lane.finish(device)?;
    job.results(outputs)?;
    device.give_back(job.lane);
    Ok(())
}

/// The scores of a problem, and E of attention.
fn parts(problem: &Problem) -> Result<(&Scores, Option<usize>), Error> {
    match problem {
        Problem::Attention(problem) => Ok((&problem.scores, Some(problem.value_dim))),
        Problem::AttentionLse(problem) => Ok((&problem.scores, None)),
        other => Err(Error::value("algorithm", "attention", other.algorithm())),
    }
}

/// The plan of the tensor cores; `None`: the portable kernels. Fails where the level that is asked for
/// cannot compute the pass.
fn choose(
    device: &Device,
    (scores, value_dim): (&Scores, Option<usize>),
    (pass, storage): (Pass, Dtype),
    options: &Options,
) -> Result<Option<hopper::Plan>, Error> {
    let plan = || match options.precision {
        Precision::Flash => hopper::Plan::new(device, scores, value_dim, pass, storage),
        Precision::Strict => Err(
            "tensor cores take P and dS in the storage type, which the precision `flash` permits",
        ),
    };
    match options.level {
        Level::Portable => Ok(None),
        Level::Auto => Ok(plan().ok()),
        Level::Sm90a => plan().map(Some).map_err(|reason| Error::Unsupported {
            what: format!("level {}", Level::Sm90a),
            reason: reason.to_string(),
        }),
    }
}

impl<'a> Job<'a> {
    fn new(
        device: &'a Device,
        (scores, value_dim): (&'a Scores, Option<usize>),
        (pass, storage): (Pass, Dtype),
        table: &Table,
        inputs: &Views<'_>,
        outputs: &ViewsMut<'_>,
        mut hopper: Option<hopper::Plan>,
    ) -> Result<Self, Error> {
        if value_dim.is_some_and(|extent| extent > i32::MAX as usize) {
            return Err(Error::Unsupported {
                what: "value_dim".to_string(),
                reason: "the cuda tier counts in 32 bits".to_string(),
            });
        }
        let mut layout = Layout::default();
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
        let between = match pass {
            Pass::DoubleBackward | Pass::Jvp => Some(Between::new(scores, value_dim, &mut layout)?),
            _ => None,
        };
        if let Some(plan) = &mut hopper {
            plan.reserve(scores, value_dim.is_some(), &mut layout)?;
        }
        let mut lane = device.lane()?;
        lane.reserve(device, &layout)?;
        Ok(Job {
            scores,
            value_dim,
            storage,
            rows,
            tables,
            delta,
            between,
            hopper,
            operands,
            device,
            lane,
        })
    }

    /// Copies what is given to the device, and fills what is not: rows of no sequence get 0, and −∞ as
    /// their lse.
    fn fill(&mut self, inputs: &Views<'_>) -> Result<(), Error> {
        let Job { scores, operands, lane, device, rows, tables, hopper, .. } = self;
        for Held { operand, room, given } in operands {
            match inputs.get(operand.name).filter(|_| *given) {
                Some(view) => with_bytes(operand.name, view, |x| lane.upload(device, *room, x))?,
                None => {
                    let nothing = if operand.name == "lse" { f32::NEG_INFINITY } else { 0.0 };
                    lane.fill(device, *room, nothing.to_bits())?;
                }
            }
        }
        if let Some(plan) = hopper {
            plan.upload(scores, lane, device)?;
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
    fn is_given(&self, name: &str) -> bool {
        self.held(name).is_none_or(|held| held.given)
    }

    /// The shape of an operand; that of a tensor without elements if it is not there.
    pub fn shape(&self, name: &str) -> &[usize] {
        self.held(name).map_or(&[0; 4], |held| &held.operand.shape)
    }

    /// Copies the results to their places.
    fn results(&self, outputs: &mut ViewsMut<'_>) -> Result<(), Error> {
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
    let element = if operand.precision == Stored::Storage { storage.bytes() } else { 4 };
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
