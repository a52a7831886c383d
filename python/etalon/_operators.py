"""PyTorch operators of every algorithm, from one table, and their derivatives."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from . import _algorithms

LIBRARY = torch.library.Library("etalon", "DEF")


def like(x, shape):
    """An empty tensor whose heads and rows lie as those of `x` do: no reshape behind it copies."""
    if x.shape == shape:
        return torch.empty_like(x)
    if len(shape) == 4 and x.dim() == 4 and x.stride(1) < x.stride(2):
        b, h, n, d = shape
        return x.new_empty((b, n, h, d)).transpose(1, 2)
    return x.new_empty(shape)


def wide(x):
    """The type of sums beside main tensors of the type of `x`."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class Operators(_algorithms.Algorithm):
    """The operators of an algorithm, by pass in `ops`. `results(tensors, options)` are empty outputs."""

    def __init__(self, name, results):
        super().__init__(name)
        self.results, self.ops = results, {}
        self.places = [self.inputs.index(x) for x in self.smooth]

    def define(self, pass_):
        """Defines the operator of a pass with its kernel and its fake kernel, and returns its name."""
        name = self.name if pass_ == "forward" else f"{self.name}_{pass_}"
        always = {*self.saved, *(x for x, may in zip(self.inputs, self.optional) if not may)}
        always |= {dy for y, dy in zip(self.outputs, self.cotangents) if y in self.needed}
        arguments = [f"Tensor{'' if x in always else '?'} {x}" for x in self.reads[pass_]]
        arguments += ["int wanted"] * (pass_ in WANTED) + ["str options"]
        count = {
            "forward": len(self.outputs),
            "forward_backward": len(self.outputs) + len(self.smooth),
            "backward": len(self.smooth),
            "double_backward": len(self.second_gradients),
            "jvp": len(self.outputs),
        }[pass_]
        results = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
        LIBRARY.define(f"{name}({', '.join(arguments)}) -> {results}")
        for device in ("CPU", "CUDA"):
            LIBRARY.impl(name, lambda *x: self._run(pass_, x), device)
        fake = lambda *x: complete(*self._asked(pass_, x)[::2])
        torch.library.register_fake(f"etalon::{name}", fake, lib=LIBRARY)
        self.ops[pass_] = getattr(torch.ops.etalon, name).default
        return f"etalon::{name}"

    def _asked(self, pass_, arguments):
        """The inputs of an operator by name, its options, and empty outputs, None for those absent or not wanted."""
        *tensors, options = arguments
        wanted = tensors.pop() if pass_ in WANTED else 0
        inputs = {name: x for name, x in zip(self.reads[pass_], tensors) if x is not None}
        empty = {}
        if pass_ in ("forward", "forward_backward"):
            empty = dict(zip(self.outputs, self.results(inputs, options)))
        if pass_ in WANTED:
            empty |= {"d" + x: alike(inputs, x) if wanted >> at & 1 else None for at, x in enumerate(self.smooth)}
        if pass_ == "double_backward":
            empty = {"g" + x: alike(inputs, x) for x in self.smooth + self.cotangents}
        if pass_ == "jvp":
            empty = {"t" + y: torch.empty_like(inputs[y]) for y in self.outputs}
        return inputs, options, empty

    def _run(self, pass_, arguments):
        inputs, options, outputs = self._asked(pass_, arguments)
        operands, places = dict(inputs), {name: x for name, x in outputs.items() if x is not None}
        mask = operands.pop("mask", None)
        if pass_ == "forward_backward":
            operands["dloss"] = inputs["h"].new_ones((), dtype=wide(inputs["h"]))
        if mask is not None and not next(iter(inputs.values())).is_cpu:
            inputs["mask"], operands["mask"] = mask_like(mask), mask.contiguous()
        compute(self.problem(inputs, options), pass_, operands, places)
        return complete(operands, outputs)

    def apply(self, options, *tensors):
        """The forward pass, differentiable."""
        if torch.compiler.is_compiling():
            return together(self.ops["forward"](*tensors, options))
        if not is_plain(tensors):
            return applied(Forward, self, options, *tensors)
        if is_differentiated(tensors):
            return in_one_step(PlainForward).apply(self, options, *tensors)
        return together(self._run("forward", (*tensors, options)))

    def call(self, pass_, *arguments):
        """The results of a pass, by its operator where somebody may look at the call, else by its kernel: the way
        through PyTorch's dispatcher takes longer than a small pass."""
        run = self._run if is_plain(arguments) else lambda pass_, arguments: self.ops[pass_](*arguments)
        return together(run(pass_, arguments))


