//! Memory that a caller may keep between calls.
//!
//! To touch memory for the first time costs a page fault for every 4 KiB, which is as much time as
//! the kernels of a short problem take. A pass therefore takes all of its memory from a
//! [`Workspace`], and a caller that keeps the workspace pays once.
//!
//! Use by a pass:
//!
//! * [`Workspace::room`] in place of a vector of f32: it lends a [`Region`], which goes back when it is
//!   dropped.
//! * [`Parts`] cuts one region into what a thread needs, and says beforehand how long it must be. A
//!   thread cuts its own part, so that the pages are first touched where they are used.
//! * [`Workspace::lists`] in place of `Vec` and `collect`, for elements that no region can hold, such
//!   as views; how much memory they take is said beforehand. A list that is made and emptied by one
//!   thread is often better an iterator: the tasks of [`share`](crate::parallel::share) need not be in
//!   memory at once.
//! * [`Workspace::remember`] for facts that follow from the problem alone.
//!
//! A pass takes everything before it writes a result, on the thread that called it: then nothing has
//! been written if memory is short, and the second call asks for the same regions in the same order
//! and finds them, however threads meet.

use crate::aligned::{Aligned, LINE};
use bumpalo::{Bump, boxed::Box, collections::Vec as BumpVec};
use etalon_problem::Error;
use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Memory for the passes of this crate, to be kept between calls.
///
/// The second call of a pass with the same problem, with results in arrays of the caller, allocates
/// nothing if it runs inside the pool of threads. One workspace serves all passes and problems, one
/// after the other or at the same time; it holds at most twice the memory that was in use at once.
///
/// ```
/// use etalon_problem::{LinearAttention, LinearExtents};
/// use etalon_simd::{Options, Workspace, linear_attention};
/// use ndarray::Array4;
///
/// let extents = LinearExtents { batch: 1, query_heads: 2, key_heads: 2, tokens: 64, dim: 16 };
/// let problem = LinearAttention::new(extents);
/// let q = Array4::<f32>::ones(problem.q_shape());
/// let inputs = linear_attention::Inputs::new(q.view(), q.view(), q.view());
/// let mut o = Array4::<f32>::zeros(problem.o_shape());
///
/// let workspace = Workspace::new();
/// for _ in 0..3 {
///     let out = linear_attention::OutputMut { o: Some(o.view_mut()), final_state: None };
///     linear_attention::forward_into(&workspace, &problem, &inputs, out, &Options::default())?;
/// }
/// assert!(workspace.bytes() > 0);
/// workspace.release();
/// assert_eq!(workspace.bytes(), 0);
/// # Ok::<(), etalon_problem::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Workspace {
    pool: Arc<Pool>,
}

/// Memory and facts that a workspace keeps. Everything that was lent holds on to it.
#[derive(Debug, Default)]
struct Pool {
    regions: Mutex<Regions>,
    lists: Mutex<Vec<Bump>>,
    facts: Mutex<Vec<Arc<dyn Any + Send + Sync>>>,
}

#[derive(Debug, Default)]
struct Regions {
    free: Vec<Aligned>,
    /// Bytes that were asked for and are in use.
    lent: usize,
    /// The most that were ever in use at once.
    most: usize,
}

