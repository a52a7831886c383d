//! The steps of lazy_attention on the levels portable and sm80: `kernels/lazy_attention/`.

use super::Steps;
use super::fallback;
use super::hopper_lazy::{HopperPass, LazyPlan};
use super::lazy_args::{LazyArgs, MeasureArgs, Memory};
use super::pair_args::wanted;
use super::portable::{columns, parts};
use crate::args::{Field, int};
use crate::memory::MemoryRange;
use crate::options::Level;
use crate::strided::TensorArgs;
use crate::variant::{Variant, width};
use etalon_problem::{Blocking, Result};

pub(crate) struct Passes<'a> {
    steps: &'a Steps<'a>,
    windows: Option<MemoryRange>,
    /// Of the level sm90a, where that computes the pass.
    hopper: Option<HopperPass<'a>>,
    args: LazyArgs,
    /// True of the fallback.
    again: bool,
}

impl<'a> Passes<'a> {
    pub fn new(steps: &'a Steps<'a>, memory: &Memory, plan: Option<&'a LazyPlan>) -> Self {
        let args = LazyArgs::new(steps, memory);
        let hopper = plan.map(|plan| HopperPass::new(plan, steps, &args, steps.range(memory.windows)));
        Passes { steps, windows: memory.windows, hopper, args, again: false }
    }

    /// The same by portable kernels, of groups that have a flag.
    fn fallback(&self) -> Self {
        Passes { hopper: None, again: true, ..*self }
    }

    fn launch(&self, name: &'static str, blocks: usize, args: &impl Field) -> Result<()> {
        let variant = self.steps.prepared.lazy_shape().lazy_portable();
        self.steps.launch((&variant, name), (blocks, variant.threads()), args)
    }

    /// Adds a launch; in the fallback few blocks take turns at the tiles.
    fn walk_portable(&self, name: &'static str, tiles: usize, args: &LazyArgs) -> Result<()> {
        if !self.again {
            return self.launch(name, tiles, args);
        }
        let variant = self.steps.prepared.lazy_shape().lazy_portable().again();
        let grid = (fallback::blocks(self.steps, tiles), variant.threads());
        self.steps.launch((&variant, name), grid, &LazyArgs { tiles: tiles as i32, ..*args })
    }

    /// The module of the level sm80, where it computes the pass.
    fn tensor(&self) -> Option<Variant> {
        let prepared = self.steps.prepared;
        (prepared.is_sm80() && !self.again).then(|| prepared.lazy_shape().lazy_sm80())
    }

    /// Adds a launch, of the level sm80 where it computes the pass.
    fn walk(&self, name: &'static str, blocks: usize, args: &LazyArgs) -> Result<()> {
        match self.tensor() {
            None => self.walk_portable(name, blocks, args),
            Some(variant) => self.steps.launch((&variant, name), (blocks, variant.threads()), args),
        }
    }

    fn walk_queries(&self, name: &'static str, args: &LazyArgs) -> Result<()> {
        self.walk(name, self.steps.query_blocks(), args)
    }

    fn is_portable(&self) -> bool {
        self.steps.prepared.choice.level == Level::Portable
    }

    /// lse, and those of o and Σ a P v that have places.
    pub fn forward(&self) -> Result<()> {
        self.steps.clear_flags();
        match &self.hopper {
            Some(hopper) => hopper.forward()?,
            None => self.rows()?,
        }
        if self.is_portable() { Ok(()) } else { self.fallback().rows() }
    }

    /// The forward pass of the levels portable and sm80, or the fallback.
    fn rows(&self) -> Result<()> {
        self.walk_queries("scores", &self.args)?;
        let pv = self.steps.tensor("pv_sum");
        for (pv, wanted) in [(TensorArgs::default(), self.steps.tensor("o")), (pv, pv)] {
            let columns = self.steps.prepared.spec.value_dim.filter(|_| wanted.is_there()).unwrap_or(0);
            let at_once = if self.tensor().is_some() { width(columns).min(128) } else { width(columns) };
            for first in (0..columns).step_by(at_once) {
                self.walk_queries("values", &LazyArgs { pv, ..self.args.at([0, first]) })?;
            }
        }
        Ok(())
    }

