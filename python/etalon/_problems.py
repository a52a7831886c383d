"""Problems: from keywords, or from the shapes of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ._etalon import Problem

SCORES = ("attention", "attention_lse", "lazy_attention")

# Keywords of other libraries, and what says the same here.
OTHERS = {
    "is_causal": "causal=True counts from the last query and key; PyTorch's is_causal and JAX's count from the first: "
    'mask={"causal": {"align": "top_left"}}',
    "attn_mask": "mask=ARRAY of bool, True where a query sees a key, or bias=ARRAY of numbers to be added",
    "enable_gqa": "nothing: query head h reads key head h // (Hq // Hk)",
    "dropout_p": "nothing: there is no dropout",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "window_size": "window=(left, right), both inclusive and None where open; the one number of "
    "flash-linear-attention counts the query's own key: window=(number - 1, 0)",
    "logits_soft_cap": "softcap",
    "logit_softcapping": "softcap",
    "final_logit_softcapping": "softcap",
    "learnable_sink": "sinks",
    "sink_bias": "sinks",
    "alibi_slopes": "bias=ARRAY of [batch or 1, query heads or 1, queries, keys]",
    "cu_seqlens_q": 'sequences={"packed": {"cu_query": OFFSETS, "cu_key": OFFSETS}} with a batch of 1',
    "cu_seqlens_k": 'sequences={"packed": {"cu_query": OFFSETS, "cu_key": OFFSETS}} with a batch of 1',
    "cu_seqlens": 'sequences={"packed": {"cu_tokens": OFFSETS}} with a batch of 1',
    "return_attn_probs": "return_lse",
    "return_softmax_lse": "return_lse",
    "output_final_state": "return_final_state",
    "ce_weight": "class_weights",
    "weight": "class_weights, of classes; the matrix of classes is w",
}


def unknown(function, names):
    """The error for keywords that a function does not have."""
    name = next(iter(names))
    if name in OTHERS:
        return TypeError(f"{function}() has no `{name}`: {OTHERS[name]}")
    return TypeError(f"{function}() has no `{name}`")


def problem(algorithm: str, /, *, arrays: Mapping[str, Any] | None = None, **keys: Any) -> Problem:
    """A problem, by the keys of a problem file, or by its tensors and the keywords of the function of its name.

    ``problem("attention", batch=1, query_heads=8, key_heads=2, queries=256, keys=256, dim=64, mask={"causal": {}})``
    and ``problem("attention", q=q, k=k, v=v, causal=True)`` are equal for tensors of such shapes. `arrays` are the
    arrays that the mask or the sequences name. Raises ValueError where a key or a value is unknown or does not fit,
    and names it.
    """
    of_tensors = {"attention": "qkv", "attention_lse": "qk", "lazy_attention": "qkv", "linear_attention": "qkv"}
    tensors = of_tensors.get(algorithm, ("h", "w") if algorithm == "linear_cross_entropy" else ())
    if tensors and all(name in keys for name in tensors):
        given = [keys.pop(name) for name in tensors]
        return BY_TENSORS[algorithm](*given, arrays=arrays, **keys)
    return Problem(text_of({"algorithm": algorithm, **keys}), arrays)


def made(problem: Any) -> Problem:
    """The problem itself, or that of a description of `etalon.problems`."""
    return problem if type(problem) is Problem else problem.problem()


def listed(part):
    """Sequences or a mask as in a problem file, of which lengths, offsets and ids may be arrays or tensors: lists."""
    if isinstance(part, dict):
        return {name: listed(x) for name, x in part.items()}
    if isinstance(part, (list, tuple)):
        return [listed(x) for x in part]
    return part.tolist() if hasattr(part, "tolist") else part


def with_names(mask, arrays):
    """A mask of which arrays have names: those that stand in it, as lists or arrays, are added to `arrays`."""
    if not isinstance(mask, dict):
        return mask

    def name(x, dtype):
        if isinstance(x, str):
            return x
        import numpy

        own = f"mask array {len(arrays)}"
        arrays[own] = numpy.asarray(x, dtype) if isinstance(x, list) else x
        return own

    named = dict(mask)
    for kind in ("and", "or"):
        if isinstance(mask.get(kind), (list, tuple)):
            named[kind] = [with_names(x, arrays) for x in mask[kind]]
    if isinstance(mask.get("segments"), dict):
        named["segments"] = {side: name(x, "int64") for side, x in mask["segments"].items()}
    if "array" in mask:
        named["array"] = name(mask["array"], "bool")
    return named


def text_of(keys):
    """A problem in JSON."""
    import json  # it takes longer to import than everything else here

    return json.dumps(keys)


@functools.lru_cache(maxsize=512)
def known(text):
    """The problem of a text without arrays, made once."""
    return Problem(text)


def _made(keys, arrays):
    text = text_of(keys)
    return Problem(text, arrays) if arrays else known(text)


def rows(x, name, axes):
    """The shape of a tensor with so many axes."""
    shape = getattr(x, "shape", None)
    if shape is None or len(shape) != len(axes):
        found = "no array" if shape is None else f"shape {tuple(shape)}"
        raise ValueError(f"`{name}` must have axes [{', '.join(axes)}], found {found}")
    return tuple(shape)


@functools.lru_cache(maxsize=512)
def _of_scores(algorithm, q, k, v, causal, window, scale, softcap, sinks, bias):
    """The keys of a problem whose tensors have these shapes, with a mask that is no tree."""
    (b, h, n, d), (_, hk, m, _) = q, k
    keys = dict(algorithm=algorithm, batch=b, query_heads=h, key_heads=hk, queries=n, keys=m, dim=d)
    if v is not None and v[3] != d:
        keys["value_dim"] = v[3]
    if causal:
        keys["mask"] = {"causal": {}}
    elif window is not None:
        ends = {"left": window[0], "right": window[1]}
        keys["mask"] = {"window": {name: int(end) for name, end in ends.items() if end is not None}}
    keys |= {name: x for name, x in (("softmax_scale", scale), ("softcap", softcap)) if x is not None}
    if sinks:
        keys["sinks"] = True
    if bias is not None:
        keys["bias"] = {"width": bias[1]} if algorithm == "lazy_attention" else {"batch": bias[0], "heads": bias[1]}
    return keys, known(text_of(keys))


def of_scores(
    algorithm,
    q,
    k,
    v,
    *,
    arrays=None,
    causal=False,
    window=None,
    mask=None,
    scale=None,
    softcap=None,
    sinks=None,
    bias=None,
    sequences=None,
    **others,
):
    """The problem of tensors and keywords of attention, attention_lse or lazy attention."""
    if others:
        raise unknown(algorithm, others)
    if (window is not None) + (mask is not None) + bool(causal) > 1:
        raise TypeError('`causal`, `window` and `mask` exclude each other: mask={"and": [...]} has several')
    q, k = rows(q, "q", ("B", "Hq", "N", "D")), rows(k, "k", ("B", "Hk", "M", "D"))
    v = None if v is None else rows(v, "v", ("B", "Hk", "M", "E"))
    if bias is not None:
        bias = rows(bias, "bias", ("Hq", "W") if algorithm == "lazy_attention" else ("B|1", "Hq|1", "N", "M"))
    window = None if window is None else tuple(window)
    keys, own = _of_scores(algorithm, q, k, v, bool(causal), window, scale, softcap, sinks is not None, bias)
    if mask is None and sequences is None:
        return own
    keys, arrays = dict(keys), dict(arrays or {})
    if hasattr(mask, "shape"):
        keys["mask"], arrays["mask"] = {"array": "mask"}, mask
    elif mask is not None:
        keys["mask"] = with_names(mask, arrays)
    if sequences is not None:
        keys["sequences"] = listed(sequences)
    return _made(keys, arrays)


def of_linear_attention(
    q,
    k,
    v,
    *,
    arrays=None,
    g_gamma=None,
    g=None,
    initial_state=None,
    return_final_state=False,
    scale=None,
    sequences=None,
    **others,
):
    """The problem of tensors and keywords of linear attention."""
    if others:
        raise unknown("linear_attention", others)
    b, h, n, d = rows(q, "q", ["B", "Hq", "N", "D"])
    hk, e = rows(k, "k", ["B", "Hk", "N", "D"])[1], rows(v, "v", ["B", "Hk", "N", "E"])[3]
    keys = dict(algorithm="linear_attention", batch=b, query_heads=h, key_heads=hk, tokens=n, dim=d)
    keys |= {} if e == d else {"value_dim": e}
    if g_gamma is not None and g is not None:
        raise TypeError("`g_gamma` (a decay of each head) and `g` (of each token) exclude each other")
    if g_gamma is not None or g is not None:
        keys["decay"] = "per_head" if g is None else "per_token"
    keys |= {"initial_state": True} if initial_state is not None and initial_state is not False else {}
    keys |= {"final_state": True} if return_final_state else {}
    for name, value in (("scale", scale), ("sequences", listed(sequences))):
        if value is not None:
            keys[name] = value
    return _made(keys, arrays)


def of_linear_cross_entropy(h, w, *, arrays=None, **options):
    """The problem of tensors and keywords of linear cross-entropy. A tensor stands for the option that it needs."""
    (t, d), v = rows(h, "h", "TD"), rows(w, "w", "VD")[0]
    flags = {name: True for name in ("bias", "class_weights", "token_weights") if options.pop(name, None) is not None}
    strange = [name for name in options if name in OTHERS]
    if strange:
        raise unknown("linear_cross_entropy", strange)
    options = {name: value for name, value in options.items() if value is not None}
    return _made(dict(algorithm="linear_cross_entropy", tokens=t, dim=d, vocab=v, **flags, **options), arrays)


BY_TENSORS: dict[str, Callable[..., Problem]] = {
    "attention": functools.partial(of_scores, "attention"),
    "attention_lse": lambda q, k, **options: of_scores("attention_lse", q, k, None, **options),
    "lazy_attention": functools.partial(of_scores, "lazy_attention"),
    "linear_attention": of_linear_attention,
    "linear_cross_entropy": of_linear_cross_entropy,
}
