"""Passes as PyTorch operators, with gradients of first and second order.

    import etalon.torch
    o = etalon.torch.attention(q, k, v, causal=True)

float32, bfloat16 and float16 go to the SIMD kernels, float64 to the exact reference. Every pass is an operator
(`torch.ops.etalon.attention`, `…_backward`, `…_double_backward`, `…_jvp`) that `torch.compile` takes whole. Gradients
may be differentiated again (`create_graph=True`), outside of `torch.compile`, which refuses that. A derivative that
there is not raises: the third order, and forward mode of all but attention and attention_lse.
"""

import functools

import torch
from torch import Tensor
from torch.autograd import Function

from . import _problems, set_num_threads
from ._sdpa import replace_sdpa

__all__ = [
    "attention",
    "attention_lse",
    "lazy_attention",
    "linear_attention",
    "linear_cross_entropy",
    "replace_sdpa",
    "use_threads_of_torch",
]

LIBRARY = torch.library.Library("etalon", "DEF")


def use_threads_of_torch():
    """Gives etalon as many threads as PyTorch has: one works while the other waits."""
    set_num_threads(torch.get_num_threads())


def like(x, shape):
    """An empty tensor whose heads and rows lie as those of `x` do: no reshape behind it copies."""
    if len(shape) == 4 and x.dim() == 4 and x.stride(1) < x.stride(2):
        b, h, n, d = shape
        return x.new_empty((b, n, h, d)).transpose(1, 2)
    return x.new_empty(shape)