/// Problems of which [`Workspace::remember`] keeps what follows: the passes of a few layers.
const REMEMBERED: usize = 32;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Workspace {
    /// A workspace without memory: passes fill it.
    pub fn new() -> Self {
        Workspace::default()
    }

    /// Bytes that are kept for the next call. Those that a pass uses at this moment are not counted.
    pub fn bytes(&self) -> usize {
        let regions = lock(&self.pool.regions).free_bytes();
        regions + lock(&self.pool.lists).iter().map(Bump::allocated_bytes).sum::<usize>()
    }

    /// Gives back all memory that no pass uses at this moment.
    pub fn release(&self) {
        let mut regions = lock(&self.pool.regions);
        regions.free.clear();
        regions.most = regions.lent;
        lock(&self.pool.lists).clear();
        lock(&self.pool.facts).clear();
    }

    /// Sets every number in memory that is kept, and that no pass uses at this moment, to `value`: of what
    /// passes have computed nothing is left there, and no result depends on it. The suite fills workspaces
    /// with NaN.
    pub fn fill(&self, value: f32) {
        lock(&self.pool.regions).free.iter_mut().for_each(|memory| memory.fill_all(value));
    }

    /// `len` elements, whatever they hold; or the error that there is no memory for them. New ones have
    /// been touched by no thread yet.
    pub(crate) fn room(&self, len: usize, what: &str) -> Result<Region, Error> {
        let free = lock(&self.pool.regions).lend(len);
        let memory = free.map_or_else(|| Aligned::zeros(len, what), Ok)?;
        let asked = len * size_of::<f32>();
        lock(&self.pool.regions).count(asked);
        Ok(Region { memory, asked, home: Arc::clone(&self.pool) })
    }

    /// Memory for lists of `bytes` in all, or the error that there is none. Lists that take more ask for
    /// more.
    pub(crate) fn lists(&self, bytes: usize, what: &str) -> Result<Lists, Error> {
        let kept = lock(&self.pool.lists).pop();
        let memory = match kept.filter(|memory| memory.chunk_capacity() >= bytes) {
            Some(memory) => memory,
            None if bytes < isize::MAX as usize / 2 => {
                Bump::try_with_capacity(bytes).map_err(|_| short(what, bytes))?
            }
            None => return Err(short(what, bytes)),
        };
        Ok(Lists { memory, home: Arc::clone(&self.pool) })
    }

    /// The value that `make` last returned for the same question: `fits` says whether that is so. An error is
    /// not remembered.
    pub(crate) fn remember<F: Any + Send + Sync>(
        &self,
        fits: impl Fn(&F) -> bool,
        make: impl FnOnce() -> Result<F, Error>,
    ) -> Result<Arc<F>, Error> {
        for known in lock(&self.pool.facts).iter() {
            if let Ok(known) = Arc::clone(known).downcast::<F>()
                && fits(&known)
            {
                return Ok(known);
            }
        }
        let fact = Arc::new(make()?);
        let mut facts = lock(&self.pool.facts);
        if facts.len() == REMEMBERED {
            facts.remove(0);
        }
        facts.push(Arc::<F>::clone(&fact));
        Ok(fact)
    }
}

impl Regions {
    fn free_bytes(&self) -> usize {
        self.free.iter().map(Aligned::bytes).sum()
    }

    fn count(&mut self, bytes: usize) {
        self.lent += bytes;
        self.most = self.most.max(self.lent);
    }

    /// The smallest free memory that is long enough. Where there is none, free memory is given up until
    /// what will be allocated fits beside the rest: problems that grow from call to call would
    /// otherwise leave all of theirs behind.
    fn lend(&mut self, len: usize) -> Option<Aligned> {
        let fitting = self.free.iter().enumerate().filter(|(_, memory)| memory.capacity() >= len);
        if let Some((best, _)) = fitting.min_by_key(|(_, memory)| memory.capacity()) {
            let mut memory = self.free.swap_remove(best);
            memory.resize(len);
            return Some(memory);
        }
        let lent = self.lent.saturating_add(len.saturating_mul(size_of::<f32>()));
        let most = self.most.max(lent).saturating_mul(2);
        while let Some((largest, _)) =
            self.free.iter().enumerate().max_by_key(|(_, memory)| memory.bytes())
            && lent.saturating_add(self.free_bytes()) > most
        {
            self.free.swap_remove(largest);
        }
        None
    }
}

/// Elements that a workspace has lent: they go back when the region is dropped.
#[derive(Debug)]
pub struct Region {
    memory: Aligned,
    /// Bytes that were asked for.
    asked: usize,
    home: Arc<Pool>,
}

impl Deref for Region {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.memory
    }
}

impl DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.memory
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let mut regions = lock(&self.home.regions);
        regions.lent -= self.asked;
        regions.free.push(std::mem::take(&mut self.memory));
    }
}

/// Memory for lists of any type, which goes back when it is dropped.
#[derive(Debug)]
pub struct Lists {
    memory: Bump,
    home: Arc<Pool>,
}

/// The error that there is no memory.
fn short(what: &str, bytes: usize) -> Error {
    Error::Memory { what: what.to_string(), bytes }
}

