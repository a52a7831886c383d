//! Tasks over rayon's current pool.

use crate::workspace::{Parts, Region, Workspace};
use etalon_problem::Error;
use std::sync::{Mutex, PoisonError};

/// A pass whose threads have memory of their own.
pub trait Threaded: Sync {
    /// Scratch of a thread.
    type Scratch<'m>;

    /// Cuts what a thread holds from its part of all memory.
    fn scratch<'m>(&self, parts: &mut Parts<'m>) -> Self::Scratch<'m>;
}

/// The threads of a pass, and the memory of all of them.
pub struct Threads<'p, P> {
    pass: &'p P,
    memory: Region,
    /// Elements for one of them.
    each: usize,
}

impl<'p, P: Threaded> Threads<'p, P> {
    /// So many, with memory of a workspace.
    pub fn new(workspace: &Workspace, pass: &'p P, count: usize) -> Result<Self, Error> {
        let each = Parts::count(|parts| pass.scratch(parts));
        let memory = workspace.room(each.saturating_mul(count), "the scratch of threads")?;
        Ok(Threads { pass, memory, each })
    }

    /// Runs `body` on every task, as [`share`] does.
    pub fn share<T: Send>(
        &mut self,
        tasks: impl Iterator<Item = T> + Send,
        body: impl Fn(T, &mut P::Scratch<'_>) + Sync,
    ) {
        let parts = self.memory.chunks_exact_mut(self.each);
        share(parts, |part| self.pass.scratch(&mut Parts::of(part)), tasks, body);
    }
}

/// Runs `body` on every task, in their order as threads become free: put the heaviest first. As many
/// threads work as there are `rooms`; each takes one and prepares it with `enter`. The result
/// of a task is the same on every thread, so results do not depend on the number of threads. Nothing is
/// allocated.
pub fn share<R: Send, S, T: Send>(
    rooms: impl ExactSizeIterator<Item = R> + Send,
    enter: impl Fn(R) -> S + Sync,
    tasks: impl Iterator<Item = T> + Send,
    body: impl Fn(T, &mut S) + Sync,
) {
    let threads = rooms.len();
    let (rooms, tasks) = (Mutex::new(rooms), Mutex::new(tasks));
    let work = || {
        let Some(mut task) = next(&tasks) else { return };
        let Some(mut scratch) = next(&rooms).map(&enter) else { return };
        loop {
            body(task, &mut scratch);
            match next(&tasks) {
                Some(next) => task = next,
                None => return,
            }
        }
    };
    on_threads(threads, &work);
}

/// The next item of an iterator that threads share.
fn next<T>(items: &Mutex<impl Iterator<Item = T>>) -> Option<T> {
    items.lock().unwrap_or_else(PoisonError::into_inner).next()
}

/// Calls `work` so many times, at once as far as threads are free. Unlike a scope, which allocates every
/// job, a `join` keeps it on the stack.
fn on_threads(threads: usize, work: &(dyn Fn() + Sync)) {
    match threads {
        0 => {}
        1 => work(),
        _ => {
            let half = threads / 2;
            rayon::join(|| on_threads(threads - half, work), || on_threads(half, work));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_is_shared_out_once() {
        for (threads, tasks) in [(1, 100), (2, 100), (3, 2), (7, 1000), (5, 0)] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let (mut done, mut rooms) = (vec![0; tasks], vec![0; threads]);
            pool.install(|| {
                let enter = |room| (room, 0);
                share(rooms.iter_mut(), enter, done.iter_mut(), |slot, (room, count)| {
                    *slot += 1;
                    *count += 1;
                    **room = *count;
                });
            });
            assert!(done.iter().all(|&count| count == 1), "{threads} threads");
            assert_eq!(rooms.iter().sum::<usize>(), tasks, "a thread keeps its room");
        }
    }
}