def wide(x):
    """The type of sums beside main tensors of the type of `x`."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class Algorithm:
    """An algorithm: its tensors, and how the problem and the shapes of results follow from them.

    `inputs` are the names of the tensors of its forward pass, with "?" those that may be absent; `fixed` those without
    derivatives. An output is read again by later passes if it is in `saved`; its cotangent may be absent unless it is
    in `needed`. `problem(tensors, options)` is the problem; `results(tensors, options)` are empty outputs.
    """

    def __init__(self, name, inputs, outputs, saved, needed, problem, results, fixed=(), is_forward_mode=False):
        self.name, self.problem, self.results, self.outputs = name, problem, results, outputs
        self.inputs = [x.rstrip("?") for x in inputs]
        self.optional = [x.endswith("?") for x in inputs]
        self.saved, self.needed, self.fixed, self.is_forward_mode = saved, needed, fixed, is_forward_mode
        self.smooth = [x for x in self.inputs if x not in fixed]
        self.cotangents = [{"o": "dout", "final_state": "dfinal_state"}.get(y, "d" + y) for y in outputs]
        self.gradients = ["d" + x for x in self.smooth]
        self.seconds = ["dd" + x for x in self.smooth]
        self.second_gradients = ["g" + x for x in self.smooth] + ["g" + dy for dy in self.cotangents]
        self.given = self.inputs + list(saved) + self.cotangents
        self.ops = {}

    def define(self):
        """Defines its operators with their kernels and fake kernels."""

        def tensors(names, optional):
            return ", ".join(f"Tensor{'?' if may else ''} {name}" for name, may in zip(names, optional))

        inputs = tensors(self.inputs, self.optional)
        late = [y not in self.needed for y in self.outputs]
        given = ", ".join([inputs, *(f"Tensor {y}" for y in self.saved), tensors(self.cotangents, late)])
        seconds = tensors(self.seconds, [True] * len(self.seconds))
        tangents = tensors(["t" + x for x in self.smooth], [True] * len(self.smooth))
        several = lambda count: "(" + ", ".join(["Tensor"] * count) + ")" if count > 1 else "Tensor"
        self._define("forward", self.name, inputs, several(len(self.outputs)))
        self._define("backward", f"{self.name}_backward", f"{given}, int wanted", several(len(self.gradients)))
        second = several(len(self.second_gradients))
        self._define("double_backward", f"{self.name}_double_backward", f"{given}, {seconds}", second)
        if self.is_forward_mode:
            kept = ", ".join([inputs, *(f"Tensor {y}" for y in self.saved), tangents])
            self._define("jvp", f"{self.name}_jvp", kept, several(len(self.outputs)))

    def _define(self, pass_, name, arguments, results):
        LIBRARY.define(f"{name}({arguments}, str options) -> {results}")
        kernel, fake = getattr(self, f"_{pass_}"), getattr(self, f"_empty_{pass_}")
        LIBRARY.impl(name, lambda *x: alone(kernel(*x)), "CPU")
        LIBRARY.impl(name, self._on_a_device, "CUDA")
        torch.library.register_fake(f"etalon::{name}", lambda *x: alone(fake(*x)), lib=LIBRARY)
        self.ops[pass_] = getattr(torch.ops.etalon, name).default

    def _on_a_device(self, *_):
        raise NotImplementedError(f"etalon.torch.{self.name} takes tensors of the CPU so far, found tensors of CUDA")

    def _named(self, names, tensors):
        return {name: x for name, x in zip(names, tensors) if x is not None}

    def _run(self, pass_, inputs, options, outputs):
        """Computes outputs that are wanted; an unwanted or absent one is a tensor without elements."""
        operands = {name: x for name, x in inputs.items() if name != "mask"}
        self.problem(inputs, options).run(pass_, operands, {name: x for name, x in outputs.items() if x is not None})
        first = inputs[self.inputs[0]]
        return tuple(first.new_empty(0) if x is None else x for x in outputs.values())

    def _forward(self, *arguments):
        *tensors, options = arguments
        inputs = self._named(self.inputs, tensors)
        return self._run("forward", inputs, options, dict(zip(self.outputs, self.results(inputs, options))))

    def _empty_forward(self, *arguments):
        *tensors, options = arguments
        return tuple(self.results(self._named(self.inputs, tensors), options))

    def _gradients(self, inputs, wanted):
        """Empty gradients of the inputs, None for those that are absent or not wanted."""
        empty = {}
        for at, x in enumerate(self.smooth):
            is_there = inputs.get(x) is not None and wanted >> at & 1
            empty["d" + x] = like(inputs[x], inputs[x].shape) if is_there else None
        return empty

    def _backward(self, *arguments):
        *tensors, wanted, options = arguments
        given = self._named(self.given, tensors)
        return self._run("backward", given, options, self._gradients(given, wanted))

    def _empty_backward(self, *arguments):
        *tensors, wanted, _ = arguments
        given = self._named(self.given, tensors)
        return tuple(
            given[self.inputs[0]].new_empty(0) if x is None else x for x in self._gradients(given, wanted).values()
        )

    def _seconds(self, given):
        empty = {"g" + x: None if given.get(x) is None else like(given[x], given[x].shape) for x in self.smooth}
        for dy in self.cotangents:
            empty["g" + dy] = None if given.get(dy) is None else like(given[dy], given[dy].shape)
        return empty

    def _double_backward(self, *arguments):
        *tensors, options = arguments
        given = self._named(self.given + self.seconds, tensors)
        return self._run("double_backward", given, options, self._seconds(given))

    def _empty_double_backward(self, *arguments):
        *tensors, _ = arguments
        given = self._named(self.given + self.seconds, tensors)
        return tuple(given[self.inputs[0]].new_empty(0) if x is None else x for x in self._seconds(given).values())

    def _jvp(self, *arguments):
        *tensors, options = arguments
        given = self._named(self.inputs + list(self.saved) + ["t" + x for x in self.smooth], tensors)
        tangents = {"t" + y: torch.empty_like(given[y]) for y in self.outputs}
        return self._run("jvp", given, options, tangents)

    def _empty_jvp(self, *arguments):
        *tensors, _ = arguments
        given = self._named(self.inputs + list(self.saved), tensors)
        return tuple(torch.empty_like(given[y]) for y in self.outputs)

    def apply(self, options, *tensors):
        """The forward pass, differentiable."""
        if torch.compiler.is_compiling():
            found = self.ops["forward"](*tensors, options)
            return found if isinstance(found, tuple) else (found,)
        return Forward.apply(self, options, *tensors)


def alone(results):
    """The one result, where an operator has one."""
    return results[0] if len(results) == 1 else results


def together(results):
    return results if isinstance(results, tuple) else (results,)


def bits(flags):
    return sum(1 << at for at, flag in enumerate(flags) if flag)


def first_order(algorithm, ctx, needs, cotangents, compute):
    """Gradients of the inputs, None where there is no need: `compute` has the backward pass."""
    tensors = ctx.saved_tensors
    filled = [
        tensors[0].new_zeros(shape, dtype=dtype) if dy is None and y in algorithm.needed else dy
        for y, dy, (shape, dtype) in zip(algorithm.outputs, cotangents, ctx.shapes)
    ]
    smooth = [x not in algorithm.fixed for x in algorithm.inputs]
    wanted = bits(need for need, is_smooth in zip(needs, smooth) if is_smooth)
    found = iter(together(compute(tensors, filled, wanted)))
    gradients = [next(found) if is_smooth else None for is_smooth in smooth]
    return [dx if need else None for dx, need in zip(gradients, needs)]


def second_order(algorithm, ctx, needs, seconds, compute):
    """Gradients of what the backward pass reads: `compute` has the double backward pass."""
    tensors = ctx.saved_tensors
    seconds = [dd if ctx.wanted >> at & 1 else None for at, dd in enumerate(seconds)]
    found = dict(zip(algorithm.second_gradients, together(compute(tensors, seconds))))
    gradients = [found.get("g" + name) for name in algorithm.given]
    return [g if x is not None and need else None for g, x, need in zip(gradients, tensors, needs)]


class Forward(Function):
    """The forward pass of an algorithm."""

    @staticmethod
    def forward(algorithm, options, *tensors):
        return together(algorithm.ops["forward"](*tensors, options))

    @staticmethod
    def setup_context(ctx, inputs, output):
        algorithm, options, *tensors = inputs
        kept = [y for name, y in zip(algorithm.outputs, output) if name in algorithm.saved]
        ctx.algorithm, ctx.options = algorithm, options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *kept)
        ctx.save_for_forward(*tensors, *kept)
        ctx.shapes = [(y.shape, y.dtype) for y in output]

    @staticmethod
    def backward(ctx, *cotangents):
        compute = lambda tensors, filled, wanted: Backward.apply(ctx.algorithm, ctx.options, wanted, *tensors, *filled)
        return (None, None, *first_order(ctx.algorithm, ctx, ctx.needs_input_grad[2:], cotangents, compute))

    @staticmethod
    def jvp(ctx, *tangents):
        algorithm = ctx.algorithm
        if not algorithm.is_forward_mode:
            raise NotImplementedError(f"forward mode of {algorithm.name} is not implemented")
        smooth = [t for x, t in zip(algorithm.inputs, tangents[2:]) if x not in algorithm.fixed]
        return Jvp.apply(algorithm, ctx.options, *ctx.saved_tensors, *smooth)

    @staticmethod
    def vmap(info, in_dims, algorithm, options, *tensors):
        apply = lambda *x: Forward.apply(algorithm, options, *x)
        return mapped(algorithm, info.batch_size, in_dims[2:], tensors, apply)


class Backward(Function):
    """The gradients of an algorithm: of an input that is absent, or not wanted, a tensor without elements."""

    @staticmethod
    def forward(algorithm, options, wanted, *tensors):
        return together(algorithm.ops["backward"](*tensors, wanted, options))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.algorithm, ctx.options, ctx.wanted, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, *seconds):
        compute = lambda tensors, seconds: Second.apply(ctx.algorithm, ctx.options, *tensors, *seconds)
        return (None, None, None, *second_order(ctx.algorithm, ctx, ctx.needs_input_grad[3:], seconds, compute))

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(f"forward mode of the gradients of {ctx.algorithm.name} is not implemented")

    @staticmethod
    def vmap(info, in_dims, algorithm, options, wanted, *tensors):
        apply = lambda *x: Backward.apply(algorithm, options, wanted, *x)
        return mapped(algorithm, info.batch_size, in_dims[3:], tensors, apply)


class Last(Function):
    """A pass without derivatives."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.algorithm = inputs[0]

    @classmethod
    def backward(cls, ctx, *_):
        raise NotImplementedError(f"{cls.what.format(ctx.algorithm.name)} is not implemented")

    jvp = backward


