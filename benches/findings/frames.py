"""The harness that all contenders share: docs/protocol.md, for kernels that take and return raw tensors.

A raw tensor is (type, shape, bytes), its type one of f64, f32, bf16, f16, i64 and bool. `serve` answers requests until
stdin ends. A kernel refuses what its library does not take by raising Refused; another exception is an error.
"""

import json
import os
import struct
import sys

HEADER, ROW = struct.Struct("<8sIIQQQQQQ"), struct.Struct("<48s8sII6QQQ")
HELLO, REQUEST, OUTPUTS, UNSUPPORTED, ERROR = 1, 2, 3, 4, 5
# Errors of a GPU after which its context is of no use.
POISONING = {"AcceleratorError"}


class Refused(Exception):
    """The library does not take this problem, and says so."""


def _frame(kind, number, text="", json_text="", outputs=None):
    rows, data = b"", b""
    for name, (dtype, shape, body) in (outputs or {}).items():
        extents = (*shape, *[0] * (6 - len(shape)))
        rows += ROW.pack(name.encode(), dtype.encode(), len(shape), 0, *extents, len(data), len(body))
        data += body
    # A library may put anything into its messages.
    text = text.encode("ascii", "replace")[:4000]
    json_bytes = json_text.encode("ascii")
    sizes = len(outputs or {}), len(json_bytes), len(text), len(data)
    return HEADER.pack(b"etalon\r\n", 1, kind, number, *sizes, 0) + rows + data + json_bytes + text


def _read(stream, size):
    data = stream.read(size)
    if len(data) != size:
        sys.exit("stdin ended within a frame")
    return data


def serve(name, capabilities, build):
    """Answers on the standard streams. build() is a kernel: of (request, given) it returns raw tensors by name.

    The request has the keys of its JSON, and `asked`: the results, name to (type, shape). The kernel is built with the
    first request, since libraries may take longer to load than a hello may.
    """
    kernel = None
    answers = os.fdopen(os.dup(1), "wb")
    # Prints of a library would be no frames.
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    while head := requests.read(64):
        _, _, kind, number, count, json_size, text_size, size, _ = HEADER.unpack(head)
        rows = [ROW.unpack(_read(requests, 128)) for _ in range(count)]
        data, request, _ = (_read(requests, n) for n in (size, json_size, text_size))
        if kind == HELLO:
            answers.write(_frame(HELLO, number, name, json.dumps(capabilities)))
        else:
            kernel = kernel or build()
            answers.write(_answer(number, json.loads(request), rows, data, kernel))
        answers.flush()


def _answer(number, request, rows, data, kernel):
    given, request["asked"] = {}, {}
    for name, dtype, axes, role, *shape, offset, size in rows:
        name, dtype, shape = name.rstrip(b"\0").decode(), dtype.rstrip(b"\0").decode(), tuple(shape[:axes])
        if role == 0:
            given[name] = dtype, shape, data[offset : offset + size]
        else:
            request["asked"][name] = dtype, shape
    try:
        return _frame(OUTPUTS, number, outputs=kernel(request, given))
    except Refused as refused:
        return _frame(UNSUPPORTED, number, f"refused: {refused}")
    except Exception as error:
        if type(error).__name__ in POISONING:
            # All later calls would fail, too: the judge starts the program again.
            sys.exit(f"{type(error).__name__}: {error}")
        return _frame(ERROR, number, f"{type(error).__name__}: {error}")
