"""The contenders: each a function of a library as its users call it, and what it takes.

Capabilities are those of the library's own pages, for the version in requirements.txt; docs/guide.md has their form.
Nothing is imported here but the standard library: the page is made where no library is.
"""

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field

FLOATS = ["f32", "bf16", "f16"]
HALVES = ["bf16", "f16"]
AUTOGRAD = ["forward", "backward"]


@dataclass
class Contender:
    """A function of a library. `profiles` names the ladder that its results climb, in recording.py."""

    algorithm: str
    call: str
    packages: list[str]
    module: str
    build: Callable
    kernels: Callable  # of the device, a list of capabilities
    devices: list[str]
    promise: str  # a key of promises.json
    devices_text: str = "the library has no such kernel for this device"
    limit: int = 150  # seconds for an answer; the first one loads a library, and may compile
    depth: dict[str, str] = field(default_factory=dict)  # by device, where it is not the run's


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _extents(**more):
    """Nobody says that no rows are taken, so that nobody is asked for them."""
    names = ["batch", "query_heads", "key_heads", "queries", "keys", "dim", "value_dim"]
    return {name: {"at_least": 1} for name in names} | more


def _attention(dtypes, masks, *, passes=AUTOGRAD, options=("softmax_scale",), limits=None, equal=(), **keys):
    return {
        "algorithm": "attention",
        "passes": list(passes),
        "dtypes": list(dtypes),
        "limits": limits or _extents(),
        "equal": [list(pair) for pair in equal],
        "masks": list(masks),
        "align": keys.pop("align", ["top_left"]),
        "sequences": keys.pop("sequences", ["dense"]),
        "options": {name: {} for name in options},
        "omits": keys.pop("omits", ["lse"]),
        **keys,
    }


SAME_DIM, SAME_ROWS = ("dim", "value_dim"), ("queries", "keys")
EIGHTS = {"multiple_of": 8, "at_least": 8}
# attn_mask of scaled_dot_product_attention adds to all scores: no mask beside it.
BIAS = ["softmax_scale", "bias"]


def _sdpa_math(_):
    kernels = [_attention(FLOATS, masks) for masks in (["full", "causal"], ["array"])]
    return [*kernels, _attention(FLOATS, ["full"], options=BIAS)]


def _sdpa_flash(device):
    if device == "cpu":
        plain = _attention(FLOATS, ["full", "causal", "array"], equal=[SAME_DIM])
        return [plain, _attention(FLOATS, ["full"], passes=["forward"], options=BIAS, equal=[SAME_DIM])]
    limits = _extents(dim=EIGHTS | {"at_most": 256}, value_dim=EIGHTS | {"at_most": 256})
    return [_attention(HALVES, ["full", "causal"], equal=[SAME_DIM, SAME_ROWS], limits=limits)]


def _sdpa_efficient(_):
    limits = _extents(dim=EIGHTS, value_dim=EIGHTS, group={"one_of": [1]})
    kernels = [_attention(FLOATS, masks, limits=limits) for masks in (["full", "causal"], ["array"])]
    return [*kernels, _attention(FLOATS, ["full"], options=BIAS, limits=limits)]


def _sdpa_cudnn(_):
    limits = _extents(dim=EIGHTS | {"at_most": 128}, value_dim=EIGHTS | {"at_most": 128})
    return [_attention(HALVES, ["full", "causal"], equal=[SAME_DIM], limits=limits)]


def _flex(device):
    masks = ["full", "causal", "window", "segments", "array"]
    passes, omits = (["forward"], ["lse"]) if device == "cpu" else (AUTOGRAD, [])
    keys = {"align": ["top_left", "bottom_right"], "omits": omits, "options": ["softmax_scale", "softcap"]}
    return [_attention(FLOATS, masks, passes=passes, equal=[SAME_DIM], **keys)]


def _jax_xla(_):
    keys = {"options": BIAS, "equal": [SAME_DIM], "omits": []}
    kernels = [_attention(FLOATS, ["full", "causal", "array"], **keys)]
    kernels.append(_attention(FLOATS, ["window"], **keys | {"equal": [SAME_DIM, SAME_ROWS]}))
    return [*kernels, _attention(FLOATS, ["full", "causal"], sequences=["lengths"], **keys)]


def _jax_cudnn(_):
    limits = _extents(dim=EIGHTS | {"at_most": 128}, value_dim=EIGHTS | {"at_most": 128})
    return [_attention(HALVES, ["full", "causal"], equal=[SAME_DIM, SAME_ROWS], limits=limits)]


