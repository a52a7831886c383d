"""Passes over arrays."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from . import _problems
from ._etalon import Problem

if TYPE_CHECKING:
    import numpy

    from .problems import Description

# An array of NumPy, or a tensor of any framework.
Array = Any

FLOATS = {"float64", "float32", "float16", "bfloat16"}


def type_name(x):
    """The name of the element type of an array or a tensor of any framework: "float32"."""
    dtype = getattr(x, "dtype", None)
    return getattr(dtype, "name", None) or str(dtype).rsplit(".", 1)[-1]


def numpy_type(name):
    """The type of NumPy of that name."""
    import numpy

    if name != "bfloat16":
        return numpy.dtype(name)
    try:
        import ml_dtypes  # type: ignore[import-not-found]
    except ImportError:
        raise TypeError("arrays of bfloat16 need the package ml_dtypes: pip install ml_dtypes") from None
    return numpy.dtype(ml_dtypes.bfloat16)


def array(name, shape, data):
    """An array of NumPy of the type of that name over bytes in row-major order."""
    import numpy

    return numpy.frombuffer(data, numpy_type(name)).reshape(shape)


@functools.lru_cache(maxsize=512)
def _outputs(problem, pass_, storage, names):
    """Names, shapes and types of the outputs of a pass, of all that are not optional or of `names`."""
    wide = "float64" if storage == "float64" else "float32"
    types = {"storage": storage, "wide": wide, "integer": "int64"}
    found = [
        (name, shape, numpy_type(types[precision]))
        for name, role, shape, precision in problem.operands(pass_)
        if (role == "output" if names is None else role in ("output", "optional_output") and name in names)
    ]
    unknown = set(names or ()) - {name for name, *_ in found}
    if unknown:
        raise ValueError(f"`{min(unknown)}` is no output of {problem.algorithm} {pass_}")
    return found


def places(problem, pass_, storage, names=None):
    """Arrays for the outputs of a pass beside main tensors of type `storage`, for those of `names` if given."""
    import numpy

    listed = _outputs(problem, pass_, storage, None if names is None else tuple(names))
    return {name: numpy.empty(shape, dtype) for name, shape, dtype in listed}


@functools.lru_cache(maxsize=512)
def _first(problem, pass_):
    return problem.operands(pass_)[0][0]


def storage_of(problem, pass_, inputs):
    """The type of the main tensors of a pass: that of the first."""
    name = type_name(inputs.get(_first(problem, pass_)))
    return name if name in FLOATS else "float32"


def run(
    problem: Problem | Description,
    pass_: str,
    inputs: Mapping[str, Any],
    *,
    out: dict[str, Any] | None = None,
    names: Iterable[str] | None = None,
    tier: str = "auto",
    recompute: bool = False,
    memory_budget: int | None = None,
) -> dict[str, Any]:
    """Computes a pass: a dictionary of its outputs, or of those of `names`.

    `inputs` holds tensors by name; those that are None count as absent. `problem.operands(pass_)` lists the names
    with roles, shapes and types. `out` may hold arrays to be written, of any strides; no others are computed then.
    `tier` is "auto" (the reference for float64, else the fastest), "reference", "simd", or one instruction set such
    as "simd/avx2". "simd/amx" and "simd/avx512bf16" round what attention, linear attention and linear
    cross-entropy on bfloat16 multiply, as the profile "bf16-flash" allows, and with "-split2" at their end, but of
    linear attention, as "bf16-split2" does; no other name does. `recompute` computes what the forward pass returned
    (o, lse) again where a later pass lacks it; `memory_budget` bounds the bytes that linear cross-entropy takes.

    Raises TypeError for a tensor that is missing, unknown or of another type, ValueError for one of another shape,
    each with its name, and NotImplementedError where the tier has no such pass. On an error nothing has been written.
    """
    made = _problems.made(problem)
    if out is None:
        out = places(made, pass_, storage_of(made, pass_, inputs), names)
    elif names is not None:
        raise TypeError("`out` and `names` exclude each other")
    made.run(pass_, inputs, out, tier=tier, recompute=recompute, memory_budget=memory_budget)
    return out


def reference(
    problem: Problem | Description, pass_: str, inputs: Mapping[str, Any], *, names: Iterable[str] | None = None
) -> dict[str, numpy.ndarray]:
    """The exact outputs of a pass, in float64: `inputs` of any type are read as they are, and nothing is rounded."""
    import numpy

    def wide(x):
        if x is None or type_name(x) not in FLOATS or type_name(x) == "float64":
            return x
        if type_name(x) == "bfloat16" and not isinstance(x, numpy.ndarray):
            # The buffer protocol has no such type: through float32, which holds every bfloat16.
            x = x.float() if hasattr(x, "float") else x.astype("float32")
        return numpy.asarray(x).astype(numpy.float64)

    inputs = {name: wide(x) for name, x in inputs.items()}
    return run(problem, pass_, inputs, names=names, tier="reference", recompute=True)


def _forward(problem, inputs, names, out):
    got = run(problem, "forward", inputs, out=out, names=None if out else names)
    return got[names[0]] if len(names) == 1 else tuple(got[name] for name in names)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    sinks: Array | None = None,
    bias: Array | None = None,
    return_lse: bool = False,
    out: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Softmax attention: o [B, Hq, N, E], and with `return_lse` lse [B, Hq, N], the logarithm of Σ exp(scores).

    q [B, Hq, N, D], k [B, Hk, M, D], v [B, Hk, M, E]; query head h reads key head h // (Hq // Hk). `causal` shows
    query i the keys up to i + M − N. Further keywords: `window` (left, right), both inclusive, None for open; `mask`,
    an array of bool, [B or 1, Hq or 1, N, M], True for what is seen, or a mask of a problem file; `scale`, 1/√D if
    absent; `softcap` c, for c tanh(s/c); `sinks` [Hq], logits without a value; `bias` [B or 1, Hq or 1, N, M];
    `sequences`, as in a problem file; `out`, a dictionary of arrays to be written. Equations: docs/attention.md.
    """
    problem = _problems.of_scores("attention", q, k, v, causal=causal, sinks=sinks, bias=bias, **options)
    inputs = dict(q=q, k=k, v=v, sinks=sinks, bias=bias)
    return _forward(problem, inputs, ("o", "lse") if return_lse else ("o",), out)


