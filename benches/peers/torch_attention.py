"""Times a computation of PyTorch on the CPU and prints the result as JSON.

    python torch_attention.py flash-forward --length 2048 --dim 64 --threads 2

Causal, inputs normally distributed. As in `etalon bench`, the first run does not count, and the time is
the median of as many runs as fit into the seconds, but of three at least. Afterwards PyTorch's profiler watches one
more run: the status is 1 if the operators are not those that the computation is meant to call.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention

try:  # PyTorch of late
    from torch.nn import LinearCrossEntropyOptions
    from torch.nn.functional import linear_cross_entropy
except ImportError:
    pass

Run = Callable[[], object]


class Shape(NamedTuple):
    batch: int
    heads: int
    length: int
    dim: int


# Each function makes the inputs of a shape and returns what is timed.


def matrices(count: int, shape: Shape, grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(shape, requires_grad=grad) for _ in range(count)]


def flash_forward(shape: Shape) -> Run:
    q, k, v = matrices(3, shape)

    def run():
        with torch.inference_mode(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return run


def flash_backward(shape: Shape) -> Run:
    q, k, v = matrices(3, shape, grad=True)
    (dout,) = matrices(1, shape)

    def run():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            o = scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(o, (q, k, v), dout)

    return run


def math_double_backward(shape: Shape) -> Run:
    """The gradient of <dq, ddq> + <dk, ddk> + <dv, ddv> with respect to q, k, v and dout."""
    q, k, v, dout = matrices(4, shape, grad=True)
    ddq, ddk, ddv = matrices(3, shape)

    def run():
        with sdpa_kernel(SDPBackend.MATH):
            o = scaled_dot_product_attention(q, k, v, is_causal=True)
            first = torch.autograd.grad(o, (q, k, v), dout, create_graph=True)
            return torch.autograd.grad(first, (q, k, v, dout), (ddq, ddk, ddv))

    return run


def hidden_keys(shape: Shape) -> torch.Tensor:
    return torch.ones(shape.length, shape.length, dtype=torch.bool).triu(diagonal=1)


def causal_lse(q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    # q is scaled, which is smaller than the scores, and the scores are masked in place: no needless pass over them.
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-2, -1))
    return torch.logsumexp(scores.masked_fill_(hidden, -torch.inf), dim=-1)


def lse_forward(shape: Shape) -> Run:
    q, k = matrices(2, shape)
    hidden = hidden_keys(shape)

    def run():
        with torch.inference_mode():
            return causal_lse(q, k, hidden)

    return run


def lse_backward(shape: Shape) -> Run:
    q, k = matrices(2, shape, grad=True)
    dlse = torch.randn(shape.batch, shape.heads, shape.length)
    hidden = hidden_keys(shape)
    return lambda: torch.autograd.grad(causal_lse(q, k, hidden), (q, k), dlse)


# Tokens of a chunk of linear attention: what such code usually takes, and what was fastest here.
CHUNK = 64


def chunked_linear_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Linear attention without decay: all chunks at once by batched products, their states by a running sum."""
    q, k, v = (x.unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    states = torch.matmul(k.transpose(-2, -1), v)
    before = states.cumsum(dim=2) - states
    scores = torch.matmul(q, k.transpose(-2, -1)).masked_fill(hidden, 0.0)
    return (torch.matmul(scores, v) + torch.matmul(q, before)).flatten(2, 3)


def hidden_in_chunk() -> torch.Tensor:
    hidden = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(diagonal=1)
    # Three chunks against the plain definition: what is timed is linear attention.
    q, k, v = (torch.randn(1, 2, 3 * CHUNK, 8, dtype=torch.float64) for _ in range(3))
    torch.testing.assert_close(chunked_linear_attention(q, k, v, hidden), torch.matmul(q, k.transpose(-2, -1)).tril() @ v)
    return hidden


def linear_forward(shape: Shape) -> Run:
    q, k, v = matrices(3, shape)
    hidden = hidden_in_chunk()

    def run():
        with torch.inference_mode():
            return chunked_linear_attention(q, k, v, hidden)

    return run


def linear_backward(shape: Shape) -> Run:
    q, k, v = matrices(3, shape, grad=True)
    (dout,) = matrices(1, shape)
    hidden = hidden_in_chunk()
    return lambda: torch.autograd.grad(chunked_linear_attention(q, k, v, hidden), (q, k, v), dout)


def linear_double_backward(shape: Shape) -> Run:
    """The gradient of <dq, ddq> + <dk, ddk> + <dv, ddv> with respect to q, k, v and dout."""
    q, k, v, dout = matrices(4, shape, grad=True)
    ddq, ddk, ddv = matrices(3, shape)
    hidden = hidden_in_chunk()

    def run():
        o = chunked_linear_attention(q, k, v, hidden)
        first = torch.autograd.grad(o, (q, k, v), dout, create_graph=True)
        return torch.autograd.grad(first, (q, k, v, dout), (ddq, ddk, ddv))

    return run


# Distances with a bias, as in `etalon bench`.
WIDTH = 512


def lazy_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
    """Elastic-Softmax with a bias by distance, causal, as it is written in eager code."""
    rows = torch.arange(q.shape[-2])
    distance = rows[:, None] - rows
    table = torch.cat([bias, bias.new_zeros(len(bias), 1)], dim=1)
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-2, -1)) + table[:, distance.clamp(0, WIDTH)]
    weights = torch.softmax(scores.masked_fill(distance < 0, -torch.inf), dim=-1)
    return torch.matmul(torch.relu(weights + tau[:, None, None] / (rows[:, None] + 1)), v)


