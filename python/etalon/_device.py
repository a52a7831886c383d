"""Passes of PyTorch's operators on a GPU: on the current stream, with scratch memory of PyTorch's allocator."""

import collections
import threading

import torch

from ._etalon import DevicePass

# Prepared passes, the one used last at the end. Each holds some kilobytes to megabytes of tables on its device.
PASSES = collections.OrderedDict()
MOST = 256
# Passes that a graph has captured: it may run at any time, so that they stay.
CAPTURED = {}
LOCK = threading.Lock()


def run(problem, pass_, inputs, outputs, shards=None):
    """Enqueues a pass; tensors are those of one device, by name. On an error nothing is enqueued.

    With `shards`, ranges of classes, `pass_` is a step of a loss in shards: those of `run_shard`, of which partials
    and parts of dh of all shards lie one behind the other, those of nodes alone.
    """
    first = next(iter(inputs.values()))
    if first.dtype == torch.float64:
        raise NotImplementedError(f"{problem.algorithm} {pass_} of float64 has no kernel on a GPU")
    for name, x in inputs.items():
        if x.device != first.device:
            raise ValueError(f"`{name}` must lie on {first.device} as the first tensor does, found {x.device}")
        if x.dtype == torch.int32 and name != "mask":
            inputs = inputs | {name: x.long()}
    device = first.device.index
    with torch.cuda.device(device):
        captured = torch.cuda.is_current_stream_capturing()
        stream = torch.cuda.current_stream(device).cuda_stream
        # No other thread drops the pass before it is enqueued: whoever drops one waits for what the device has.
        with LOCK:
            prepared = _prepared(problem, pass_, inputs, outputs, device, captured, shards)
            scratch = torch.empty(prepared.scratch_bytes, dtype=torch.uint8, device=first.device)
            prepared.enqueue(stream, _addresses(inputs), _addresses(outputs), scratch.data_ptr())


def _addresses(tensors):
    return [x.data_ptr() for x in tensors.values()]


def _prepared(problem, pass_, inputs, outputs, device, captured, shards):
    """The pass for tensors like these, under the lock. Kernels are compiled where no cache has them."""
    described = [[_described(name, x) for name, x in tensors.items()] for tensors in (inputs, outputs)]
    # The copy engine begins at multiples of 16 bytes.
    like = [(name, *rest, address % 16) for tensors in described for name, address, *rest in tensors]
    # Equal problems have equal arrays, ids of segments among them, which the pass has in its tables; not those of a
    # mask that is an operand, which are not compared.
    own = problem.json() if "mask" in inputs else problem
    key = (own, pass_, *like, device, None if shards is None else tuple(shards))
    found = PASSES.get(key) or CAPTURED.get(key)
    if found is None:
        if captured:
            raise RuntimeError(
                f"{problem.algorithm} {pass_} must run once with tensors of these shapes before a graph captures "
                "it: its kernels and tables are not on the device yet"
            )
        if shards is None:
            found = DevicePass(problem, pass_, *described, device=device)
        else:
            found = DevicePass.of_shards(problem, pass_, shards, *described, device=device)
        if len(PASSES) >= MOST:
            (*_, oldest, _), dropped = PASSES.popitem(last=False)
            # Work that it has enqueued may not have run.
            torch.cuda.synchronize(oldest)
            del dropped
        PASSES[key] = found
    elif captured:
        CAPTURED[key] = found
    elif key in PASSES:
        PASSES.move_to_end(key)
    return found


def _described(name, x):
    return name, x.data_ptr(), tuple(x.shape), x.stride(), str(x.dtype).removeprefix("torch.")
