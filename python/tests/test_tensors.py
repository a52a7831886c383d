"""Tensors: every layout, type and owner gives the bits of a contiguous array, and what cannot be borrowed is said."""

import numpy as np
import pytest

import etalon

B, H, N, D = 2, 3, 7, 5
PROBLEM = etalon.problem("attention", batch=B, query_heads=H, key_heads=H, queries=N, keys=N, dim=D)


def bits(x):
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))


def interleaved(x):
    """As [B, N, H, D] in memory, between other numbers."""
    b, h, n, d = x.shape
    room = np.full((b, n, 3, h, 2 * d), 9, x.dtype)
    view = room[:, :, 1, :, ::2].swapaxes(1, 2)
    view[...] = x
    return view


def reversed_(x):
    """With its rows and elements from the last to the first."""
    return np.ascontiguousarray(x[:, :, ::-1, ::-1])[:, :, ::-1, ::-1]


LAYOUTS = [np.asfortranarray, interleaved, reversed_]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_have_the_bits_of_contiguous_arrays(draw, dtype, layout):
    q, k, v = (draw(B, H, N, D, dtype=dtype) for _ in range(3))
    expected = etalon.run(PROBLEM, "forward", dict(q=q, k=k, v=v))
    given = dict(q=layout(q), k=layout(k), v=layout(v))
    o = layout(np.zeros((B, H, N, D), dtype))
    out = dict(o=o, lse=np.zeros((B, H, N), expected["lse"].dtype))
    got = etalon.run(PROBLEM, "forward", given, out=out)
    assert got["o"] is o
    for name in ("o", "lse"):
        np.testing.assert_array_equal(bits(np.ascontiguousarray(got[name])), bits(expected[name]))


def test_a_broadcast_input_is_read_and_a_broadcast_output_refused(draw):
    q, row = draw(B, H, N, D), draw(1, 1, N, D)
    k = np.broadcast_to(row, (B, H, N, D))
    expected = etalon.run(PROBLEM, "forward", dict(q=q, k=k.copy(), v=q))
    got = etalon.run(PROBLEM, "forward", dict(q=q, k=k, v=q))
    np.testing.assert_array_equal(got["o"], expected["o"])
    o = np.lib.stride_tricks.as_strided(np.zeros(D, np.float32), (B, H, N, D), (0, 0, 0, 4))
    with pytest.raises(ValueError, match="`o` must have an element in memory for each of its own"):
        etalon.run(PROBLEM, "forward", dict(q=q, k=q, v=q), out=dict(o=o))


def test_results_share_no_memory_with_other_tensors(draw):
    q, k, v = (draw(B, H, N, D) for _ in range(3))
    with pytest.raises(ValueError, match="`o` is written and must share no memory with `q`"):
        etalon.run(PROBLEM, "forward", dict(q=q, k=k, v=v), out=dict(o=q))
    # Slices of one array that lie between each other share nothing.
    forward = etalon.run(PROBLEM, "forward", dict(q=q, k=k, v=v))
    inputs = dict(q=q, k=k, v=v, **forward, dout=draw(B, H, N, D))
    expected = etalon.run(PROBLEM, "backward", inputs)
    room = np.zeros((B, N, 3, H, D), np.float32)
    out = {name: room[:, :, at].swapaxes(1, 2) for at, name in enumerate(("dq", "dk", "dv"))}
    etalon.run(PROBLEM, "backward", inputs, out=out)
    for name, x in out.items():
        np.testing.assert_array_equal(x, expected[name])
    # One row further two of them meet.
    flat = np.zeros(2 * B * H * N * D, np.float32)
    size = B * H * N * D
    out = {name: flat[at : at + size].reshape(B, H, N, D) for name, at in (("dq", 0), ("dk", size - 1))}
    with pytest.raises(ValueError, match="`dq` is written and must share no memory with `dk`"):
        etalon.run(PROBLEM, "backward", inputs, out=out)


def test_what_cannot_be_borrowed_is_named(draw):
    q = draw(B, H, N, D)
    given = dict(q=q, k=q, v=q)
    read_only = np.zeros_like(q)
    read_only.flags.writeable = False
    for out, text in [
        (read_only, "`o` must be writable"),
        ([1.0], "`o` must be an array or a tensor"),
        (q.astype(">f4"), "byte order"),
    ]:
        with pytest.raises((TypeError, ValueError), match=text):
            etalon.run(PROBLEM, "forward", given, out=dict(o=out))
    bytes_ = np.zeros(q.nbytes + 1, np.uint8)
    odd = np.frombuffer(bytes_[1:].data, np.float32).reshape(q.shape)
    with pytest.raises(ValueError, match="`k` must lie at a multiple of 4 bytes"):
        etalon.run(PROBLEM, "forward", dict(given, k=odd))
    for wrong, text in [
        (q.astype(np.complex64), "`v` must hold"),
        (q.astype(np.int64), "`v` must hold f32"),
        (q.astype(np.float64), "`v` must hold f32, as q does, found f64"),
        (q[..., :-1], r"`v` must have shape \[2, 3, 7, 5\], found \[2, 3, 7, 4\]"),
    ]:
        with pytest.raises((TypeError, ValueError), match=text):
            etalon.run(PROBLEM, "forward", dict(given, v=wrong))
    with pytest.raises(TypeError, match="`v` is missing"):
        etalon.run(PROBLEM, "forward", dict(q=q, k=q))
    with pytest.raises(TypeError, match="`w` was given"):
        etalon.run(PROBLEM, "forward", dict(given, w=q))


def test_an_input_may_be_read_only_and_targets_have_32_bits(draw):
    h, w = draw(6, 4), draw(9, 4)
    targets = np.array([0, 8, -100, 3, 3, 1])
    expected = etalon.linear_cross_entropy(h, w, targets)
    for x in (h, w):
        x.flags.writeable = False
    np.testing.assert_array_equal(etalon.linear_cross_entropy(h, w, targets.astype(np.int32)), expected)


def test_empty_tensors_are_tensors():
    q = np.zeros((1, 1, 0, 8), np.float32)
    k = np.zeros((1, 1, 4, 8), np.float32)
    assert etalon.attention(q, k, k).shape == (1, 1, 0, 8)


class Dlpack:
    """A producer of DLPack that is no array."""

    def __init__(self, x):
        self.x, self.dtype, self.shape = x, x.dtype, x.shape

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)


def test_any_producer_of_dlpack_is_read_but_not_written(draw):
    q = draw(B, H, N, D)
    expected = etalon.run(PROBLEM, "forward", dict(q=q, k=q, v=q))
    got = etalon.run(PROBLEM, "forward", dict(q=Dlpack(q), k=Dlpack(q[...]), v=Dlpack(q)))
    np.testing.assert_array_equal(got["o"], expected["o"])
    with pytest.raises(TypeError, match="`o` is written: it must be a NumPy array"):
        etalon.run(PROBLEM, "forward", dict(q=q, k=q, v=q), out=dict(o=Dlpack(np.zeros_like(q))))


def test_tensors_of_pytorch(draw):
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q, k, v = (torch.randn(B, H, N, D, requires_grad=True).to(dtype) for _ in range(3))
        o, lse = torch.empty(B, N, H, D, dtype=dtype).transpose(1, 2), torch.empty(B, H, N)
        etalon.run(PROBLEM, "forward", dict(q=q, k=k, v=v), out=dict(o=o, lse=lse))
        exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
        assert (o.double() - exact).abs().max() < 2 * torch.finfo(dtype).eps * exact.abs().max()
        assert etalon.check(PROBLEM, dict(q=q, k=k, v=v), dict(o=o, lse=lse))
