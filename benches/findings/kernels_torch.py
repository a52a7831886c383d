"""Attention of PyTorch: scaled_dot_product_attention by its backends, and flex_attention."""

import re

import torch
import torch.nn.functional as F
from frames import Refused
from torch.nn.attention import SDPBackend, sdpa_kernel

TYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
TYPES |= {"i64": torch.int64, "bool": torch.bool}
NAMES = {dtype: name for name, dtype in TYPES.items()}

# Words by which libraries on PyTorch say that they do not take something.
REFUSALS = re.compile(r"No available kernel|[Nn]ot (yet )?support|[Oo]nly support|[Ss]upported|must be|NYI")


def tensors(given, device):
    """Raw tensors on the device."""

    def one(dtype, shape, body):
        if not body:
            return torch.empty(shape, dtype=TYPES[dtype], device=device)
        return torch.frombuffer(bytearray(body), dtype=TYPES[dtype]).reshape(shape).to(device)

    return {name: one(*raw) for name, raw in given.items()}


def raw(results, asked):
    """The results that are asked for, in the types that are asked for."""

    def one(x, dtype):
        x = x.detach().to(TYPES[dtype]).cpu().contiguous()
        return dtype, tuple(x.shape), x.reshape(-1).view(torch.uint8).numpy().tobytes()

    return {name: one(results[name], dtype) for name, (dtype, _) in asked.items() if name in results}


def refusing(function, *args, **options):
    """Calls a library, whose refusals are no errors of ours."""
    try:
        return function(*args, **options)
    except (AssertionError, NotImplementedError) as refused:
        raise Refused(f"{type(refused).__name__}: {refused}") from refused
    except (RuntimeError, ValueError) as refused:
        if REFUSALS.search(str(refused)):
            raise Refused(str(refused)) from refused
        raise


def gradients(of, x, cotangent):
    """The gradients of what the function returns, by input: dq of q."""
    leaves = {name: x[name].requires_grad_() for name in of}

    def made(results):
        found = torch.autograd.grad(results, list(leaves.values()), cotangent, allow_unused=True)
        return {
            f"d{name}": torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(leaves.items(), found)
        }

    return made


def sdpa(backend, device):
    """scaled_dot_product_attention, forced to one backend."""

    def call(problem, x):
        mask, causal = problem.get("mask", "full"), False
        options = {"scale": problem.get("softmax_scale")}
        if "causal" in mask:
            causal = True
        elif "array" in mask:
            options["attn_mask"] = x[mask["array"]]
        elif "bias" in problem:
            options["attn_mask"] = x["bias"]
        if problem["query_heads"] != problem["key_heads"]:
            options["enable_gqa"] = True
        with sdpa_kernel([getattr(SDPBackend, backend)]):
            return F.scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=causal, **options)

    def kernel(request, given):
        problem, x = request["problem"], tensors(given, device)
        if request["pass"] == "forward":
            with torch.no_grad():
                return raw({"o": refusing(call, problem, x)}, request["asked"])
        made = gradients([name for name in ("q", "k", "v", "bias") if name in x], x, x["dout"])
        return raw(refusing(lambda: made(call(problem, x))), request["asked"])

    return kernel


def visible(problem, x):
    """The mask_mod of flex_attention for a mask, and None for a full one."""
    mask, n, m = problem.get("mask", "full"), problem["queries"], problem["keys"]
    shift = lambda part: 0 if part.get("align") == "top_left" else m - n
    if "causal" in mask:
        s = shift(mask["causal"])
        return lambda b, h, i, j: j <= i + s
    if "window" in mask:
        s, left, right = shift(mask["window"]), mask["window"].get("left"), mask["window"].get("right")
        left, right = (n + m if end is None else end for end in (left, right))
        return lambda b, h, i, j: (j >= i + s - left) & (j <= i + s + right)
    if "segments" in mask:
        ids, keys = x[mask["segments"]["query"]], x[mask["segments"]["key"]]
        # A negative id is padding, which sees nothing and is not seen.
        return lambda b, h, i, j: (ids[b, i] == keys[b, j]) & (ids[b, i] >= 0)
    if "array" in mask:
        allowed = x[mask["array"]].expand(problem["batch"], problem["query_heads"], n, m)
        return lambda b, h, i, j: allowed[b, h, i, j]
    return None


def flex(device):
    """flex_attention, compiled as its pages tell to."""
    import torch._dynamo
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
    compiled = torch.compile(flex_attention, dynamic=False)
    # On a CPU it has no lse.
    with_lse = device != "cpu"

    def call(problem, x):
        b, h, n, m = (problem[name] for name in ("batch", "query_heads", "queries", "keys"))
        seen, cap, score_mod = visible(problem, x), problem.get("softcap"), None
        block_mask = seen and create_block_mask(seen, b, h, n, m, device=device)
        if cap is not None:
            score_mod = lambda score, b, h, i, j: cap * torch.tanh(score / cap)
        torch._dynamo.reset()
        made = compiled(
            x["q"],
            x["k"],
            x["v"],
            score_mod=score_mod,
            block_mask=block_mask,
            scale=problem.get("softmax_scale"),
            enable_gqa=problem["query_heads"] != problem["key_heads"],
            return_lse=with_lse,
        )
        return made if with_lse else (made,)

    def kernel(request, given):
        problem, x = request["problem"], tensors(given, device)
        if request["pass"] == "forward":
            with torch.no_grad():
                return raw(dict(zip(("o", "lse"), refusing(call, problem, x))), request["asked"])
        made = gradients(["q", "k", "v"], x, x["dout"])
        return raw(refusing(lambda: made(call(problem, x)[0])), request["asked"])

    return kernel
