"""PyTorch's attention, forward and backward; run by hand: etalon verify --candidate 'python attention_torch.py'"""

import struct
import sys

import torch
import torch.nn.functional as F


# The kernel.
def attention(q, k, v, causal, dout=None):
    q, k, v = (x.requires_grad_(dout is not None) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    if dout is None:
        return {"o": o}
    o.backward(dout)
    return {"dq": q.grad, "dk": k.grad, "dv": v.grad}


TAKES = """{"kernels": [{"algorithm": "attention", "passes": ["forward", "backward"], "dtypes": ["f32", "bf16", "f16"],
    "limits": {"batch": {"at_least": 1}, "queries": {"at_least": 1}, "keys": {"at_least": 1}}, "omits": ["lse"],
    "equal": [["queries", "keys"]], "masks": ["full", "causal"], "sequences": ["dense"], "options": {}}]}"""


# The harness.
HEADER, ROW = struct.Struct("<8sIIQQQQQQ"), struct.Struct("<48s8sII6QQQ")
TYPES = {b"f32": torch.float32, b"bf16": torch.bfloat16, b"f16": torch.float16}
HELLO, REQUEST, OUTPUTS, UNSUPPORTED, ERROR = 1, 2, 3, 4, 5


def send(kind, number, text="", json_text="", outputs={}):
    rows, data = b"", b""
    for name, x in outputs.items():
        kind_of = next(name for name, dtype in TYPES.items() if dtype == x.dtype)
        x = x.detach().cpu().contiguous()
        body = x.view(-1).view(torch.uint8).numpy().tobytes()
        rows += ROW.pack(name.encode(), kind_of, x.ndim, 0, *x.shape, *[0] * (6 - x.ndim), len(data), len(body))
        data += body
    sizes = len(outputs), len(json_text), len(text), len(data)
    sys.stdout.buffer.write(HEADER.pack(b"etalon\r\n", 1, kind, number, *sizes, 0) + rows + data)
    sys.stdout.buffer.write(json_text.encode("ascii") + text.encode("ascii", "replace"))
    sys.stdout.buffer.flush()


while head := sys.stdin.buffer.read(64):
    _, _, kind, number, count, *sizes, _ = HEADER.unpack(head)
    rows = [ROW.unpack(sys.stdin.buffer.read(128)) for _ in range(count)]
    data, _, text = (bytearray(sys.stdin.buffer.read(sizes[i])) for i in (2, 0, 1))
    if kind == HELLO:
        send(HELLO, number, "torch", TAKES)
        continue
    given = {}
    for name, dtype, axes, role, *shape, offset, size in rows:
        if role == 0 and name.rstrip(b"\0") in (b"q", b"k", b"v", b"dout"):
            x = torch.frombuffer(data[offset : offset + size], dtype=TYPES[dtype.rstrip(b"\0")])
            given[name.rstrip(b"\0").decode()] = x.reshape(shape[:axes])
    try:
        send(OUTPUTS, number, outputs=attention(**given, causal=b"problem.mask.causal" in text))
    except Exception as error:
        send(ERROR, number, repr(error))
