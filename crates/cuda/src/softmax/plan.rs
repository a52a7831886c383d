//! How a pass will work, told without a device.

use crate::family::Family;
use crate::options::{Level, Options};
use crate::plan::{Buffer, Plan, Step};
use crate::room::ALIGNMENT;
use crate::softmax::asked::Asked;
use crate::softmax::counts::Counts;
use crate::softmax::portable::{TENSOR_THREADS, fused_variant, parts, tensor_second_variant};
use crate::softmax::prepared::scores_of;
use crate::softmax::rows::Rows;
use crate::softmax::slots::Shares;
use crate::softmax::variants::Results;
use crate::softmax::way::{TensorVariants, Way, choose, on_level, tensor_variants};
use crate::softmax::{blocks, hopper};
use crate::target::Target;
use crate::unit::Unit;
use crate::variant::{Variant, declared_bytes, shared_bytes, threads, width};
use etalon_problem::{Dtype, Error, Mode, Pass, Problem};

/// The levels, the fastest first.
const LEVELS: [Level; 3] = [Level::Sm90a, Level::Sm80, Level::Portable];

/// How a pass works on a device, every result being asked for.
pub(crate) fn plan(
    problem: &Problem,
    (pass, storage): (Pass, Dtype),
    options: &Options,
    target: &Target,
) -> Result<Plan, Error> {
    let (scores, value_dim) = scores_of(problem)?;
    Rows::check_extents(scores)?;
    let e = &scores.extents;
    let gradient = options.mode == Mode::ForwardGradient && value_dim.is_none();
    let asked = Asked {
        scores,
        value_dim,
        pass,
        storage,
        counts: Counts::of_scores(scores),
        whole: e.dim % 8 == 0 && value_dim.is_none_or(|columns| columns % 8 == 0),
        both: pass != Pass::Backward || !gradient,
        target: *target,
    };
    let way = choose(&asked, options)?;
    let level = match &way {
        Way::Portable => Level::Portable,
        Way::Tensor if options.level == Level::Sm80Narrow => Level::Sm80Narrow,
        Way::Tensor => Level::Sm80,
        Way::Hopper(_) => Level::Sm90a,
    };
    let shares = way.shares(&asked, options);
    let fused = if shares.is_some() { Mode::FusedPartials } else { Mode::Separate };
    let mode = if gradient { Mode::ForwardGradient } else { fused };
    let steps = Steps { asked: &asked, shares, gradient, options };
    let blockings = match &way {
        Way::Portable => blocks::of_portable(),
        Way::Tensor => blocks::of_tensor(&asked, options.mode),
        Way::Hopper(plan) => blocks::of_hopper(&asked, plan.variant),
    };
    let refusal = |level| Some((level, on_level(&asked, level, options).err()?));
    Ok(Plan {
        target: *target,
        level,
        refusals: LEVELS.into_iter().filter_map(refusal).collect(),
        mode: (pass == Pass::Backward).then_some(mode),
        blocking: blocks::chosen(&blockings, options.blocking),
        blockings,
        steps: steps.of(&way),
        buffers: steps.buffers(&way),
    })
}

/// The kernels of a pass.
struct Steps<'a> {
    asked: &'a Asked<'a>,
    shares: Option<Shares>,
    gradient: bool,
    options: &'a Options,
}

