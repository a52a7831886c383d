"""Mixers and losses of a decoder: PyTorch's best code for each, and etalon's.

Shapes: q, k, v and o [B, H, N, D], views of [B, N, H, D]; h [T, E] and w [V, E] of the loss, targets y [T].
"""

import torch
from torch.nn import functional as F

import etalon.torch


def softmax_torch(q, k, v):
    """Causal softmax attention, whose flash kernel PyTorch chooses."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def softmax_etalon(q, k, v):
    return etalon.torch.attention(q, k, v, causal=True)


def linear_torch(q, k, v, decay, chunk=64):
    """Linear attention in chunks: products within a chunk, and states handed from chunk to chunk by one product.

    `decay` [H] are logarithms, at most 0. The states of all chunks are the product of a triangle of decays with what
    each chunk adds to the state, so that no loop remains. Other lengths than multiples of `chunk` are an error.
    """
    b, h, n, d = q.shape
    if n % chunk:
        raise ValueError(f"`q` must have a multiple of {chunk} tokens, found {n}")
    q, k, v = (x.reshape(b, h, n // chunk, chunk, d) for x in (q, k, v))
    i = torch.arange(chunk, device=q.device)
    within = triangle(decay, i[:, None] - i).to(q.dtype)
    o = (q @ k.mT * within[:, None]) @ v

    c = torch.arange(n // chunk, device=q.device)
    between = triangle(decay * chunk, c[:, None] - c - 1)
    added = (k * decayed(decay, chunk - 1 - i, k)).mT @ v
    states = between.to(q.dtype) @ added.flatten(3)
    o = o + (q * decayed(decay, i + 1, q)) @ states.view_as(added)
    return o.reshape(b, h, n, d)


def triangle(decay, distance):
    """exp(decay · distance) of each head, 0 where the distance is below 0: [H, rows, columns]."""
    return torch.exp(decay[:, None, None] * distance.clamp(min=0)) * (distance >= 0)


def decayed(decay, distance, like):
    """exp(decay · distance) of each head and token of a chunk: [H, 1, chunk, 1]."""
    return torch.exp(decay[:, None] * distance)[:, None, :, None].to(like.dtype)


def linear_etalon(q, k, v, decay):
    return etalon.torch.linear_attention(q, k, v, g_gamma=decay)


def lazy_torch(q, k, v, tau, bias):
    """Lazy attention by its formula (docs/lazy_attention.md, E1 to E6), for τ ≤ 0.

    One matrix of all pairs holds bias and mask, so that scores, weights and their cut are four operations. A pair
    ahead of its query has P = 0, and with τ ≤ 0 its weight is cut, too.
    """
    b, h, n, d = q.shape
    s = torch.baddbmm(by_distance(bias, n).to(q.dtype), q.flatten(0, 1), k.flatten(0, 1).mT, alpha=d**-0.5)
    p = torch.softmax(s.float(), -1)
    seen = torch.arange(1, n + 1, device=q.device)
    e = torch.relu(p + (tau[:, None] / seen)[..., None])
    return (e.to(v.dtype) @ v.flatten(0, 1)).view(b, h, n, d)


def by_distance(bias, n):
    """The matrix of bias_d with d = i − j, 0 from the width on, −∞ where j is ahead of i: [H, N, N].

    Row i is one vector over j − i, read i places later: cut rows of 2 N elements to rows of 2 N − 1 in place of an
    index, whose gradient would be a scatter.
    """
    h, width = bias.shape
    near, far = bias[:, : min(n, width)].flip(1), bias.new_zeros(h, max(n - width, 0))
    # By (j − i) mod 2 N: the query's own key, the keys ahead of it, a gap that no pair has, the keys behind it.
    behind = torch.cat((far, near[:, :-1]), 1)
    row = torch.cat((near[:, -1:], bias.new_full((h, 2 * n - 1 - behind.shape[1]), -torch.inf), behind), 1)
    rows = row[:, None].expand(h, n, 2 * n).reshape(h, 2 * n * n)
    return rows[:, : n * (2 * n - 1)].view(h, n, 2 * n - 1)[:, :, :n]


def lazy_etalon(q, k, v, tau, bias):
    return etalon.torch.lazy_attention(q, k, v, tau, bias=bias)


def loss_torch(h, w, y):
    """The cross-entropy of logits that are stored, in float32."""
    return F.cross_entropy(F.linear(h, w).float(), y)


def loss_chunked(h, w, y):
    """PyTorch's own cross-entropy in chunks."""
    return F.linear_cross_entropy(h, w, y, options=torch.nn.LinearCrossEntropyOptions())


def loss_etalon(h, w, y):
    return etalon.torch.linear_cross_entropy(h, w, y)


MIXERS = {
    "softmax": {"torch": softmax_torch, "etalon": softmax_etalon},
    "linear": {"torch": linear_torch, "etalon": linear_etalon},
    "lazy": {"torch": lazy_torch, "etalon": lazy_etalon},
}
LOSSES = {"torch": loss_torch, "chunked": loss_chunked, "etalon": loss_etalon}

# A contender: whose mixer, whose loss, and whether torch.compile takes the model as a whole.
CONTENDERS = {
    "eager": ("torch", "torch", False),
    "compile": ("torch", "torch", True),
    "chunked": ("torch", "chunked", False),
    "etalon": ("etalon", "etalon", False),
    "etalon+compile": ("etalon", "etalon", True),
    "etalon-mixer": ("etalon", "torch", False),
}


def available(name):
    """Whether this PyTorch has what a contender needs."""
    return name != "chunked" or hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions")
