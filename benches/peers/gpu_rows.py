"""Rows of `compare_gpu.py`: for each the same computation by etalon and by its peers, on a GPU.

A row makes its inputs and returns contenders. Etalon's stand first, then the peer that the others' results are
compared with. Another computation – products alone, copies – has no results.
"""

import importlib.metadata
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from etalon_device import Library, Pass, Refused

Tensors = tuple[torch.Tensor, ...]


@dataclass
class Contender:
    name: str
    # Enqueues one run and returns its results, which are compared with the others'.
    run: Callable[[], Tensors | None]
    # Why it is absent.
    absent: str | None = None
    passes: list[Pass] = field(default_factory=list)


@dataclass
class Bench:
    """Device and size of the computation of rows. Smaller sizes show that a row works."""

    library: Library | None
    device: str = "cuda"
    shrink: int = 1
    # True for a peer that is left out.
    without: Callable[[str], bool] = lambda name: False

    def size(self, tokens: int) -> int:
        return max(128, tokens // self.shrink)

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.float32).to(dtype)

    def etalon(self, name: str, problem: dict, *calls: tuple[str, dict, dict], results: Tensors, **options) -> Contender:
        """Some passes in a row, as one run."""
        try:
            passes = [Pass(self.library, problem, kind, given, places, **options) for kind, given, places in calls]
        except Refused as reason:
            return Contender(name, lambda: None, absent=str(reason))

        def run():
            for each in passes:
                each()
            return results

        return Contender(name, run, passes=passes)

    def peer(self, name: str, make: Callable[[], Callable[[], Tensors | None]]) -> Contender:
        """A contender of other code, which may not be there or may refuse."""
        if self.without(name):
            return Contender(name, lambda: None, absent="left out")
        try:
            return Contender(name, make())
        except Exception as reason:  # whatever it raises, the others are compared
            return Contender(name, lambda: None, absent=f"{type(reason).__name__}: {reason}".splitlines()[0])


def like(*tensors: torch.Tensor) -> Tensors:
    return tuple(torch.empty_like(x) for x in tensors)


FLASH = {"precision": "flash"}
FINITE = {"precision": "flash", "assume_finite": True}
SM80 = {"precision": "flash", "level": "sm80"}
F32 = {"tf32": {"precision": "tf32"}, "bf16x3": {"precision": "bf16x3"}, "strict": {}}


# attention


def heads_problem(algorithm: str, shape: tuple[int, int, int, int], **options) -> dict:
    batch, heads, length, dim = shape
    extents = {"batch": batch, "query_heads": heads, "key_heads": heads, "queries": length, "keys": length, "dim": dim}
    return {"algorithm": algorithm, **extents, **options}


CAUSAL = {"mask": {"causal": {}}}


@dataclass(frozen=True)
class Softmax:
    """The problem of a row of attention."""

    heads: tuple[int, int] = (4, 16)  # batch elements, and query heads of each
    tokens: int = 4096
    dim: int = 128
    value_dim: int | None = None  # as `dim`
    key_heads: int | None = None  # as many as query heads
    causal: bool = True
    window: int | None = None  # the keys that a query sees, its own the last
    softcap: float = 0.0
    sinks: bool = False
    bias: bool = False  # of every pair
    fixed: bool = False  # the bias has no gradient
    sequences: int = 1  # of equal length, packed in each batch element

    def is_plain(self) -> bool:
        return self.window is None and not (self.softcap or self.sinks or self.bias) and self.sequences == 1

    def extents(self) -> tuple[int, int, int, int, int]:
        """Query heads, key heads, tokens, D and E."""
        heads = self.heads[1]
        return heads, self.key_heads or heads, self.tokens, self.dim, self.value_dim or self.dim

    def ends(self) -> list[int]:
        return list(range(0, self.tokens + 1, self.tokens // self.sequences))

    def problem(self) -> dict:
        heads, key_heads, tokens, dim, value_dim = self.extents()
        problem = heads_problem("attention", (self.heads[0], heads, tokens, dim))
        problem |= {"key_heads": key_heads, "value_dim": value_dim, **(CAUSAL if self.causal else {})}
        if self.window is not None:
            problem["mask"] = {"window": {"left": self.window - 1, "right": 0}}
        if self.softcap:
            problem["softcap"] = self.softcap
        if self.sinks:
            problem["sinks"] = True
        if self.bias:
            problem["bias"] = {"batch": self.heads[0], "heads": heads}
        if self.sequences > 1:
            problem["sequences"] = {"packed": {"cu_query": self.ends(), "cu_key": self.ends()}}
        return problem


def flex(bench: Bench, length: int, causal: bool) -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=bench.device)
    compiled = torch.compile(flex_attention)

    def call(q, k, v, bias=None):
        more = {} if bias is None else {"score_mod": lambda score, b, h, i, j: score + bias[b, h, i, j]}
        return compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1], **more)

    return call


