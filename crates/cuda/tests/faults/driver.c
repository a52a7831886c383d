// A driver (libcuda) for tests: it has memory, modules and streams, computes nothing, and fails on demand.
// It exports what the crate calls and no more.

#include "control.h"
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

typedef int Result;
enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201 };

static int devices = 1, version = 13000, capability = 90, pools = 1;
// The device whose context is current, plus 1; the code of the fault that ended all contexts.
static long current;
static int lost;
// Objects that were taken and not given back: contexts, streams, modules, events.
static long contexts, streams, modules, events, graphs;

// Allocations: their device, address and size.
enum { MOST = 8192 };
static struct { int device; char *at; size_t bytes; } memory[MOST];

// ---- for the tests ----

EXPORT void fake_set(const char *name, long value) {
    if (!strcmp(name, "devices")) devices = value;
    if (!strcmp(name, "version")) version = value;
    if (!strcmp(name, "capability")) capability = value;
    if (!strcmp(name, "pools")) pools = value;
    if (!strcmp(name, "lost")) lost = value;
    if (!strcmp(name, "current")) current = value;
}
EXPORT void fake_fail(const char *function, long nth, int code) { set_failure(function, nth, code); }
EXPORT long fake_calls(void) { return calls; }
EXPORT const char *fake_failed(void) { return failed; }
EXPORT long fake_held(void) {
    long held = contexts + streams + modules + events + graphs;
    for (int i = 0; i < MOST; i++) held += memory[i].at != NULL;
    return held;
}
EXPORT uint64_t fake_memory(int device, size_t bytes) {
    for (int i = 0; i < MOST; i++) {
        if (memory[i].at) continue;
        memory[i].device = device;
        memory[i].bytes = bytes;
        memory[i].at = aligned_alloc(256, (bytes + 255) / 256 * 256);
        memset(memory[i].at, 0, bytes);
        return (uint64_t)memory[i].at;
    }
    return 0;
}

// ---- the driver ----

// Faults from here on end the context: the codes that say so.
static int ends(int code) {
    static const int codes[] = {214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911};
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (codes[i] == code) return 1;
    return 0;
}
// Threads call one after the other: a call has its turn until it returns.
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static int take_turn(void) { return pthread_mutex_lock(&turn); }
static void end_turn(int *taken) { (void)taken, pthread_mutex_unlock(&turn); }
// Of a function that works without a context.
#define ANYWHERE                                  \
    __attribute__((cleanup(end_turn))) int taken = take_turn(); \
    do {                                          \
        int code = entered(__func__);             \
        if (ends(code)) lost = code;              \
        if (code) return code;                    \
    } while (0)
// Of one that needs a context which is alive.
#define IN_CONTEXT                                \
    ANYWHERE;                                     \
    do {                                          \
        if (lost) return lost;                    \
        if (!current) return INVALID_CONTEXT;     \
    } while (0)