class Second(Last):
    """The gradients of the gradients."""

    what = "a derivative of third order of {}"

    @staticmethod
    def forward(algorithm, options, *tensors):
        return together(algorithm.ops["double_backward"](*tensors, options))

    @staticmethod
    def vmap(info, in_dims, algorithm, options, *tensors):
        apply = lambda *x: Second.apply(algorithm, options, *x)
        return mapped(algorithm, info.batch_size, in_dims[2:], tensors, apply)


class Jvp(Last):
    """The tangents of the outputs."""

    what = "a derivative of the forward mode of {}"

    @staticmethod
    def forward(algorithm, options, *tensors):
        return together(algorithm.ops["jvp"](*tensors, options))

    @staticmethod
    def vmap(info, in_dims, algorithm, options, *tensors):
        apply = lambda *x: Jvp.apply(algorithm, options, *x)
        return mapped(algorithm, info.batch_size, in_dims[2:], tensors, apply)


def mapped(algorithm, size, dims, tensors, apply):
    """One call for each entry of the axis that is mapped."""
    entries = []
    for at in range(size):
        chosen = [x if dim is None or x is None else x.select(dim, at) for x, dim in zip(tensors, dims)]
        entries.append(apply(*chosen))
    results = tuple(torch.stack(list(entry)) for entry in zip(*entries))
    return results, (0,) * len(results)