def compute(problem, pass_, inputs, outputs):
    """Runs a pass on the device of its tensors: on that of the CPU, or on the current stream of a GPU."""
    if next(iter(inputs.values())).is_cpu:
        problem.run(pass_, inputs, outputs)
        return
    from . import _device

    _device.run(problem, pass_, inputs, outputs)


def mask_like(mask):
    """The mask of the problem of a pass whose `mask` lies on a GPU, which reads its elements in every call."""
    return torch.ones(mask.shape, dtype=torch.bool)


PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(arguments):
    """True if all tensors are plain ones in memory, and no mode, no transformation and no subclass sees calls."""
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    for x in arguments:
        if x is not None and isinstance(x, Tensor) and not (x.__class__ in PLAIN and (x.is_cpu or x.is_cuda)):
            return False
    return True


def is_differentiated(tensors):
    """True if a derivative of results may be asked for: backwards, or in forward mode."""
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


# Passes that are told which gradients are wanted, by bits.
WANTED = ("backward", "forward_backward")


def alike(tensors, name):
    """An empty tensor like one of these, if it is there."""
    x = tensors.get(name)
    return None if x is None else torch.empty_like(x)


def complete(inputs, outputs):
    """The outputs of an operator: what is absent or not wanted is a tensor without elements."""
    results = []
    for x in outputs.values():
        results.append(next(iter(inputs.values())).new_empty(0) if x is None else x)
    return results[0] if len(results) == 1 else tuple(results)


def together(results):
    return results if isinstance(results, tuple) else (results,)


def bits(flags):
    return sum(1 << at for at, flag in enumerate(flags) if flag)


def by_inputs(algorithm, gradients, needs):
    """Gradients of the smooth inputs in the places of all inputs, None where there is no need."""
    found = [None] * len(algorithm.inputs)
    for place, gradient in zip(algorithm.places, gradients):
        if needs[place]:
            found[place] = gradient
    return found


def keep(ctx, algorithm, options, tensors, output):
    """Keeps what the later passes read, and returns it."""
    ctx.algorithm, ctx.options = algorithm, options
    ctx.shapes = [(y.shape, y.dtype) for y in output]
    ctx.set_materialize_grads(False)
    kept = (*tensors, *(y for name, y in zip(algorithm.outputs, output) if name in algorithm.saved))
    ctx.save_for_backward(*kept)
    return kept


def first_order(ctx, needs, cotangents, compute):
    """Gradients of the inputs, None where there is no need: `compute` has the backward pass."""
    algorithm, tensors = ctx.algorithm, ctx.saved_tensors
    filled = [
        tensors[0].new_zeros(shape, dtype=dtype) if dy is None and y in algorithm.needed else dy
        for y, dy, (shape, dtype) in zip(algorithm.outputs, cotangents, ctx.shapes)
    ]
    wanted = bits([needs[place] for place in algorithm.places])
    return by_inputs(algorithm, together(compute(tensors, filled, wanted)), needs)


def second_order(ctx, needs, seconds, compute):
    """Gradients of what the backward pass reads: `compute` has the double backward pass."""
    algorithm, tensors = ctx.algorithm, ctx.saved_tensors
    seconds = [dd if ctx.wanted >> at & 1 else None for at, dd in enumerate(seconds)]
    found = dict(zip(algorithm.second_gradients, together(compute(tensors, seconds))))
    gradients = [found.get("g" + name) for name in algorithm.reads["backward"]]
    return [g if x is not None and need else None for g, x, need in zip(gradients, tensors, needs)]


class Mapped(Function):
    """A pass that `vmap` calls once for each entry."""

    @classmethod
    def vmap(cls, info, in_dims, *arguments):
        entries = []
        for at in range(info.batch_size):
            pairs = zip(arguments, in_dims)
            entries.append(cls.apply(*(x if dim is None or x is None else x.select(dim, at) for x, dim in pairs)))
        results = tuple(torch.stack(entry) for entry in zip(*entries))
        return results, (0,) * len(results)


