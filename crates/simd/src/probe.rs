//! Rates of the hardware, measured in the same run as the kernels.

use crate::Level;
use crate::lanes::matrix::{Matrix, MatrixKernel};
use crate::lanes::{Isa, Kernel, Lanes};
use crate::memory::zeroed;
use etalon_problem::Error;
use rayon::prelude::*;
use std::hint::black_box;
use std::time::Instant;

/// The peak of fused multiply-adds in f32, in GFLOP/s (2 operations each), of all threads of rayon's
/// current pool at once: the best of many tries within a third of a second, which is as long as a clock
/// may take to rise.
pub fn fma_gflops(level: Level) -> f64 {
    best(|| fma_sample(level))
}

/// The same of products of bf16 by the level's own unit, on registers or tiles alone; `None` if it has no such unit.
pub fn bf16_gflops(level: Level) -> Option<f64> {
    level.has_pairs().then(|| best(|| bf16_sample(level)))
}

fn best(sample: impl Fn() -> f64) -> f64 {
    let (start, mut best) = (Instant::now(), 0.0f64);
    while start.elapsed().as_secs_f64() < 0.3 {
        best = best.max(sample());
    }
    best
}

/// One try of about a millisecond, of which [`fma_gflops`] takes the best. Beside the runs of a kernel it
/// shows how fast the clock was just then.
pub fn fma_sample(level: Level) -> f64 {
    sample(|| level.run(Peak { rounds: 400_000 }))
}

/// One try of some milliseconds, of which [`bf16_gflops`] takes the best; 0 if the level multiplies no bf16.
pub fn bf16_sample(level: Level) -> f64 {
    let flops = || level.run_tiles(Spin { rounds: 100_000 });
    sample(|| flops().unwrap_or_default() as f64)
}

/// GFLOP/s of all threads, of which each returns its operations.
fn sample(run: impl Fn() -> f64 + Sync) -> f64 {
    let start = Instant::now();
    let flops: Vec<f64> = rayon::broadcast(|_| run());
    flops.iter().sum::<f64>() / start.elapsed().as_secs_f64() * 1e-9
}

/// Products of bf16 on registers or tiles alone.
struct Spin {
    rounds: usize,
}

impl MatrixKernel<usize> for Spin {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) -> usize {
        by.spin(self.rounds)
    }
}

/// Multiply-adds on registers alone, as many sums as hide the latency.
struct Peak {
    rounds: usize,
}

/// Independent sums: 2 units × 4 cycles of latency, and half as much again.
const SUMS: usize = 12;

impl Kernel<f64> for Peak {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> f64 {
        let factor = I::F32::splat(isa, black_box(0.5));
        let mut sums = [I::F32::splat(isa, black_box(1.0)); SUMS];
        for _ in 0..self.rounds {
            // Twelve at a time, twice over, so that counting the rounds costs nothing.
            for _ in 0..2 {
                for sum in &mut sums {
                    *sum = sum.mul_add(factor, factor);
                }
            }
        }
        for sum in sums {
            black_box(sum.reduce_add());
        }
        (self.rounds * 2 * SUMS * I::F32::N * 2) as f64
    }
}

/// GB/s of memory that is read and written in place, as the states of a step are: `bytes` of them, by
/// one thread of each that rayon's current pool has. The median of many tries; or the error that there is
/// no such memory.
pub fn update_gbps(level: Level, bytes: usize) -> Result<f64, Error> {
    let threads = rayon::current_num_threads();
    let mut memory = zeroed::<f32>(bytes / size_of::<f32>(), "memory to be measured")?;
    memory.fill(1.0);
    let part = memory.len().div_ceil(threads).next_multiple_of(16).max(16);
    let mut tries = Vec::new();
    let begin = Instant::now();
    while tries.len() < 5 || begin.elapsed().as_secs_f64() < 0.2 {
        let start = Instant::now();
        memory.par_chunks_mut(part).for_each(|part| level.run(Update(part)));
        tries.push(2.0 * bytes as f64 / start.elapsed().as_nanos().max(1) as f64);
    }
    tries.sort_by(f64::total_cmp);
    Ok(tries[tries.len() / 2])
}

struct Update<'a>(&'a mut [f32]);

impl Kernel for Update<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let factor = I::F32::splat(isa, black_box(1.0));
        for x in self.0.chunks_exact_mut(I::F32::N) {
            (I::F32::load(isa, x) * factor).store(x);
        }
    }
}

/// A cache of data of this CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cache {
    /// 1 for the one next to the registers.
    pub level: u8,
    /// Its size.
    pub bytes: usize,
}

/// The caches of data that the CPU says it has, the nearest first; none where it doesn't say.
#[cfg(target_arch = "x86_64")]
pub fn caches() -> Vec<Cache> {
    use raw_cpuid::{CacheType, CpuId};
    let all = CpuId::new().get_cache_parameters().into_iter().flatten();
    let data =
        all.filter(|cache| matches!(cache.cache_type(), CacheType::Data | CacheType::Unified));
    let size = |x: &raw_cpuid::CacheParameter| {
        x.sets() * x.associativity() * x.coherency_line_size() * x.physical_line_partitions()
    };
    let mut caches: Vec<Cache> =
        data.map(|cache| Cache { level: cache.level(), bytes: size(&cache) }).collect();
    caches.sort_by_key(|cache| cache.level);
    caches
}

/// The caches of data that the CPU says it has: none.
#[cfg(not(target_arch = "x86_64"))]
pub fn caches() -> Vec<Cache> {
    Vec::new()
}

/// The CPU's own name, where it has one.
#[cfg(target_arch = "x86_64")]
pub fn cpu_name() -> Option<String> {
    let name = raw_cpuid::CpuId::new().get_processor_brand_string()?;
    Some(name.as_str().trim().to_string())
}

/// The CPU's own name: unknown.
#[cfg(not(target_arch = "x86_64"))]
pub fn cpu_name() -> Option<String> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_that_multiply_bf16_have_a_peak_of_it() {
        for level in Level::all() {
            let peak = bf16_gflops(level);
            assert_eq!(peak.is_some(), level.has_pairs(), "{level}");
            assert!(peak.is_none_or(|peak| peak.is_finite() && peak > 0.0), "{level}: {peak:?}");
        }
        let [pairs, tiles] = Level::emulated().map(|level| level.run_tiles(Spin { rounds: 1 }));
        assert!(pairs > Some(0) && pairs == tiles);
        assert_eq!(bf16_sample(Level::available()[0]), 0.0);
    }
}
