"""Attention of ggml's CPU backend, by ctypes: ggml_flash_attn_ext of the shared libraries that a wheel brings."""

import ctypes
import importlib.metadata

import numpy as np
from frames import Refused

F32, F16 = 0, 1
PREC_DEFAULT, PREC_F32 = 0, 10


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def libraries():
    """ggml's two libraries, of which the second needs the first."""
    files = importlib.metadata.files("libggml-python")
    places = {name: next(p for p in files if p.name == f"{name}.so") for name in ("libggml-base", "libggml-cpu")}
    base, cpu = (ctypes.CDLL(str(path.locate()), mode=ctypes.RTLD_GLOBAL) for path in places.values())
    pointer, c_float = ctypes.c_void_p, ctypes.c_float
    for function, result, arguments in [
        (base.ggml_init, pointer, [InitParams]),
        (base.ggml_free, None, [pointer]),
        (base.ggml_new_tensor_4d, pointer, [pointer, ctypes.c_int, *[ctypes.c_int64] * 4]),
        (base.ggml_get_data, pointer, [pointer]),
        (base.ggml_flash_attn_ext, pointer, [pointer] * 5 + [c_float] * 3),
        (base.ggml_flash_attn_ext_set_prec, None, [pointer, ctypes.c_int]),
        (base.ggml_flash_attn_ext_add_sinks, None, [pointer] * 2),
        (base.ggml_new_graph, pointer, [pointer]),
        (base.ggml_build_forward_expand, None, [pointer] * 2),
        (cpu.ggml_graph_compute_with_ctx, ctypes.c_int, [pointer, pointer, ctypes.c_int]),
    ]:
        function.restype, function.argtypes = result, arguments
    cpu.ggml_cpu_init()
    return base, cpu


def flash_attn_ext(precision, threads=2):
    """o of a forward pass; q in f32, as ggml wants it, k and v in their type, the mask in f16."""
    base, cpu = libraries()

    def tensor(context, array):
        array = np.ascontiguousarray(array)
        kind = F16 if array.dtype == np.float16 else F32
        made = base.ggml_new_tensor_4d(context, kind, *reversed(array.shape))
        ctypes.memmove(base.ggml_get_data(made), array.ctypes.data, array.nbytes)
        return made

    def computed(problem, q, k, v, mask, sinks):
        size = 4 * (q.nbytes + k.nbytes + v.nbytes + (0 if mask is None else mask.nbytes)) + 64 * 2**20
        context = base.ggml_init(InitParams(size, None, False))
        try:
            places = [tensor(context, x) for x in (q, k, v)]
            places.append(None if mask is None else tensor(context, mask))
            scale = problem.get("softmax_scale", problem["dim"] ** -0.5)
            out = base.ggml_flash_attn_ext(context, *places, scale, 0.0, problem.get("softcap") or 0.0)
            base.ggml_flash_attn_ext_set_prec(out, precision)
            if sinks is not None:
                base.ggml_flash_attn_ext_add_sinks(out, tensor(context, sinks.reshape(1, 1, 1, -1)))
            graph = base.ggml_new_graph(context)
            base.ggml_build_forward_expand(graph, out)
            if cpu.ggml_graph_compute_with_ctx(context, graph, threads) != 0:
                raise RuntimeError("ggml_graph_compute failed")
            # Heads lie inside the queries.
            shape = q.shape[0], q.shape[2], q.shape[1], v.shape[3]
            size = 4 * int(np.prod(shape))
            body = ctypes.string_at(base.ggml_get_data(out), size)
            return np.frombuffer(body, np.float32).reshape(shape).swapaxes(1, 2)
        finally:
            base.ggml_free(context)

    def kernel(request, given):
        problem, types = request["problem"], {"f32": np.float32, "f16": np.float16, "bool": np.bool_}
        x = {name: np.frombuffer(body, types[dtype]).reshape(shape) for name, (dtype, shape, body) in given.items()}
        o = computed(problem, x["q"].astype(np.float32), x["k"], x["v"], mask_of(problem, x), x.get("sinks"))
        dtype, shape = request["asked"]["o"]
        return {"o": (dtype, shape, np.ascontiguousarray(o.astype(types[dtype])).tobytes())}

    return kernel


def mask_of(problem, x):
    """The mask that ggml adds to the scores: 0 or -inf in f16."""
    mask, n, m = problem.get("mask", "full"), problem["queries"], problem["keys"]
    if mask == "full":
        return None
    if "causal" in mask:
        shift = 0 if mask["causal"].get("align") == "top_left" else m - n
        allowed = (np.arange(m) <= np.arange(n)[:, None] + shift)[None, None]
    elif "array" in mask:
        allowed = x[mask["array"]]
    else:
        raise Refused(f"mask {mask}")
    return np.where(allowed, np.float16(0), np.float16(-np.inf))