def _flash_attention_4(_):
    limits = _extents(dim={"one_of": [64, 128]}, value_dim={"one_of": [64, 128]})
    keys = {"align": ["bottom_right"], "omits": [], "equal": [SAME_DIM], "limits": limits, "cotangents": ["dlse"]}
    options = ["softmax_scale", "softcap", "sinks"]
    plain = _attention(HALVES, ["full", "causal", "window"], options=options, **keys)
    packed = _attention(HALVES, ["full", "causal"], sequences=["packed"], **keys)
    return [plain, packed]


def _ggml(_):
    keys = {"passes": ["forward"], "align": ["top_left", "bottom_right"], "equal": [SAME_DIM]}
    options = ["softmax_scale", "softcap", "sinks"]
    return [_attention(["f32", "f16"], ["full", "causal", "array"], options=options, **keys)]


def _simple_gla(dtypes, decays, sequences, omits):
    return {
        "algorithm": "linear_attention",
        "passes": AUTOGRAD,
        "dtypes": dtypes,
        "limits": {name: {"at_least": 1} for name in ("batch", "query_heads", "tokens", "dim", "value_dim")}
        | {"group": {"one_of": [1]}},
        "sequences": sequences,
        "options": {"scale": {}, "initial_state": {}, "final_state": {}, "decay": {"one_of": decays}},
        "omits": omits,
        "cotangents": ["dfinal_state"],
    }


def _chunk_simple_gla(_):
    return [_simple_gla(FLOATS, [None, "per_head", "per_token"], ["dense", "packed"], ["dg_gamma", "dscale"])]


def _naive_chunk_simple_gla(_):
    return [_simple_gla(FLOATS, ["per_token"], ["dense"], ["dscale"])]


def _loss(dtypes, options, reductions=("mean", "sum", "none"), **limits):
    words = [None if x == "mean" else x for x in reductions]
    return {
        "algorithm": "linear_cross_entropy",
        "passes": AUTOGRAD,
        "dtypes": dtypes,
        "limits": {name: {"at_least": 1} for name in ("tokens", "dim", "vocab")} | limits,
        "options": {"ignore_index": {}, "reduction": {"one_of": [*words, *reductions]}, "nothing_left": {}}
        | {name: {} for name in options},
        "omits": ["n_valid", "normaliser"],
        "cotangents": ["dloss"],
    }


def _losses(dtypes, options, **keys):
    return lambda _: [_loss(dtypes, options, **keys)]


TORCH_OPTIONS = ["bias", "class_weights", "label_smoothing"]
LIGER_OPTIONS = [*TORCH_OPTIONS, "softcap", "lse_square_scale"]


def _cross_entropy(call, package, make, kernels, devices, promise, **keys):
    packages = list(dict.fromkeys(["torch", package]))
    build = lambda module, device: module.kernel_of(make(module), device)
    return Contender(
        "linear_cross_entropy", call, packages, "kernels_cross_entropy", build, kernels, devices, promise, **keys
    )


def _sdpa(backend, kernels, devices, **keys):
    call = f"F.scaled_dot_product_attention, SDPBackend.{backend}"
    build = lambda module, device: module.sdpa(backend, device)
    return Contender("attention", call, ["torch"], "kernels_torch", build, kernels, devices, "sdpa", **keys)


GPU, BOTH = ["cuda"], ["cpu", "cuda"]
TRITON = "its kernels are written in Triton, which has no backend for CPUs"
CUTE = "its kernels are written in the CuTe DSL, for NVIDIA GPUs"


def _jax(implementation, kernels, devices, *devices_text, **keys):
    call = f'jax.nn.dot_product_attention, implementation="{implementation}"'
    build = lambda module, device: module.attention(implementation, device)
    return Contender(
        "attention", call, ["jax", "jaxlib"], "kernels_jax", build, kernels, devices, "jax", *devices_text, **keys
    )


def _ggml_flash(precision):
    call = f"ggml_flash_attn_ext, GGML_{precision}"
    build = lambda module, device: module.flash_attn_ext(getattr(module, precision))
    text = "the wheel has ggml's CPU backend alone"
    return Contender("attention", call, ["libggml-python"], "kernels_ggml", build, _ggml, ["cpu"], "ggml", text)


def _gpu_loss(call, package, make, kernels, promise, written, **keys):
    """A loss whose kernels are written for GPUs alone."""
    keys = {"devices_text": written, "depth": {"cuda": "smoke"}} | keys
    return _cross_entropy(call, package, make, kernels, GPU, promise, **keys)


def _liger(call, f32_sums):
    make = lambda module: module.liger_loss(f32_sums)
    return _gpu_loss(call, "liger-kernel", make, _losses(FLOATS, LIGER_OPTIONS), "liger", TRITON)