def sdpa(backend: SDPBackend, causal: bool) -> Callable:
    def call(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    return call


FLASH_ATTENTION_4 = "4.0.0b36"


def flash_attention_4(bench: Bench, of: Softmax, deterministic: bool = False) -> Callable:
    """Of the package flash-attn-4, whose tensors have heads behind tokens."""
    found = importlib.metadata.version("flash-attn-4")
    if found != FLASH_ATTENTION_4:
        raise RuntimeError(f"flash-attn-4 {found} is there, and {FLASH_ATTENTION_4} is compared")
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    options = {"causal": of.causal, "softcap": of.softcap, "deterministic": deterministic}
    if of.window is not None:
        options |= {"causal": False, "window_size": (of.window - 1, 0)}
    if of.sequences > 1:
        ends = torch.tensor(of.ends(), device=bench.device, dtype=torch.int32)
        longest = of.tokens // of.sequences
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}

    def call(q, k, v, *sinks):
        tensors = [x.transpose(1, 2) for x in (q, k, v)]
        if of.sequences > 1:
            results = flash_attn_varlen_func(*(x.squeeze(0) for x in tensors), **options)
        else:
            results = flash_attn_func(*tensors, learnable_sink=sinks[0] if sinks else None, **options)
        o = results[0] if isinstance(results, tuple) else results
        return (o[None] if of.sequences > 1 else o).transpose(1, 2)

    return call


def peers_of_attention(bench: Bench, of: Softmax, backward: bool, dtype: torch.dtype) -> dict[str, Callable]:
    """By the name of each peer, a function that makes its call."""
    if dtype == torch.float32:
        return {"PyTorch efficient": lambda: sdpa(SDPBackend.EFFICIENT_ATTENTION, of.causal)}
    calls = {}
    if of.is_plain():
        calls = {
            "PyTorch flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION, of.causal),
            "PyTorch cuDNN": lambda: sdpa(SDPBackend.CUDNN_ATTENTION, of.causal),
            "PyTorch flex": lambda: flex(bench, of.tokens, of.causal),
        }
    if of.bias:
        return {"PyTorch flex": lambda: flex(bench, of.tokens, of.causal)}
    calls["FlashAttention-4"] = lambda: flash_attention_4(bench, of)
    if backward:
        calls["FlashAttention-4 deterministic"] = lambda: flash_attention_4(bench, of, deterministic=True)
    return calls


