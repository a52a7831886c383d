"""Tiled kernels in NumPy that write down what they hold (docs/guide.md): python tiled_numpy.py DIR"""

import json, struct, sys
from pathlib import Path

import numpy as np

folder, rng, f32 = Path(sys.argv[1]), np.random.default_rng(0), np.float32

def save(name, tensors, **metadata):
    header, data = {"__metadata__": {key: json.dumps(x) for key, x in metadata.items()}}, b""
    for key, x in tensors.items():
        header[key] = {"dtype": "F32", "shape": x.shape, "data_offsets": [len(data), len(data) + x.nbytes]}
        data += np.ascontiguousarray(x, "<f4").tobytes()
    head = json.dumps(header).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(head)) + head + data)

def attention(q, k, v, dout, tile=32):
    (_, heads, n, dim), m = q.shape, k.shape[2]
    steps, unwritten = range(0, m, tile), lambda *shape: np.full(shape, np.nan, f32)
    held = {x: unwritten(len(steps), 1, heads, n, *width) for x, width in dict(lse=(), o=(dim,), dq=(dim,)).items()}
    held |= {x: unwritten(1, heads, n, m) for x in ("p", "dS")}
    for h, i in ((h, i) for h in range(heads) for i in range(0, n, tile)):
        rows = slice(i, i + tile)
        top, l, acc, dq = np.full((tile, 1), -np.inf, f32), f32(0), f32(0), f32(0)
        seen = [(t, slice(j, j + tile)) for t, j in enumerate(steps) if j <= i]  # up to the diagonal
        score = lambda j: q[0, h, rows] @ k[0, h, j].T * f32(dim**-0.5) + np.where(causal[rows, j], f32(0), -np.inf)
        for t, j in seen:
            s = score(j)
            high = np.maximum(top, s.max(1, keepdims=True))
            p, a, top = np.exp(s - high), np.exp(top - high), high
            l, acc = l * a + p.sum(1, keepdims=True), acc * a + p @ v[0, h, j]
            held["lse"][t, 0, h, rows], held["o"][t, 0, h, rows] = (top + np.log(l))[:, 0], acc / l
        lse, delta = top + np.log(l), (dout[0, h, rows] * (acc / l)).sum(1, keepdims=True)
        for t, j in seen:
            p = np.exp(score(j) - lse)
            ds = p * (dout[0, h, rows] @ v[0, h, j].T - delta)
            dq = dq + ds @ k[0, h, j] * f32(dim**-0.5)
            held["p"][0, h, rows, j], held["dS"][0, h, rows, j], held["dq"][t, 0, h, rows] = p, ds, dq
    return held

def states(k, v, g, chunk=32):
    state, held, left = f32(0), [], np.arange(chunk - 1, -1, -1, dtype=f32)
    for c in range(0, k.shape[2], chunk):
        decayed = k[:, :, c : c + chunk] * np.exp(g[:, None] * left)[None, ..., None]
        state = state * np.exp(g * chunk)[:, None, None] + decayed.swapaxes(2, 3) @ v[:, :, c : c + chunk]
        held.append(state)
    return {"state": np.stack(held)}

causal, g = np.tri(96, dtype=bool), np.array([-0.1, -0.01], f32)
q, k, v, dout = (rng.standard_normal((1, 2, 96, 16), dtype=f32) for _ in range(4))
common = {"batch": 1, "query_heads": 2, "key_heads": 2, "dim": 16}
problem = {"algorithm": "attention", **common, "queries": 96, "keys": 96, "mask": {"causal": {}}}
(folder / "attention.json").write_text(json.dumps(problem))
save("attention.safetensors", {"q": q, "k": k, "v": v, "dout": dout})
save("attention_trace.safetensors", attention(q, k, v, dout), trace={"tile": {"queries": 32, "keys": 32}})
problem = {"algorithm": "linear_attention", **common, "tokens": 96, "decay": "per_head"}
(folder / "linear.json").write_text(json.dumps(problem))
save("linear.safetensors", {"q": q, "k": k, "v": v, "g_gamma": g})
save("linear_trace.safetensors", states(k, v, g), trace={"chunk": 32})