def lazy_forward(shape: Shape) -> Run:
    q, k, v = matrices(3, shape)
    bias, tau = torch.zeros(shape.heads, WIDTH), torch.full((shape.heads,), -1.0)

    def run():
        with torch.inference_mode():
            return lazy_attention(q, k, v, bias, tau)

    return run


def lazy_backward(shape: Shape) -> Run:
    q, k, v = matrices(3, shape, grad=True)
    (dout,) = matrices(1, shape)
    bias = torch.zeros(shape.heads, WIDTH, requires_grad=True)
    tau = torch.full((shape.heads,), -1.0, requires_grad=True)
    inputs = (q, k, v, bias, tau)
    return lambda: torch.autograd.grad(lazy_attention(*inputs), inputs, dout)


def lazy_double_backward(shape: Shape) -> Run:
    """The gradient of <dq, ddq> + … + <dtau, ddtau> with respect to q, k, v, bias, tau and dout."""
    q, k, v, dout = matrices(4, shape, grad=True)
    bias = torch.zeros(shape.heads, WIDTH, requires_grad=True)
    tau = torch.full((shape.heads,), -1.0, requires_grad=True)
    inputs = (q, k, v, bias, tau)
    directions = [torch.randn_like(x) for x in inputs]

    def run():
        first = torch.autograd.grad(lazy_attention(*inputs), inputs, dout, create_graph=True)
        return torch.autograd.grad(first, (*inputs, dout), directions, allow_unused=True)

    return run


# Classes of linear cross-entropy, as in `etalon bench`.
VOCAB = 32_000