def attention(bench: Bench, of: Softmax, backward: bool, dtype: torch.dtype = torch.bfloat16) -> list[Contender]:
    of = replace(of, tokens=bench.size(of.tokens))
    (batch, heads), (_, key_heads, tokens, dim, value_dim) = of.heads, of.extents()
    shapes = {"q": (heads, dim), "k": (key_heads, dim), "v": (key_heads, value_dim), "dout": (heads, value_dim)}
    inputs = {name: bench.randn(batch, h, tokens, d, dtype=dtype) for name, (h, d) in shapes.items()}
    dout = inputs.pop("dout")
    if of.sinks:
        inputs["sinks"] = bench.randn(heads, dtype=torch.float32)
    if of.bias:
        inputs["bias"] = bench.randn(batch, heads, tokens, tokens, dtype=dtype)
    o, lse = torch.empty_like(dout), torch.empty(batch, heads, tokens, device=bench.device)
    forward = ("forward", inputs, {"o": o, "lse": lse})
    calls = peers_of_attention(bench, of, backward, dtype).items()
    options = F32 if dtype == torch.float32 else {"flash": FLASH, "sm80": SM80}
    if not backward:
        own = [bench.etalon(f"etalon {name}", of.problem(), forward, results=(o,), **x) for name, x in options.items()]

        def peer_forward(make):
            call = make()
            return lambda: (call(*inputs.values()),)

        return own + [bench.peer(name, lambda make=make: peer_forward(make)) for name, make in calls]
    first = bench.etalon("", of.problem(), forward, results=(o,), **FLASH)  # of f32 the same as strict
    first.run()
    own_wanted = {name: x for name, x in inputs.items() if not (of.fixed and name == "bias")}
    gradients = like(*own_wanted.values())
    saved = {**inputs, "o": o, "lse": lse, "dout": dout}
    second = ("backward", saved, dict(zip((f"d{name}" for name in own_wanted), gradients)))
    own = [bench.etalon(f"etalon {name}", of.problem(), second, results=gradients, **x) for name, x in options.items()]
    given = {name: x.detach().requires_grad_(name in own_wanted) for name, x in inputs.items()}
    wanted = [given[name] for name in own_wanted]

    def peer_backward(make):
        out = make()(*given.values())
        return lambda: torch.autograd.grad(out, wanted, dout, retain_graph=True)

    return own + [bench.peer(name, lambda make=make: peer_backward(make)) for name, make in calls]


def lse_formula(q, k):
    """attention_lse, causal, with scores in f32."""
    rows = torch.arange(q.shape[-2], device=q.device)
    scores = (q @ k.transpose(-2, -1)).float() * q.shape[-1] ** -0.5
    return torch.logsumexp(scores.masked_fill(rows[:, None] < rows, -torch.inf), dim=-1)


def attention_lse(bench: Bench, dim: int, backward: bool) -> list[Contender]:
    shape = (4, 16, bench.size(4096), dim)
    q, k = (bench.randn(*shape) for _ in range(2))
    lse, dlse = (make(shape[:3], device=bench.device) for make in (torch.empty, torch.randn))
    problem, inputs = heads_problem("attention_lse", shape, **CAUSAL), {"q": q, "k": k}
    forward, options = ("forward", inputs, {"lse": lse}), {"flash": FLASH, "sm80": SM80}
    compiled = torch.compile(lse_formula)
    if not backward:
        own = [bench.etalon(f"etalon {name}", problem, forward, results=(lse,), **x) for name, x in options.items()]
        return [*own, bench.peer("torch.compile", lambda: lambda: (compiled(q, k),))]
    bench.etalon("", problem, forward, results=(lse,), **FLASH).run()
    gradients = like(q, k)
    second = ("backward", {**inputs, "lse": lse, "dlse": dlse}, dict(zip(("dq", "dk"), gradients)))
    own = [bench.etalon(f"etalon {name}", problem, second, results=gradients, **x) for name, x in options.items()]
    wanted = [x.detach().clone().requires_grad_() for x in (q, k)]

    def make():
        out = compiled(*wanted)
        return lambda: torch.autograd.grad(out, wanted, dlse, retain_graph=True)

    return [*own, bench.peer("torch.compile", make)]


