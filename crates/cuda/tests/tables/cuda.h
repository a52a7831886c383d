// Parts of CUDA that the kernels of pairs/tables.cu need, for a compiler of the host. The threads of a block have
// stacks of their own and leave the processor to each other where they wait at a barrier or for the reduction of a
// warp; in between they run in a random order.
#include "host.h"
#include <csetjmp>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <ucontext.h>

static unsigned long long state;
static unsigned random_word() { return (state = state * 6364136223846793005ull + 1442695040888963407ull) >> 33; }
static int below(int n) { return random_word() % n; }

static int2 make_int2(int x, int y) { return {x, y}; }
struct Index { unsigned x; };
Index blockIdx, threadIdx, gridDim;

static void atomicMin(int* to, int x) { *to = std::min(*to, x); }
static void atomicMax(int* to, int x) { *to = std::max(*to, x); }

// ---- threads -------------------------------------------------------------------------------------------------------
enum Wait { RUNS, AT_BARRIER, FOR_LEAST, FOR_LARGEST, DONE };
struct Thread {
  jmp_buf at;
  Wait wait;
  int value;  // what it gives to a reduction, and then what it gets
  bool begun;
};
static Thread threads[1024];
static jmp_buf scheduler;
static std::function<void()> kernel;

// The thread that runs leaves, until it is let go on.
static __attribute__((noinline)) void leave(Wait wait, int value = 0) {
  Thread& own = threads[threadIdx.x];
  own.wait = wait, own.value = value;
  __asm__ volatile("" ::: "memory");
  if (!_setjmp(own.at)) _longjmp(scheduler, 1);
  __asm__ volatile("" ::: "memory");
}
static void __syncthreads() { leave(AT_BARRIER); }
static int __reduce_min_sync(unsigned, int x) { leave(FOR_LEAST, x); return threads[threadIdx.x].value; }
static int __reduce_max_sync(unsigned, int x) { leave(FOR_LARGEST, x); return threads[threadIdx.x].value; }

// A thread is begun once, and has a kernel of its block after the other.
static void live() { for (;;) kernel(), leave(DONE); }
// Lets a thread run until it leaves.
static __attribute__((noinline)) void resume(int t) {
  constexpr size_t STACK = (1 << 15) + 320;  // no power of two, so that the stacks do not share a few lines of the cache
  static char* stacks = (char*)malloc(1024 * STACK);
  static ucontext_t first;
  threadIdx.x = t;
  if (_setjmp(scheduler)) return;
  if (threads[t].begun) _longjmp(threads[t].at, 1);
  threads[t].begun = true;
  getcontext(&first);
  first.uc_stack.ss_sp = stacks + t * STACK, first.uc_stack.ss_size = STACK, first.uc_link = nullptr;
  makecontext(&first, live, 0);
  setcontext(&first);
}

// Lets the threads of a warp go on that have come to the same reduction; whether they have.
static bool reduce(Thread* warp) {
  const Wait wait = warp->wait;
  if (wait != FOR_LEAST && wait != FOR_LARGEST) return false;
  int all = warp->value;
  for (int i = 0; i < 32; i++) {
    if (warp[i].wait != wait) return false;
    all = wait == FOR_LEAST ? min(all, warp[i].value) : max(all, warp[i].value);
  }
  for (int i = 0; i < 32; i++) warp[i].wait = RUNS, warp[i].value = all;
  return true;
}
// Lets all threads run that may, and go on that have come where they waited for each other; false where all are done.
static bool step(int size) {
  const int first = below(size), stride = below(size) | 1;  // odd, and the size is a power of two
  for (int i = 0; i < size; i++) {
    const int t = (first + i * stride) % size;
    if (threads[t].wait == RUNS) resume(t);
  }
  auto all = [&](Wait wait) { return std::all_of(threads, threads + size, [&](const Thread& x) { return x.wait == wait; }); };
  if (all(DONE)) return false;
  bool some = all(AT_BARRIER);
  if (some) for (int t = 0; t < size; t++) threads[t].wait = RUNS;
  for (int t = 0; t < size; t += 32) some |= reduce(threads + t);
  if (!some) printf("threads wait for others that never come\n"), exit(1);
  return true;
}
// One block after the other, in a random order.
static void launch(int blocks, int size, std::function<void()> body) {
  std::vector<int> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  for (int i = blocks; i > 1; i--) std::swap(order[i - 1], order[below(i)]);
  kernel = body, gridDim.x = blocks;
  for (int block : order) {
    blockIdx.x = block;
    for (int t = 0; t < size; t++) threads[t].wait = RUNS;
    while (step(size)) {}
  }
}
