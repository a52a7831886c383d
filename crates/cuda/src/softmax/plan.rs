//! How a pass will work, told without a device.

use crate::family::Family;
use crate::levels::{choose, refusals};
use crate::options::{Level, Options};
use crate::plan::{Buffer, Plan, Step};
use crate::room::ALIGNMENT;
use crate::softmax::counts::Counts;
use crate::softmax::modules::{Modules, TENSOR_THREADS};
use crate::softmax::portable::parts;
use crate::softmax::prepared::scores_of;
use crate::softmax::ready::shares;
use crate::softmax::rows::Rows;
use crate::softmax::slots::Shares;
use crate::softmax::spec::{LEVELS, Spec};
use crate::softmax::variants::Results;
use crate::softmax::{blocks, hopper};
use crate::target::Target;
use crate::unit::Unit;
use crate::variant::{Variant, declared_bytes, shared_bytes, threads, width};
use etalon_problem::{Dtype, Error, Mode, Pass, Problem};

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
    let whole = e.dim % 8 == 0 && value_dim.is_none_or(|columns| columns % 8 == 0);
    let flags = [whole, pass != Pass::Backward || !gradient];
    let counts = Counts::of_scores(scores);
    let spec = Spec::new((scores, value_dim), (pass, storage), counts, flags, *target, options);
    let way = choose(&LEVELS, &spec, options.level)?.level;
    let level = match way {
        Level::Sm80 if options.level == Level::Sm80Narrow => Level::Sm80Narrow,
        level => level,
    };
    let modules = Modules::new(&spec, way);
    let shares = shares(&spec, way);
    let fused = if shares.is_some() { Mode::FusedPartials } else { Mode::Separate };
    let mode = if gradient { Mode::ForwardGradient } else { fused };
    let steps = Steps { scores, spec: &spec, modules: &modules, shares, gradient };
    let blockings = match way {
        Level::Portable => blocks::of_portable(),
        Level::Sm80 => blocks::of_tensor(&spec),
        _ => blocks::of_hopper(&spec, spec.hopper()),
    };
    Ok(Plan {
        target: *target,
        level,
        refusals: refusals(&LEVELS, &spec),
        mode: (pass == Pass::Backward).then_some(mode),
        blocking: blocks::chosen(&blockings, options.blocking),
        blockings,
        steps: steps.of(way),
        buffers: steps.buffers(way),
    })
}

/// The kernels of a pass.
struct Steps<'a> {
    scores: &'a etalon_problem::Scores,
    spec: &'a Spec,
    modules: &'a Modules,
    shares: Option<Shares>,
    gradient: bool,
}