EXPORT Result cuInit(unsigned flags) { ANYWHERE; return flags ? INVALID_VALUE : 0; }
EXPORT Result cuDriverGetVersion(int *to) { ANYWHERE; *to = version; return 0; }
EXPORT Result cuDeviceGetCount(int *to) { ANYWHERE; *to = devices; return 0; }
EXPORT Result cuDeviceGet(int *to, int ordinal) {
    ANYWHERE;
    if (ordinal < 0 || ordinal >= devices) return INVALID_DEVICE;
    *to = ordinal;
    return 0;
}
EXPORT Result cuDeviceGetName(char *to, int bytes, int device) {
    ANYWHERE;
    (void)device;
    strncpy(to, "Fake", bytes);
    return 0;
}
EXPORT Result cuDeviceGetUuid_v2(char *to, int device) {
    ANYWHERE;
    for (int i = 0; i < 16; i++) to[i] = (char)(240 - 16 * device + i);
    return 0;
}
EXPORT Result cuDeviceGetAttribute(int *to, int attribute, int device) {
    ANYWHERE;
    (void)device;
    switch (attribute) {
    case 16: *to = 4; break; // multiprocessors
    case 75: *to = capability / 10; break;
    case 76: *to = capability % 10; break;
    case 97: *to = 101376; break; // shared memory of a block
    case 115: *to = pools; break;
    default: return INVALID_VALUE;
    }
    return 0;
}
EXPORT Result cuDevicePrimaryCtxRetain(void **to, int device) {
    ANYWHERE;
    contexts++;
    *to = (void *)(intptr_t)(device + 1);
    return 0;
}
EXPORT Result cuDevicePrimaryCtxRelease_v2(int device) { ANYWHERE; (void)device; contexts--; return 0; }
EXPORT Result cuCtxGetCurrent(void **to) { ANYWHERE; *to = (void *)current; return 0; }
EXPORT Result cuCtxSetCurrent(void *context) {
    ANYWHERE;
    if (lost) return lost;
    current = (long)context;
    return 0;
}
EXPORT Result cuStreamCreate(void **to, unsigned flags) {
    IN_CONTEXT;
    (void)flags;
    *to = (void *)(intptr_t)(4096 * ++streams); // 1 and 2 are default streams
    return 0;
}
EXPORT Result cuStreamDestroy_v2(void *stream) { IN_CONTEXT; (void)stream; streams--; return 0; }
EXPORT Result cuStreamSynchronize(void *stream) { IN_CONTEXT; (void)stream; return 0; }

EXPORT Result cuStreamBeginCapture_v2(void *stream, int mode) {
    IN_CONTEXT;
    return stream && mode == 1 ? 0 : INVALID_VALUE; // what other threads call does not matter
}
EXPORT Result cuStreamEndCapture(void *stream, void **to) {
    IN_CONTEXT;
    graphs++;
    *to = (void *)4096;
    return stream ? 0 : INVALID_VALUE;
}
EXPORT Result cuGraphInstantiateWithFlags(void **to, void *graph, unsigned long long flags) {
    IN_CONTEXT;
    graphs++;
    *to = (void *)8192;
    return graph && !flags ? 0 : INVALID_VALUE;
}
EXPORT Result cuGraphLaunch(void *graph, void *stream) { IN_CONTEXT; (void)stream; return graph ? 0 : INVALID_VALUE; }
EXPORT Result cuGraphExecDestroy(void *graph) { IN_CONTEXT; (void)graph; graphs--; return 0; }
EXPORT Result cuGraphDestroy(void *graph) { IN_CONTEXT; (void)graph; graphs--; return 0; }

EXPORT Result cuEventCreate(void **to, unsigned flags) {
    IN_CONTEXT;
    (void)flags;
    *to = (void *)(intptr_t)++events;
    return 0;
}
EXPORT Result cuEventDestroy_v2(void *event) { IN_CONTEXT; (void)event; events--; return 0; }
EXPORT Result cuEventRecord(void *event, void *stream) { IN_CONTEXT; (void)stream; return event ? 0 : INVALID_VALUE; }
EXPORT Result cuEventElapsedTime_v2(float *to, void *begin, void *end) {
    IN_CONTEXT;
    *to = 8; // ms
    return begin && end ? 0 : INVALID_VALUE;
}
EXPORT Result cuModuleLoadData(void **to, const void *image) {
    IN_CONTEXT;
    if (memcmp(image, "\x7f" "ELF", 4)) return 200; // CUDA_ERROR_INVALID_IMAGE
    *to = (void *)(intptr_t)++modules;
    return 0;
}
EXPORT Result cuModuleUnload(void *module) { IN_CONTEXT; (void)module; modules--; return 0; }
EXPORT Result cuModuleGetFunction(void **to, void *module, const char *name) {
    IN_CONTEXT;
    (void)name;
    *to = module;
    return 0;
}
EXPORT Result cuFuncSetAttribute(void *function, int attribute, int value) {
    IN_CONTEXT;
    (void)function;
    return attribute == 8 && value <= 232448 ? 0 : INVALID_VALUE; // dynamic shared memory
}
EXPORT Result cuLaunchKernel(
    void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
    unsigned shared, void *stream, void **arguments, void **extra
) {
    IN_CONTEXT;
    (void)shared, (void)stream, (void)extra;
    int blocks = x > 0 && y > 0 && z > 0;
    return function && arguments && blocks && bx * by * bz <= 1024 ? 0 : INVALID_VALUE;
}