def second_order(bench: Bench, dtype: torch.dtype) -> list[Contender]:
    """Forward, backward and the gradient of <dq, ddq> + <dk, ddk> + <dv, ddv> to q, k, v and dout."""
    shape = (2, 8, bench.size(2048), 64)
    q, k, v, dout, ddq, ddk, ddv = (bench.randn(*shape, dtype=dtype) for _ in range(7))
    o, lse = torch.empty_like(q), torch.empty(shape[:3], device=bench.device)
    inputs = {"q": q, "k": k, "v": v}
    saved = {**inputs, "o": o, "lse": lse, "dout": dout}
    first, results = like(q, k, v), like(q, k, v, dout)
    calls = [
        ("forward", inputs, {"o": o, "lse": lse}),
        ("backward", saved, dict(zip(("dq", "dk", "dv"), first))),
        ("double_backward", {**saved, "ddq": ddq, "ddk": ddk, "ddv": ddv},
            dict(zip(("gq", "gk", "gv", "gdout"), results))),
    ]  # fmt: skip
    precision = {} if dtype == torch.float32 else FLASH
    own = bench.etalon("etalon", heads_problem("attention", shape, **CAUSAL), *calls, results=results, **precision)
    wanted = [x.detach().clone().requires_grad_() for x in (q, k, v, dout)]

    def math_run():
        out = sdpa(SDPBackend.MATH, True)(*wanted[:3])
        grads = torch.autograd.grad(out, wanted[:3], wanted[3], create_graph=True)
        return torch.autograd.grad(grads, wanted, (ddq, ddk, ddv))

    return [own, bench.peer("PyTorch math", lambda: math_run)]


# linear_cross_entropy


def cross_entropy(bench: Bench, backward: bool) -> list[Contender]:
    tokens, dim, vocab = bench.size(8192), 2304, bench.size(256_000)
    h, w = bench.randn(tokens, dim), bench.randn(vocab, dim) * dim**-0.5
    targets = torch.randint(vocab, (tokens,), device=bench.device)
    inputs = {"h": h, "w": w, "targets": targets}
    problem = {"algorithm": "linear_cross_entropy", "tokens": tokens, "dim": dim, "vocab": vocab}
    loss = torch.empty((), device=bench.device)
    dh, dw = like(h, w)
    logits = torch.empty(tokens, vocab, device=bench.device, dtype=h.dtype)

    def first():
        torch.mm(h, w.t(), out=logits)

    def gradients():
        torch.mm(logits, w, out=dh)
        torch.mm(logits.t(), h, out=dw)

    def four():
        first(), first(), gradients()

    compiled = torch.compile(lambda h, w: F.cross_entropy(F.linear(h, w), targets))
    if not backward:
        own = bench.etalon("etalon", problem, ("forward", inputs, {"loss": loss}), results=(loss,), **FLASH)
        with_loss = bench.peer("torch.compile", lambda: lambda: (compiled(h, w),))
        return [own, with_loss, Contender("cuBLAS, 1 product", first)]
    places = {"loss": loss, "dh": torch.empty_like(h), "dw": torch.empty_like(w)}
    results = (places["dh"], places["dw"])
    given = {**inputs, "dloss": torch.ones((), device=bench.device)}
    budget = {"memory_budget": 768 << 20}
    own = bench.etalon("etalon", problem, ("forward_backward", given, places), results=results, **FLASH, **budget)
    wanted = [x.detach().clone().requires_grad_() for x in (h, w)]
    with_loss = bench.peer("torch.compile", lambda: lambda: torch.autograd.grad(compiled(*wanted), wanted))
    return [own, with_loss, Contender("cuBLAS, 4 products", four), Contender("cuBLAS, 2 products", gradients)]


# lazy_attention

WIDTH = 512


def lazy_formula(q, k, v, bias, tau):
    """Elastic-Softmax with a bias by distance, causal; P and what is kept of it in f32."""
    rows = torch.arange(q.shape[-2], device=q.device)
    distance = rows[:, None] - rows
    table = torch.cat([bias, bias.new_zeros(len(bias), 1)], dim=1)
    scores = (q @ k.transpose(-2, -1)).float() * q.shape[-1] ** -0.5 + table[:, distance.clamp(0, WIDTH)]
    weights = torch.softmax(scores.masked_fill(distance < 0, -torch.inf), dim=-1)
    kept = torch.relu(weights + tau[:, None, None] / (rows[:, None] + 1))
    return kept.to(v.dtype) @ v