@functools.cache
def in_one_step(function):
    """The same function with a `forward` that sets its context up: PyTorch takes 25 µs to bind the arguments of the
    other form, which `torch.func` needs."""

    class InOneStep(function):
        @staticmethod
        def forward(ctx, *arguments):
            output = function.forward(*arguments)
            function.setup_context(ctx, arguments, output)
            return output

        setup_context = staticmethod(Function.setup_context)

    InOneStep.__name__ = InOneStep.__qualname__ = function.__name__
    return InOneStep


def applied(function, *arguments):
    """Results of a function that PyTorch differentiates."""
    if not torch._C._are_functorch_transforms_active():
        function = in_one_step(function)
    return function.apply(*arguments)


class Forward(Mapped):
    """The forward pass of an algorithm."""

    @staticmethod
    def forward(algorithm, options, *tensors):
        return algorithm.call("forward", *tensors, options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        algorithm, options, *tensors = inputs
        kept = keep(ctx, algorithm, options, tensors, output)
        if torch.autograd.forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
            ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx, *cotangents):
        def compute(tensors, filled, wanted):
            given = (*tensors, *filled)
            if is_plain(given) and not is_differentiated(given):
                return ctx.algorithm._run("backward", (*given, wanted, ctx.options))
            return applied(Backward, ctx.algorithm, ctx.options, wanted, *given)

        return (None, None, *first_order(ctx, ctx.needs_input_grad[2:], cotangents, compute))

    @staticmethod
    def jvp(ctx, *tangents):
        algorithm = ctx.algorithm
        if not algorithm.is_forward_mode:
            raise NotImplementedError(f"forward mode of {algorithm.name} is not implemented")
        smooth = [t for x, t in zip(algorithm.inputs, tangents[2:]) if x not in algorithm.fixed]
        return Jvp.apply(algorithm, ctx.options, *ctx.saved_tensors, *smooth)


class PlainForward(Forward):
    """The same of tensors that nobody else looks at."""

    @staticmethod
    def forward(algorithm, options, *tensors):
        return together(algorithm._run("forward", (*tensors, options)))


class Backward(Mapped):
    """The gradients of an algorithm: of an input that is absent, or not wanted, a tensor without elements."""

    @staticmethod
    def forward(algorithm, options, wanted, *tensors):
        return algorithm.call("backward", *tensors, wanted, options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.algorithm, ctx.options, ctx.wanted, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, *seconds):
        compute = lambda tensors, seconds: Second.apply(ctx.algorithm, ctx.options, *tensors, *seconds)
        return (None, None, None, *second_order(ctx, ctx.needs_input_grad[3:], seconds, compute))

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(f"forward mode of the gradients of {ctx.algorithm.name} is not implemented")


