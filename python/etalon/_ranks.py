"""Ranks of a process group: what they agree on, what they send to each other, and passes over all of them."""

import zlib

import torch
import torch.distributed as dist
from torch.autograd import Function

KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Numbers that ranks compare before a call.
WIDTH = 24


class Ranks:
    """A process group, and this rank in it: `own` of `count`. A call is about tensors on the device of `x`."""

    def __init__(self, function, group, x):
        if torch.compiler.is_compiling():
            raise NotImplementedError(f"etalon.distributed.{function} is not traced: call it outside of torch.compile")
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(f"etalon.distributed.{function} is not there under transforms of torch.func")
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(f"{function} needs a process group: torch.distributed.init_process_group makes one")
        self.function, self.group = function, group
        self.device = x.device if isinstance(x, torch.Tensor) else torch.device("cpu")
        self.count, self.own = dist.get_world_size(group), dist.get_rank(group)
        if self.own < 0:
            raise ValueError("`group` must have this process as a member, found one of other processes")
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise NotImplementedError(f"etalon.distributed.{function} waits for the GPU: no graph captures it")
        self.backends = backends_of(group)

    @property
    def meeting(self):
        """The device of numbers that ranks compare: one for which the group has a backend, wherever tensors are."""
        if "cpu" in self.backends:
            return torch.device("cpu")
        return self.device if self.device.type in self.backends else torch.device(next(iter(self.backends)))

    def agree(self, facts):
        """Calls `facts` on every rank: returns what it returned, and the numbers of all ranks.

        `facts()` returns a dictionary of whole numbers of this rank, one of those that must be the same on all ranks,
        and anything else. Where it raises, on any rank, all ranks raise: nobody waits for one that has left.
        """
        error, own, same, result = None, {}, {}, None
        try:
            own, same, result = facts()
            same["whether tensors are on a GPU"] = self.device.type == "cuda"
        except Exception as found:
            error = found
        row = [error is not None, *own.values(), *same.values()]
        row = torch.tensor(row + [0] * (WIDTH - len(row)), dtype=torch.int64, device=self.meeting)
        table = self.gather(row).tolist()
        if error is not None:
            raise error
        failed = [rank for rank, row in enumerate(table) if row[0]]
        if failed:
            raise RuntimeError(f"{self.function} has failed on rank {failed[0]} of the group, which says why")
        for at, name in enumerate(same, start=1 + len(own)):
            others = [rank for rank, row in enumerate(table) if row[at] != table[0][at]]
            if others:
                raise ValueError(f"{name} must be the same on every rank, found another on rank {others[0]} than on 0")
        return result, [dict(zip(own, row[1:])) for row in table]

    def gather(self, x):
        """The tensors of all ranks, of one shape: [ranks, *shape]."""
        x = x.contiguous()
        all_ = x.new_empty((self.count, *x.shape))
        if x.numel():
            dist.all_gather_into_tensor(bytes_of(all_), bytes_of(x), group=self.group)
        return all_

    def exchange(self, x):
        """x[r] goes to rank r: what all ranks send to this one, in their order."""
        received = torch.empty_like(x)
        if x.numel():
            dist.all_to_all_single(bytes_of(received), bytes_of(x), group=self.group)
        return received

    def pass_on(self, tensors, shapes, tag=0):
        """Begins to send tensors to the next rank, and to receive others of these shapes from the one before.

        Returns a function that waits for both and returns what was received. What is under way at the same time has
        another `tag`.
        """
        if self.count == 1:
            return lambda: tensors
        # A byte more: every rank sends and receives something, which NCCL wants of the first call of a group.
        sent = torch.cat([*(bytes_of(x) for x in tensors), tensors[0].new_zeros(1, dtype=torch.uint8)])
        empty = [x.new_empty(shape) for x, shape in zip(tensors, shapes)]
        sizes = [x.numel() * x.element_size() for x in empty]
        received, waiting = sent.new_empty(sum(sizes) + 1), []
        for operation, buffer, step in ((dist.isend, sent, 1), (dist.irecv, received, -1)):
            peer = (self.own + step) % self.count
            peer = peer if self.group is None else dist.get_global_rank(self.group, peer)
            waiting.append(dist.P2POp(operation, buffer, peer, group=self.group, tag=tag))
        requests = dist.batch_isend_irecv(waiting)

        def wait():
            for request in requests:
                request.wait()
            return [x.view(y.dtype).view(y.shape) for x, y in zip(received[:-1].split(sizes), empty)]

        return wait


def bytes_of(x):
    """The bytes of a contiguous tensor: what every backend sends, whatever the type."""
    return x.reshape(-1).view(torch.uint8)


def backends_of(group):
    """The names of the backends of a group by the kind of device: {"cpu": "gloo", "cuda": "nccl"}."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


def checksum(x):
    """A number that differs for tensors of other elements, as far as 32 bits tell; −1 for None."""
    return -1 if x is None else zlib.crc32(bytes_of(x.detach().cpu().contiguous()).numpy(), x.dim())


def checksum_of_text(text):
    """The same of a text."""
    return zlib.crc32(text.encode())


def check_tensor(ranks, name, x, shape, dtypes):
    """Fails unless a tensor on the device of the call has this shape, None for any extent, and one of these types."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"`{name}` must be a tensor, found {type(x).__name__}")
    if x.device != ranks.device:
        raise ValueError(f"`{name}` must be on {ranks.device} as the first tensor is, found {x.device}")
    check_device(ranks, name, x.device)
    if x.dim() != len(shape) or any(n is not None and n != m for n, m in zip(shape, x.shape)):
        expected = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"`{name}` must have shape [{expected}], found {list(x.shape)}")
    if x.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"`{name}` must hold {expected}, found {str(x.dtype).removeprefix('torch.')}")


def check_device(ranks, name, device):
    """Fails unless passes run on a device, and the group sends what lies there."""
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"etalon.distributed.{ranks.function} takes tensors of CPUs and of CUDA: `{name}` is on {device}"
        )
    found = ranks.backends.get(device.type)
    if found is None or (device.type == "cuda" and found != "nccl"):
        backend = "nccl" if device.type == "cuda" else "gloo"
        raise ValueError(
            f"`group` must have the backend {backend} for `{name}`, which is on {device}, found {found}: "
            'init_process_group("cpu:gloo,cuda:nccl") has one for each'
        )


def is_differentiated(*tensors):
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


class Forward(Function):
    """A pass of all ranks: `call.forward(*tensors)` returns its outputs and what the backward pass reads besides."""

    @staticmethod
    def forward(ctx, call, *tensors):
        outputs, kept = call.forward(*tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *kept)
        return outputs

    @staticmethod
    def backward(ctx, *cotangents):
        saved = (*ctx.saved_tensors, *cotangents)
        return (None, *Backward.apply(ctx.call, ctx.needs_input_grad[1:], *saved))

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(f"forward mode of {ctx.call.ranks.function} is not implemented")


class Backward(Function):
    """The gradients, `call.backward(needs, *tensors)`: those by the inputs, None where there is no need."""

    @staticmethod
    def forward(ctx, call, needs, *tensors):
        ctx.function = call.ranks.function
        return call.backward(needs, *tensors)

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(f"a second derivative of {ctx.function} is not implemented")

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(f"forward mode of the gradients of {ctx.function} is not implemented")
