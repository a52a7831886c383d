"""Linear cross-entropy: PyTorch's, Liger's, Apple's and quack's."""

import torch
import torch.nn.functional as F
from frames import Refused
from kernels_torch import gradients, raw, refusing, tensors


def reduction(problem):
    how = problem.get("reduction", "mean")
    if not isinstance(how, str):
        raise Refused(f"reduction {how}")
    return how


def torch_loss(chunked):
    """F.linear_cross_entropy: options=None is the reference path, options the chunked one."""
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError("this version of PyTorch has no torch.nn.functional.linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions() if chunked else None

    def loss(problem, x):
        weights = x.get("class_weights")
        return F.linear_cross_entropy(
            x["h"],
            x["w"],
            x["targets"],
            linear_bias=x.get("bias"),
            weight=None if weights is None else weights.to(x["h"].dtype),
            reduction=reduction(problem),
            ignore_index=problem.get("ignore_index", -100),
            label_smoothing=problem.get("label_smoothing", 0.0),
            options=options,
        )

    return loss


def liger_loss(accumulated):
    """LigerFusedLinearCrossEntropyLoss; dw summed in f32 if accumulated, else in the type of w, the default."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    def loss(problem, x):
        function = LigerFusedLinearCrossEntropyLoss(
            ce_weight=x.get("class_weights"),
            ignore_index=problem.get("ignore_index", -100),
            lse_square_scale=problem.get("lse_square_scale", 0.0),
            label_smoothing=problem.get("label_smoothing", 0.0),
            reduction=reduction(problem),
            softcap=problem.get("softcap"),
            accum_dtype=torch.float32 if accumulated else None,
        )
        return function(x["w"], x["h"], x["targets"], x.get("bias"))

    return loss


def apple_loss(implementation, filter_eps):
    """linear_cross_entropy of cut_cross_entropy."""
    from cut_cross_entropy import linear_cross_entropy

    def loss(problem, x):
        return linear_cross_entropy(
            x["h"],
            x["w"],
            x["targets"],
            ignore_index=problem.get("ignore_index", -100),
            softcap=problem.get("softcap"),
            reduction=reduction(problem),
            filter_eps=filter_eps,
            impl=implementation,
        )

    return loss


def quack_loss(chunked):
    """quack's chunked_linear_cross_entropy, or linear_cross_entropy_func."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy, linear_cross_entropy_func

    def loss(problem, x):
        options = {"ignore_index": problem.get("ignore_index", -100), "reduction": reduction(problem)}
        if chunked:
            return chunked_linear_cross_entropy(x["h"], x["w"], x["targets"], tuned=False, **options)
        return linear_cross_entropy_func(x["h"], x["w"], x.get("bias"), x["targets"], **options)

    return loss


def kernel_of(loss, device):
    """The passes of a loss whose gradients are those of autograd."""

    def kernel(request, given):
        problem, x = request["problem"], tensors(given, device)
        if request["pass"] == "forward":
            with torch.no_grad():
                return raw({"loss": refusing(loss, problem, x)}, request["asked"])
        dloss = x.get("dloss")

        def backward():
            leaves = [name for name in ("h", "w", "bias") if name in x]
            for name in leaves:
                x[name].requires_grad_()
            made = loss(problem, x)
            cotangent = torch.ones_like(made) if dloss is None else dloss.to(made.dtype).reshape(made.shape)
            return gradients(leaves, x, cotangent)(made)

        return raw(refusing(backward), request["asked"])

    return kernel
