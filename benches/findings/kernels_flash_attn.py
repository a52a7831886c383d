"""FlashAttention-4 (package flash-attn-4), whose tensors have heads behind rows."""

import torch
import torch.nn.functional as F
from frames import Refused
from kernels_torch import gradients, raw, refusing, tensors


def attention(deterministic):
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    def options(problem, x, deterministic):
        mask, found = problem.get("mask", "full"), {"softmax_scale": problem.get("softmax_scale")}
        found |= {"softcap": problem.get("softcap") or 0.0, "return_lse": True, "deterministic": deterministic}
        if "causal" in mask:
            found["causal"] = True
        elif "window" in mask:
            found["window_size"] = (mask["window"].get("left"), mask["window"].get("right"))
        if "sinks" in x:
            found["learnable_sink"] = x["sinks"]
        return found

    def call(problem, x):
        heads_behind = [x[name].transpose(1, 2) for name in "qkv"]
        chosen = options(problem, x, deterministic)
        sequences = problem.get("sequences", "dense")
        if sequences == "dense":
            o, lse = flash_attn_func(*heads_behind, **chosen)
            return o.transpose(1, 2), lse
        # The function takes the rows of sequences, and no others behind them.
        packed = sequences["packed"]
        for name, key in (("cu_seqlens_q", "cu_query"), ("cu_seqlens_k", "cu_key")):
            chosen[name] = torch.tensor(packed[key], dtype=torch.int32, device=x["q"].device)
        chosen |= {"max_seqlen_q": problem["queries"], "max_seqlen_k": problem["keys"]}
        ends = [packed["cu_query"][-1], packed["cu_key"][-1], packed["cu_key"][-1]]
        o, lse = flash_attn_varlen_func(*(t.squeeze(0)[:end] for t, end in zip(heads_behind, ends)), **chosen)
        behind = problem["queries"] - ends[0]
        o = F.pad(o, (0, 0, 0, 0, 0, behind))[None].transpose(1, 2)
        return o, F.pad(lse, (0, behind), value=-torch.inf)[None]

    def kernel(request, given):
        problem, x = request["problem"], tensors(given, "cuda")
        if problem["queries"] == 0 or problem["keys"] == 0:
            raise Refused("no rows")
        if request["pass"] == "forward":
            with torch.no_grad():
                return raw(dict(zip(("o", "lse"), refusing(call, problem, x))), request["asked"])
        if "dlse" in x:
            made = gradients([name for name in ("q", "k", "v", "sinks") if name in x], x, (x["dout"], x["dlse"]))
            return raw(refusing(lambda: made(call(problem, x))), request["asked"])
        made = gradients([name for name in ("q", "k", "v", "sinks") if name in x], x, x["dout"])
        return raw(refusing(lambda: made(call(problem, x)[0])), request["asked"])

    return kernel
