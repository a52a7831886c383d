# device: cpu. Two keys of equal scores with the value 40000: o, in f32 and with GGML_PREC_F32, is their mean, 40000.
import ctypes as c
import glob
import importlib.util

import numpy as np

folder = importlib.util.find_spec("libggml").submodule_search_locations[0]
base, cpu = (c.CDLL(glob.glob(f"{folder}/lib*/libggml-{x}.so")[0], c.RTLD_GLOBAL) for x in ("base", "cpu"))
for name in ("init", "new_tensor_4d", "get_data", "flash_attn_ext", "new_graph"):
    getattr(base, f"ggml_{name}").restype = c.c_void_p
Params = type("Params", (c.Structure,), {"_fields_": [("n", c.c_size_t), ("p", c.c_void_p), ("b", c.c_bool)]})
cpu.ggml_cpu_init()
ctx, p = c.c_void_p(base.ggml_init(Params(2**24, None, False))), c.c_void_p
for kind, dtype in ((0, np.float32), (1, np.float16)):  # keys and values in f32, then in f16
    types = ((0, 1), (kind, 2), (kind, 2))
    q, k, v = (p(base.ggml_new_tensor_4d(ctx, t, *map(c.c_int64, (32, n, 1, 1)))) for t, n in types)
    for x, values in ((q, np.zeros(32, np.float32)), (k, np.zeros(64, dtype)), (v, np.full(64, 40000, dtype))):
        c.memmove(p(base.ggml_get_data(x)), values.ctypes.data, values.nbytes)
    o = p(base.ggml_flash_attn_ext(ctx, q, k, v, None, c.c_float(1), c.c_float(0), c.c_float(0)))
    base.ggml_flash_attn_ext_set_prec(o, 10)  # GGML_PREC_F32
    graph = p(base.ggml_new_graph(ctx))
    base.ggml_build_forward_expand(graph, o)
    cpu.ggml_graph_compute_with_ctx(ctx, graph, 1)
    print(dtype.__name__, c.cast(p(base.ggml_get_data(o)), c.POINTER(c.c_float))[0])