def head(shape: Shape, grad: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    h = torch.randn(shape.length, shape.dim, requires_grad=grad)
    w = (torch.randn(VOCAB, shape.dim) * shape.dim**-0.5).requires_grad_(grad)  # logits of a variance of 1
    return h, w, torch.randint(VOCAB, (shape.length,))


def cross_entropy_forward(shape: Shape) -> Run:
    h, w, targets = head(shape)

    def run():
        with torch.inference_mode():
            return cross_entropy(linear(h, w), targets)

    return run


def cross_entropy_backward(shape: Shape) -> Run:
    h, w, targets = head(shape, grad=True)
    return lambda: torch.autograd.grad(cross_entropy(linear(h, w), targets), (h, w))


def chunked_cross_entropy_forward(shape: Shape) -> Run:
    h, w, targets = head(shape)

    def run():
        with torch.inference_mode():
            return linear_cross_entropy(h, w, targets, options=LinearCrossEntropyOptions())

    return run


def chunked_cross_entropy_backward(shape: Shape) -> Run:
    h, w, targets = head(shape, grad=True)
    options = LinearCrossEntropyOptions()
    return lambda: torch.autograd.grad(linear_cross_entropy(h, w, targets, options=options), (h, w))


class Computation(NamedTuple):
    prepare: Callable[[Shape], Run]
    # Operators that the profiler must see: without them something else was timed.
    operators: tuple[str, ...]


FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
FUSED = "torch_nn::_linear_cross_entropy_batch_chunked"
COMPUTATIONS = {
    "flash-forward": Computation(flash_forward, (FLASH,)),
    "flash-backward": Computation(flash_backward, (FLASH, f"{FLASH}_backward")),
    "math-double-backward": Computation(math_double_backward, ("aten::_scaled_dot_product_attention_math",)),
    "lse-forward": Computation(lse_forward, ("aten::logsumexp",)),
    "lse-backward": Computation(lse_backward, ("aten::logsumexp", "LogsumexpBackward0")),
    "lazy-forward": Computation(lazy_forward, ("aten::softmax", "aten::relu")),
    "lazy-backward": Computation(lazy_backward, ("SoftmaxBackward0", "ReluBackward0")),
    "lazy-double-backward": Computation(lazy_double_backward, ("SoftmaxBackward0", "ReluBackward0")),
    "linear-forward": Computation(linear_forward, ("aten::bmm", "aten::cumsum")),
    "linear-backward": Computation(linear_backward, ("aten::bmm", "CumsumBackward0")),
    "cross-entropy-forward": Computation(cross_entropy_forward, ("aten::linear", "aten::cross_entropy_loss")),
    "cross-entropy-backward": Computation(cross_entropy_backward, ("aten::linear", "LogSoftmaxBackward0")),
    "chunked-cross-entropy-forward": Computation(chunked_cross_entropy_forward, (FUSED,)),
    "chunked-cross-entropy-backward": Computation(chunked_cross_entropy_backward, (FUSED,)),
    "linear-double-backward": Computation(linear_double_backward, ("aten::bmm", "CumsumBackward0")),
}


DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def times_ns(run: Run, seconds: float) -> list[int]:
    run()
    times = []
    begin = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < seconds:
        start = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - start)
    return times


def called_operators(run: Run) -> set[str]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler logs that it started, and that there is no GPU
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return {event.key for event in profile.key_averages()}


def measure(computation: Computation, shape: Shape, seconds: float) -> dict:
    run = computation.prepare(shape)
    times = times_ns(run, seconds)
    missing = set(computation.operators) - called_operators(run)
    if missing:
        sys.exit(f"PyTorch did not call {', '.join(sorted(missing))}")
    return {
        "version": torch.__version__,
        "level": torch.backends.cpu.get_cpu_capability().lower(),
        "dtype": next(name for name, dtype in DTYPES.items() if dtype == torch.get_default_dtype()),
        "mask": "causal",
        **shape._asdict(),
        "threads": torch.get_num_threads(),
        "operators": computation.operators,
        "runs": len(times),
        "median_ns": statistics.median_high(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Times a computation of PyTorch on the CPU and prints the result as JSON.")
    parser.add_argument("computation", choices=COMPUTATIONS)
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--batch", metavar="B", type=int, default=1)
    parser.add_argument("--heads", metavar="H", type=int, default=8)
    parser.add_argument("--length", metavar="N", type=int, default=2048)
    parser.add_argument("--dim", metavar="D", type=int, default=64)
    parser.add_argument("--threads", metavar="T", type=int, default=1)
    parser.add_argument("--seconds", metavar="S", type=float, default=1.0)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    torch.set_default_dtype(DTYPES[options.dtype])
    shape = Shape(options.batch, options.heads, options.length, options.dim)
    print(json.dumps(measure(COMPUTATIONS[options.computation], shape, options.seconds), indent=2))


if __name__ == "__main__":
    main()