static Result give_back(uint64_t at) {
    for (int i = 0; i < MOST; i++) {
        if ((uint64_t)memory[i].at != at) continue;
        free(memory[i].at);
        memory[i].at = NULL;
        return 0;
    }
    return INVALID_VALUE;
}
EXPORT Result cuMemAlloc_v2(uint64_t *to, size_t bytes) {
    IN_CONTEXT;
    if (!bytes) return INVALID_VALUE;
    *to = fake_memory(current - 1, bytes);
    return *to ? 0 : OUT_OF_MEMORY;
}
EXPORT Result cuMemFree_v2(uint64_t at) {
    IN_CONTEXT;
    return give_back(at);
}
EXPORT Result cuMemAllocAsync(uint64_t *to, size_t bytes, void *stream) {
    IN_CONTEXT;
    (void)stream;
    *to = fake_memory(current - 1, bytes);
    return *to ? 0 : OUT_OF_MEMORY;
}
EXPORT Result cuMemFreeAsync(uint64_t at, void *stream) {
    IN_CONTEXT;
    (void)stream;
    return give_back(at);
}

// The allocation in which so many bytes lie, or −1.
static int holds(uint64_t at, size_t bytes) {
    for (int i = 0; i < MOST; i++) {
        uint64_t begin = (uint64_t)memory[i].at;
        if (begin && at >= begin && at + bytes <= begin + memory[i].bytes) return i;
    }
    return -1;
}
EXPORT Result cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
    IN_CONTEXT;
    (void)stream;
    if (holds(to, bytes) < 0) return INVALID_VALUE;
    memcpy((void *)to, from, bytes);
    return 0;
}
EXPORT Result cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
    IN_CONTEXT;
    (void)stream;
    if (holds(from, bytes) < 0) return INVALID_VALUE;
    memcpy(to, (void *)from, bytes);
    return 0;
}
EXPORT Result cuMemsetD32Async(uint64_t to, unsigned word, size_t words, void *stream) {
    IN_CONTEXT;
    (void)stream;
    if (holds(to, 4 * words) < 0) return INVALID_VALUE;
    for (size_t i = 0; i < words; i++) ((unsigned *)to)[i] = word;
    return 0;
}
EXPORT Result cuPointerGetAttribute(void *to, int attribute, uint64_t at) {
    IN_CONTEXT;
    int held = holds(at, 1);
    if (attribute != 9 || held < 0) return INVALID_VALUE; // 9: the device's ordinal
    *(int *)to = memory[held].device;
    return 0;
}
EXPORT Result cuTensorMapEncodeTiled(
    void *map, int type, unsigned rank, void *at, const uint64_t *extents, const uint64_t *strides,
    const unsigned *box, const unsigned *steps, int interleave, int swizzle, int promotion, int fill
) {
    ANYWHERE; // computes on the host alone
    (void)type, (void)interleave, (void)promotion, (void)fill;
    if ((uint64_t)map % 64 || (uint64_t)at % 16 || rank < 1 || rank > 5) return INVALID_VALUE;
    for (unsigned i = 0; i < rank; i++) {
        if (!extents[i] || extents[i] > 1ull << 32 || !box[i] || box[i] > 256 || steps[i] != 1) return INVALID_VALUE;
        if (i + 1 < rank && (strides[i] % 16 || strides[i] >= 1ull << 40)) return INVALID_VALUE;
    }
    if (swizzle == 3 && 2 * box[0] > 128) return INVALID_VALUE; // a row of 128 bytes
    memset(map, 0, 128);
    return 0;
}
