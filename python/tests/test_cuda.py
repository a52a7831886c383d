"""PyTorch's operators on a GPU: judged by the exact result, on streams, in graphs, and beside what they refuse."""

import threading

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
import etalon  # noqa: E402
import etalon.torch as E  # noqa: E402
from etalon import _device, _operators  # noqa: E402

CASES = {
    "attention": dict(batch=2, query_heads=4, key_heads=2, queries=70, keys=70, dim=64, mask={"causal": {}}),
    "attention_lse": dict(batch=2, query_heads=4, key_heads=2, queries=70, keys=90, dim=64),
    "lazy_attention": dict(batch=1, query_heads=4, key_heads=2, queries=70, keys=70, dim=64, mask={"causal": {}}),
    "linear_attention": dict(batch=1, query_heads=2, key_heads=2, tokens=130, dim=64, decay="per_head"),
    "linear_cross_entropy": dict(tokens=130, dim=64, vocab=1000),
}
TYPES = ["float32", "bfloat16", "float16"]


def function(name):
    return {
        "attention": lambda q, k, v: E.attention(q, k, v, causal=True, return_lse=True),
        "attention_lse": lambda q, k: E.attention_lse(q, k),
        "lazy_attention": lambda q, k, v, tau: E.lazy_attention(q, k, v, tau, return_lse=True),
        "linear_attention": lambda q, k, v, g_gamma: E.linear_attention(q, k, v, g_gamma=g_gamma),
        "linear_cross_entropy": lambda h, w, targets: E.linear_cross_entropy(h, w, targets),
    }[name]


def on_the_device(inputs):
    return {
        name: torch.from_numpy(x.astype("float32")).cuda().to(torch.bfloat16)
        if x.dtype.name == "bfloat16"
        else torch.from_numpy(x).cuda()
        for name, x in inputs.items()
    }


def results(name, tensors, problem):
    """Results of the forward and the backward pass by name, with a cotangent of o, of lse or of the loss alone."""
    leaves = {x: t.requires_grad_(t.is_floating_point()) for x, t in tensors.items() if not x.startswith("d")}
    y = function(name)(*leaves.values())
    y = y if isinstance(y, tuple) else (y,)
    outputs = dict(zip([x for x, role, *_ in problem.operands() if role == "output"], y))
    first = {"attention_lse": "dlse", "linear_cross_entropy": "dloss"}.get(name, "dout")
    y[0].backward(tensors.get(first))
    return outputs, {"d" + x: t.grad for x, t in leaves.items() if t.grad is not None}, first


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", CASES)
def test_passes_are_within_their_bounds(name, dtype):
    problem = etalon.problem(name, **CASES[name])
    inputs = etalon.random_inputs(problem, dtype=dtype)
    first = {"attention_lse": "dlse", "linear_cross_entropy": "dloss"}.get(name, "dout")
    inputs |= {first: etalon.random_inputs(problem, "backward", dtype=dtype)[first]}
    if first == "dloss":
        # Gradients are computed with the loss and rounded before they are scaled: a power of 2 rounds nothing more.
        inputs[first][...] = 0.25
    outputs, gradients, _ = results(name, on_the_device(inputs), problem)
    plain = lambda tensors: {x: t.detach().cpu() for x, t in tensors.items()}
    given = {x: t for x, t in inputs.items() if x != first}
    assert etalon.check(problem, given, plain(outputs), only=list(outputs)).require()
    assert etalon.check(problem, inputs, plain(gradients), "backward", only=list(gradients)).require()


def tensors(**options):
    return [torch.randn(2, 4, 96, 64, device="cuda", **options) for _ in range(3)]


def test_a_mask_and_strides_as_models_have_them():
    x = torch.randn(2, 96, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x[:, :, at].transpose(1, 2) for at in range(3))
    mask = torch.rand(2, 1, 96, 96, device="cuda") > 0.3
    o = E.attention(q, k, v, mask=mask)
    assert o.transpose(1, 2).is_contiguous(), "heads and rows lie as those of q"
    own = E.attention(*(x.float().cpu() for x in (q, k, v)), mask=mask.cpu())
    torch.testing.assert_close(o.float().cpu(), own, rtol=2e-2, atol=2e-2)
    other = E.attention(q, k, v, mask=~mask)
    assert not torch.equal(o, other), "the elements of the mask are those of the call"