def _of_scores(name):
    def problem(tensors, options):
        keywords = dict(decoded(options))
        given = {x: tensors.get(x) for x in ("bias", "sinks", "mask")}
        tree = keywords.pop("tree", None)
        given["mask"] = given["mask"] if tree is None else decoded(tree)
        return _problems.of_scores(name, tensors["q"], tensors["k"], tensors.get("v"), **given, **keywords)

    return problem


def _rows(tensors, _):
    q, v = tensors["q"], tensors["v"]
    return [like(q, (*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide(q))]


def _row_sums(tensors, _):
    q = tensors["q"]
    return [q.new_empty(q.shape[:3], dtype=wide(q))]


def _states(tensors, options):
    q, k, v = (tensors[name] for name in "qkv")
    o = like(q, (*q.shape[:3], v.shape[3]))
    state = q.new_empty((q.shape[0], k.shape[1], k.shape[3], v.shape[3]), dtype=wide(q))
    return [o, state]


def _of_tokens(tensors, options):
    given = {name: tensors.get(name) for name in ("g_gamma", "g", "initial_state")}
    return _problems.of_linear_attention(
        tensors["q"], tensors["k"], tensors["v"], return_final_state=True, **given, **decoded(options)
    )


def _loss(tensors, options):
    h = tensors["h"]
    tokens = decoded(options).get("reduction") == "none"
    return [h.new_empty(h.shape[:1] if tokens else (), dtype=wide(h))]


def _of_classes(tensors, options):
    given = {name: tensors.get(name) for name in ("bias", "class_weights", "token_weights")}
    return _problems.of_linear_cross_entropy(tensors["h"], tensors["w"], **given, **decoded(options))


@functools.lru_cache(maxsize=512)
def _encoded(names, values):
    return _problems.text_of({name: value for name, value in zip(names, values) if value is not None})


@torch.compiler.assume_constant_result
def encoded(names, values):
    """Options as the text that an operator takes."""
    return _encoded(names, values)


@torch.compiler.assume_constant_result
def encoded_tree(mask):
    """A mask of a problem file as text."""
    return _problems.text_of(mask)


@functools.lru_cache(maxsize=512)
def decoded(options):
    """The options of a text."""
    import json

    return json.loads(options)


ATTENTION = Algorithm(
    "attention",
    ["q", "k", "v", "sinks?", "bias?", "mask?"],
    ["o", "lse"],
    ["o", "lse"],
    ["o"],
    _of_scores("attention"),
    _rows,
    fixed=("mask",),
    is_forward_mode=True,
)
LSE = Algorithm(
    "attention_lse",
    ["q", "k", "sinks?", "bias?", "mask?"],
    ["lse"],
    ["lse"],
    ["lse"],
    _of_scores("attention_lse"),
    _row_sums,
    fixed=("mask",),
    is_forward_mode=True,
)
LAZY = Algorithm(
    "lazy_attention",
    ["q", "k", "v", "tau", "bias?", "mask?"],
    ["o", "lse"],
    ["lse"],
    ["o"],
    _of_scores("lazy_attention"),
    _rows,
    fixed=("mask",),
)
LINEAR = Algorithm(
    "linear_attention",
    ["q", "k", "v", "g_gamma?", "g?", "initial_state?"],
    ["o", "final_state"],
    [],
    ["o", "final_state"],
    _of_tokens,
    _states,
)
LOSS = Algorithm(
    "linear_cross_entropy",
    ["h", "w", "targets", "bias?", "class_weights?", "token_weights?"],
    ["loss"],
    [],
    ["loss"],
    _of_classes,
    _loss,
    fixed=("targets", "class_weights", "token_weights"),
)


def _setup(algorithm):
    """The operators with autograd formulas of their own, for `torch.compile`."""

    def setup_forward(ctx, inputs, output):
        *tensors, ctx.options = inputs
        output = together(output)
        kept = [y for name, y in zip(algorithm.outputs, output) if name in algorithm.saved]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *kept)
        ctx.shapes = [(y.shape, y.dtype) for y in output]

    def backward(ctx, *cotangents):
        compute = lambda tensors, filled, wanted: algorithm.ops["backward"](*tensors, *filled, wanted, ctx.options)
        return (*first_order(algorithm, ctx, ctx.needs_input_grad[:-1], cotangents, compute), None)

    def setup_backward(ctx, inputs, output):
        *tensors, ctx.wanted, ctx.options = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)

    def double_backward(ctx, *seconds):
        compute = lambda tensors, seconds: algorithm.ops["double_backward"](*tensors, *seconds, ctx.options)
        return (*second_order(algorithm, ctx, ctx.needs_input_grad[:-2], seconds, compute), None, None)

    def no_third(ctx, *_):
        raise NotImplementedError(f"a derivative of third order of {algorithm.name} is not implemented")

    algorithm.define()
    name = f"etalon::{algorithm.name}"
    torch.library.register_autograd(name, backward, setup_context=setup_forward, lib=LIBRARY)
    torch.library.register_autograd(f"{name}_backward", double_backward, setup_context=setup_backward, lib=LIBRARY)
    torch.library.register_autograd(f"{name}_double_backward", no_third, lib=LIBRARY)
    if algorithm.is_forward_mode:
        torch.library.register_autograd(f"{name}_jvp", no_third, lib=LIBRARY)


