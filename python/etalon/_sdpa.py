"""etalon's attention in the place of PyTorch's."""

import contextlib
import functools
import warnings

import torch
from torch.nn import functional

from . import _operators
from ._etalon import DevicePass

STORAGE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WARNED = set()


class Unsupported(NotImplementedError):
    """A call that goes to PyTorch, or raises where that is wanted."""


def refuse(reason, strict, what="attention"):
    """Raises, or warns once and leaves the call to PyTorch."""
    if strict:
        raise Unsupported(f"etalon's {what} does not take this call: {reason}")
    if (what, reason) not in WARNED:
        WARNED.add((what, reason))
        warnings.warn(f"{what} is left to PyTorch: {reason}", stacklevel=3)


def unsupported(q, k, v, mask, dropout):
    """The reason for which a call of attention is not for etalon, if there is one."""
    if dropout > 0:
        return "it has dropout"
    given = [q, k, v] + ([] if mask is None else [mask])
    if any(x.device.type not in ("cpu", "cuda") or x.device != q.device for x in given):
        return "tensors are not on the CPU, nor on one GPU"
    if q.is_cuda and DevicePass.absent:
        return DevicePass.absent
    if q.is_cuda and q.dtype == torch.float64:
        return "float64 has no kernel on a GPU"
    if q.dtype not in STORAGE or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k and v are of {q.dtype}, {k.dtype} and {v.dtype}"
    if any(x.dim() not in (3, 4) or x.dim() != q.dim() for x in (q, k, v)) or any(x.is_nested for x in given):
        return "tensors are not of three or four axes"
    if k.shape[:-1] != v.shape[:-1] or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        return "shapes of q, k and v are to be broadcast"
    return None


# The diagonal of PyTorch's is_causal.
TOP_LEFT = {"causal": {"align": "top_left"}}


def masked(mask, q, k):
    """The option for a mask of PyTorch, bool or additive, of axes that broadcast to [B, Hq, N, M]."""
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    mask = mask.expand(*mask.shape[:2], q.shape[2], k.shape[2])
    return {"mask": mask} if mask.dtype == torch.bool else {"bias": mask.to(q.dtype)}


def scaled_dot_product_attention(
    own, strict, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """etalon's attention with the arguments of PyTorch's, which is `own`."""
    q, k, v = query, key, value
    if torch.is_autocast_enabled("cpu") and q.device.type == "cpu":
        narrow = torch.get_autocast_dtype("cpu")
        q, k, v = (x.to(narrow) if x.dtype == torch.float32 else x for x in (q, k, v))
    reason = unsupported(q, k, v, attn_mask, dropout_p)
    if reason is None and q.dim() == 4 and q.shape[1] != k.shape[1] and not enable_gqa:
        reason = "q has other heads than k, without enable_gqa"
    if reason is None and attn_mask is not None and is_causal:
        reason = "attn_mask and is_causal exclude each other"
    if reason is not None:
        refuse(reason, strict)
        return own(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    is_flat = q.dim() == 3
    if is_flat:
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
    options = {}
    if attn_mask is not None:
        options = masked(attn_mask.unsqueeze(1) if is_flat and attn_mask.dim() == 3 else attn_mask, q, k)
    elif is_causal:
        options = {"mask": TOP_LEFT}
    o = _operators.attention(q, k, v, scale=scale, **options)
    return o.squeeze(1) if is_flat else o


@contextlib.contextmanager
def replace_sdpa(*, strict=False):
    """Within this context `torch.nn.functional.scaled_dot_product_attention` is etalon's, of the whole process.

    A call that etalon does not take (dropout, tensors of a GPU) goes to PyTorch with one warning, or raises
    NotImplementedError where `strict` is set.
    """
    own = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = functools.partial(scaled_dot_product_attention, own, strict)
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = own
