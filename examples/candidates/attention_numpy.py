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


# The harness. Tensors lie in files that it shares with etalon, where these are offered, or come in frames.
HEADER, ROW = struct.Struct("<8sIIQQQQQQ"), struct.Struct("<48s8sII6QQQ")
HELLO, REQUEST, OUTPUTS, UNSUPPORTED, ERROR = 1, 2, 3, 4, 5
read = sys.stdin.buffer.read


def send(kind, number, text="", json_text="", rows=(), data=b""):
    sizes = len(rows), len(json_text), len(text), len(data)
    sys.stdout.buffer.write(HEADER.pack(b"etalon\r\n", 1, kind, number, *sizes, 0))
    sys.stdout.buffer.write(b"".join(ROW.pack(*row) for row in rows) + data)
    sys.stdout.buffer.write(json_text.encode("ascii") + text.encode("ascii", "replace"))
    sys.stdout.buffer.flush()


while head := read(64):
    _, _, kind, number, count, json_size, text_size, size, _ = HEADER.unpack(head)
    rows = [ROW.unpack(read(128)) for _ in range(count)]
    data, request, _ = read(size), json.loads(read(json_size) or "{}"), read(text_size)
    if kind == HELLO:
        send(HELLO, number, "numpy\nshared", TAKES)
        continue
    out = bytearray(sum(row[-1] for row in rows if row[3] == 1))
    if files := request.get("shared"):
        data, out = np.memmap(files["inputs"], mode="r"), np.memmap(files["outputs"], mode="r+")
    given, wanted, answer, end = {}, {}, [], 0
    for name, dtype, axes, role, *shape, offset, size in rows:
        is_given = role in (0, 2)
        if role == 1:  # elements of an answer follow one another
            offset, end = end, end + size
        x = np.frombuffer(data if is_given else out, "<f4", size // 4, offset).reshape(shape[:axes])
        (given if is_given else wanted)[name.rstrip(b"\0").decode()] = x
        answer += [] if is_given else [(name, dtype, axes, role & 2 and 3, *shape, offset, size)]
    problem = request["problem"]
    try:
        scale, causal = problem.get("softmax_scale", given["q"].shape[3] ** -0.5), "causal" in problem.get("mask", {})
        for name, x in attention(**given, scale=scale, causal=causal).items():
            wanted[name][...] = x
        send(OUTPUTS, number, rows=answer, data=b"" if files else out)
    except Exception as error:
        send(ERROR, number, repr(error))
