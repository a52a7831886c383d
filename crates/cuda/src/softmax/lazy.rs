//! The kernels of lazy_attention: `kernels/lazy.cu`, and of the level sm80 `kernels/lazy_sm80*`.

use crate::family::Family;
use crate::gpu::Kernels;
use crate::parts::absent;
use crate::room::{Layout, Room};
use crate::softmax::Job;
use crate::softmax::hopper_lazy::{KERNELS, Kept, LazyPlan};
use crate::softmax::portable::{Call, TENSOR_THREADS, Tensor, parts, tensor};
use crate::softmax::prepared::Prepared;
use crate::variant::{self, shared_bytes, width};
use cudarc::driver::DeviceRepr;
use etalon_problem::{Align, Blocking, DistanceBias, Error};

/// What its kernels keep between them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    /// τ/n, 1/n, Δ − dlse and (1/n) Σ a g of every row.
    numbers: Room,
    /// Which stripes of keys may hold an active pair, of each tile of queries and head.
    active: Room,
    /// What each tile of keys adds to dbias.
    windows: Room,
    /// Whether some operand holds a number that is not finite, and a counter for each kernel of sm90a.
    odd: Room,
    /// Whether nobody looks: the caller says that there is none.
    assume_finite: bool,
}

impl Memory {
    pub fn new(
        prepared: &Prepared<'_>,
        bias: Option<DistanceBias>,
        assume_finite: bool,
        layout: &mut Layout,
    ) -> Result<Memory, Error> {
        let (scores, counts) = (&prepared.scores, &prepared.counts);
        let heads = scores.extents.query_heads;
        let windows = if prepared.has("dbias") { reach(prepared, bias) } else { 0 };
        let windows = [4, counts.by_keys, heads, windows];
        let windows = windows.iter().try_fold(1usize, |n, &x| n.checked_mul(x));
        Ok(Memory {
            numbers: layout.room(16 * scores.row_shape().iter().product::<usize>())?,
            active: layout.room(4 * counts.tiles * heads)?,
            windows: layout.room(windows.unwrap_or(usize::MAX))?,
            odd: layout.room(4 * (1 + KERNELS.len()))?,
            assume_finite,
        })
    }
}

/// W, or as many distances as the extents of the problem have.
fn reach(prepared: &Prepared<'_>, bias: Option<DistanceBias>) -> usize {
    let e = &prepared.scores.extents;
    bias.map_or(0, |bias| bias.width.min(e.queries.max(e.keys)))
}

/// What a kernel is told: `Lazy` of `lazy.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Lazy {
    call: Call,
    pv: Tensor,
    bias: u64,
    tau: u64,
    dbias: u64,
    dtau: u64,
    numbers: u64,
    active: u64,
    windows: u64,
    odd: u64,
    width: i32,
    reach: i32,
    bottom: i32,
    windowed: i32,
}

// SAFETY: the fields, their types and their order are those of `Lazy` in `lazy.cuh`, and it holds no
// reference of the host.
unsafe impl DeviceRepr for Lazy {}

impl Lazy {
    fn new(job: &Job<'_>, memory: &Memory, bias: Option<DistanceBias>) -> Lazy {
        Lazy {
            call: Call::new(job),
            pv: Tensor::default(),
            bias: job.address("bias"),
            tau: job.address("tau"),
            dbias: job.address("dbias"),
            dtau: job.address("dtau"),
            numbers: job.at(memory.numbers),
            active: job.at(memory.active),
            windows: 0,
            odd: job.at(memory.odd),
            width: bias.map_or(0, |bias| bias.width) as i32,
            reach: reach(job.prepared, bias) as i32,
            bottom: bias.is_some_and(|bias| bias.align == Align::BottomRight).into(),
            windowed: job.prepared.counts.by_keys as i32,
        }
    }

    /// The launch whose accumulators begin at these columns.
    fn at(self, first_dim: i32, first_value: i32) -> Lazy {
        Lazy { call: self.call.at(first_dim, first_value), ..self }
    }
}

