//! Exchange of device memory between ranks of one process: NCCL, or copies between devices.

use cudarc::driver::{CudaStream, result as driver, sys as cu};
use cudarc::nccl::{result as nccl, sys};
use std::error::Error;
use std::ops::Range;
use std::sync::{Arc, Barrier, Mutex, PoisonError};

pub type Outcome<X> = Result<X, Box<dyn Error + Send + Sync>>;

/// Bytes of a region of memory, for each rank; those of a rank in pieces.
pub type Pieces = Vec<Vec<Range<usize>>>;

/// Counts and places of the elements that a rank sends to and receives from each rank: of two regions of its device's
/// memory. Pieces that belong together are equally long.
pub struct Plan {
    pub from: u64,
    pub sends: Pieces,
    pub to: u64,
    pub receives: Pieces,
}

/// The ranks' way to each other.
pub enum Exchange {
    Nccl(Communicator),
    Copies(Arc<Meeting>),
}

/// A rank's communicator of NCCL.
pub struct Communicator(sys::ncclComm_t);

// SAFETY: a communicator may be used by any thread, by one at a time: each is moved to the thread of its rank.
unsafe impl Send for Communicator {}

impl Drop for Communicator {
    fn drop(&mut self) {
        // SAFETY: it was made by `ncclCommInitAll`, and nobody uses it any more.
        let _ = unsafe { nccl::comm_destroy(self.0) };
    }
}

/// The meeting point of ranks that copy from each other's devices.
pub struct Meeting {
    barrier: Barrier,
    /// Of each rank its context as an address, where what it sends begins, and the pieces for each rank.
    sent: Mutex<Vec<(usize, u64, Pieces)>>,
}

/// Communicators of NCCL for some devices, or why there are none.
pub fn by_nccl(devices: &[usize]) -> Outcome<Vec<Exchange>> {
    // SAFETY: opens the library by name and calls nothing; cudarc panics on any later call if it is missing.
    if !unsafe { sys::is_culib_present() } {
        let reason = "NCCL is not where the loader looks for `libnccl.so` (the wheel nvidia-nccl has `libnccl.so.2`: \
                      name a link to it so, and its folder in LD_LIBRARY_PATH)";
        return Err(reason.into());
    }
    let version = nccl::get_nccl_version().map_err(|error| failed("ncclGetVersion", error))?;
    let ordinals: Vec<i32> = devices.iter().map(|&device| device as i32).collect();
    let mut communicators = vec![std::ptr::null_mut(); devices.len()];
    // SAFETY: both lists have as many entries as there are devices.
    let made = unsafe { nccl::comm_init_all(communicators.as_mut_ptr(), ordinals.len() as i32, ordinals.as_ptr()) };
    made.map_err(|error| failed("ncclCommInitAll", error))?;
    println!("exchange: NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
    Ok(communicators.into_iter().map(|x| Exchange::Nccl(Communicator(x))).collect())
}

/// Copies between devices for so many ranks, which may share one.
pub fn by_copies(ranks: usize) -> Vec<Exchange> {
    println!("exchange: copies between devices, with a barrier of the host");
    let sent = Mutex::new(vec![(0, 0, Pieces::new()); ranks]);
    let meeting = Arc::new(Meeting { barrier: Barrier::new(ranks), sent });
    (0..ranks).map(|_| Exchange::Copies(meeting.clone())).collect()
}

fn failed(what: &str, error: nccl::NcclError) -> Box<dyn Error + Send + Sync> {
    format!("{what}: {:?}", error.0).into()
}

impl Exchange {
    /// Sends and receives on a stream of the rank's device.
    pub fn swap(&self, rank: usize, stream: &Arc<CudaStream>, plan: &Plan) -> Outcome<()> {
        match self {
            Exchange::Nccl(communicator) => communicator.swap(rank, stream, plan),
            Exchange::Copies(meeting) => meeting.swap(rank, stream, plan),
        }
    }
}

impl Communicator {
    fn swap(&self, rank: usize, stream: &Arc<CudaStream>, plan: &Plan) -> Outcome<()> {
        let bytes = sys::ncclDataType_t::ncclUint8;
        stream.context().bind_to_thread()?;
        keep_own(rank, stream, plan)?;
        nccl::group_start().map_err(|error| failed("ncclGroupStart", error))?;
        for peer in (0..plan.sends.len()).filter(|&peer| peer != rank) {
            let (on, other) = (stream.cu_stream().cast(), peer as i32);
            for send in &plan.sends[peer] {
                let from = (plan.from + send.start as u64) as *const _;
                // SAFETY: the piece lies in memory of the rank's device that lives until the stream has been waited
                // for, and nothing on it writes there before it has been sent.
                let sent = unsafe { nccl::send(from, send.len(), bytes, other, self.0, on) };
                sent.map_err(|error| failed("ncclSend", error))?;
            }
            for receive in &plan.receives[peer] {
                let to = (plan.to + receive.start as u64) as *mut _;
                // SAFETY: as above, and nothing on the stream reads the piece before it has been received.
                let received = unsafe { nccl::recv(to, receive.len(), bytes, other, self.0, on) };
                received.map_err(|error| failed("ncclRecv", error))?;
            }
        }
        nccl::group_end().map_err(|error| failed("ncclGroupEnd", error))?;
        Ok(())
    }
}

impl Meeting {
    fn swap(&self, rank: usize, stream: &Arc<CudaStream>, plan: &Plan) -> Outcome<()> {
        let sent = || self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        sent()[rank] = (stream.context().cu_ctx() as usize, plan.from, plan.sends.clone());
        // Sent data have been written before anybody reads them, and are read before anybody writes again.
        stream.synchronize()?;
        self.barrier.wait();
        keep_own(rank, stream, plan)?;
        let all = sent().clone();
        for (peer, (context, from, sends)) in all.into_iter().enumerate().filter(|x| x.0 != rank) {
            let (own, other) = (stream.context().cu_ctx(), context as cu::CUcontext);
            for (send, receive) in sends[rank].iter().zip(&plan.receives[peer]) {
                let (from, to) = (from + send.start as u64, plan.to + receive.start as u64);
                let (length, on) = (send.len().min(receive.len()), stream.cu_stream());
                // SAFETY: the peer's memory lives until all ranks have met below, and this rank's until the stream has
                // been waited for.
                unsafe { driver::memcpy_peer_async(own, to, other, from, length, on) }?;
            }
        }
        stream.synchronize()?;
        self.barrier.wait();
        Ok(())
    }
}

/// Copies what a rank sends to itself, unless it lies there.
fn keep_own(rank: usize, stream: &Arc<CudaStream>, plan: &Plan) -> Outcome<()> {
    stream.context().bind_to_thread()?;
    for (send, receive) in plan.sends[rank].iter().zip(&plan.receives[rank]) {
        let (from, to) = (plan.from + send.start as u64, plan.to + receive.start as u64);
        let length = send.len().min(receive.len());
        if from != to && length > 0 {
            // SAFETY: both pieces lie in memory of the rank's device that lives until the stream has been waited for.
            unsafe { driver::memcpy_dtod_async(to, from, length, stream.cu_stream()) }?;
        }
    }
    Ok(())
}