impl Steps<'_> {
    fn of(&self, way: Level) -> Vec<Step> {
        let steps = match (way, self.spec.pass) {
            (Level::Sm90a, Pass::Forward) => self.hopper_forward(),
            (Level::Sm90a, _) => self.hopper_backward(),
            (Level::Sm80, Pass::Forward) => self.forward(true),
            (_, Pass::Forward) => self.forward(false),
            (Level::Sm80, Pass::Backward) => self.backward(true),
            (_, Pass::Backward) => self.backward(false),
            _ => self.second(),
        };
        steps.into_iter().filter(|step| step.blocks > 0 && step.launches > 0).collect()
    }

    fn dims(&self) -> usize {
        self.spec.extents.dim
    }

    fn values(&self) -> usize {
        self.spec.value_dim.unwrap_or(0)
    }

    /// Blocks that own a tile of queries, and those that own a tile of keys.
    fn owners(&self) -> [usize; 2] {
        let e = &self.spec.extents;
        [self.spec.counts.by_queries * e.query_heads, self.spec.counts.by_keys * e.key_heads]
    }

    /// Rows of all heads.
    fn rows(&self) -> usize {
        self.spec.rows()
    }

    /// A kernel of the portable level.
    fn portable(&self, kernel: &'static str, blocks: usize, walks: bool, terms: usize) -> Step {
        let second = !matches!(self.spec.pass, Pass::Forward | Pass::Backward);
        let family = if second { Family::Second } else { Family::Portable };
        let variant = Variant::portable(Dtype::F32, self.dims(), self.spec.value_dim, true);
        // Those of the second order have the same slabs.
        let slabs = declared_bytes(&variant, "forward").unwrap_or(0);
        Step {
            kernel,
            level: Level::Portable,
            launches: 1,
            blocks,
            threads: threads(family, self.dims(), self.spec.value_dim),
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
            let variant =
                self.modules.tensor.clone().unwrap_or_else(|| self.modules.portable.clone());
            launched(self.tensor(&variant, "forward", blocks, 0), width(columns).min(128))
        } else {
            launched(self.portable("forward", blocks, true, 0), width(columns))
        }];
        if self.spec.options.mode == Mode::ForwardGradient && self.spec.value_dim.is_none() {
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
        let (spec, dims, values) = (self.spec, self.dims(), self.values());
        let [by_queries, by_keys] = self.owners();
        let (tensor, wide) = (&self.modules.tensor, &self.modules.wide);
        let walk = |kernel, blocks, terms| match wide.as_ref().or(tensor.as_ref()) {
            Some(variant) => self.tensor(variant, kernel, blocks, terms),
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
                    true => self.tensor(
                        self.modules.fused.as_ref().unwrap_or(&self.modules.portable),
                        "fused",
                        by_keys,
                        terms,
                    ),
                    false => self.portable("fused", by_keys, true, terms),
                };
                let threads = fused.threads;
                let working = shares.working(spec);
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
                let wide = wide.is_some() && values > 0;
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
        let (spec, e) = (self.spec, &self.spec.extents);
        let mut steps = Vec::new();
        if self.scores.sinks {
            let step = self.portable(sinks, e.query_heads, false, 0);
            steps.push(Step { shared_bytes: 4 * step.threads, ..step });
        }
        if let Some(extents) = self.scores.bias {
            let tiles = self.tiles_of_bias(extents.batch);
            let (blocks, terms) =
                (tiles.saturating_mul(extents.heads), self.dims() + self.values());
            let narrow = spec.storage != Dtype::F32 && !spec.is_wide();
            steps.push(if tensor && narrow {
                let variant =
                    self.modules.by_pairs.clone().unwrap_or_else(|| self.modules.portable.clone());
                self.tensor(&variant, bias, blocks, terms)
            } else {
                self.portable(bias, blocks, true, terms)
            });
        }
        steps
    }

    /// Tiles of 64 × 64 pairs that have a gradient of the bias: of batch elements that share it those of the longest.
    fn tiles_of_bias(&self, batch: usize) -> usize {
        let list = self.scores.sequences();
        let tiles = |rows: usize| rows.div_ceil(64);
        if batch == 1 && self.spec.extents.batch > 1 {
            let most = |f: fn(&etalon_problem::Sequence) -> usize| list.iter().map(f).max();
            return tiles(most(|s| s.queries).unwrap_or(0)) * tiles(most(|s| s.keys).unwrap_or(0));
        }
        list.iter().map(|s| tiles(s.queries) * tiles(s.keys)).sum()
    }

    /// The second order: of bf16 on tensor cores, beside which the portable kernels do what is not finite.
    fn second(&self) -> Vec<Step> {
        let (spec, dims, values) = (self.spec, self.dims(), self.values());
        let [by_queries, by_keys] = self.owners();
        let variant = self.modules.tensor_second.clone();
        let walk = |kernel, blocks, terms| match &variant {
            Some(variant) => self.tensor(variant, kernel, blocks, terms),
            None => self.portable(kernel, blocks, true, terms),
        };
        let jvp = spec.pass == Pass::Jvp;
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
                let (working, sums) = (shares.working(spec), shares.sums());
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
            blocks: tiles.min(self.spec.target.multiprocessors),
            threads: 384,
            shared_bytes: shared_bytes(variant, kernel),
            terms,
            unit: Unit::Wgmma,
            partials: 0.0,
            sums: 0,
            working: tiles.min(self.spec.target.multiprocessors),
        }
    }

    fn hopper_forward(&self) -> Vec<Step> {
        let e = &self.spec.extents;
        let values = self.spec.value_dim.is_some();
        let variant = Variant::hopper_forward_of(
            self.spec.hopper(),
            values,
            blocks::chosen(
                &blocks::of_hopper(self.spec, self.spec.hopper()),
                self.spec.options.blocking,
            ),
        );
        let groups = variant.define("GROUPS");
        let tiles = e.queries.div_ceil(64 * groups) * e.query_heads * e.batch;
        let step = self.hopper(&variant, "forward", tiles, self.dims() + self.values());
        vec![Step { threads: 128 * (groups as u32 + 1), ..step }]
    }

    fn hopper_backward(&self) -> Vec<Step> {
        let e = &self.spec.extents;
        let results = if self.spec.value_dim.is_some() { Results::All } else { Results::Lse };
        let variant = Variant::hopper_backward(self.spec.hopper(), results);
        let (dims, values) = (self.dims(), self.values());
        let (by_keys, by_queries) = (e.keys.div_ceil(128), e.queries.div_ceil(128));
        let delta = self.hopper(&variant, "delta", 0, 0);
        let numbers = self.stat_rows() * self.spec.hopper().width / 8;
        let mut steps = vec![
            Step { blocks: numbers.div_ceil(256), threads: 256, shared_bytes: 0, ..delta },
            self.hopper(&variant, "keys", by_keys * e.batch * e.key_heads, 2 * (dims + values)),
        ];
        let tiles = by_queries * e.batch * e.query_heads;
        steps.push(match self.gradient {
            true => self.of_rows("scale", self.rows()),
            false => self.hopper(&variant, "queries", tiles, 2 * dims + values),
        });
        if self.scores.sinks || self.scores.bias.is_some() {
            steps.push(self.of_rows("delta", self.rows()));
        }
        steps.extend(self.sinks_and_bias(["dsinks", "dbias"], true));
        steps
    }

    /// The scratch memory, as the pass lays it out for operands that are dense.
    fn buffers(&self, way: Level) -> Vec<Buffer> {
        let (spec, e) = (self.spec, &self.spec.extents);
        let mut list = Vec::new();
        let mut add = |name, bytes: usize| {
            if bytes > 0 {
                list.push(Buffer { name, bytes: bytes.next_multiple_of(ALIGNMENT) });
            }
        };
        let rows = self.rows();
        let second = matches!(spec.pass, Pass::DoubleBackward | Pass::Jvp);
        if spec.pass == Pass::Backward {
            add("delta of rows", 4 * rows);
        }
        if second {
            add("sums of rows", 2 * 4 * rows * self.values());
            add("numbers of rows", 4 * 4 * rows);
            add("heads that are not finite", 4 * spec.counts.sequences * e.key_heads);
        }
        if let Some([slots, sums]) = self.shares.and_then(Shares::bytes) {
            add("partial sums of dq", slots);
            add("sums of dq of the tiles before", sums);
            if way == Level::Sm80 {
                add("heads that are not finite", 4 * spec.counts.sequences * e.key_heads);
            }
        }
        if way == Level::Sm90a {
            let backward = spec.pass == Pass::Backward;
            let guarded = backward && !spec.options.assume_finite;
            add(
                "operands and results in whole columns, or of finite numbers",
                self.copies(guarded),
            );
            if backward {
                add("lse and delta of rows", 2 * 4 * self.stat_rows());
            }
            // And what is not finite of each key head of each sequence.
            let groups = if backward { self.spec.counts.sequences * e.key_heads } else { 0 };
            add("counters of tiles, and what was found of key heads", 4 * (3 + groups));
        }
        list
    }

    /// The copies of operands that have other columns than the kernels, and those in which NaN is 0.
    fn stat_rows(&self) -> usize {
        let e = &self.spec.extents;
        let listed = self.spec.hopper().lengths == crate::softmax::Lengths::Listed;
        let batch = if listed { 1 } else { e.batch };
        let rows = if listed {
            64 * (self.spec.counts.by_queries + 1)
        } else {
            e.queries.next_multiple_of(128)
        };
        batch * e.query_heads * rows
    }

    fn copies(&self, guarded: bool) -> usize {
        let e = &self.spec.extents;
        let first = ["q", "k", "v", "o"];
        let later = ["dout", "dq", "dk", "dv"];
        let backward = self.spec.pass == Pass::Backward;
        let names = first.into_iter().chain(later.into_iter().filter(|_| backward));
        let copied = |name: &&str| {
            let of_values = matches!(*name, "v" | "o" | "dout" | "dv");
            let columns = if of_values { self.values() } else { self.dims() };
            let given = *name == "dq" && self.gradient;
            let copied = columns != self.spec.hopper().width || guarded && *name != "o";
            copied && !given && (columns > 0 || !of_values)
        };
        let bytes = |name: &str| {
            let (heads, rows) = hopper::rows_of(e, name);
            (2 * e.batch * heads * rows * self.spec.hopper().width).next_multiple_of(ALIGNMENT)
        };
        names.filter(copied).map(bytes).sum()
    }
}