def test_ids_of_segments_of_each_call_count():
    q, k, v = (torch.randn(1, 2, 160, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    for cut in (70, 100, 70):
        ids = (torch.arange(160, device="cuda") >= cut).long()[None]
        mask = {"and": [{"causal": {}}, {"segments": {"query": ids, "key": ids}}]}
        parts = [[x[:, :, rows] for x in (q, k, v)] for rows in (slice(cut), slice(cut, None))]
        expected = torch.cat([E.attention(*part, causal=True) for part in parts], 2)
        torch.testing.assert_close(E.attention(q, k, v, mask=mask), expected)


@pytest.mark.parametrize("name", ["attention", "attention_lse", "linear_attention", "linear_cross_entropy"])
def test_the_second_order_is_that_of_the_cpu(name):
    problem = etalon.problem(name, **CASES[name])
    inputs = etalon.random_inputs(problem, dtype="float32")
    found = []
    for device in ("cpu", "cuda"):
        leaves = [torch.from_numpy(x).to(device) for x in inputs.values()]
        leaves = [x.requires_grad_(x.is_floating_point()) for x in leaves]
        smooth = [x for x in leaves if x.requires_grad]
        y = function(name)(*leaves)
        y = y[0] if isinstance(y, tuple) else y
        first = torch.autograd.grad(y.square().sum(), smooth, create_graph=True)
        found.append([x.cpu() for x in torch.autograd.grad(sum(g.square().sum() for g in first), smooth)])
    for x, z in zip(*found):
        # Both lie within the bounds of f32; sums of thousands of products of numbers of this size.
        torch.testing.assert_close(x, z, rtol=1e-3, atol=1e-3 * float(z.abs().max()))


def test_lazy_attention_has_no_second_order():
    q, k, v = tensors(requires_grad=True)
    o = E.lazy_attention(q, k, v, torch.zeros(4, device="cuda"))
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError):
        dq.sum().backward()


def test_a_pass_runs_on_the_current_stream():
    q, k, v = tensors(dtype=torch.bfloat16)
    expected, stream = E.attention(q, k, v), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = q * 2
        o = E.attention(late / 2, k, v)
    stream.synchronize()
    assert torch.equal(o, expected)


def test_a_graph_captures_a_pass_that_has_run():
    q, k, v = tensors(dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    expected = E.attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        o = E.attention(q, k, v, causal=True)
    q.copy_(torch.randn_like(q))
    graph.replay()
    torch.cuda.synchronize()
    assert not torch.equal(o, expected)
    assert torch.equal(o, E.attention(q, k, v, causal=True))


def test_a_graph_of_a_pass_that_has_not_run_raises():
    q, k, v = (torch.randn(1, 3, 33, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="must run once"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        E.attention(q, k, v, softcap=20.0)
    torch.cuda.synchronize()


def test_a_training_step_in_a_graph():
    h = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(1000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 1000, (256,), device="cuda")

    def step():
        h.grad = w.grad = None
        loss = E.linear_cross_entropy(h, w, targets)
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = step().item(), h.grad.clone()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    graph.replay()
    torch.cuda.synchronize()
    assert loss.item() == expected[0] and torch.equal(h.grad, expected[1])


def test_old_passes_go_and_threads_share_them(monkeypatch):
    monkeypatch.setattr(_device, "MOST", 2)
    errors = []

    def work(length):
        try:
            x = [torch.randn(1, 2, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
            first = E.attention(*x)
            for _ in range(3):
                assert torch.equal(E.attention(*x), first)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(length,)) for length in (16, 32, 48, 64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(_device.PASSES) <= max(2, 256)


def test_transformations_and_compile():
    q, k, v = tensors()
    expected = E.attention(q, k, v, causal=True)
    compiled = torch.compile(lambda *x: E.attention(*x, causal=True), fullgraph=True)
    assert torch.equal(compiled(q, k, v), expected)
    mapped = torch.vmap(lambda q, k, v: E.attention(q[None], k[None], v[None], causal=True)[0])
    assert torch.equal(mapped(q, k, v), expected)


def test_errors_name_the_tensor():
    q, k, v = tensors(dtype=torch.bfloat16)
    with pytest.raises((ValueError, RuntimeError), match="k|same device"):
        E.attention(q, k.cpu(), v)
    with pytest.raises(NotImplementedError, match="float64 has no kernel"):
        E.attention(q.double(), k.double(), v.double())
    with pytest.raises(TypeError, match="`k`"):
        E.attention(q, k.float(), v)
    assert _operators.is_plain((q, k, v))


def test_pytorchs_attention_is_replaced():
    q, k, v = tensors(dtype=torch.bfloat16)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    expected = sdpa(q, k, v, is_causal=True)
    with E.replace_sdpa(strict=True):
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(o, expected, rtol=2e-2, atol=2e-2)
