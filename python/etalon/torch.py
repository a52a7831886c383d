"""Passes as PyTorch operators, with gradients of first and second order.

    import etalon.torch
    o = etalon.torch.attention(q, k, v, causal=True)

float32, bfloat16 and float16 go to the SIMD kernels, float64 to the exact reference, tensors of a GPU to the CUDA tier
on the current stream. Every pass is an operator
(`torch.ops.etalon.attention`, `…_backward`, `…_double_backward`, `…_jvp`) that `torch.compile` takes whole. Gradients
may be differentiated again (`create_graph=True`), outside of `torch.compile`, which refuses that. A derivative that
there is not raises: the third order, forward mode of all but attention and attention_lse, and on a GPU the second
order of lazy attention.
"""

import torch

from . import set_num_threads
from ._etalon import find_openmp
from ._operators import attention, attention_lse, lazy_attention, linear_attention, linear_cross_entropy
from ._sdpa import replace_sdpa

__all__ = [
    "attention",
    "attention_lse",
    "lazy_attention",
    "linear_attention",
    "linear_cross_entropy",
    "replace_sdpa",
    "use_threads_of_torch",
]

# PyTorch's operators leave threads spinning, which end before a long pass.
find_openmp()


def use_threads_of_torch() -> None:
    """Gives etalon as many threads as PyTorch has: one works while the other waits."""
    set_num_threads(torch.get_num_threads())
