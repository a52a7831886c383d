//! Tasks over rayon's current pool.

use crate::workspace::{Parts, Region, Workspace};
use etalon_problem::Error;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Runs `body` on every task, in the order of the list as threads become free: put the heaviest
/// first. Each thread keeps one scratch, of those that are `idle` or a new one. Which thread runs a
/// task changes nothing about its result, so results do not depend on the number of threads.
pub fn for_each<T: Send, S: Send>(
    idle: &Mutex<Vec<S>>,
    tasks: Vec<T>,
    scratch: impl Fn() -> Result<S, Error> + Sync,
    body: impl Fn(T, &mut S) + Sync,
) -> Result<(), Error> {
    let threads = rayon::current_num_threads().min(tasks.len());
    let (tasks, failure) = (Mutex::new(tasks.into_iter()), Mutex::new(None));
    let work = || {
        let kept = lock(idle).pop();
        let mut scratch = match kept.map_or_else(&scratch, Ok) {
            Ok(scratch) => scratch,
            Err(error) => {
                *lock(&failure) = Some(error);
                return;
            }
        };
        while let Some(task) = next(&tasks) {
            body(task, &mut scratch);
        }
        lock(idle).push(scratch);
    };
    on_threads(threads, &work);
    let (failure, left) = (lock(&failure).take(), lock(&tasks).len());
    match failure {
        // One thread without a scratch is no failure while others did its work.
        Some(error) if left > 0 => Err(error),
        _ => Ok(()),
    }
}

/// A pass whose threads have memory of their own.
pub trait Threaded: Sync {
    /// What a thread holds.
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
/// threads work as there are `rooms`; each takes one and prepares it with `enter`. Which thread runs a
/// task changes nothing about its result, so results do not depend on the number of threads. Nothing is
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The next item of an iterator that threads share.
fn next<T>(items: &Mutex<impl Iterator<Item = T>>) -> Option<T> {
    lock(items).next()
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
    fn every_task_runs_once_whatever_the_threads() {
        for threads in [1, 2, 3, 7] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut done = vec![0; 100];
            pool.install(|| {
                let idle = Mutex::default();
                for_each(&idle, done.iter_mut().collect(), || Ok(()), |slot, ()| *slot += 1)
                    .unwrap();
            });
            assert!(done.iter().all(|&count| count == 1), "{threads} threads");
        }
    }

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

    #[test]
    fn no_scratch_anywhere_is_an_error() {
        let none = || Err::<(), _>(Error::Memory { what: "scratch".into(), bytes: 1 });
        assert!(for_each(&Mutex::default(), vec![1, 2], none, |_, ()| {}).is_err());
    }
}