def _apple(call, filter_eps):
    make = lambda module: module.apple_loss("cce", filter_eps)
    return _gpu_loss(call, "cut-cross-entropy", make, _losses(HALVES, ["softcap"]), "apple", TRITON, limit=200)


def _quack(call, chunked, kernels):
    make = lambda module: module.quack_loss(chunked)
    return _gpu_loss(call, "quack-kernels", make, kernels, "quack", CUTE, limit=200)


def _torch_loss(call, chunked):
    make = lambda module: module.torch_loss(chunked)
    return _cross_entropy(call, "torch", make, _losses(FLOATS, TORCH_OPTIONS), BOTH, "torch-loss")


CONTENDERS = {
    "sdpa-math": _sdpa("MATH", _sdpa_math, BOTH),
    "sdpa-flash": _sdpa("FLASH_ATTENTION", _sdpa_flash, BOTH),
    "sdpa-efficient": _sdpa("EFFICIENT_ATTENTION", _sdpa_efficient, GPU),
    "sdpa-cudnn": _sdpa("CUDNN_ATTENTION", _sdpa_cudnn, GPU),
    "flex": Contender(
        "attention",
        "torch.compile(flex_attention)",
        ["torch"],
        "kernels_torch",
        lambda module, device: module.flex(device),
        _flex,
        BOTH,
        "flex",
        limit=300,
        depth={"cpu": "smoke", "cuda": "smoke"},
    ),
    "flash-attn-4": Contender(
        "attention",
        "flash_attn.cute.flash_attn_func, flash_attn_varlen_func",
        ["torch", "flash-attn-4", "nvidia-cutlass-dsl"],
        "kernels_flash_attn",
        lambda module, device: module.attention(False),
        _flash_attention_4,
        GPU,
        "flash-attn-4",
        CUTE,
        limit=300,
        depth={"cuda": "smoke"},
    ),
    "jax-xla": _jax("xla", _jax_xla, BOTH),
    "jax-cudnn": _jax(
        "cudnn", _jax_cudnn, GPU, "cuDNN is a library for NVIDIA GPUs", limit=120, depth={"cuda": "smoke"}
    ),
    "ggml-default": _ggml_flash("PREC_DEFAULT"),
    "ggml-f32": _ggml_flash("PREC_F32"),
    "fla-chunk": Contender(
        "linear_attention",
        "fla.ops.simple_gla.chunk_simple_gla, the first of its tuner's configurations",
        ["torch", "triton", "flash-linear-attention", "fla-core"],
        "kernels_fla",
        lambda module, device: module.simple_gla("chunk", device),
        _chunk_simple_gla,
        GPU,
        "fla",
        TRITON,
        limit=200,
        depth={"cuda": "smoke"},
    ),
    "fla-naive": Contender(
        "linear_attention",
        "fla.ops.simple_gla.naive.naive_chunk_simple_gla",
        ["torch", "flash-linear-attention", "fla-core"],
        "kernels_fla",
        lambda module, device: module.simple_gla("naive_chunk", device),
        _naive_chunk_simple_gla,
        BOTH,
        "fla",
    ),
    "torch-loss": _torch_loss("F.linear_cross_entropy", False),
    "torch-loss-chunked": _torch_loss("F.linear_cross_entropy, options=LinearCrossEntropyOptions()", True),
    "liger": _liger("LigerFusedLinearCrossEntropyLoss", False),
    "liger-f32-sums": _liger("LigerFusedLinearCrossEntropyLoss, accum_dtype=torch.float32", True),
    "apple": _apple("cut_cross_entropy.linear_cross_entropy", "high"),
    "apple-unfiltered": _apple("cut_cross_entropy.linear_cross_entropy, filter_eps=None", None),
    "apple-compiled": _cross_entropy(
        'cut_cross_entropy.linear_cross_entropy, impl="torch_compile"',
        "cut-cross-entropy",
        lambda module: module.apple_loss("torch_compile", "high"),
        _losses(FLOATS, ["softcap"]),
        BOTH,
        "apple",
        depth={"cpu": "smoke", "cuda": "smoke"},
        limit=300,
    ),
    "quack": _quack("quack.linear_cross_entropy.linear_cross_entropy_func", False, _losses(FLOATS, ["bias"])),
    "quack-chunked": _quack(
        "quack.linear_cross_entropy.chunked_linear_cross_entropy",
        True,
        _losses(
            HALVES, [], reductions=("mean", "sum"), **{name: {"multiple_of": 8} for name in ("tokens", "dim", "vocab")}
        ),
    ),
}