class Last(Mapped):
    """A pass without derivatives: its name, and what its derivative would be."""

    @classmethod
    def forward(cls, algorithm, options, *tensors):
        return algorithm.call(cls.pass_, *tensors, options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.algorithm = inputs[0]

    @classmethod
    def backward(cls, ctx, *_):
        raise NotImplementedError(f"a derivative of {cls.derivative} of {ctx.algorithm.name} is not implemented")

    jvp = backward


class Second(Last):
    """The gradients of the gradients."""

    pass_, derivative = "double_backward", "third order"


class Jvp(Last):
    """The tangents of the outputs."""

    pass_, derivative = "jvp", "the forward mode"


def _rows(tensors, _):
    q, v = tensors["q"], tensors["v"]
    return [like(q, (*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide(q))]


def _row_sums(tensors, _):
    q = tensors["q"]
    return [q.new_empty(q.shape[:3], dtype=wide(q))]


def _states(tensors, options):
    q, k, v = (tensors[name] for name in "qkv")
    o = like(q, (*q.shape[:3], v.shape[3]))
    packed = (_algorithms.tree_of(options, "sequences") or {}).get("packed")
    count = q.shape[0] if packed is None else len(packed["cu_tokens"]) - 1
    state = q.new_empty((count, k.shape[1], k.shape[3], v.shape[3]), dtype=wide(q))
    return [o, state]


def _loss(tensors, options):
    h = tensors["h"]
    tokens = _algorithms.decoded(options).get("reduction") == "none"
    return [h.new_empty(h.shape[:1] if tokens else (), dtype=wide(h))]


@torch.compiler.assume_constant_result
def encoded(names, values):
    """Options as the text that an operator takes."""
    return _algorithms.encoded(names, values)


@torch.compiler.assume_constant_result
def encoded_part(part):
    """A mask or sequences of a problem file as text."""
    return _algorithms.encoded_part(part)


ATTENTION = Operators("attention", _rows)
LSE = Operators("attention_lse", _row_sums)
LAZY = Operators("lazy_attention", _rows)
LINEAR = Operators("linear_attention", _states)
LOSS = Operators("linear_cross_entropy", _loss)


def _setup(algorithm):
    """Defines the operators of an algorithm with autograd formulas of their own, for `torch.compile`."""

    def setup_forward(ctx, inputs, output):
        *tensors, options = inputs
        keep(ctx, algorithm, options, tensors, together(output))

    def backward(ctx, *cotangents):
        compute = lambda tensors, filled, wanted: algorithm.ops["backward"](*tensors, *filled, wanted, ctx.options)
        return (*first_order(ctx, ctx.needs_input_grad[:-1], cotangents, compute), None)

    def setup_backward(ctx, inputs, output):
        *tensors, wanted, options = inputs
        Backward.setup_context(ctx, (algorithm, options, wanted, *tensors), output)

    def double_backward(ctx, *seconds):
        compute = lambda tensors, seconds: algorithm.ops["double_backward"](*tensors, *seconds, ctx.options)
        return (*second_order(ctx, ctx.needs_input_grad[:-2], seconds, compute), None, None)

    def no_third(ctx, *_):
        raise NotImplementedError(f"a derivative of third order of {algorithm.name} is not implemented")

    differentiable = torch.library.register_autograd
    differentiable(algorithm.define("forward"), backward, setup_context=setup_forward, lib=LIBRARY)
    differentiable(algorithm.define("backward"), double_backward, setup_context=setup_backward, lib=LIBRARY)
    differentiable(algorithm.define("double_backward"), no_third, lib=LIBRARY)
    if algorithm.is_forward_mode:
        differentiable(algorithm.define("jvp"), no_third, lib=LIBRARY)


for _algorithm in (ATTENTION, LSE, LAZY, LINEAR, LOSS):
    _setup(_algorithm)


def _times(gradients, dloss):
    """Gradients times the cotangent of the loss, by dh, dw and dbias."""
    # To look at a number of a GPU would be to wait for it; one that is traced has none.
    is_one = not torch.compiler.is_compiling() and dloss.is_cpu and is_plain((dloss,)) and bool(dloss == 1)
    return [x if is_one or x.numel() == 0 else (x * dloss).to(x.dtype) for x in gradients]


class Loss(Mapped):
    """The loss with its gradients for a cotangent of 1: three products of the size of the logits, where a forward and
    a backward pass have four. These gradients are differentiated by the passes one after the other."""

    @staticmethod
    def forward(options, wanted, *tensors):
        return LOSS.call("forward_backward", *tensors, wanted, options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(*output[1:])
        Loss.keep(ctx, inputs, output)

    @staticmethod
    def keep(ctx, inputs, output):
        ctx.options, ctx.wanted, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[1:])

    @staticmethod
    def backward(ctx, dloss, *_):
        count = len(LOSS.inputs)
        tensors, gradients = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        if dloss is None:
            return (None,) * (2 + count)
        if torch.is_grad_enabled():
            gradients = Backward.apply(LOSS, ctx.options, ctx.wanted, *tensors, dloss)
        else:
            gradients = _times(gradients, dloss)
        return (None, None, *by_inputs(LOSS, gradients, ctx.needs_input_grad[2:]))

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError("forward mode of linear_cross_entropy is not implemented")


def _setup_both(ctx, inputs, output):
    *tensors, wanted, options = inputs
    Loss.keep(ctx, (options, wanted, *tensors), output)


def _backward_both(ctx, dloss, *_):
    gradients = _times(ctx.saved_tensors[len(LOSS.inputs) :], dloss)
    return (*by_inputs(LOSS, gradients, ctx.needs_input_grad[:-2]), None, None)


torch.library.register_autograd(
    LOSS.define("forward_backward"), _backward_both, setup_context=_setup_both, lib=LIBRARY
)


# Keys that a query sees to its left and right, both inclusive; None is open.
Window = tuple[int | None, int | None] | None


def _score_options(causal, window, mask, scale, sequences, softcap=None):
    tree = None if mask is None or isinstance(mask, Tensor) else encoded_part(mask)
    ends, rows = None if window is None else tuple(window), encoded_part(sequences)
    names = ("causal", "window", "tree", "scale", "sequences", "softcap")
    return encoded(names, (bool(causal) or None, ends, tree, scale, rows, softcap)), mask if tree is None else None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    mask: Tensor | Mapping[str, Any] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    sequences: Mapping[str, Any] | None = None,
    return_lse: bool = False,
) -> Any:
    """Softmax attention: o [B, Hq, N, E], and with `return_lse` lse [B, Hq, N], both differentiable.

    Tensors and keywords are those of `etalon.attention`; `mask` is a tensor of bool, [B or 1, Hq or 1, N, M]. Lengths
    and offsets of `sequences` are lists or tensors: {"packed": {"cu_query": OFFSETS, "cu_key": OFFSETS}}. Those of a
    GPU are waited for, and each list of them is prepared anew.
    """
    options, mask = _score_options(causal, window, mask, scale, sequences, softcap)
    o, lse = ATTENTION.apply(options, q, k, v, sinks, bias, mask)
    return (o, lse) if return_lse else o


def attention_lse(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    mask: Tensor | Mapping[str, Any] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    sequences: Mapping[str, Any] | None = None,
) -> Tensor:
    """The log-sum-exp of attention's scores, lse [B, Hq, N]."""
    options, mask = _score_options(causal, window, mask, scale, sequences, softcap)
    return LSE.apply(options, q, k, sinks, bias, mask)[0]


def lazy_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tau: Tensor,
    *,
    causal: bool = True,
    window: Window = None,
    mask: Tensor | Mapping[str, Any] | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    sequences: Mapping[str, Any] | None = None,
    return_lse: bool = False,
) -> Any:
    """Lazy attention with Elastic-Softmax: o [B, Hq, N, E]; tau [Hq], bias [Hq, W] of distances."""
    options, mask = _score_options(causal, window, mask, scale, sequences)
    o, lse = LAZY.apply(options, q, k, v, tau, bias, mask)
    return (o, lse) if return_lse else o


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g_gamma: Tensor | None = None,
    g: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    sequences: Mapping[str, Any] | None = None,
    return_final_state: bool = False,
) -> Any:
    """Linear ("lightning") attention: o [B, Hq, N, E], and with `return_final_state` the states [S, Hk, D, E] of S
    sequences."""
    options = encoded(("scale", "sequences"), (scale, encoded_part(sequences)))
    o, state = LINEAR.apply(options, q, k, v, g_gamma, g, initial_state)
    return (o, state) if return_final_state else o