def attention_lse(
    q: Array,
    k: Array,
    *,
    causal: bool = False,
    sinks: Array | None = None,
    bias: Array | None = None,
    out: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """The log-sum-exp of attention's scores: lse [B, Hq, N]. Keywords are those of `attention`."""
    problem = _problems.of_scores("attention_lse", q, k, None, causal=causal, sinks=sinks, bias=bias, **options)
    return _forward(problem, dict(q=q, k=k, sinks=sinks, bias=bias), ("lse",), out)


def lazy_attention(
    q: Array,
    k: Array,
    v: Array,
    tau: Array,
    *,
    bias: Array | None = None,
    causal: bool = True,
    return_lse: bool = False,
    out: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Lazy attention with Elastic-Softmax: weights max(P + τ/n, 0) of a softmax P over n keys; o [B, Hq, N, E].

    tau [Hq]; `bias` [Hq, W], of distances from 0 to W − 1. Equations: docs/lazy_attention.md.
    """
    problem = _problems.of_scores("lazy_attention", q, k, v, causal=causal, bias=bias, **options)
    inputs = dict(q=q, k=k, v=v, tau=tau, bias=bias)
    return _forward(problem, inputs, ("o", "lse") if return_lse else ("o",), out)


def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    g_gamma: Array | None = None,
    g: Array | None = None,
    initial_state: Array | None = None,
    return_final_state: bool = False,
    out: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Linear ("lightning") attention: o [B, Hq, N, E], and with `return_final_state` the states [S, Hk, D, E].

    Logarithms of decays: `g_gamma` of each head, or `g` of each token. `initial_state` [S, Hk, D, E] of S sequences.
    `scale` is 1 if absent. Equations: docs/linear_attention.md.
    """
    states = dict(initial_state=initial_state, return_final_state=return_final_state)
    problem = _problems.of_linear_attention(q, k, v, g_gamma=g_gamma, g=g, **states, **options)
    inputs = dict(q=q, k=k, v=v, g_gamma=g_gamma, g=g, initial_state=initial_state)
    return _forward(problem, inputs, ("o", "final_state") if return_final_state else ("o",), out)


def linear_cross_entropy(
    h: Array,
    w: Array,
    targets: Array,
    *,
    bias: Array | None = None,
    class_weights: Array | None = None,
    token_weights: Array | None = None,
    out: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """The cross-entropy of logits h wᵀ + bias, which are never stored as a whole: the loss.

    h [T, D], w [V, D], targets [T] (int64 or int32). Options: `reduction` ("mean", "sum", "none"), `ignore_index`
    (−100), `label_smoothing`, `lse_square_scale`, `softcap`, `temperature`, `logit_scale`. Equations:
    docs/linear_cross_entropy.md.
    """
    given = dict(bias=bias, class_weights=class_weights, token_weights=token_weights)
    problem = _problems.of_linear_cross_entropy(h, w, **given, **options)
    return _forward(problem, dict(h=h, w=w, targets=targets, **given), ("loss",), out)
