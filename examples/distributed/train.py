"""A small model in shares: every rank has a chunk of the tokens and a shard of the classes.

    torchrun --nproc-per-node 4 examples/distributed/train.py
    torchrun --nproc-per-node 2 examples/distributed/train.py cuda      # a rank for each GPU, through NCCL

Attention runs over chunks (`sequence_parallel_attention`), the loss over shards (`vocab_parallel_cross_entropy`). The
losses are those of one process up to rounding, whatever the number of ranks.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

import etalon.distributed as parallel

TOKENS, DIM, HEADS, VOCAB = 256, 32, 4, 2048


class Together(torch.autograd.Function):
    """The chunks of all ranks, one behind the other. The gradient is whole on every rank, which takes its chunk."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.rank, ctx.count = dist.get_rank(group), dist.get_world_size(group)
        whole = x.new_empty((ctx.count * len(x), *x.shape[1:]))
        dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(ctx.count)[ctx.rank], None


def train(steps=20, group=None, device="cpu"):
    """Learns which token follows which; returns the loss of each step."""
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    if TOKENS % count:
        raise ValueError(f"the number of ranks must divide {TOKENS}, found {count}")
    torch.manual_seed(0)  # on every rank the same
    embedding, qkv = torch.randn(VOCAB, DIM), 0.2 * torch.randn(3 * DIM, DIM)
    start, end = parallel.shard_of_classes(VOCAB, count, rank)
    head = (0.2 * torch.randn(VOCAB, DIM))[start:end].clone()
    embedding, qkv, own = (x.to(device).requires_grad_() for x in (embedding, qkv, head))
    shared = [embedding, qkv]
    optimiser = torch.optim.Adam([*shared, own], lr=0.02)
    text = (7 ** torch.arange(16)).remainder(2039).repeat(1 + TOKENS // 16)[: TOKENS + 1].to(device)
    tokens, targets = text[:-1].chunk(count)[rank], text[1:]
    losses = []
    for _ in range(steps):
        x = F.embedding(tokens, embedding)
        q, k, v = F.linear(x, qkv).view(1, len(x), 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        o = parallel.sequence_parallel_attention(q, k, v, causal=True, group=group)
        h = Together.apply(x + o.transpose(1, 2).reshape(x.shape), group)
        loss = parallel.vocab_parallel_cross_entropy(h, own, targets, group=group)
        optimiser.zero_grad()
        loss.backward()
        for parameter in shared:  # each rank has the gradient of its tokens
            dist.all_reduce(parameter.grad, group=group)
        optimiser.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    kind = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    found = train(device=device)
    if dist.get_rank() == 0:
        print("\n".join(f"step {step:2}: loss {loss:.4f}" for step, loss in enumerate(found)))
    dist.destroy_process_group()