for _algorithm in (ATTENTION, LSE, LAZY, LINEAR, LOSS):
    _setup(_algorithm)

# The loss with its gradients for a cotangent of 1: three products of the size of the logits, where a forward and a
# backward pass have four.
_BOTH = "linear_cross_entropy_forward_backward"
LIBRARY.define(
    f"{_BOTH}(Tensor h, Tensor w, Tensor targets, Tensor? bias, Tensor? class_weights, Tensor? token_weights, "
    "int wanted, str options) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _both(*arguments):
    *tensors, wanted, options = arguments
    inputs = LOSS._named(LOSS.inputs, tensors)
    places = {"loss": LOSS.results(inputs, options)[0], **LOSS._gradients(inputs, wanted)}
    one = torch.ones((), dtype=wide(inputs["h"]))
    return LOSS._run("forward_backward", inputs | {"dloss": one}, options, places)


def _empty_both(*arguments):
    *tensors, wanted, options = arguments
    inputs = LOSS._named(LOSS.inputs, tensors)
    gradients = LOSS._gradients(inputs, wanted).values()
    return (*LOSS.results(inputs, options), *(inputs["h"].new_empty(0) if x is None else x for x in gradients))


LIBRARY.impl(_BOTH, _both, "CPU")
LIBRARY.impl(_BOTH, LOSS._on_a_device, "CUDA")
torch.library.register_fake(f"etalon::{_BOTH}", _empty_both, lib=LIBRARY)
LOSS.ops["forward_backward"] = getattr(torch.ops.etalon, _BOTH).default


def _times(gradients, dloss):
    """Gradients times the cotangent of the loss, by dh, dw and dbias."""
    is_one = not torch.compiler.is_compiling() and bool(dloss == 1)
    return [x if is_one or x.numel() == 0 else (x * dloss).to(x.dtype) for x in gradients]


def _setup_both(ctx, inputs, output):
    *tensors, ctx.wanted, ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[1:])


def _backward_both(ctx, dloss, *_):
    dh, dw, dbias = _times(ctx.saved_tensors[6:], dloss)
    found = [dh, dw, None, dbias, None, None]
    return (*(dx if need else None for dx, need in zip(found, ctx.needs_input_grad)), None, None)


torch.library.register_autograd(f"etalon::{_BOTH}", _backward_both, setup_context=_setup_both, lib=LIBRARY)


