"""Passes over the ranks of `torch.distributed`, with gradients: tensors of CPUs through gloo, of GPUs through NCCL.

    import etalon.distributed
    loss = etalon.distributed.vocab_parallel_cross_entropy(h, w_shard, targets)

`vocab_parallel_cross_entropy` has the classes of a loss in shards; `sequence_parallel_attention` and
`sequence_parallel_linear_attention` have the tokens of a sequence in chunks. All ranks of the group call a function
with the same options, and all call its backward pass. Wrong arguments of one rank raise on all. What is not there
raises: second derivatives, forward mode, `torch.func`, `torch.compile`, graphs of CUDA.

A rank has all tensors of a call on one device, on that of the CPU or on a GPU of its own, and the group a backend for
it: `init_process_group("gloo")`, `("nccl")`, or `("cpu:gloo,cuda:nccl")` for both.
"""

from ._sequence_parallel import sequence_parallel_attention, sequence_parallel_linear_attention
from ._vocab_parallel import shard_of_classes, vocab_parallel_cross_entropy

__all__ = [
    "sequence_parallel_attention",
    "sequence_parallel_linear_attention",
    "shard_of_classes",
    "vocab_parallel_cross_entropy",
]