def lazy(bench: Bench, backward: bool) -> list[Contender]:
    shape = (4, 16, bench.size(2048), 64)
    q, k, v, dout = (bench.randn(*shape) for _ in range(4))
    bias, tau = 0.1 * bench.randn(16, WIDTH, dtype=torch.float32), torch.full((16,), -1.0, device=bench.device)
    problem = heads_problem("lazy_attention", shape, bias={"width": WIDTH})
    o, lse = torch.empty_like(q), torch.empty(shape[:3], device=bench.device)
    inputs = {"q": q, "k": k, "v": v, "bias": bias, "tau": tau}
    forward = ("forward", inputs, {"o": o, "lse": lse})
    compiled = torch.compile(lazy_formula)
    if not backward:
        own = [bench.etalon("etalon flash", problem, forward, results=(o,), **FLASH)]
        return [*own, bench.peer("torch.compile", lambda: lambda: (compiled(*inputs.values()),))]
    bench.etalon("", problem, forward, results=(o,), **FLASH).run()
    gradients = like(*inputs.values())
    places = dict(zip(("dq", "dk", "dv", "dbias", "dtau"), gradients))
    second = ("backward", {**inputs, "lse": lse, "dout": dout}, places)
    own = [bench.etalon("etalon flash", problem, second, results=gradients, **FLASH)]
    wanted = [x.detach().clone().requires_grad_() for x in inputs.values()]

    def make():
        out = compiled(*wanted)
        return lambda: torch.autograd.grad(out, wanted, dout, retain_graph=True)

    return [*own, bench.peer("torch.compile", make)]


# The tiles of queries and keys of the sm90a kernel's `values` with D = 64: of what it loads, and of a warpgroup's
# products.
LAZY_TILES = [(192, 128), (64, 128)]
# With it two fifths of the tiles that are loaded hold an active pair.
SLOPE = 0.024


def tile_densities(q, k, bias, tau) -> list[float]:
    """The shares of the visible tiles of each size that hold an active pair, in the first batch element."""
    length, width = q.shape[-2], bias.shape[-1]
    rows = torch.arange(length, device=q.device)
    distance = rows[:, None] - rows

    def tiles(pairs, size):
        return F.max_pool2d(pairs[None].float(), size, ceil_mode=True).sum().item()

    held = [0.0 for _ in LAZY_TILES]
    for head in range(q.shape[1]):
        table = torch.cat([bias[head], bias.new_zeros(1)])
        scores = (q[0, head].float() @ k[0, head].float().T) * q.shape[-1] ** -0.5 + table[distance.clamp(0, width)]
        weights = torch.softmax(scores.masked_fill(distance < 0, -torch.inf), dim=-1)
        active = (weights + tau[head] / (rows[:, None] + 1) > 0) & (distance >= 0)
        held = [sum + tiles(active, size) for sum, size in zip(held, LAZY_TILES)]
    return [sum / q.shape[1] / tiles(distance >= 0, size) for sum, size in zip(held, LAZY_TILES)]


def lazy_sparse(bench: Bench, backward: bool) -> list[Contender]:
    """Forward, or forward and backward, with a bias of zeros, where every tile holds an active pair, and with one
    that falls by SLOPE from each distance to the next, where two fifths do."""
    shape = (4, 16, bench.size(2048), 64)
    width = shape[2]
    q, k, v, dout = (bench.randn(*shape) for _ in range(4))
    tau = torch.full((16,), -1.0, device=bench.device)
    falling = -SLOPE * torch.arange(width, device=bench.device, dtype=torch.float32)
    problem = heads_problem("lazy_attention", shape, bias={"width": width}, **CAUSAL)
    contenders = []
    for kind, bias in [("dense", torch.zeros(width, device=bench.device)), ("sparse", falling)]:
        bias = bias.expand(16, width).contiguous()
        loaded, multiplied = tile_densities(q, k, bias, tau)
        o, lse = torch.empty_like(q), torch.empty(shape[:3], device=bench.device)
        inputs = {"q": q, "k": k, "v": v, "bias": bias, "tau": tau}
        calls = [("forward", inputs, {"o": o, "lse": lse})]
        gradients = like(*inputs.values())
        if backward:
            places = dict(zip(("dq", "dk", "dv", "dbias", "dtau"), gradients))
            calls.append(("backward", {**inputs, "lse": lse, "dout": dout}, places))
        name = f"etalon {kind}, {loaded:.2f} of the tiles loaded, {multiplied:.2f} multiplied"
        contenders.append(bench.etalon(name, problem, *calls, results=gradients if backward else (o,), **FLASH))
    return contenders


