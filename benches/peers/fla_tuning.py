"""Lets FLA choose the configurations of its kernels for linear attention with a decay per head, on a short sequence.

FLA tries some hundred configurations, and Triton compiles each of them first: one after the other, that takes minutes. What FLA
chooses depends on heads and widths, not on the number of tokens. So other processes try some of the configurations each, on a
short sequence, only so that Triton finds all of them in its cache on disk; then this process lets FLA try and choose among all.
"""

import os
import subprocess
import sys
from pathlib import Path

# Of the short sequence.
TOKENS = 8192

# What a process may take.
SECONDS = 120


def attend(tokens: int, heads: int, dim: int) -> None:
    """Both passes once."""
    import torch
    from fla.ops.simple_gla import chunk_simple_gla

    shape = 1, tokens, heads, dim
    q, k, v = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    decay = torch.full((heads,), -0.01, device="cuda")
    out = chunk_simple_gla(q, k, v, g_gamma=decay, scale=1.0)[0]
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    torch.cuda.synchronize()


def tuners() -> list:
    """FLA's kernels that choose among configurations."""
    from fla.ops.common import chunk_h, chunk_o

    found = []
    for kernel in [*vars(chunk_h).values(), *vars(chunk_o).values()]:
        # Decorators stand around one another.
        while kernel is not None and not isinstance(getattr(kernel, "configs", None), list):
            kernel = getattr(kernel, "fn", None)
        if kernel is not None:
            found.append(kernel)
    return found


def tune(heads: int, dim: int) -> None:
    """Lets FLA choose in this process."""
    parts = max(1, min(16, len(os.sched_getaffinity(0))))
    command = [sys.executable, str(Path(__file__).resolve()), str(heads), str(dim), str(parts)]
    others = [subprocess.Popen([*command, str(part)]) for part in range(parts)]
    for other in others:
        try:
            other.wait(SECONDS)
        except subprocess.TimeoutExpired:
            other.kill()
    attend(TOKENS, heads, dim)


def main() -> None:
    heads, dim, parts, part = map(int, sys.argv[1:])
    for kernel in tuners():
        kernel.configs = kernel.configs[part::parts] or kernel.configs[:1]
    attend(TOKENS, heads, dim)


if __name__ == "__main__":
    main()
