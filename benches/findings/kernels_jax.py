"""Attention of JAX: jax.nn.dot_product_attention, by its implementation."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from frames import Refused

TYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16, "i64": np.int64, "bool": np.bool_}


def attention(implementation, device):
    """The function, and its vector-Jacobian product. Its axes are batch, rows, heads, elements."""
    swap = lambda x: jnp.swapaxes(x, 1, 2)
    where = jax.devices("gpu" if device == "cuda" else "cpu")[0]

    def options(problem, x):
        mask, found = problem.get("mask", "full"), {"scale": problem.get("softmax_scale")}
        if "causal" in mask:
            found["is_causal"] = True
        elif "window" in mask:
            ends = (mask["window"].get("left"), mask["window"].get("right"))
            found["local_window_size"] = tuple(problem["keys"] if end is None else end for end in ends)
        elif "array" in mask:
            found["mask"] = x[mask["array"]]
        if "lengths" in problem.get("sequences", {}):
            lengths = problem["sequences"]["lengths"]
            for name, key in (("query_seq_lengths", "query"), ("key_value_seq_lengths", "key")):
                found[name] = jnp.asarray(lengths[key], jnp.int32)
        return found

    def call(problem, x, with_lse):
        def function(q, k, v, bias=None):
            made = jax.nn.dot_product_attention(
                swap(q),
                swap(k),
                swap(v),
                bias,
                implementation=implementation,
                return_residual=with_lse,
                **options(problem, x),
            )
            return (swap(made[0]), swap(made[1])) if with_lse else swap(made)

        return function

    def one(dtype, shape, body):
        return jax.device_put(np.frombuffer(body, TYPES[dtype]).reshape(shape), where)

    def computed(request, x):
        operands = [x[name] for name in ("q", "k", "v", "bias") if name in x]
        if request["pass"] == "forward":
            with_lse = "lse" in request["asked"]
            made = jax.jit(call(request["problem"], x, with_lse))(*operands)
            return dict(zip(("o", "lse"), made if with_lse else (made,)))
        _, back = jax.vjp(jax.jit(call(request["problem"], x, False)), *operands)
        return dict(zip(("dq", "dk", "dv", "dbias"), back(x["dout"])))

    def kernel(request, given):
        x = {name: one(*raw) for name, raw in given.items()}
        try:
            results = computed(request, x)
        except (NotImplementedError, ValueError) as refused:
            raise Refused(f"{type(refused).__name__}: {refused}") from refused
        asked = [(name, dtype) for name, (dtype, _) in request["asked"].items() if name in results]
        arrays = {name: (dtype, np.asarray(results[name]).astype(TYPES[dtype])) for name, dtype in asked}
        return {name: (dtype, x.shape, x.tobytes()) for name, (dtype, x) in arrays.items()}

    return kernel