# non-finite numbers


def non_finite(bench: Bench, algorithm: str, backward: bool) -> list[Contender]:
    """A pass on finite operands, and with a NaN in a query of one head or of every head: groups with one are computed
    again."""
    shape = (4, 16, bench.size(4096), 128)
    q, k, v, dout = (bench.randn(*shape) for _ in range(4))
    problem = heads_problem(algorithm, shape, **CAUSAL)
    more = {"tau": torch.full((16,), -1.0, device=bench.device)} if algorithm == "lazy_attention" else {}
    contenders = []
    for name, heads in [("no group", 0), ("one group of 64", 1), ("every group", 64)]:
        struck = q.clone()
        struck.flatten(0, 1)[:heads, -1, 0] = torch.nan
        o, lse = torch.empty_like(q), torch.empty(shape[:3], device=bench.device)
        inputs = {"q": struck, "k": k, "v": v, **more}
        call, results = ("forward", inputs, {"o": o, "lse": lse}), (o,)
        if backward:
            bench.etalon("", problem, call, results=results, **FLASH).run()
            results = like(q, k, v)
            saved = {"lse": lse, "dout": dout} | ({} if more else {"o": o})
            call = ("backward", {**inputs, **saved}, dict(zip(("dq", "dk", "dv"), results)))
        contenders.append(bench.etalon(f"etalon, a NaN in {name}", problem, call, results=results, **FLASH))
    return contenders


# linear_attention