/// `Measure` of `lazy.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Measure {
    lazy: Lazy,
    figures: u64,
    states: u64,
    tile_queries: i32,
    tile_keys: i32,
}

// SAFETY: the fields, their types and their order are those of `Measure` in `lazy.cu`, and it holds no
// reference of the host.
unsafe impl DeviceRepr for Measure {}

/// The passes of a prepared problem.
pub(crate) struct Passes<'a> {
    job: &'a Job<'a>,
    memory: &'a Memory,
    bias: Option<DistanceBias>,
    kernels: &'a Kernels,
    /// Those of the level sm90a, where the pass was prepared with them.
    hopper: Option<&'a LazyPlan>,
    call: Lazy,
}

impl<'a> Passes<'a> {
    pub fn new(
        job: &'a Job<'a>,
        memory: &'a Memory,
        bias: Option<DistanceBias>,
        hopper: Option<&'a LazyPlan>,
    ) -> Result<Self, Error> {
        let kernels = job.prepared.portable.as_deref().ok_or_else(|| absent("lazy_attention"))?;
        Ok(Passes { job, memory, bias, kernels, hopper, call: Lazy::new(job, memory, bias) })
    }

    fn threads(&self) -> u32 {
        variant::threads(Family::Lazy, self.job.scores().extents.dim, self.job.prepared.value_dim)
    }

    fn launch(&self, name: &str, blocks: usize, call: Lazy) -> Result<(), Error> {
        let kernel = self.kernels.get(name)?;
        self.job.queue.launch(kernel, blocks as u64, (self.threads(), 0), &call)
    }

    /// Launches a kernel that walks tiles: that of the level sm80 where the pass was prepared with it.
    fn walk(&self, name: &str, blocks: usize, call: Lazy) -> Result<(), Error> {
        let Some((kernels, variant)) = &self.job.prepared.tensor else {
            return self.launch(name, blocks, call);
        };
        let block = (TENSOR_THREADS, shared_bytes(variant, name));
        self.job.queue.launch(kernels.get(name)?, blocks as u64, block, &call)
    }

    /// Blocks of a kernel that owns tiles of queries.
    fn by_queries(&self) -> usize {
        self.job.prepared.counts.by_queries * self.job.scores().extents.query_heads
    }

    /// Looks for numbers that are not finite.
    fn inspect(&self) -> Result<(), Error> {
        let (job, e) = (self.job, &self.job.scores().extents);
        job.queue.fill(self.call.odd, self.memory.odd.bytes, 0)?;
        if self.memory.assume_finite {
            return Ok(());
        }
        let heads = e.batch * e.query_heads.max(e.key_heads);
        let each = (8 * job.prepared.device().multiprocessors).div_ceil(heads.max(1));
        self.launch("inspect", heads * each, self.call)
    }

    /// What the kernels of sm90a are told of the memory that all levels share.
    fn kept(&self) -> Kept {
        let wanted = self.job.address("dbias") != 0;
        let windows = if wanted { self.job.at(self.memory.windows) } else { 0 };
        let Lazy { numbers, odd, reach, .. } = self.call;
        Kept { numbers, odd, windows, reach }
    }

    /// lse, the numbers of every row, and the stripes that may hold an active pair.
    fn scores(&self) -> Result<(), Error> {
        if let Some(plan) = self.hopper {
            return plan.scores(self.job, self.bias, self.kept());
        }
        self.walk("scores", self.by_queries(), self.call)
    }

    /// lse, and those of o and Σ a P v that have places.
    pub fn forward(&self) -> Result<(), Error> {
        if let Some(plan) = self.hopper {
            self.inspect()?;
            return plan.forward(self.job, self.bias, self.kept());
        }
        let tensor_cores = self.job.prepared.tensor.is_some();
        if tensor_cores {
            self.inspect()?;
        }
        self.scores()?;
        let pv = tensor(self.job, "pv_sum");
        for (pv, wanted) in [(Tensor::default(), tensor(self.job, "o")), (pv, pv)] {
            let columns = self.job.prepared.value_dim.filter(|_| wanted.is_there()).unwrap_or(0);
            let at_once = if tensor_cores { width(columns).min(128) } else { width(columns) };
            for first in (0..columns).step_by(at_once) {
                let call = Lazy { pv, ..self.call.at(0, first as i32) };
                self.walk("values", self.by_queries(), call)?;
            }
        }
        Ok(())
    }