impl Lists {
    /// A list of all items, of which there are `len`.
    pub fn collect<T>(
        &self,
        len: usize,
        items: impl IntoIterator<Item = T>,
        what: &str,
    ) -> Result<Box<'_, [T]>, Error> {
        let mut list = BumpVec::new_in(&self.memory);
        let reserve = |list: &mut BumpVec<'_, T>, more: usize| {
            list.try_reserve(more).map_err(|_| short(what, more.saturating_mul(size_of::<T>())))
        };
        reserve(&mut list, len)?;
        for item in items {
            if list.len() == list.capacity() {
                reserve(&mut list, 1)?;
            }
            list.push(item);
        }
        Ok(list.into_boxed_slice())
    }

    /// A list of `len` times the same.
    pub fn repeat<T: Copy>(&self, len: usize, item: T, what: &str) -> Result<&mut [T], Error> {
        let list = self.memory.try_alloc_slice_fill_copy(len, item);
        list.map_err(|_| short(what, len.saturating_mul(size_of::<T>())))
    }
}

impl Drop for Lists {
    fn drop(&mut self) {
        let mut memory = std::mem::take(&mut self.memory);
        let used = memory.allocated_bytes();
        memory.reset();
        if memory.allocated_bytes() < used {
            // The last of several chunks is left. The next call finds all in one.
            drop(memory);
            memory = Bump::try_with_capacity(used).unwrap_or_default();
        }
        lock(&self.home.lists).push(memory);
    }
}

/// Cuts memory into parts that begin cache lines; or says, without memory, how much they take.
#[derive(Debug, Default)]
pub struct Parts<'m> {
    memory: Option<&'m mut [f32]>,
    /// Elements of all parts so far.
    len: usize,
    /// Bytes of the parts of every group, where they are listed.
    groups: Option<Vec<(&'static str, usize)>>,
}

/// Elements of a cache line.
const STEP: usize = LINE / size_of::<f32>();

impl<'m> Parts<'m> {
    /// Cuts `memory`, which begins a cache line and is as long as [`Parts::count`] says.
    pub fn of(memory: &'m mut [f32]) -> Self {
        Parts { memory: Some(memory), ..Parts::default() }
    }

    /// The elements of all parts that `make` takes. The parts that it gets are empty.
    pub fn count<T>(make: impl FnOnce(&mut Parts<'m>) -> T) -> usize {
        let mut parts = Parts::default();
        make(&mut parts);
        parts.len
    }

    /// The bytes of the parts that `make` takes, by group.
    pub fn list<T>(make: impl FnOnce(&mut Parts<'m>) -> T) -> Vec<(&'static str, usize)> {
        let mut parts = Parts { groups: Some(Vec::new()), ..Parts::default() };
        make(&mut parts);
        parts.groups.unwrap_or_default()
    }

    /// The parts from here on are for `group`.
    pub fn group(&mut self, group: &'static str) -> &mut Self {
        self.groups.iter_mut().for_each(|groups| groups.push((group, 0)));
        self
    }

    /// The next `len` elements, whatever they hold.
    pub fn room(&mut self, len: usize) -> &'m mut [f32] {
        let step = len.checked_next_multiple_of(STEP).unwrap_or(usize::MAX);
        self.len = self.len.saturating_add(step);
        if let Some((_, bytes)) = self.groups.iter_mut().flat_map(|groups| groups.last_mut()).next()
        {
            *bytes = bytes.saturating_add(step.saturating_mul(size_of::<f32>()));
        }
        let Some(memory) = self.memory.take() else { return &mut [] };
        let (part, rest) = memory.split_at_mut(step);
        self.memory = Some(rest);
        &mut part[..len]
    }

    /// The next `len` bytes, whatever they hold.
    pub fn bytes(&mut self, len: usize) -> &'m mut [u8] {
        let bytes = bytemuck::cast_slice_mut(self.room(len.div_ceil(size_of::<f32>())));
        let len = len.min(bytes.len());
        &mut bytes[..len]
    }

    /// The next `len` elements, all 0.
    pub fn zeros(&mut self, len: usize) -> &'m mut [f32] {
        let part = self.room(len);
        part.fill(0.0);
        part
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes regions of these lengths at once, writes to them, and gives them back.
    fn take(workspace: &Workspace, lens: &[usize]) {
        let regions = lens.iter().map(|&len| workspace.room(len, "test").unwrap());
        for (region, &len) in regions.collect::<Vec<_>>().iter_mut().zip(lens) {
            assert_eq!((region.len(), region.as_ptr().align_offset(LINE)), (len, 0));
            region.fill(1.0);
        }
    }

