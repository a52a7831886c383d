"""Passes as functions of JAX, with gradients of first and second order.

    import etalon.jax
    o = etalon.jax.attention(q, k, v, causal=True)

float32, bfloat16 and float16 go to the SIMD kernels, float64 (`jax_enable_x64`) to the exact reference. Each pass is a
call of XLA's foreign function interface, which `jax.jit` takes; `jax.vmap` makes one call with all entries. Gradients
may be differentiated again in reverse mode. A derivative that there is not raises: the third order, forward mode
(`jax.jvp`, `jax.jacfwd`, `jax.hessian`), and weights of classes and of tokens. Arrays of a GPU raise, too.
"""

import ctypes
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from . import _algorithms, _etalon

__all__ = ["attention", "attention_lse", "lazy_attention", "linear_attention", "linear_cross_entropy"]

TARGET = "etalon"
ALGORITHMS = {name: _algorithms.Algorithm(name) for name in _algorithms.TABLE}


def _register():
    run, refuse = (jax.ffi.pycapsule(ctypes.c_void_p(address)) for address in _etalon.xla_handlers())
    jax.ffi.register_ffi_target(TARGET, run, platform="cpu", api_version=1)
    for platform in ("CUDA", "ROCM"):
        jax.ffi.register_ffi_target(TARGET, refuse, platform=platform, api_version=1)


_register()


@dataclasses.dataclass(frozen=True)
class Call:
    """A problem of one algorithm. `text` is its file; `problem` lacks an array of its mask."""

    algorithm: _algorithms.Algorithm
    problem: _etalon.Problem
    text: str

    def run(self, pass_, tensors, outputs):
        """The outputs of these names of a pass over tensors by name."""
        table = {name: (shape, precision) for name, _, shape, precision in self.problem.operands(pass_)}
        types = _types(next(tensors[x] for x in ("q", "h") if x in tensors).dtype)
        results = [jax.ShapeDtypeStruct(table[name][0], types[table[name][1]]) for name in outputs]
        call = jax.ffi.ffi_call(TARGET, results, vmap_method="expand_dims")
        names = dict(inputs=" ".join(tensors), outputs=" ".join(outputs))
        return dict(zip(outputs, call(*tensors.values(), problem=self.text, pass_=pass_, **names)))


def _types(storage):
    """The types of tensors beside main tensors of type `storage`."""
    wide = jnp.float64 if storage == jnp.float64 else jnp.float32
    return {"storage": jnp.dtype(storage), "wide": jnp.dtype(wide), "integer": jnp.dtype(jnp.int32)}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Names:
    """Names of tensors beside arrays that JAX keeps."""

    names: tuple


def _opened(call, primals):
    """The tensors that a forward rule is given, and the names of those that are differentiated by."""
    perturbed = tuple(name for name, x in primals.items() if x.perturbed)
    for name in perturbed:
        if name in call.algorithm.fixed:
            raise NotImplementedError(
                f"a gradient by `{name}` is not implemented: hand in jax.lax.stop_gradient({name})"
            )
    return {name: x.value for name, x in primals.items()}, Names(perturbed)


def _nonzero(cotangents):
    return {name: x for name, x in cotangents.items() if type(x) is not SymbolicZero}


# Forward rules call the differentiable functions: their results are differentiated again for the second order.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forward(call, tensors):
    return call.run("forward", tensors, call.algorithm.outputs)


def _forward_kept(call, primals):
    tensors, wanted = _opened(call, primals)
    outputs = _forward(call, tensors)
    return outputs, (tensors, {name: outputs[name] for name in call.algorithm.saved}, wanted)


def _first_order(call, kept, cotangents):
    tensors, saved, wanted = kept
    given = {}
    for y, dy in zip(call.algorithm.outputs, call.algorithm.cotangents):
        x = cotangents[y]
        if type(x) is not SymbolicZero:
            given[dy] = x
        elif y in call.algorithm.needed:
            given[dy] = jnp.zeros(x.aval.shape, x.aval.dtype)
    found = _backward(call, wanted.names, {**tensors, **saved, **given})
    return ({name: found.get("d" + name) for name in tensors},)


