"""Passes of etalon's CUDA tier on PyTorch's tensors, through the C door of `benches/device`."""

import ctypes
import json
from pathlib import Path

import torch

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64"}


class Refused(Exception):
    """Etalon's own words."""


class Library:
    """The library that `cargo build --release -p etalon-device` makes."""

    def __init__(self, path: Path):
        c = ctypes.CDLL(str(Path(path).resolve()))
        c.etalon_prepare.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        c.etalon_prepare.restype = ctypes.c_uint64
        c.etalon_scratch_bytes.argtypes = [ctypes.c_uint64]
        c.etalon_scratch_bytes.restype = ctypes.c_uint64
        c.etalon_enqueue.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64]
        c.etalon_enqueue.restype = ctypes.c_int32
        c.etalon_forget.argtypes = [ctypes.c_uint64]
        c.etalon_forget.restype = ctypes.c_int32
        c.etalon_error.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        c.etalon_error.restype = ctypes.c_size_t
        self.c = c

    def refused(self) -> Refused:
        reason = ctypes.create_string_buffer(4096)
        length = self.c.etalon_error(reason, len(reason))
        return Refused(reason.raw[: min(length, len(reason))].decode(errors="replace"))


def described(tensors: dict[str, torch.Tensor]) -> dict:
    return {
        name: {"address": x.data_ptr(), "shape": list(x.shape), "strides": list(x.stride()), "dtype": DTYPES[x.dtype]}
        for name, x in tensors.items()
    }


class Pass:
    """A pass that is prepared for these tensors. To call it is to enqueue it on PyTorch's current stream."""

    def __init__(
        self,
        library: Library,
        problem: dict,
        name: str,
        inputs: dict[str, torch.Tensor],
        outputs: dict[str, torch.Tensor],
        **options,
    ):
        self.c, self.refused = library.c, library.refused
        self.tensors = (inputs, outputs)  # they stay as long as this
        device = str(next(iter(inputs.values())).device.index or 0)
        request = {
            "problem": problem,
            "pass": name,
            "inputs": described(inputs),
            "outputs": described(outputs),
            "options": {"device": device, **options},
        }
        text = json.dumps(request).encode()
        self.number = self.c.etalon_prepare(text, len(text))
        if self.number == 0:
            raise self.refused()
        self.scratch_bytes = self.c.etalon_scratch_bytes(self.number)
        self.scratch = torch.empty(self.scratch_bytes + 256, dtype=torch.uint8, device=next(iter(inputs.values())).device)
        self.scratch_at = -(-self.scratch.data_ptr() // 256) * 256

    def __call__(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else None
        if self.c.etalon_enqueue(self.number, stream, self.scratch_at) != 0:
            raise self.refused()

    def forget(self) -> None:
        """Gives back what it holds: what it has enqueued must have run."""
        if self.c.etalon_forget(self.number) != 0:
            raise self.refused()