impl Steps<'_> {
    fn of(&self, way: &Way) -> Vec<Step> {
        let steps = match (way, self.asked.pass) {
            (Way::Hopper(plan), Pass::Forward) => self.hopper_forward(plan),
            (Way::Hopper(plan), _) => self.hopper_backward(plan),
            (Way::Tensor, Pass::Forward) => self.forward(true),
            (_, Pass::Forward) => self.forward(false),
            (Way::Tensor, Pass::Backward) => self.backward(true),
            (_, Pass::Backward) => self.backward(false),
            _ => self.second(),
        };
        steps.into_iter().filter(|step| step.blocks > 0 && step.launches > 0).collect()
    }

    fn dims(&self) -> usize {
        self.asked.scores.extents.dim
    }

    fn values(&self) -> usize {
        self.asked.value_dim.unwrap_or(0)
    }

    /// Blocks that own a tile of queries, and those that own a tile of keys.
    fn owners(&self) -> [usize; 2] {
        let e = &self.asked.scores.extents;
        [self.asked.counts.by_queries * e.query_heads, self.asked.counts.by_keys * e.key_heads]
    }

    /// Rows of all heads.
    fn rows(&self) -> usize {
        self.asked.scores.row_shape().iter().product()
    }

    /// A kernel of the portable level.
    fn portable(&self, kernel: &'static str, blocks: usize, walks: bool, terms: usize) -> Step {
        let second = !matches!(self.asked.pass, Pass::Forward | Pass::Backward);
        let family = if second { Family::Second } else { Family::Portable };
        let variant = Variant::portable(Dtype::F32, self.dims(), self.asked.value_dim, true);
        // Those of the second order have the same slabs.
        let slabs = declared_bytes(&variant, "forward").unwrap_or(0);
        Step {
            kernel,
            level: Level::Portable,
            launches: 1,
            blocks,
            threads: threads(family, self.dims(), self.asked.value_dim),
            shared_bytes: if walks { slabs } else { 0 },
            terms,
            unit: Unit::Ffma,
            partials: 0.0,
            sums: 0,
            working: blocks,
        }
    }

    /// A kernel of the level sm80.
    fn tensor(&self, variant: &Variant, kernel: &'static str, blocks: usize, terms: usize) -> Step {
        Step {
            kernel,
            level: Level::Sm80,
            launches: 1,
            blocks,
            threads: TENSOR_THREADS,
            shared_bytes: shared_bytes(variant, kernel),
            terms,
            unit: Unit::Mma,
            partials: 0.0,
            sums: 0,
            working: blocks,
        }
    }

    fn forward(&self, on_tensor_cores: bool) -> Vec<Step> {
        let (blocks, dims) = (self.owners()[0], self.dims());
        let columns = self.values().max(1);
        let launched = |step: Step, at_once: usize| {
            let launches = columns.div_ceil(at_once);
            Step { launches, terms: dims * launches + self.values(), ..step }
        };
        let mut steps = vec![if on_tensor_cores {
            let variant = tensor_variants(self.asked, self.options).tensor;
            launched(self.tensor(&variant, "forward", blocks, 0), width(columns).min(128))
        } else {
            launched(self.portable("forward", blocks, true, 0), width(columns))
        }];
        if self.options.mode == Mode::ForwardGradient && self.asked.value_dim.is_none() {
            let launches = parts(dims).count();
            let sweep = self.portable("queries", blocks, true, launches * dims + dims);
            steps.push(Step { launches, ..sweep });
        }
        steps
    }

    /// Kernels that have a row or a head each.
    fn of_rows(&self, kernel: &'static str, rows: usize) -> Step {
        let step = self.portable(kernel, 0, false, 0);
        Step { blocks: rows.div_ceil(step.threads as usize / 32), ..step }
    }

    fn backward(&self, on_tensor_cores: bool) -> Vec<Step> {
        let (asked, dims, values) = (self.asked, self.dims(), self.values());
        let [by_queries, by_keys] = self.owners();
        let variants = on_tensor_cores.then(|| tensor_variants(asked, self.options));
        let walk = |kernel, blocks, terms| match &variants {
            Some(TensorVariants { tensor, wide }) => {
                self.tensor(wide.as_ref().unwrap_or(tensor), kernel, blocks, terms)
            }
            None => self.portable(kernel, blocks, true, terms),
        };
        // Columns of a launch.
        let many = |columns: usize| if on_tensor_cores { 1 } else { parts(columns).count() };
        let of_both = many(dims).max(if values > 0 { many(values) } else { 0 });
        let mut steps = vec![self.of_rows("delta", self.rows())];
        // S and dP, then what each adds to.
        let pairs = dims + values;
        match self.shares {
            Some(shares) => {
                let turns = shares.turns();
                let partials = dims.next_multiple_of(64) as f64 * 4.0 / 64.0;
                let terms = of_both * pairs + 2 * dims + values;
                let fused = match on_tensor_cores {
                    true => self.tensor(&fused_variant(asked), "fused", by_keys, terms),
                    false => self.portable("fused", by_keys, true, terms),
                };
                let threads = fused.threads;
                let working = shares.working(asked);
                let launches = turns * of_both;
                steps.push(Step { launches, partials, working, ..fused.clone() });
                steps.push(Step {
                    kernel: "collect",
                    launches: turns,
                    blocks: 4 * by_queries,
                    threads,
                    shared_bytes: 0,
                    terms: 0,
                    partials,
                    sums: shares.sums(),
                    working: 4 * by_queries,
                    ..fused
                });
                if on_tensor_cores {
                    // Of key heads whose keys are not finite.
                    steps.push(walk("queries", by_queries, 0));
                }
            }
            None => {
                if self.gradient {
                    steps.push(self.of_rows("scale", self.rows()));
                } else {
                    let launches = many(dims);
                    let sweep = walk("queries", by_queries, launches * pairs + dims);
                    steps.push(Step { launches, ..sweep });
                }
                let wide = variants.as_ref().is_some_and(|x| x.wide.is_some()) && values > 0;
                if wide {
                    steps.push(walk("keys", by_keys, pairs + dims));
                    steps.push(walk("values", by_keys, dims + values));
                } else {
                    let sweep = walk("keys", by_keys, of_both * pairs + dims + values);
                    steps.push(Step { launches: of_both, ..sweep });
                }
            }
        }
        steps.extend(self.sinks_and_bias(["dsinks", "dbias"], on_tensor_cores));
        steps
    }

    fn sinks_and_bias(&self, [sinks, bias]: [&'static str; 2], tensor: bool) -> Vec<Step> {
        let (asked, e) = (self.asked, &self.asked.scores.extents);
        let mut steps = Vec::new();
        if asked.scores.sinks {
            let step = self.portable(sinks, e.query_heads, false, 0);
            steps.push(Step { shared_bytes: 4 * step.threads, ..step });
        }
        if let Some(extents) = asked.scores.bias {
            let tiles = self.tiles_of_bias(extents.batch);
            let (blocks, terms) =
                (tiles.saturating_mul(extents.heads), self.dims() + self.values());
            let narrow = asked.storage != Dtype::F32 && !asked.is_wide();
            steps.push(if tensor && narrow {
                let variant = tensor_variants(asked, self.options).tensor;
                self.tensor(&variant, bias, blocks, terms)
            } else {
                self.portable(bias, blocks, true, terms)
            });
        }
        steps
    }

    /// Tiles of 64 × 64 pairs that have a gradient of the bias: of batch elements that share it those of the longest.
    fn tiles_of_bias(&self, batch: usize) -> usize {
        let list = self.asked.scores.sequences();
        let tiles = |rows: usize| rows.div_ceil(64);
        if batch == 1 && self.asked.scores.extents.batch > 1 {
            let most = |f: fn(&etalon_problem::Sequence) -> usize| list.iter().map(f).max();
            return tiles(most(|s| s.queries).unwrap_or(0)) * tiles(most(|s| s.keys).unwrap_or(0));
        }
        list.iter().map(|s| tiles(s.queries) * tiles(s.keys)).sum()
    }

    /// The second order: of bf16 on tensor cores, beside which the portable kernels do what is not finite.
    fn second(&self) -> Vec<Step> {
        let (asked, dims, values) = (self.asked, self.dims(), self.values());
        let [by_queries, by_keys] = self.owners();
        let variant = tensor_second_variant(asked);
        let walk = |kernel, blocks, terms| match &variant {
            Some(variant) => self.tensor(variant, kernel, blocks, terms),
            None => self.portable(kernel, blocks, true, terms),
        };
        let jvp = asked.pass == Pass::Jvp;
        // S and u of three products, dP and T of as many; then what they add to.
        let (scores, turns) = (3 * dims, 3 * values);
        let mut steps = Vec::new();
        let tangents = walk("tangents", by_queries, scores + 2 * values);
        steps.push(Step { launches: parts(values.max(1)).count(), ..tangents });
        steps.push(self.of_rows("rows", self.rows()));
        if jvp {
            return steps;
        }
        match self.shares {
            Some(shares) => {
                let terms = scores + turns + 4 * dims + 2 * values;
                let (launches, partials) = (shares.turns(), 4.0);
                let (working, sums) = (shares.working(asked), shares.sums());
                let fused = self.portable("fused", by_keys, true, terms);
                steps.push(Step { launches, partials, working, ..fused });
                let collect = self.portable("collect", 4 * by_queries, false, 0);
                steps.push(Step { launches, partials, sums, ..collect });
            }
            None => {
                let launches = parts(dims).count();
                let sweep = walk("queries", by_queries, scores + turns + 2 * dims);
                steps.push(Step { launches, ..sweep });
                let launches = launches.max(parts(values).count());
                let sweep = walk("keys", by_keys, scores + turns + 2 * dims + 2 * values);
                steps.push(Step { launches, ..sweep });
            }
        }
        steps.extend(self.sinks_and_bias(["gsinks", "gbias"], false));
        steps
    }

    /// A kernel of the level sm90a, whose blocks draw tiles.
    fn hopper(&self, variant: &Variant, kernel: &'static str, tiles: usize, terms: usize) -> Step {
        Step {
            kernel,
            level: Level::Sm90a,
            launches: 1,
            blocks: tiles.min(self.asked.target.multiprocessors),
            threads: 384,
            shared_bytes: shared_bytes(variant, kernel),
            terms,
            unit: Unit::Wgmma,
            partials: 0.0,
            sums: 0,
            working: tiles.min(self.asked.target.multiprocessors),
        }
    }

    fn hopper_forward(&self, plan: &hopper::Plan) -> Vec<Step> {
        let e = &self.asked.scores.extents;
        let values = self.asked.value_dim.is_some();
        let variant = Variant::hopper_forward_of(plan.variant, values, plan.tile);
        let groups = variant.define("GROUPS");
        let tiles = e.queries.div_ceil(64 * groups) * e.query_heads * e.batch;
        let step = self.hopper(&variant, "forward", tiles, self.dims() + self.values());
        vec![Step { threads: 128 * (groups as u32 + 1), ..step }]
    }

    fn hopper_backward(&self, plan: &hopper::Plan) -> Vec<Step> {
        let e = &self.asked.scores.extents;
        let results = if self.asked.value_dim.is_some() { Results::All } else { Results::Lse };
        let variant = Variant::hopper_backward(plan.variant, results);
        let (dims, values) = (self.dims(), self.values());
        let (by_keys, by_queries) = (e.keys.div_ceil(128), e.queries.div_ceil(128));
        let delta = self.hopper(&variant, "delta", 0, 0);
        let numbers = plan.stat_rows(e) * plan.width / 8;
        let mut steps = vec![
            Step { blocks: numbers.div_ceil(256), threads: 256, shared_bytes: 0, ..delta },
            self.hopper(&variant, "keys", by_keys * e.batch * e.key_heads, 2 * (dims + values)),
        ];
        let tiles = by_queries * e.batch * e.query_heads;
        steps.push(match self.gradient {
            true => self.of_rows("scale", self.rows()),
            false => self.hopper(&variant, "queries", tiles, 2 * dims + values),
        });
        if self.asked.scores.sinks || self.asked.scores.bias.is_some() {
            steps.push(self.of_rows("delta", self.rows()));
        }
        steps.extend(self.sinks_and_bias(["dsinks", "dbias"], true));
        steps
    }

    /// The scratch memory, as the pass lays it out for operands that are dense.
    fn buffers(&self, way: &Way) -> Vec<Buffer> {
        let (asked, e) = (self.asked, &self.asked.scores.extents);
        let mut list = Vec::new();
        let mut add = |name, bytes: usize| {
            if bytes > 0 {
                list.push(Buffer { name, bytes: bytes.next_multiple_of(ALIGNMENT) });
            }
        };
        let rows = self.rows();
        let second = matches!(asked.pass, Pass::DoubleBackward | Pass::Jvp);
        if asked.pass == Pass::Backward {
            add("delta of rows", 4 * rows);
        }
        if second {
            add("sums of rows", 2 * 4 * rows * self.values());
            add("numbers of rows", 4 * 4 * rows);
            add("heads that are not finite", 4 * asked.counts.sequences * e.key_heads);
        }
        if let Some([slots, sums]) = self.shares.and_then(Shares::bytes) {
            add("partial sums of dq", slots);
            add("sums of dq of the tiles before", sums);
            if way.is_tensor() {
                add("heads that are not finite", 4 * asked.counts.sequences * e.key_heads);
            }
        }
        if let Way::Hopper(plan) = way {
            let backward = asked.pass == Pass::Backward;
            let guarded = backward && !self.options.assume_finite;
            add(
                "operands and results in whole columns, or of finite numbers",
                self.copies(plan, guarded),
            );
            if backward {
                add("lse and delta of rows", 2 * 4 * plan.stat_rows(e));
            }
            // And what is not finite of each key head of each sequence.
            let groups = if backward { self.asked.counts.sequences * e.key_heads } else { 0 };
            add("counters of tiles, and what was found of key heads", 4 * (3 + groups));
        }
        list
    }

    /// The copies of operands that have other columns than the kernels, and those in which NaN is 0.
    fn copies(&self, plan: &hopper::Plan, guarded: bool) -> usize {
        let e = &self.asked.scores.extents;
        let first = ["q", "k", "v", "o"];
        let later = ["dout", "dq", "dk", "dv"];
        let backward = self.asked.pass == Pass::Backward;
        let names = first.into_iter().chain(later.into_iter().filter(|_| backward));
        let copied = |name: &&str| {
            let of_values = matches!(*name, "v" | "o" | "dout" | "dv");
            let columns = if of_values { self.values() } else { self.dims() };
            let given = *name == "dq" && self.gradient;
            let copied = columns != plan.width || guarded && *name != "o";
            copied && !given && (columns > 0 || !of_values)
        };
        let bytes = |name: &str| {
            let (heads, rows) = hopper::rows_of(e, name);
            (2 * e.batch * heads * rows * plan.width).next_multiple_of(ALIGNMENT)
        };
        names.filter(copied).map(bytes).sum()
    }
}
