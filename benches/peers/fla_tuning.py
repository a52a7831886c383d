"""Lets FLA choose the configurations of its kernels for linear attention, on a short sequence.

FLA tries some hundred configurations, and Triton compiles each of them first: one after the other, that takes minutes.
What FLA chooses depends on heads and widths, not on the number of tokens. So other processes run some of the
configurations each, on a short sequence, only so that Triton finds all of them in its cache on disk; then this process
lets FLA try and choose among all.
"""

import os
import subprocess
import sys
import time

# Of the short sequence.
TOKENS = 8192

# Time limit of the other processes.
SECONDS = 180


def attend(heads: int, dim: int, by_token: bool, backward: bool) -> None:
    """A pass over the short sequence, or both."""
    import torch
    from fla.ops.simple_gla import chunk_simple_gla

    shape = 1, TOKENS, heads, dim
    q, k, v = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    decay = torch.full((1, TOKENS, heads) if by_token else (heads,), -0.01, device="cuda").requires_grad_(by_token)
    out = chunk_simple_gla(q, k, v, **{"g" if by_token else "g_gamma": decay}, scale=1.0)[0]
    if backward:
        torch.autograd.grad(out, (q, k, v, *([decay] if by_token else [])), torch.ones_like(out))
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


def compile_parts(*what: int) -> list[subprocess.Popen]:
    """Processes that compile for `attend` of these arguments, each its part."""
    parts = max(1, min(16, len(os.sched_getaffinity(0))))
    command = [sys.executable, __file__, *(str(int(x)) for x in [*what, parts])]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return [subprocess.Popen([*command, str(part)], **quiet) for part in range(parts)]


def tune(heads: int, dim: int, by_token: bool, backward: bool) -> None:
    """Lets FLA choose in this process."""
    import triton

    end = time.monotonic() + SECONDS
    for other in compile_parts(heads, dim, by_token, backward):
        try:
            other.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            other.kill()
    for kernel in tuners():
        # A fifth of the time that Triton takes for each.
        kernel.do_bench = lambda run, quantiles: triton.testing.do_bench(run, warmup=5, rep=20, quantiles=quantiles)
    attend(heads, dim, by_token, backward)


def main() -> None:
    heads, dim, by_token, backward, parts, part = map(int, sys.argv[1:])
    kernels = [(kernel, kernel.configs) for kernel in tuners()]
    for number in range(part, max(len(configs) for _, configs in kernels), parts):
        # Of a single configuration nothing is timed.
        for kernel, configs in kernels:
            kernel.configs = [configs[number % len(configs)]]
        attend(heads, dim, bool(by_token), bool(backward))


if __name__ == "__main__":
    main()