def refuse_gradients(**tensors):
    """Fails where a gradient is asked for that there is not."""
    for name, x in tensors.items():
        if x is not None and x.requires_grad:
            raise NotImplementedError(f"a gradient by `{name}` is not implemented: hand in {name}.detach()")


def linear_cross_entropy(
    h: Tensor,
    w: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    class_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    reduction: str | None = None,
    ignore_index: int | None = None,
    label_smoothing: float | None = None,
    lse_square_scale: float | None = None,
    softcap: float | None = None,
    temperature: float | None = None,
    logit_scale: float | None = None,
) -> Tensor:
    """The cross-entropy of logits h wᵀ + bias, which are never stored as a whole: the loss.

    Where a gradient is needed it is computed with the loss, unless `reduction` is "none" or the type is float16.
    Weights of classes and of tokens have no gradients: it raises where one is asked for.
    """
    values = (reduction, ignore_index, label_smoothing, lse_square_scale, softcap, temperature, logit_scale)
    refuse_gradients(class_weights=class_weights, token_weights=token_weights)
    options, tensors = (
        encoded(_algorithms.OPTIONS_OF_LOSS, values),
        (h, w, targets, bias, class_weights, token_weights),
    )
    needs = [x is not None and x.requires_grad for x in (h, w, bias)]
    # Gradients for a cotangent of 1 may underflow in float16, before the scale of a loss reaches them.
    is_alone = reduction == "none" or h.dtype == torch.float16
    if is_alone or not (torch.is_grad_enabled() and any(needs)):
        return LOSS.apply(options, *tensors)[0]
    if torch.compiler.is_compiling():
        return LOSS.ops["forward_backward"](*tensors, bits(needs), options)[0]
    return applied(Loss, options, bits(needs), *tensors)[0]
