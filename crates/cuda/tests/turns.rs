//! Turns at the sums of dq in the mode `fused` of sm90a: a block waits for none that may have no multiprocessor.
//! However many of these another kernel holds, the pass ends, and with the same bits. The test has a process of its
//! own: the driver loads kernels of other tests only once all that run have ended. Without a device of compute
//! capability 9.0 it says that it was skipped.

#[path = "gpu/arrays.rs"]
mod arrays;
mod gpu;
#[path = "gpu/held.rs"]
mod held;
#[path = "gpu/numbers.rs"]
mod numbers;
#[path = "gpu/tensors.rs"]
mod tensors;

use cudarc::driver::sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SHARED_BYTES;
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DevicePtr, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::compile_ptx;
use etalon_cuda::{DevicePass, Level, Options, Workspace};
use etalon_problem::{Attention, Extents, Mask, Mode, Pass, Problem};
use held::Held;
use std::sync::Arc;

/// Blocks that count themselves in word 1 and stay until word 0 is set, or for a minute: then word 2 is.
const HOLD: &str = r#"
extern "C" __global__ void hold(volatile unsigned *words) {
    if (threadIdx.x != 0) return;
    atomicAdd((unsigned *)words + 1, 1u);
    unsigned long long begun, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        if (now - begun > 60000000000ull) words[2] = 1;
    } while (words[0] == 0 && words[2] == 0);
}
"#;

/// The kernel above, each block of which takes all shared memory of a multiprocessor.
struct Holder {
    hold: CudaFunction,
    shared: u32,
    own: Arc<CudaStream>,
    /// Copies the words while the kernel runs.
    other: Arc<CudaStream>,
}

impl Holder {
    fn new(context: &Arc<CudaContext>, shared: u32) -> Holder {
        let module = context.load_module(compile_ptx(HOLD).unwrap()).unwrap();
        let hold = module.load_function("hold").unwrap();
        hold.set_attribute(SHARED_BYTES, shared as i32).unwrap();
        let [own, other] = [0; 2].map(|_| context.new_stream().unwrap());
        Holder { hold, shared, own, other }
    }

    /// The result of `run` while `count` multiprocessors are held.
    fn beside<R>(&self, count: usize, run: impl FnOnce() -> R) -> R {
        let mut words = self.own.alloc_zeros::<u32>(3).unwrap();
        self.own.synchronize().unwrap();
        let address = words.device_ptr(&self.own).0;
        let size =
            LaunchConfig { grid_dim: (count as u32, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: self.shared };
        // SAFETY: the kernel takes one address, of three words, which live until its stream has been waited for.
        unsafe { self.own.launch_builder(&self.hold).arg(&address).launch(size) }.unwrap();
        while self.other.clone_dtoh(&words).unwrap()[1] < count as u32 {}
        let result = run();
        self.other.memcpy_htod(&[1], &mut words.slice_mut(..1)).unwrap();
        self.own.synchronize().unwrap();
        assert_eq!(self.other.clone_dtoh(&words).unwrap()[2], 0, "{count} multiprocessors were held for a minute");
        result
    }
}

/// Attention of which there are tiles for more blocks than a device has multiprocessors; and of 65,536 keys.
fn problems() -> Vec<Problem> {
    let sizes = [(6, 4096, Mask::causal()), (6, 4096, Mask::Full), (1, 65_536, Mask::causal())];
    let of = |(heads, rows, mask): &(usize, usize, Mask), dim| {
        let extents = Extents { batch: 1, query_heads: *heads, key_heads: *heads, queries: *rows, keys: *rows, dim };
        Attention::new(extents).mask(mask.clone()).into()
    };
    sizes.iter().flat_map(|size| [64, 128].map(|dim| of(size, dim))).collect()
}

/// Fills the memory of the results with ones, which are NaN.
fn blank(held: &mut Held) {
    for x in held.outputs.values_mut() {
        let ones = vec![0xff; x.memory.len()];
        x.put(&held.stream, &ones);
    }
    held.stream.synchronize().unwrap();
}

#[test]
fn no_block_waits_for_one_that_has_no_multiprocessor() {
    let (Some(stream), workspace) = (gpu::stream(), Workspace::new()) else { return };
    let Some(flash) = gpu::options(&workspace).into_iter().find(|x| x.level == Level::Sm90a) else {
        return println!("skipped: no device of compute capability 9.0");
    };
    let context = stream.context();
    let target = workspace.target(0).unwrap();
    let holder = Holder::new(context, target.shared_memory);
    for problem in problems() {
        let inputs = arrays::inputs(&workspace, &problem, Pass::Backward, &flash).unwrap();
        let prepare = |mode| {
            let held = Held::new(context.new_stream().unwrap(), &problem, &inputs);
            let options = Options { mode, ..flash };
            let [inputs, outputs] = held.tensors();
            let pass = DevicePass::new(&workspace, &problem, Pass::Backward, &inputs, &outputs, &options).unwrap();
            (held, pass)
        };
        let [(mut separate, seven), (mut fused, five)] = [Mode::Separate, Mode::FusedPartials].map(prepare);
        // A first call loads the kernels and takes memory, for which the driver may wait for all that runs.
        separate.enqueue(&seven);
        fused.enqueue(&five);
        let wanted = separate.get();
        assert!(fused.get() == wanted, "{problem:?}");
        for count in [target.multiprocessors / 2, target.multiprocessors - 1] {
            blank(&mut fused);
            let found = holder.beside(count, || {
                fused.enqueue(&five);
                fused.get()
            });
            assert!(found == wanted, "{problem:?} beside a kernel that holds {count} multiprocessors");
        }
    }
}
