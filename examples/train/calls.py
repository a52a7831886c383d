"""Times calls alone: a mixer or the loss, forward and backward, by PyTorch and by etalon in turns.

python calls.py                       # every call in float32, and those of attention and the loss in bfloat16
python calls.py --avx2                # the same with both restricted to AVX2
python calls.py --only linear,lazy    # those whose names begin so
"""

import argparse
import json
import os
import sys

if "--avx2" in sys.argv:
    # PyTorch's own kernels, oneDNN and MKL read these when they are loaded.
    os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}

import torch  # noqa: E402

import etalon.torch  # noqa: E402
import measure  # noqa: E402
from operators import LOSSES, MIXERS  # noqa: E402

# Names of calls, with the types in which PyTorch and etalon are compared.
CALLS = {"softmax": ("float32", "bfloat16"), "linear": ("float32",), "lazy": ("float32",)}
CALLS["loss"] = CALLS["softmax"]


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in dict(tokens=2048, heads=8, dim=64, width=512, vocab=32000, rounds=7).items():
        p.add_argument(f"--{name}", type=int, default=value)
    p.add_argument("--only", default="", help="beginnings of names, with commas between them")
    p.add_argument("--avx2", action="store_true")
    p.add_argument("--compile", action="store_true", help="PyTorch's code compiled, too")
    p.add_argument("--quick", action="store_true", help="small, in seconds")
    if "--quick" in sys.argv:
        p.set_defaults(tokens=128, heads=2, dim=16, width=32, vocab=512, rounds=2)
    return p.parse_args()


def tensors_of(name, dtype, a):
    """The tensors of a call by name."""
    source = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=source)
    if name == "loss":
        h, w = draw(a.tokens, a.width), draw(a.vocab, a.width) / a.width**0.5
        return {"h": h.to(dtype), "w": w.to(dtype), "targets": torch.randint(a.vocab, (a.tokens,), generator=source)}
    q, k, v = (draw(1, a.tokens, a.heads, a.dim).to(dtype).transpose(1, 2) for _ in "qkv")
    more = {}
    if name == "linear":
        more = {"g_gamma": -(2.0 ** (-8 * torch.arange(1, a.heads + 1) / a.heads))}
        q, k = q / a.dim**0.5, k / a.dim**0.5
    if name == "lazy":
        more = {"tau": torch.full((a.heads,), -1.0), "bias": draw(a.heads, min(512, a.tokens)) / 4}
    return {"q": q, "k": k, "v": v} | more


def by_torch(function, tensors):
    """A call and its gradients by PyTorch's autograd; decays are constants."""
    given = [x.detach() for x in tensors.values()]
    for name, x in zip(tensors, given):
        x.requires_grad_(x.is_floating_point() and name != "g_gamma")
    result = function(*given)
    wanted = [x for x in given if x.requires_grad]
    return torch.autograd.grad(result, wanted, torch.ones_like(result))


def by_etalon(problem, tensors, tier):
    """The same passes by etalon, in one tier: `etalon.torch` always takes the fastest."""
    first = next(iter(tensors.values()))

    types = {"storage": first.dtype, "wide": torch.float32}
    gradients = ["d" + x for x in tensors if x not in ("targets", "g_gamma")]

    def run(pass_, known, names):
        listed = problem.operands(pass_)
        out = {x: torch.empty(shape, dtype=types[type_]) for x, _, shape, type_ in listed if x in names}
        problem.run(pass_, {x: known[x] for x, *_ in listed if x in known}, out, tier=tier)
        return out

    if problem.algorithm == "linear_cross_entropy":
        out = run("forward_backward", tensors | {"dloss": torch.ones(())}, ["loss", *gradients])
    else:
        known = tensors | run("forward", tensors, ["o", "lse"])
        out = run("backward", known | {"dout": torch.ones_like(known["o"])}, gradients)
    return [out[x] for x in gradients]


def problem_of(name, tensors):
    algorithm = {"softmax": "attention", "loss": "linear_cross_entropy"}.get(name, f"{name}_attention")
    given = {x: y for x, y in tensors.items() if x not in ("targets", "tau")}
    return etalon.problem(algorithm, **given, **({"causal": True} if name in ("softmax", "lazy") else {}))


def compare(name, dtype, a):
    """Median seconds of each, their ratio, and how far their gradients lie apart."""
    tensors = tensors_of(name, getattr(torch, dtype), a)
    problem = problem_of(name, tensors)
    tier = "simd/avx2" if a.avx2 else "auto"
    function = LOSSES["torch"] if name == "loss" else MIXERS[name]["torch"]
    functions = {"torch": function} | ({"compile": torch.compile(function)} if a.compile else {})
    turns = {key: lambda f=f: by_torch(f, tensors) for key, f in functions.items()}
    turns["etalon"] = lambda: by_etalon(problem, tensors, tier)
    far = lambda x, y: ((x.double() - y.double()).norm() / y.double().norm()).item()
    apart = max(far(x, y) for x, y in zip(turns["etalon"](), turns["torch"]()))
    seconds = {key: measure.median(times) for key, times in measure.take_turns(turns, a.rounds).items()}
    best = min(seconds[key] for key in functions)
    found = {"call": name, "dtype": dtype} | {key: round(x, 5) for key, x in seconds.items()}
    return found | {"of_torch": round(best / seconds["etalon"], 3), "gradients_apart": float(f"{apart:.1e}")}


def main():
    a = arguments()
    etalon.torch.use_threads_of_torch()
    etalon.set_precision("flash")  # products in bfloat16, as PyTorch has them
    print(json.dumps({"machine": measure.machine(), "avx2": a.avx2, "tokens": a.tokens, "dim": a.dim}))
    for name, dtypes in CALLS.items():
        for dtype in dtypes:
            if any(name.startswith(x) for x in a.only.split(",")):
                print(json.dumps(compare(name, dtype, a)), flush=True)


if __name__ == "__main__":
    main()