    /// The figures of every row, and the states of every tile of the statistics, at addresses that hold zeros.
    pub fn measure(&self, [figures, states]: [u64; 2], tile: Blocking) -> Result<(), Error> {
        self.scores()?;
        // One that is longer than the arrays holds them all.
        let e = &self.job.scores().extents;
        let tile_queries = tile.queries.min(e.queries.max(1)) as i32;
        let tile_keys = tile.keys.min(e.keys.max(1)) as i32;
        let of = Measure { lazy: self.call, figures, states, tile_queries, tile_keys };
        let kernel = self.kernels.get("measure")?;
        self.job.queue.launch(kernel, self.by_queries() as u64, (self.threads(), 0), &of)
    }

    /// The gradients that have places.
    pub fn backward(&self) -> Result<(), Error> {
        let prepared = self.job.prepared;
        let wants = |name: &str| self.job.address(name) != 0;
        self.inspect()?;
        match prepared.is_given("lse") {
            // What the forward pass does not save.
            true => self.launch("counts", self.by_queries(), self.call)?,
            false => self.scores()?,
        }
        if let Some(plan) = self.hopper {
            if wants("dbias") {
                let room = self.memory.windows;
                self.job.queue.fill(self.job.at(room), room.bytes, 0)?;
            }
            plan.backward(self.job, self.bias, self.kept())?;
            return self.sums();
        }
        if ["dq", "dk", "dbias", "dtau"].into_iter().any(wants) {
            let dims = if wants("dq") { self.job.scores().extents.dim } else { 0 };
            if prepared.tensor.is_some() {
                self.walk("means", self.by_queries(), self.call)?;
            } else if dims == 0 {
                self.launch("queries", self.by_queries(), self.call)?; // Δ and Σ a g alone
            }
            for first in parts(dims) {
                self.walk("queries", self.by_queries(), self.call.at(first, 0))?;
            }
        }
        self.keys()?;
        self.sums()
    }

    /// dbias and dtau, of what the kernels before left for them.
    fn sums(&self) -> Result<(), Error> {
        let wants = |name: &str| self.job.address(name) != 0;
        if wants("dbias") {
            let groups = (self.call.width as usize).div_ceil(32);
            let windows = self.job.at(self.memory.windows);
            let blocks = groups * self.job.scores().extents.query_heads;
            self.launch("dbias", blocks, Lazy { windows, ..self.call })?;
        }
        if wants("dtau") {
            self.launch("dtau", self.job.scores().extents.query_heads, self.call)?;
        }
        Ok(())
    }

    /// dk, dv, and what the tiles of keys add to dbias.
    fn keys(&self) -> Result<(), Error> {
        let (job, e) = (self.job, &self.job.scores().extents);
        let columns = |name: &str, all: usize| if job.address(name) == 0 { 0 } else { all };
        let all_values = job.prepared.value_dim.unwrap_or(0);
        let (mut dims, mut values) =
            (parts(columns("dk", e.dim)), parts(columns("dv", all_values)));
        let mut windows = if job.address("dbias") == 0 { 0 } else { job.at(self.memory.windows) };
        let call =
            Lazy { call: self.call.call.over(job.table(job.prepared.tables.by_keys)), ..self.call };
        let blocks = job.prepared.counts.by_keys * e.key_heads;
        loop {
            let (dim, value) = (dims.next(), values.next());
            if dim.is_none() && value.is_none() && windows == 0 {
                return Ok(());
            }
            // A part that is not wanted any more begins beyond the last column.
            let first_dim = dim.unwrap_or(e.dim as i32);
            let first_value = value.unwrap_or(all_values as i32);
            self.walk("keys", blocks, Lazy { windows, ..call.at(first_dim, first_value) })?;
            windows = 0;
        }
    }
}