def chunked(q, k, v, g, chunk):
    """Linear attention with a decay per head: products over chunks, states by a product with powers of the decay."""
    length, dtype = q.shape[2], q.dtype
    q, k, v = (x.unflatten(2, (-1, chunk)) for x in (q, k, v))
    at = torch.arange(chunk, device=q.device)
    apart = (at[:, None] - at).clamp(min=0)
    within = torch.where(at[:, None] >= at, torch.exp(g[:, None, None] * apart), 0.0).to(dtype)[:, None]
    to_end = torch.exp(g[:, None] * (chunk - 1 - at)).to(dtype)[:, None, :, None]
    sums = (k * to_end).transpose(-2, -1) @ v
    number = torch.arange(length // chunk, device=q.device)
    between = number[:, None] - number - 1
    powers = torch.where(between >= 0, torch.exp(g[:, None, None] * chunk * between.clamp(min=0)), 0.0).to(dtype)
    before = (powers @ sums.flatten(-2)).unflatten(-1, sums.shape[-2:])
    from_begin = torch.exp(g[:, None] * (at + 1)).to(dtype)[:, None, :, None]
    o = ((q @ k.transpose(-2, -1)) * within) @ v + (q * from_begin) @ before
    return o.flatten(2, 3)


def chunked_by_token(q, k, v, g, chunk):
    """The same with a decay per token: differences of sums, as long as a chunk is and as there are chunks."""
    dtype = q.dtype
    q, k, v = (x.unflatten(2, (-1, chunk)) for x in (q, k, v))
    until = g.unflatten(2, (-1, chunk)).cumsum(-1)
    whole = until[..., -1]

    def decays(to, begin, diagonal):
        apart = to[..., :, None] - begin[..., None, :]
        hidden = torch.ones(apart.shape[-2:], device=q.device, dtype=torch.bool).triu(diagonal)
        return apart.masked_fill(hidden, -math.inf).exp().to(dtype)

    sums = (k * (whole[..., None] - until).exp().to(dtype)[..., None]).transpose(-2, -1) @ v
    ends = whole.cumsum(-1)
    before = (decays(ends - whole, ends, 0) @ sums.flatten(-2)).unflatten(-1, sums.shape[-2:])
    o = ((q @ k.transpose(-2, -1)) * decays(until, until, 1)) @ v + (q * until.exp().to(dtype)[..., None]) @ before
    return o.flatten(2, 3)


def linear(bench: Bench, sizes: tuple[int, int, int], backward: bool, by_token: bool = False) -> list[Contender]:
    batch, heads, length = sizes
    shape = batch, heads, length, dim = (batch, heads, bench.size(length), 128)
    # States by a product of as many rows as there are chunks: fewer where the sequence is long.
    chunk = 64 if length <= 8192 else 512
    q, k, v, dout = (bench.randn(*shape) * dim**-0.25 for _ in range(4))
    g = -(2.0 ** -torch.linspace(3, 9, heads, device=bench.device))
    problem = {"algorithm": "linear_attention", "batch": batch, "query_heads": heads, "key_heads": heads,
               "tokens": length, "dim": dim, "decay": "per_token" if by_token else "per_head"}  # fmt: skip
    if by_token:  # the same decays on the average
        g = g[:, None] * -torch.rand(batch, heads, length, device=bench.device).log()
    products = chunked_by_token if by_token else chunked
    decay, name = ("g", "dg") if by_token else ("g_gamma", "dg_gamma")
    inputs = {"q": q, "k": k, "v": v, decay: g}
    # Half as many bytes are read and written again as the pass reads and writes.
    source = torch.empty((7 if backward else 4) * q.numel() // 2, device=bench.device, dtype=q.dtype)
    target = torch.empty_like(source)
    copy = Contender("copy of the same bytes", lambda: [target.copy_(source)].clear())
    kinds = [("flash, finite", FINITE), ("flash", FLASH), ("sm80", SM80)]
    # The layout that FLA takes.
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def fla():
        from fla.ops.simple_gla import chunk_simple_gla
        from fla_tuning import tune

        tune(heads, dim, by_token, backward)
        if by_token:
            return lambda q, k, v, g: chunk_simple_gla(q, k, v, g=g, scale=1.0)[0]
        return lambda q, k, v, _: chunk_simple_gla(q, k, v, g_gamma=g, scale=1.0)[0]

    given = g.transpose(1, 2).contiguous() if by_token else None

    def back(x):
        return x.transpose(1, 2)

    if not backward:
        o = torch.empty_like(q)
        own = [bench.etalon(f"etalon {name}", problem, ("forward", inputs, {"o": o}), results=(o,), **x)
               for name, x in kinds]  # fmt: skip

        def fla_forward():
            call = fla()
            return lambda: (back(call(*turned, given)),)

        plain = bench.peer("PyTorch chunked", lambda: lambda: (products(q, k, v, g, chunk),))
        return [*own, plain, bench.peer("FLA", fla_forward), copy]
    places = dict(zip(("dq", "dk", "dv", name), like(q, k, v, g)))
    results = tuple(places.values())[: 4 if by_token else 3]  # FLA has no gradient of the decay of a head
    own = [bench.etalon(f"etalon {name}", problem, ("backward", {**inputs, "dout": dout}, places), results=results, **x)
           for name, x in kinds]  # fmt: skip
    wanted = [x.detach().clone().requires_grad_() for x in ((q, k, v, g) if by_token else (q, k, v))]

    def plain_backward():
        out = products(*wanted[:3], wanted[3] if by_token else g, chunk)
        return lambda: torch.autograd.grad(out, wanted, dout, retain_graph=True)

    def fla_backward():
        call, leaves = fla(), [x.requires_grad_() for x in [*turned, *([given] if by_token else [])]]
        out, cotangent = call(*leaves[:3], given), dout.transpose(1, 2).contiguous()
        return lambda: tuple(back(x) for x in torch.autograd.grad(out, leaves, cotangent, retain_graph=True))

    return [*own, bench.peer("PyTorch chunked", plain_backward), bench.peer("FLA", fla_backward), copy]


Row = Callable[[Bench], list[Contender]]

ATTENTION = {
    "128-causal": Softmax(),
    "64-causal": Softmax(dim=64),
    "128-full": Softmax(causal=False),
    "16384": Softmax(heads=(1, 16), tokens=16384),
    "grouped": Softmax(heads=(4, 32), key_heads=4),
    "packed": Softmax(heads=(1, 16), tokens=16384, sequences=16),
    "256-causal": Softmax(heads=(4, 8), dim=256),
    "256-full": Softmax(heads=(4, 8), dim=256, causal=False),
    "192-causal": Softmax(dim=192, value_dim=128),
    "softcap": Softmax(softcap=30.0),
    "sinks": Softmax(dim=64, window=128, sinks=True),
    "window": Softmax(heads=(2, 16), tokens=8192, window=256),
    "bias": Softmax(bias=True),
}

ROWS: dict[str, Row] = {}
for _name, _of in ATTENTION.items():
    for _pass in ["forward", "backward"]:
        ROWS[f"attention-{_pass}-{_name}"] = lambda bench, x=(_of, _pass == "backward"): attention(bench, *x)
ROWS["attention-backward-bias-fixed"] = lambda bench: attention(bench, Softmax(bias=True, fixed=True), True)
for _pass in ["forward", "backward"]:
    ROWS[f"attention-{_pass}-f32"] = lambda bench, x=(Softmax(), _pass == "backward"): attention(bench, *x, torch.float32)
ROWS |= {
    "attention-lse-forward": lambda bench: attention_lse(bench, 64, False),
    "attention-lse-backward": lambda bench: attention_lse(bench, 128, True),
    "second-order-f32": lambda bench: second_order(bench, torch.float32),
    "second-order-bf16": lambda bench: second_order(bench, torch.bfloat16),
    "cross-entropy-forward": lambda bench: cross_entropy(bench, False),
    "cross-entropy-forward-backward": lambda bench: cross_entropy(bench, True),
    "lazy-forward": lambda bench: lazy(bench, False),
    "lazy-backward": lambda bench: lazy(bench, True),
    "lazy-sparse-forward": lambda bench: lazy_sparse(bench, False),
    "lazy-sparse-both": lambda bench: lazy_sparse(bench, True),
    "non-finite-attention-forward": lambda bench: non_finite(bench, "attention", False),
    "non-finite-attention-backward": lambda bench: non_finite(bench, "attention", True),
    "non-finite-lazy-forward": lambda bench: non_finite(bench, "lazy_attention", False),
    "non-finite-lazy-backward": lambda bench: non_finite(bench, "lazy_attention", True),
    "linear-forward": lambda bench: linear(bench, (4, 16, 8192), False),
    "linear-backward": lambda bench: linear(bench, (4, 16, 8192), True),
    "linear-token-forward": lambda bench: linear(bench, (4, 16, 8192), False, by_token=True),
    "linear-token-backward": lambda bench: linear(bench, (4, 16, 8192), True, by_token=True),
    "linear-long-forward": lambda bench: linear(bench, (1, 1, 1 << 20), False),
    "linear-long-backward": lambda bench: linear(bench, (1, 1, 1 << 20), True),
}


def distance(found: Tensors, wanted: Tensors) -> float:
    """The largest relative distance of a tensor from another one, in the Frobenius norm."""
    far = 0.0
    for x, y in zip(found, wanted, strict=True):
        x, y = x.detach().float(), y.detach().float()
        far = max(far, ((x - y).norm() / y.norm()).item())
    return far if not math.isnan(far) else math.inf