    /// The figures of every row and the states of every tile, at addresses that hold zeros.
    pub fn measure(&self, [figures, states]: [u64; 2], tile: Blocking) -> Result<()> {
        self.walk_queries("scores", &self.args)?;
        // One that is longer than the arrays holds them all.
        let e = self.steps.extents();
        let args = MeasureArgs {
            lazy: self.args,
            figures: figures.into(),
            states: states.into(),
            tile_queries: int(tile.queries.min(e.queries.max(1))),
            tile_keys: int(tile.keys.min(e.keys.max(1))),
        };
        self.launch("measure", self.steps.query_blocks(), &args)
    }

    /// The gradients that have places.
    pub fn backward(&self) -> Result<()> {
        self.steps.clear_flags();
        match &self.hopper {
            None => self.gradients()?,
            Some(hopper) => {
                if !self.count()? {
                    hopper.scores()?;
                }
                self.windows.into_iter().for_each(|range| self.steps.clear(range));
                hopper.backward()?;
            }
        }
        // The portable kernels count n by S themselves, unless lse is given.
        if !self.is_portable() || self.steps.prepared.is_given("lse") {
            self.fallback().gradients()?;
        }
        self.sums()
    }

    /// Numbers of rows that the forward pass does not save; false if it has not been.
    fn count(&self) -> Result<bool> {
        let given = self.steps.prepared.is_given("lse");
        if given {
            self.walk_portable("counts", self.steps.query_blocks(), &self.args)?;
        }
        Ok(given)
    }

    /// The same of the backward pass, with the terms of dbias and dtau.
    fn gradients(&self) -> Result<()> {
        if !self.count()? {
            self.walk_queries("scores", &self.args)?;
        }
        let wants = |name: &str| self.steps.is_there(name);
        if ["dq", "dk", "dbias", "dtau"].into_iter().any(wants) {
            let dims = if wants("dq") { self.steps.extents().dim } else { 0 };
            if self.tensor().is_some() {
                self.walk_queries("means", &self.args)?;
            } else if dims == 0 {
                self.walk_queries("queries", &self.args)?; // Δ and Σ a g alone
            }
            for first in parts(dims) {
                self.walk_queries("queries", &self.args.at([first, 0]))?;
            }
        }
        self.keys()
    }

    /// dbias and dtau, of what the kernels before left for them.
    fn sums(&self) -> Result<()> {
        let wants = |name: &str| self.steps.is_there(name);
        if wants("dbias") {
            let groups = (self.args.width as usize).div_ceil(32);
            let windows = self.steps.range(self.windows).into();
            let blocks = groups * self.steps.extents().query_heads;
            self.launch("dbias", blocks, &LazyArgs { windows, ..self.args })?;
        }
        if wants("dtau") {
            self.launch("dtau", self.steps.extents().query_heads, &self.args)?;
        }
        Ok(())
    }

    /// dk, dv, and what the tiles of keys add to dbias.
    fn keys(&self) -> Result<()> {
        let (steps, c) = (self.steps, self.args.c);
        let all = [steps.extents().dim, steps.values()];
        let wanted = [wanted(c.dk, all[0]), wanted(c.dv, all[1])];
        let args = LazyArgs { c: c.over(steps.table(steps.prepared.tables.by_keys)), ..self.args };
        let mut windows = steps.range(self.windows);
        // Windows alone are a launch without columns.
        let alone = (wanted == [0, 0] && windows != 0).then_some(all);
        for first in columns(wanted, all).chain(alone) {
            self.walk("keys", steps.key_blocks(), &LazyArgs { windows: windows.into(), ..args.at(first) })?;
            windows = 0;
        }
        Ok(())
    }
}
