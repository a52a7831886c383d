"""PyTorch's operators: results and derivatives against finite differences and PyTorch's own, and what must raise."""

import pytest

torch = pytest.importorskip("torch")
import etalon  # noqa: E402
import etalon.torch as E  # noqa: E402
from etalon import _operators as O  # noqa: E402

F = torch.nn.functional


def draw(*shape, dtype=torch.float64, grad=True):
    source = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=source).to(dtype).requires_grad_(grad)


def tensors(name, dtype=torch.float64):
    """A function of an algorithm, and its tensors."""
    q, k, v = draw(1, 4, 5, 3, dtype=dtype), draw(1, 2, 5, 3, dtype=dtype), draw(1, 2, 5, 2, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    targets = torch.tensor([0, 3, 8, -100, 2, 2])
    h, w = draw(6, 4, dtype=dtype), draw(9, 4, dtype=dtype)
    sinks, bias = draw(4, dtype=wide), draw(1, 1, 5, 5, dtype=dtype)
    tau = torch.linspace(-0.9, -0.3, 4, dtype=wide).requires_grad_()
    decays = (-draw(1, 2, 5, dtype=wide).abs()).detach().requires_grad_()
    state = draw(1, 2, 3, 2, dtype=wide)
    return {
        "attention": (lambda *x: E.attention(*x, causal=True, return_lse=True), (q, k, v)),
        "attention_options": (
            lambda q, k, v, sinks, bias: E.attention(
                q, k, v, window=(2, 1), scale=0.7, softcap=2.0, sinks=sinks, bias=bias
            ),
            (q, k, v, sinks, bias),
        ),
        "attention_lse": (lambda q, k: E.attention_lse(q, k, causal=True), (q, k)),
        "lazy_attention": (lambda *x: E.lazy_attention(*x), (q, k, v, tau)),
        "linear_attention": (
            lambda q, k, v, g, s: E.linear_attention(q, k, v, g=g, initial_state=s, return_final_state=True),
            (q, k, v, decays, state),
        ),
        "linear_cross_entropy": (lambda h, w: E.linear_cross_entropy(h, w, targets, label_smoothing=0.1), (h, w)),
    }[name]


NAMES = [
    "attention",
    "attention_options",
    "attention_lse",
    "lazy_attention",
    "linear_attention",
    "linear_cross_entropy",
]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_both_orders_are_those_of_finite_differences(name):
    function, inputs = tensors(name)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_have_the_gradients_of_the_reference(name, dtype):
    function, inputs = tensors(name, dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found, expected = [], []
    for values, list_ in ((inputs, found), (exact, expected)):
        y = function(*values)
        y = y if isinstance(y, tuple) else (y,)
        loss = sum((x.double() * torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(x.shape)).sum() for x in y)
        first = torch.autograd.grad(loss, values, create_graph=True)
        second = torch.autograd.grad(sum((g.double() ** 2).sum() for g in first), values)
        list_.extend([*y, *first, *second])
    for x, z in zip(found, expected):
        scale = z.abs().max().clamp(min=1e-3)
        assert (x.double() - z).abs().max() <= 40 * torch.finfo(dtype).eps * scale


OPCHECKS = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("name", NAMES)
def test_operators_pass_opcheck(name, monkeypatch):
    monkeypatch.setattr(O, "is_plain", lambda _: False)
    function, inputs = tensors(name, torch.float32)
    algorithm = {x.name: x for x in (O.ATTENTION, O.LSE, O.LAZY, O.LINEAR, O.LOSS)}[name.removesuffix("_options")]
    calls = []

    def spy(op):
        def call(*arguments):
            calls.append((op, arguments))
            return op(*arguments)

        return call

    ops = dict(algorithm.ops)
    algorithm.ops.update({pass_: spy(op) for pass_, op in ops.items()})
    try:
        y = function(*inputs)
        y = y[0] if isinstance(y, tuple) else y
        first = torch.autograd.grad(y.sum(), inputs, create_graph=True)
        torch.autograd.grad(sum((g**2).sum() for g in first), inputs)
    finally:
        algorithm.ops.update(ops)
    forward = ops.get("forward_backward", ops["forward"])
    assert {op for op, _ in calls} >= {forward, ops["backward"], ops["double_backward"]}
    for op, arguments in calls:
        is_last = op is ops["double_backward"]  # whose derivative is refused
        for tests, is_leaf in ((OPCHECKS[:3], True), (OPCHECKS[3:], not is_last)):
            leaves = [
                x.detach().requires_grad_(x.is_floating_point() and is_leaf) if isinstance(x, torch.Tensor) else x
                for x in arguments
            ]
            torch.library.opcheck(op, leaves, test_utils=tests)


def test_a_mode_sees_the_operators():
    """A call that nobody looks at skips PyTorch's dispatcher; one under a mode or of a subclass does not."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    function, inputs = tensors("attention", torch.float32)
    with Seeing():
        y = function(*inputs)[0]
        torch.autograd.grad(y.sum(), inputs)
    assert {O.ATTENTION.ops["forward"], O.ATTENTION.ops["backward"]} <= set(seen)
    plain = [torch.randn(1, 2, 5, 8) for _ in range(3)]
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in plain]
        assert etalon.torch.attention(*fake).shape == plain[0].shape


@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_function_has_the_same_gradients(name):
    function, inputs = tensors(name, torch.float32)

    def loss(*x):
        y = function(*(2 * a for a in x))
        return sum((1.5 * a).sum() for a in (y if isinstance(y, tuple) else (y,)))

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(loss(*inputs), inputs)
    for x, z in zip(torch.autograd.grad(compiled(*inputs), inputs), expected):
        torch.testing.assert_close(x, z, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="double backward|create_graph=False"):
        first = torch.autograd.grad(compiled(*inputs), inputs, create_graph=True)
        torch.autograd.grad(sum((g**2).sum() for g in first), inputs)


def test_a_mask_of_a_problem_file_is_compiled():
    mask = {"chunked_causal": {"chunk": 2}}
    torch._dynamo.reset()
    function = torch.compile(lambda q: E.attention(q, q, q, mask=mask), fullgraph=True, backend="aot_eager")
    q = draw(1, 2, 6, 8, dtype=torch.float32)
    torch.testing.assert_close(function(q), E.attention(q, q, q, mask=mask))


def test_lengths_that_change_are_compiled_once():
    function = torch.compile(
        lambda q, k, v: E.attention(q, k, v, causal=True), fullgraph=True, backend="aot_eager", dynamic=True
    )
    torch._dynamo.reset()
    for n in (4, 5, 6, 7):
        q = draw(1, 2, n, 8, dtype=torch.float32)
        y = function(q, q, q)
        torch.testing.assert_close(y, F.scaled_dot_product_attention(q, q, q, is_causal=True))


@pytest.mark.parametrize("name", NAMES)
def test_transforms_of_functions(name):
    function, inputs = tensors(name)

    def loss(*x):
        y = function(*x)
        return sum(a.square().sum() for a in (y if isinstance(y, tuple) else (y,)))

    plain = [x.detach() for x in inputs]
    expected = torch.autograd.grad(loss(*inputs), inputs)
    order = tuple(range(len(inputs)))
    torch.testing.assert_close(torch.func.grad(loss, order)(*plain), expected)
    several = [torch.stack([x, 0.5 * x, -x if name == "attention" else x]) for x in plain]
    mapped = torch.vmap(torch.func.grad(loss, order))(*several)
    for at in range(3):
        own = [x[at].clone().requires_grad_() for x in several]
        for x, z in zip(mapped, torch.autograd.grad(loss(*own), own)):
            torch.testing.assert_close(x[at], z)


@pytest.mark.parametrize("name", ["attention", "attention_options", "attention_lse"])
def test_forward_mode_is_that_of_finite_differences(name):
    function, inputs = tensors(name)
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, check_backward_ad=False)
    plain = tuple(x.detach() for x in inputs)
    tangents = tuple(torch.ones_like(x) for x in plain)
    _, found = torch.func.jvp(lambda *x: function(*x), plain, tangents)
    h = 1e-6
    ends = [function(*(x + s * h * t for x, t in zip(plain, tangents))) for s in (1, -1)]
    ends = [y if isinstance(y, tuple) else (y,) for y in ends]
    for x, a, b in zip(found if isinstance(found, tuple) else (found,), *ends):
        torch.testing.assert_close(x, (a - b) / (2 * h), rtol=1e-6, atol=1e-8)


def test_what_has_no_derivative_raises():
    for name in ("lazy_attention", "linear_attention", "linear_cross_entropy"):
        function, inputs = tensors(name)
        plain = tuple(x.detach() for x in inputs)
        with pytest.raises(NotImplementedError, match=f"forward mode of {name} is not implemented"):
            torch.func.jvp(lambda *x: function(*x), plain, tuple(map(torch.ones_like, plain)))
    for name in NAMES:
        function, inputs = tensors(name)
        y = function(*inputs)
        y = y[0] if isinstance(y, tuple) else y
        (first, *_) = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
        (second, *_) = torch.autograd.grad(first.square().sum(), inputs, create_graph=True)
        with pytest.raises(NotImplementedError, match="third order"):
            torch.autograd.grad(second.sum(), inputs)


def test_weights_have_no_gradient_in_silence():
    h, w, targets = draw(6, 4), draw(9, 4), torch.arange(6)
    weights = draw(9).abs().detach().requires_grad_()
    with pytest.raises(NotImplementedError, match="a gradient by `class_weights` is not implemented"):
        E.linear_cross_entropy(h, w, targets, class_weights=weights)
    assert E.linear_cross_entropy(h, w, targets, class_weights=weights.detach()).isfinite()


def test_an_output_that_is_not_used_has_no_cotangent():
    q, k, v = (draw(1, 2, 5, 3) for _ in range(3))
    o, lse = E.attention(q, k, v, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    expected = torch.autograd.grad(E.attention_lse(q, k).sum(), (q, k))
    torch.testing.assert_close((dq, dk), expected)
    assert (dv == 0).all()
    (only,) = torch.autograd.grad(E.attention(q, k.detach(), v.detach()).sum(), q)
    assert only.shape == q.shape


def test_attention_is_that_of_pytorch_in_every_layout():
    for dtype in (torch.float32, torch.bfloat16):
        packed = draw(2, 33, 3, 4, 16, dtype=dtype, grad=False)
        q, k, v = (packed[:, :, at].transpose(1, 2) for at in range(3))
        o = E.attention(q, k, v, causal=True)
        assert o.transpose(1, 2).is_contiguous(), "heads lie as those of q do"
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
        assert (o.double() - exact).abs().max() < 2 * torch.finfo(dtype).eps * exact.abs().max()
    mask = torch.rand(2, 1, 33, 33) < 0.7
    mask[..., 0] = True
    o = E.attention(q.float(), k.float(), v.float(), mask=mask)
    exact = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask)
    torch.testing.assert_close(o, exact, rtol=1e-5, atol=1e-5)


def test_the_loss_is_that_of_pytorch():
    h, w, targets = (
        draw(6, 4, dtype=torch.float32),
        draw(9, 4, dtype=torch.float32),
        torch.tensor([0, 3, 8, -100, 2, 2]),
    )
    for reduction in ("mean", "sum", "none"):
        own = E.linear_cross_entropy(h, w, targets, reduction=reduction)
        other = F.cross_entropy(h @ w.T, targets, reduction=reduction)
        torch.testing.assert_close(own, other)
        for factor in (1, 3):
            found, expected = (torch.autograd.grad(factor * x.sum(), (h, w), retain_graph=True) for x in (own, other))
            torch.testing.assert_close(found, expected)


def test_a_scaled_loss_keeps_small_gradients_in_f16():
    h, w, targets = 1e-5 * draw(64, 4), draw(9, 4), torch.arange(64) % 9
    exact = torch.autograd.grad(2.0**14 * F.cross_entropy(h @ w.T, targets), (h, w))
    h, w = (x.detach().half().requires_grad_() for x in (h, w))
    found = torch.autograd.grad(2.0**14 * E.linear_cross_entropy(h, w, targets), (h, w))
    for x, z in zip(found, exact):
        assert (x.double() - z).norm() < 1e-2 * z.norm()


def test_errors_name_the_tensor():
    q, k = draw(1, 2, 5, 8, dtype=torch.float32), draw(1, 2, 5, 8, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="`k` must hold f32, as q does, found bf16"):
        E.attention(q, k, q)
    with pytest.raises(ValueError, match="`k` must have shape"):
        E.attention(q, q[..., :-1], q)
    with pytest.raises(ValueError, match="`query_heads` must be a multiple"):
        E.attention(q, draw(1, 3, 5, 8, dtype=torch.float32), q)


def test_threads_are_those_of_pytorch():
    threads = etalon.get_num_threads()
    E.use_threads_of_torch()
    assert etalon.get_num_threads() == torch.get_num_threads()
    etalon.set_num_threads(threads)


OFFSETS = [0, 3, 3, 10, 12]


@pytest.mark.parametrize("name", ["attention", "attention_lse", "lazy_attention", "linear_attention"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_packed_sequences_are_calls_of_their_own(name, as_tensor):
    q, k, v = (torch.randn(1, 2, 12, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    more = {"tau": torch.zeros(2, dtype=torch.float64)} if name == "lazy_attention" else {}
    given = [q, k] if name == "attention_lse" else [q, k, v]
    offsets = torch.tensor(OFFSETS, dtype=torch.int32) if as_tensor else OFFSETS
    linear = name == "linear_attention"
    packed = {"cu_tokens": offsets} if linear else {"cu_query": offsets, "cu_key": offsets}
    options = {"return_final_state": True} if linear else {} if name == "lazy_attention" else {"causal": True}
    function = getattr(E, name)
    found = function(*given, **more, **options, sequences={"packed": packed})
    state, y = (found[1], found[0]) if linear else (None, found)
    parts = []
    for at, (start, end) in enumerate(zip(OFFSETS, OFFSETS[1:])):
        if end == start:
            continue
        part = function(*(x[:, :, start:end] for x in given), **more, **options)
        if linear:
            torch.testing.assert_close(state[at], part[1][0])
            part = part[0]
        parts.append(part)
    whole = torch.cat(parts, dim=2)
    torch.testing.assert_close(y, whole)
    weights = torch.randn_like(y)
    for x, z in zip(
        torch.autograd.grad((y * weights).sum(), given), torch.autograd.grad((whole * weights).sum(), given)
    ):
        torch.testing.assert_close(x, z)


def test_lengths_of_sequences_are_padding():
    q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))
    o = E.attention(q, k, v, sequences={"lengths": {"query": [6, 2], "key": torch.tensor([6, 3])}})
    assert (o[1, :, 2:] == 0).all()
    torch.testing.assert_close(o[1:, :, :2], E.attention(q[1:, :, :2], k[1:, :, :3], v[1:, :, :3]))


def test_ids_of_segments_stand_in_a_mask():
    ids = torch.tensor([[0, 0, 0, 1, 1, -1, 2, 2], [3, 3, 4, 4, 4, 4, 4, -1]])
    function, (q, k, v) = tensors("attention", torch.float32)
    q, k, v = (torch.randn(2, 2, 8, 4, requires_grad=True) for _ in "qkv")
    dense = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None] & torch.ones(8, 8, dtype=torch.bool).tril()
    tree = {"and": [{"causal": {}}, {"segments": {"query": ids, "key": ids}}]}
    found, expected = [], []
    for mask, list_ in ((tree, found), (dense[:, None], expected)):
        o, lse = E.attention(q, k, v, mask=mask, return_lse=True)
        seen = lse.isfinite()
        list_.extend([o, lse[seen], *torch.autograd.grad(o.square().sum() + lse[seen].sum(), (q, k, v))])
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y)
    arrays = [x.detach().numpy() for x in (q, k, v)]
    tree = {"and": [{"causal": {}}, {"segments": {"query": ids.numpy(), "key": ids.tolist()}}]}
    torch.testing.assert_close(torch.from_numpy(etalon.attention(*arrays, mask=tree)), found[0].detach())
    with pytest.raises(ValueError, match="mask array 0"):
        E.attention(q, k, v, mask={"segments": {"query": ids[:1], "key": ids}})


def test_a_prepared_pass_of_a_gpu_is_that_of_its_ids(monkeypatch):
    from etalon import _device

    made = []

    class Prepared:
        def __init__(self, problem, *_, device):
            made.append(problem)

    monkeypatch.setattr(_device, "DevicePass", Prepared)
    monkeypatch.setattr(_device, "PASSES", _device.PASSES.copy())
    x = torch.zeros(1, 1, 4, 8)
    for ids in ([0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1]):
        mask = {"segments": {"query": [ids], "key": [ids]}}
        problem = etalon.problem("attention", q=x, k=x, v=x, mask=mask)
        _device._prepared(problem, "forward", {"q": x, "k": x, "v": x}, {"o": x}, 0, False, None)
    assert len(made) == 2 and made[0] != made[1]