    #[test]
    fn regions_come_back_and_are_lent_again() {
        let workspace = Workspace::new();
        take(&workspace, &[100, 10, 1000]);
        let bytes = workspace.bytes();
        assert!((4440..4440 + 3 * LINE).contains(&bytes));
        for lens in [&[1000, 100, 10][..], &[1000, 10], &[100, 100], &[]] {
            take(&workspace, lens);
            assert_eq!(workspace.bytes(), bytes, "{lens:?}");
        }
        let region = workspace.room(900, "test").unwrap();
        assert!(workspace.bytes() < 1000);
        workspace.release();
        assert_eq!(workspace.bytes(), 0);
        drop(region);
        assert!(workspace.bytes() > 4000, "what was lent comes back also after a release");
    }

    #[test]
    fn problems_that_grow_do_not_leave_their_memory_behind() {
        let workspace = Workspace::new();
        for len in 1000..1100 {
            take(&workspace, &[len, 2 * len, 3 * len]);
        }
        assert!(workspace.bytes() <= 2 * 4 * 6 * 1100 + 6 * LINE, "{} bytes", workspace.bytes());
    }

    #[test]
    fn memory_that_cannot_be_had_is_an_error() {
        let workspace = Workspace::new();
        take(&workspace, &[10]);
        assert!(matches!(workspace.room(usize::MAX / 8, "test"), Err(Error::Memory { .. })));
        assert!(matches!(workspace.room(usize::MAX, "test"), Err(Error::Memory { .. })));
        for bytes in [usize::MAX, 1 << 60] {
            assert!(matches!(workspace.lists(bytes, "test"), Err(Error::Memory { .. })));
        }
        take(&workspace, &[10]);
    }

    #[test]
    fn lists_drop_their_elements_and_find_their_memory_again() {
        let workspace = Workspace::new();
        let element = Arc::new(());
        let mut kept = 0;
        for round in 0..3 {
            let lists = workspace.lists(100, "test").unwrap();
            for len in [3, 1000, 20] {
                let items = (0..len).map(|i| (i, Arc::clone(&element)));
                let list = lists.collect(len / 2, items, "test").unwrap();
                assert_eq!(list.len(), len);
                assert_eq!(Arc::strong_count(&element), len + 1);
                assert!(list.iter().enumerate().all(|(i, item)| item.0 == i));
                assert_eq!(lists.repeat(3, len, "test").unwrap(), [len; 3]);
            }
            drop(lists);
            assert_eq!(Arc::strong_count(&element), 1);
            assert!(round == 0 || workspace.bytes() == kept, "{kept} bytes");
            kept = workspace.bytes();
        }
    }

    #[test]
    fn facts_are_made_once() {
        let workspace = Workspace::new();
        let square = |x: u64| {
            let made = workspace.remember(|known: &(u64, u64)| known.0 == x, || Ok((x, x * x)));
            made.unwrap()
        };
        assert_eq!((square(3).1, square(4).1), (9, 16));
        assert!(Arc::ptr_eq(&square(3), &square(3)));
        let other = workspace.remember(|known: &u64| *known == 3, || Ok(3)).unwrap();
        assert_eq!(*other, 3, "of another type");
        let error = || Err(Error::value("x", "known", 5));
        assert!(workspace.remember(|known: &(u64, u64)| known.0 == 5, error).is_err());
        assert_eq!(square(5).1, 25, "an error is not kept");
        (0..1000).for_each(|x| assert_eq!(square(x).1, x * x));
        assert_eq!(lock(&workspace.pool.facts).len(), REMEMBERED);
    }

    #[test]
    fn parts_are_counted_and_then_cut() {
        fn make<'m>(parts: &mut Parts<'m>) -> [&'m mut [f32]; 3] {
            parts.group("first");
            let first = [parts.room(5), parts.zeros(16)];
            parts.group("second");
            let [a, b] = first;
            [a, b, parts.zeros(17)]
        }
        assert_eq!(Parts::count(make), 16 + 16 + 32);
        assert_eq!(Parts::list(make), [("first", 128), ("second", 128)]);
        let mut memory = [1.0; 64];
        let [a, b, c] = make(&mut Parts::of(&mut memory));
        assert_eq!((&*a, &*b, &*c), (&[1.0; 5][..], &[0.0; 16][..], &[0.0; 17][..]));
        assert_eq!(Parts::count(|parts| parts.room(usize::MAX).len()), usize::MAX);
    }
}
