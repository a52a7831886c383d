"""Linear attention of flash-linear-attention, whose tensors have heads behind tokens."""

import torch
import torch.nn.functional as F
from kernels_torch import gradients, raw, refusing, tensors

# etalon's names of the inputs that have gradients.
INPUTS = ["q", "k", "v", "g", "g_gamma", "initial_state"]


def first_configuration():
    """Triton's tuner left one of up to 48 configurations of a kernel: it would compile them all for each shape.

    Call it before the kernels are imported. Every configuration must be right: which one a user gets, timing decides.
    """
    from triton.runtime.autotuner import Autotuner

    tuned = Autotuner.__init__

    def one(self, fn, arg_names, configs, *more, **keys):
        tuned(self, fn, arg_names, configs[:1], *more, **keys)

    Autotuner.__init__ = one


def simple_gla(form, device):
    """chunk_simple_gla and its like; naive_chunk_simple_gla, the library's own reference, runs on a CPU, too."""
    if form == "naive_chunk":
        from fla.ops.simple_gla.naive import naive_chunk_simple_gla as function
    else:
        first_configuration()
        import fla.ops.simple_gla

        function = getattr(fla.ops.simple_gla, f"{form}_simple_gla")

    def end_of(problem):
        """The tokens of all sequences: the function takes no others behind them."""
        sequences = problem.get("sequences", "dense")
        return problem["tokens"] if sequences == "dense" else sequences["packed"]["cu_tokens"][-1]

    def options(problem, x):
        found = {"scale": float(problem.get("scale", 1.0)), "initial_state": x.get("initial_state")}
        # Without the state nobody knows whether a sequence has one.
        found["output_final_state"] = bool(problem.get("final_state"))
        for name in ("g", "g_gamma"):
            if name in x:
                found[name] = x[name].transpose(1, 2)[:, : end_of(problem)] if name == "g" else x[name]
        sequences = problem.get("sequences", "dense")
        if sequences != "dense":
            found["cu_seqlens"] = torch.tensor(sequences["packed"]["cu_tokens"], dtype=torch.int64, device=device)
        return found

    def call(problem, x):
        end = end_of(problem)
        o, state = function(*(x[name].transpose(1, 2)[:, :end] for name in "qkv"), **options(problem, x))
        return F.pad(o.transpose(1, 2), (0, 0, 0, problem["tokens"] - end)), state

    def kernel(request, given):
        problem, x = request["problem"], tensors(given, device)
        if request["pass"] == "forward":
            with torch.no_grad():
                results = dict(zip(("o", "final_state"), refusing(call, problem, x)))
                return raw({name: x for name, x in results.items() if x is not None}, request["asked"])
        made = gradients([name for name in INPUTS if name in x], x, cotangents(x))

        def backward():
            o, state = call(problem, x)
            return made((o, state) if "dfinal_state" in x else o)

        return raw(refusing(backward), request["asked"])

    def cotangents(x):
        # The library's reference computes in f32 and returns that.
        dout = x["dout"].float() if form == "naive_chunk" else x["dout"]
        return (dout, x["dfinal_state"]) if "dfinal_state" in x else dout

    return kernel
