//! Tasks over rayon's current pool.

use etalon_problem::Error;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Runs `body` on every task, in the order of the list as threads become free: put the heaviest
/// first. Each thread keeps one scratch, of those that are `idle` or a new one. Which thread runs a
/// task changes nothing about its result, so results do not depend on the number of threads.
pub fn for_each<T: Send, S: Send>(
    idle: &Mutex<Vec<S>>,
    tasks: Vec<T>,
    scratch: impl Fn() -> Result<S, Error> + Sync,
    body: impl Fn(T, &mut S) + Sync,
) -> Result<(), Error> {
    let take = || idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let threads = rayon::current_num_threads().min(tasks.len());
    let tasks: Vec<Mutex<Option<T>>> =
        tasks.into_iter().map(|task| Mutex::new(Some(task))).collect();
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    let work = || {
        let mut scratch = match take().map_or_else(&scratch, Ok) {
            Ok(scratch) => scratch,
            Err(error) => {
                *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                return;
            }
        };
        while let Some(task) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Some(task) = task.lock().unwrap_or_else(PoisonError::into_inner).take() {
                body(task, &mut scratch);
            }
        }
        idle.lock().unwrap_or_else(PoisonError::into_inner).push(scratch);
    };
    on_threads(threads, &work);
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        // One thread without a scratch is no failure while others did its work.
        Some(error) if next.load(Ordering::Relaxed) < tasks.len() => Err(error),
        _ => Ok(()),
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