class Loss(Function):
    """The loss, whose gradients are computed with it. They are differentiated by the passes one after the other."""

    @staticmethod
    def forward(options, wanted, *tensors):
        return LOSS.ops["forward_backward"](*tensors, wanted, options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.options, ctx.wanted, *tensors = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[1:])

    @staticmethod
    def backward(ctx, dloss, *_):
        tensors, gradients = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
        if dloss is None:
            return (None,) * 8
        if torch.is_grad_enabled():
            gradients = Backward.apply(LOSS, ctx.options, ctx.wanted, *tensors, dloss)
        else:
            gradients = _times(gradients, dloss)
        found = [gradients[0], gradients[1], None, gradients[2], None, None]
        return (None, None, *(dx if need else None for dx, need in zip(found, ctx.needs_input_grad[2:])))

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError("forward mode of linear_cross_entropy is not implemented")

    @staticmethod
    def vmap(info, in_dims, options, wanted, *tensors):
        apply = lambda *x: Loss.apply(options, wanted, *x)
        return mapped(LOSS, info.batch_size, in_dims[2:], tensors, apply)


def _score_options(causal, window, mask, scale, softcap=None):
    tree = None if mask is None or isinstance(mask, Tensor) else encoded_tree(mask)
    ends = None if window is None else tuple(window)
    names = ("causal", "window", "tree", "scale", "softcap")
    return encoded(names, (bool(causal) or None, ends, tree, scale, softcap)), mask if tree is None else None


def attention(
    q, k, v, *, causal=False, window=None, mask=None, scale=None, softcap=None, sinks=None, bias=None, return_lse=False
):
    """Softmax attention: o [B, Hq, N, E], and with `return_lse` lse [B, Hq, N], both differentiable.

    Tensors and keywords are those of `etalon.attention`; `mask` is a tensor of bool, [B or 1, Hq or 1, N, M].
    """
    options, mask = _score_options(causal, window, mask, scale, softcap)
    o, lse = ATTENTION.apply(options, q, k, v, sinks, bias, mask)
    return (o, lse) if return_lse else o


def attention_lse(q, k, *, causal=False, window=None, mask=None, scale=None, softcap=None, sinks=None, bias=None):
    """The log-sum-exp of attention's scores, lse [B, Hq, N]."""
    options, mask = _score_options(causal, window, mask, scale, softcap)
    return LSE.apply(options, q, k, sinks, bias, mask)[0]


def lazy_attention(q, k, v, tau, *, causal=True, window=None, mask=None, scale=None, bias=None, return_lse=False):
    """Lazy attention with Elastic-Softmax: o [B, Hq, N, E]; tau [Hq], bias [Hq, W] of distances."""
    options, mask = _score_options(causal, window, mask, scale)
    o, lse = LAZY.apply(options, q, k, v, tau, bias, mask)
    return (o, lse) if return_lse else o


def linear_attention(q, k, v, *, g_gamma=None, g=None, initial_state=None, scale=None, return_final_state=False):
    """Linear ("lightning") attention: o [B, Hq, N, E], and with `return_final_state` the states [B, Hk, D, E]."""
    o, state = LINEAR.apply(encoded(("scale",), (scale,)), q, k, v, g_gamma, g, initial_state)
    return (o, state) if return_final_state else o


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

    Where a gradient is needed it is computed with the loss, unless `reduction` is "none". Weights of classes and of
    tokens have no gradients: it raises where one is asked for.
    """
    names = (
        "reduction",
        "ignore_index",
        "label_smoothing",
        "lse_square_scale",
        "softcap",
        "temperature",
        "logit_scale",
    )
    values = (reduction, ignore_index, label_smoothing, lse_square_scale, softcap, temperature, logit_scale)
    for name, x in (("class_weights", class_weights), ("token_weights", token_weights)):
        if x is not None and x.requires_grad:
            raise NotImplementedError(f"a gradient by `{name}` is not implemented: hand in {name}.detach()")
    options, tensors = encoded(names, values), (h, w, targets, bias, class_weights, token_weights)
    needs = [x is not None and x.requires_grad for x in (h, w, bias)]
    if reduction == "none" or not (torch.is_grad_enabled() and any(needs)):
        return LOSS.apply(options, *tensors)[0]
    if torch.compiler.is_compiling():
        return LOSS.ops["forward_backward"](*tensors, bits(needs), options)[0]
    return Loss.apply(options, bits(needs), *tensors)[0]