_forward.defvjp(_forward_kept, _first_order, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _backward(call, wanted, tensors):
    """Gradients by the tensors of these names."""
    return call.run("backward", tensors, ["d" + name for name in wanted])


def _backward_kept(call, wanted, primals):
    tensors, perturbed = _opened(call, primals)
    return _backward(call, wanted, tensors), (tensors, perturbed)


def _second_order(call, _, kept, seconds):
    """The gradients of gradients, by inputs and cotangents. What the forward pass returned has no share: what depends
    on it is counted as dependent on the inputs."""
    tensors, perturbed = kept
    given = {"d" + name: x for name, x in _nonzero(seconds).items()}
    asked = tuple("g" + name for name in perturbed.names if name not in call.algorithm.saved)
    found = _double_backward(call, asked, {**tensors, **given}) if given and asked else {}
    return ({name: found.get("g" + name) for name in tensors},)


_backward.defvjp(_backward_kept, _second_order, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _double_backward(call, asked, tensors):
    return call.run("double_backward", tensors, asked)


def _no_third_order(call, *_):
    raise NotImplementedError(f"a derivative of third order of {call.algorithm.name} is not implemented")


_double_backward.defvjp(_no_third_order, _no_third_order, symbolic_zeros=True)


# The loss with its gradients for a cotangent of 1: three products of the size of the logits, where a forward and a
# backward pass have four.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(call, tensors):
    return call.run("forward", tensors, ["loss"])["loss"]


def _loss_kept(call, primals):
    tensors, wanted = _opened(call, primals)
    loss, gradients = _both(call, wanted.names, tensors)
    return loss, (tensors, gradients, wanted)


def _loss_first_order(call, kept, dloss):
    tensors, gradients, wanted = kept
    if type(dloss) is SymbolicZero:
        return ({name: None for name in tensors},)
    found = _times(call, wanted.names, {**tensors, "dloss": dloss}, gradients)
    return ({name: found.get("d" + name) for name in tensors},)


_loss.defvjp(_loss_kept, _loss_first_order, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _both(call, wanted, tensors):
    """The loss, and its gradients by the tensors of these names for a cotangent of 1."""
    given = {**tensors, "dloss": _one(tensors)}
    found = call.run("forward_backward", given, ["loss", *("d" + name for name in wanted)])
    return found.pop("loss"), found


def _one(tensors):
    return jnp.ones((), _types(tensors["h"].dtype)["wide"])


def _both_kept(call, wanted, primals):
    tensors, perturbed = _opened(call, primals)
    return _both(call, wanted, tensors), (tensors, perturbed)


def _both_second_order(call, wanted, kept, cotangents):
    tensors, perturbed = kept
    dloss, seconds = cotangents
    found = {}
    if type(dloss) is not SymbolicZero:
        found = _backward(call, perturbed.names, {**tensors, "dloss": dloss})
    (more,) = _second_order(call, wanted, ({**tensors, "dloss": _one(tensors)}, perturbed), seconds)
    gradients = [(name, found.get("d" + name), more[name]) for name in tensors]
    return ({name: x if y is None else y if x is None else x + y for name, x, y in gradients},)


_both.defvjp(_both_kept, _both_second_order, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _times(call, wanted, tensors, gradients):
    """Gradients for a cotangent of 1 times that of the loss: those of the backward pass, and differentiated so."""
    return {name: (x * tensors["dloss"]).astype(x.dtype) for name, x in gradients.items()}


def _times_kept(call, wanted, primals, gradients):
    tensors, perturbed = _opened(call, primals)
    return _times(call, wanted, tensors, {name: x.value for name, x in gradients.items()}), (tensors, perturbed)


def _times_second_order(call, wanted, kept, seconds):
    return (*_second_order(call, wanted, kept, seconds), None)


_times.defvjp(_times_kept, _times_second_order, symbolic_zeros=True)


def _called(name, options, tensors):
    """The call of an algorithm with these options, and its tensors, which fit the problem."""
    algorithm = ALGORITHMS[name]
    tensors = {x: jnp.asarray(tensors[x]) for x in algorithm.inputs if tensors[x] is not None}
    problem = whole = algorithm.problem({x: y for x, y in tensors.items() if x != "mask"}, options)
    mask = tensors.get("mask")
    if mask is not None:
        if mask.dtype != jnp.bool_:
            raise TypeError(f"`mask` must hold bool, found {mask.dtype}")
        whole = algorithm.problem({**tensors, "mask": np.empty(mask.shape, bool)}, options)
    _check(problem, tensors)
    return Call(algorithm, problem, whole.json()), tensors


def _check(problem, tensors):
    """Raises unless tensors have the shapes and types of a problem's forward pass."""
    first = next(x for x in ("q", "h") if x in tensors)
    storage = tensors[first].dtype
    if storage not in [jnp.float64, jnp.float32, jnp.bfloat16, jnp.float16]:
        raise TypeError(f"`{first}` must hold float64, float32, bfloat16 or float16, found {storage}")
    types = _types(storage)
    for name, role, shape, precision in problem.operands("forward"):
        if role != "input":
            continue
        x = tensors[name]
        if x.shape != tuple(shape):
            raise ValueError(f"`{name}` must have shape {shape}, found {list(x.shape)}")
        if precision == "integer" and x.dtype not in (jnp.int32, jnp.int64):
            raise TypeError(f"`{name}` must hold int32 or int64, found {x.dtype}")
        if precision != "integer" and x.dtype != types[precision]:
            raise TypeError(f"`{name}` must hold {types[precision]} beside {first} of {storage}, found {x.dtype}")


def _number(name, value):
    """An option as a number of Python."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"`{name}` must be a number, found a traced array: it is a part of the problem")
    return value.item() if hasattr(value, "item") else value


def _encoded(**options):
    names = tuple(options)
    return _algorithms.encoded(names, tuple(_number(name, options[name]) for name in names))


def _of_scores(name, tensors, causal, window, scale, sequences, softcap=None):
    """The outputs of an algorithm of scores."""
    mask, tree = tensors["mask"], None
    if mask is not None and not hasattr(mask, "shape"):
        tensors["mask"], tree = None, _algorithms.encoded_part(mask)
    ends = None if window is None else tuple(None if end is None else int(end) for end in window)
    given = dict(window=ends, tree=tree, scale=scale, sequences=_algorithms.encoded_part(sequences), softcap=softcap)
    options = _encoded(causal=bool(causal) or None, **given)
    return _forward(*_called(name, options, tensors))


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    mask=None,
    scale=None,
    softcap=None,
    sinks=None,
    bias=None,
    sequences=None,
    return_lse=False,
):
    """Softmax attention: o [B, Hq, N, E], and with `return_lse` lse [B, Hq, N], both differentiable.

    Tensors and keywords are those of `etalon.attention`; `mask` is an array of bool, [B or 1, Hq or 1, N, M], or a
    mask of a problem file; `sequences` has lists or arrays: {"packed": {"cu_query": OFFSETS, "cu_key": OFFSETS}}.
    Numbers, masks of a file and sequences are parts of the problem: no arrays that JAX traces.

    Raises TypeError, ValueError and NotImplementedError as `etalon.attention` does, when JAX traces the call.
    """
    tensors = dict(q=q, k=k, v=v, sinks=sinks, bias=bias, mask=mask)
    found = _of_scores("attention", tensors, causal, window, scale, sequences, softcap)
    return (found["o"], found["lse"]) if return_lse else found["o"]


def attention_lse(
    q, k, *, causal=False, window=None, mask=None, scale=None, softcap=None, sinks=None, bias=None, sequences=None
):
    """The log-sum-exp of attention's scores, lse [B, Hq, N]. Keywords and errors are those of `attention`."""
    tensors = dict(q=q, k=k, sinks=sinks, bias=bias, mask=mask)
    return _of_scores("attention_lse", tensors, causal, window, scale, sequences, softcap)["lse"]


def lazy_attention(
    q, k, v, tau, *, causal=True, window=None, mask=None, scale=None, bias=None, sequences=None, return_lse=False
):
    """Lazy attention with Elastic-Softmax: o [B, Hq, N, E]; tau [Hq], bias [Hq, W] of distances."""
    tensors = dict(q=q, k=k, v=v, tau=tau, bias=bias, mask=mask)
    found = _of_scores("lazy_attention", tensors, causal, window, scale, sequences)
    return (found["o"], found["lse"]) if return_lse else found["o"]


def linear_attention(
    q, k, v, *, g_gamma=None, g=None, initial_state=None, scale=None, sequences=None, return_final_state=False
):
    """Linear ("lightning") attention: o [B, Hq, N, E], and with `return_final_state` the states [S, Hk, D, E] of S
    sequences."""
    tensors = dict(q=q, k=k, v=v, g_gamma=g_gamma, g=g, initial_state=initial_state)
    found = _forward(
        *_called("linear_attention", _encoded(scale=scale, sequences=_algorithms.encoded_part(sequences)), tensors)
    )
    return (found["o"], found["final_state"]) if return_final_state else found["o"]


def linear_cross_entropy(
    h,
    w,
    targets,
    *,
    bias=None,
    class_weights=None,
    token_weights=None,
    reduction=None,
    ignore_index=None,
    label_smoothing=None,
    lse_square_scale=None,
    softcap=None,
    temperature=None,
    logit_scale=None,
):
    """The cross-entropy of logits h wᵀ + bias, which are never stored as a whole: the loss.

    Where a gradient is needed it is computed with the loss, unless `reduction` is "none" or the type is float16, in
    which gradients could underflow before the scale of a loss reaches them. Weights of classes and of tokens have no
    gradients: it raises where one is asked for.
    """
    values = (reduction, ignore_index, label_smoothing, lse_square_scale, softcap, temperature, logit_scale)
    options = _encoded(**dict(zip(_algorithms.OPTIONS_OF_LOSS, values)))
    given = dict(bias=bias, class_weights=class_weights, token_weights=token_weights)
    call, tensors = _called("linear_cross_entropy", options, dict(h=h, w=w, targets=targets, **given))
    if reduction == "none" or tensors["h"].dtype == jnp.float16:
        return _forward(call, tensors)["loss"]
    return _loss(call, tensors)
