"""Attention in NumPy: etalon verify --candidate 'python examples/candidates/attention_numpy.py'"""

import json
import struct
import sys

import numpy as np


# The kernel.
def attention(q, k, v, scale, causal):
    q, (k, v) = q.astype(float), (np.repeat(x.astype(float), q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    s = q @ k.swapaxes(2, 3) * scale
    if causal:
        s = np.where(np.tri(*s.shape[2:], s.shape[3] - s.shape[2], dtype=bool), s, -np.inf)
    m = s.max(3, keepdims=True, initial=-np.inf)
    p = np.where(s == -np.inf, 0, np.exp(s - m))
    total = p.sum(3, keepdims=True)
    if np.isfinite(v).all():
        o = p @ v
    else:  # a pair that is not visible adds nothing, not 0 × NaN
        rows = (np.where(x == 0, 0, x * v).sum(2) for x in np.moveaxis(p, 2, 0)[..., None])
        o = np.stack(list(rows), 2)
    o, lse = o / np.where(total == 0, 1, total), (m + np.log(total))[..., 0]
    return {"o": o.astype("<f4"), "lse": lse.astype("<f4")}


np.seterr(all="ignore")
TAKES = """{"kernels": [{"algorithm": "attention", "passes": ["forward"], "dtypes": ["f32"], "align": ["bottom_right"],
    "masks": ["full", "causal"], "sequences": ["dense"], "options": {"softmax_scale": {}}}]}"""


# The harness.
HEADER, ROW = struct.Struct("<8sIIQQQQQQ"), struct.Struct("<48s8sII6QQQ")
HELLO, REQUEST, OUTPUTS, UNSUPPORTED, ERROR = 1, 2, 3, 4, 5


def send(kind, number, text="", json_text="", outputs={}):
    rows, data = b"", b""
    for name, x in outputs.items():
        shape = x.shape + (0,) * (6 - x.ndim)
        rows += ROW.pack(name.encode(), b"f32", x.ndim, 0, *shape, len(data), x.nbytes)
        data += x.tobytes()
    sizes = len(outputs), len(json_text), len(text), len(data)
    sys.stdout.buffer.write(HEADER.pack(b"etalon\r\n", 1, kind, number, *sizes, 0) + rows + data)
    sys.stdout.buffer.write(json_text.encode("ascii") + text.encode("ascii", "replace"))
    sys.stdout.buffer.flush()


def read(size):
    return sys.stdin.buffer.read(size)


while head := read(64):
    _, _, kind, number, count, json_size, text_size, size, _ = HEADER.unpack(head)
    rows = [ROW.unpack(read(128)) for _ in range(count)]
    data, request, _ = read(size), read(json_size), read(text_size)
    if kind == HELLO:
        send(HELLO, number, "numpy", TAKES)
        continue
    given = {}
    for name, _, axes, role, *shape, offset, size in rows:
        if role == 0:
            x = np.frombuffer(data, "<f4", size // 4, offset)
            given[name.rstrip(b"\0").decode()] = x.reshape(shape[:axes])
    problem = json.loads(request)["problem"]
    scale = problem.get("softmax_scale", given["q"].shape[3] ** -0.5)
    causal = "causal" in problem.get("mask", {})
    try:
        send(OUTPUTS, number, outputs=attention(**given, scale=scale, causal=causal))
    except Exception as error:
        send(ERROR, number, repr(error))
