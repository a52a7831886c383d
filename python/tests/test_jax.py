"""JAX: results and derivatives against the reference and finite differences, its transforms, and what must raise."""

import ctypes
import functools

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import etalon  # noqa: E402
import etalon.jax as E  # noqa: E402

TARGETS = np.array([0, 3, 8, -100, 2, 2], np.int32)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def draw(*shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), dtype)


def tensors(name, dtype):
    """Tensors of an algorithm by name, and keywords."""
    wide = "float64" if dtype == "float64" else "float32"
    q, k, v = draw(1, 4, 5, 3, dtype=dtype), draw(1, 2, 5, 3, dtype=dtype), draw(1, 2, 5, 2, dtype=dtype)
    sinks, bias = draw(4, dtype=wide), draw(1, 1, 5, 5, dtype=dtype)
    h, w, b = draw(6, 4, dtype=dtype), draw(9, 4, dtype=dtype), draw(9, dtype=dtype)
    tau = jnp.linspace(-0.9, -0.3, 4, dtype=wide)
    decays, state = -abs(draw(1, 2, 5, dtype=wide)), draw(1, 2, 3, 2, dtype=wide)
    return {
        "attention": (dict(q=q, k=k, v=v), dict(causal=True, return_lse=True)),
        "attention_options": (
            dict(q=q, k=k, v=v, sinks=sinks, bias=bias),
            dict(window=(2, 1), scale=0.7, softcap=2.0, return_lse=True),
        ),
        "attention_lse": (dict(q=q, k=k), dict(causal=True)),
        "lazy_attention": (dict(q=q, k=k, v=v, tau=tau), dict(return_lse=True)),
        "linear_attention": (dict(q=q, k=k, v=v, g=decays, initial_state=state), dict(return_final_state=True)),
        "linear_cross_entropy": (dict(h=h, w=w, bias=b), dict(targets=TARGETS, label_smoothing=0.1)),
        "losses": (dict(h=h, w=w), dict(targets=TARGETS, reduction="none")),
    }[name]


NAMES = [
    "attention",
    "attention_options",
    "attention_lse",
    "lazy_attention",
    "linear_attention",
    "linear_cross_entropy",
    "losses",
]


def algorithm(name):
    return {"attention_options": "attention", "losses": "linear_cross_entropy"}.get(name, name)


def by_order(name, dtype, module=E):
    """The function of an algorithm that takes its tensors in their order, and these."""
    given, keywords = tensors(name, dtype)
    function = getattr(module, algorithm(name))
    return lambda *x: function(**dict(zip(given, x)), **keywords), tuple(given.values())


def results(y):
    return y if isinstance(y, tuple) else (y,)


def scalar(function):
    """A number that depends on every element of every result, each with a weight of its own."""

    def call(*x):
        total = 0
        for y in results(function(*x)):
            weights = jnp.cos(jnp.arange(y.size, dtype=jnp.promote_types(y.dtype, jnp.float32))).reshape(y.shape)
            total += (y.astype(weights.dtype) * weights).sum()
        return total

    return call


def gradients(function, inputs):
    """Results and gradients of first and second order."""
    every = tuple(range(len(inputs)))
    first = jax.grad(scalar(function), every)
    second = jax.grad(
        lambda *x: sum((g.astype(jnp.promote_types(g.dtype, jnp.float32)) ** 2).sum() for g in first(*x))
    )
    return [*results(function(*inputs)), *first(*inputs), second(*inputs)]


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_has_the_results_of_the_module_and_of_the_reference(name, dtype, x64):
    function, inputs = by_order(name, dtype.name)
    wide = [np.float64(x) for x in inputs]
    own, exact = by_order(name, dtype.name, etalon)[0], by_order(name, "float64", etalon)[0]
    bits, expected = own(*map(np.asarray, inputs)), exact(*wide)
    for x, y, z in zip(results(function(*inputs)), results(bits), results(expected), strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.dtype == y.dtype
        # Every row sums a few terms of the size of the largest: some roundings of inputs and of the result.
        bound = 20 * float(jnp.finfo(dtype).eps) * max(1, np.abs(z).max())
        np.testing.assert_allclose(np.float64(x), z, rtol=0, atol=bound)
    for x, z in zip(results(function(*wide)), results(expected), strict=True):
        np.testing.assert_array_equal(x, z)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_both_orders_are_those_of_finite_differences(name, x64):
    function, inputs = by_order(name, "float64")
    check_grads(jax.jit(function), inputs, order=2, modes=["rev"], rtol=1e-5, atol=1e-6)


def test_a_loss_that_is_used_twice_has_both_orders(x64):
    function, inputs = by_order("linear_cross_entropy", "float64")
    check_grads(jax.jit(lambda *x: function(*x) ** 2), inputs, order=2, modes=["rev"], rtol=1e-5, atol=1e-6)

    def with_value(*x):
        value, first = jax.value_and_grad(function)(*x)
        return value * (first**2).sum()

    check_grads(jax.jit(with_value), inputs, order=1, modes=["rev"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_kernels_have_the_gradients_of_the_reference(name, x64):
    compute = jax.jit(lambda *x: gradients(by_order(name, "float64")[0], x))
    for kind in ("float32", "bfloat16", "float16"):
        inputs = by_order(name, kind)[1]
        rounded, exact = compute(*inputs), compute(*(x.astype("float64") for x in inputs))
        for x, z in zip(rounded, exact, strict=True):
            scale = np.abs(z).max(initial=1e-3)
            np.testing.assert_allclose(np.float64(x), z, rtol=0, atol=60 * float(jnp.finfo(kind).eps) * scale)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_functions_have_the_same_bits(name):
    function, inputs = by_order(name, "float32")
    first = jax.grad(scalar(function), tuple(range(len(inputs))))
    for plain, compiled in [(function, jax.jit(function)), (first, jax.jit(first))]:
        for x, z in zip(results(compiled(*inputs)), results(plain(*inputs)), strict=True):
            np.testing.assert_array_equal(x, z)
    for x, z in zip(jax.grad(scalar(jax.jit(function)))(*inputs), first(*inputs)[0]):
        np.testing.assert_array_equal(x, z)


@pytest.mark.parametrize("name", NAMES)
def test_mapped_functions_have_the_bits_of_single_calls(name):
    function, inputs = by_order(name, "float32")
    every = tuple(range(len(inputs)))
    several = [jnp.stack([x, 0.5 * x, 0.25 * x]) for x in inputs]
    for call in (lambda *x: results(function(*x)), jax.grad(scalar(function), every)):
        for mapped in (every, every[:1], every[1:]):
            given = [several[at] if at in mapped else x for at, x in enumerate(inputs)]
            axes = [0 if at in mapped else None for at in every]
            found = jax.jit(jax.vmap(call, axes))(*given)
            for entry in range(3):
                own = [x[entry] if at in mapped else x for at, x in enumerate(given)]
                for x, z in zip(found, call(*own), strict=True):
                    np.testing.assert_array_equal(x[entry], z)


def test_axes_of_maps_are_any_and_several():
    q, k, v = draw(2, 1, 2, 3, 8, 16), draw(3, 1, 2, 8, 16), draw(1, 2, 8, 16, 2)
    call = functools.partial(E.attention, causal=True)
    found = jax.vmap(jax.vmap(call, (2, 0, None), 1), (0, None, -1))(q, k, v)
    for i in range(2):
        for j in range(3):
            np.testing.assert_array_equal(found[i, :, j], call(q[i, :, :, j], k[j], v[..., i]))


def test_gradients_of_what_is_not_mapped_are_summed():
    h, w = draw(3, 6, 4), draw(9, 4)
    loss = functools.partial(E.linear_cross_entropy, targets=TARGETS)
    found = jax.grad(lambda w: jax.vmap(loss, (0, None))(h, w).sum())(w)
    np.testing.assert_allclose(found, sum(jax.grad(loss, 1)(x, w) for x in h), rtol=1e-5, atol=1e-6)
    per_example = jax.vmap(jax.grad(loss, 1), (0, None))(h, w)
    np.testing.assert_allclose(per_example.sum(0), found, rtol=1e-5, atol=1e-6)


def test_a_mask_is_an_array_that_jax_traces_and_maps():
    q, masks = draw(2, 3, 6, 8), np.random.default_rng(1).random((4, 2, 1, 6, 6)) < 0.6
    masks[..., 0] = True

    @jax.jit
    def call(q, mask):
        return E.attention(q, q, q, mask=mask, return_lse=True)

    mapped = jax.vmap(call, (None, 0))(q, masks)
    repeated = jax.vmap(call, (0, None))(jnp.stack([q, 2 * q]), masks[0])
    for entry in range(4):
        for x, y in zip(mapped, etalon.attention(q, q, q, mask=masks[entry], return_lse=True)):
            np.testing.assert_array_equal(x[entry], y)
    for entry, factor in enumerate((1, 2)):
        for x, y in zip(repeated, etalon.attention(*[factor * q] * 3, mask=masks[0], return_lse=True)):
            np.testing.assert_array_equal(x[entry], y)
    assert jax.vmap(call, (None, 0))(q, masks[:0])[0].shape == (0, 2, 3, 6, 8)
    tree = {"chunked_causal": {"chunk": 2}}
    np.testing.assert_array_equal(E.attention(q, q, q, mask=tree), etalon.attention(q, q, q, mask=tree))
    seen = jnp.where(masks[0], 0.0, -jnp.inf)
    bias = jax.grad(lambda x: (E.attention(x, x, x, bias=jnp.maximum(seen, -1e9)) ** 2).sum())(q)
    np.testing.assert_allclose(jax.grad(lambda x: (call(x, masks[0])[0] ** 2).sum())(q), bias, rtol=1e-4, atol=1e-5)


def test_packed_sequences_are_those_of_their_own():
    q, k, v, offsets = draw(1, 2, 9, 8), draw(1, 2, 9, 8), draw(1, 2, 9, 8), np.array([0, 4, 9])
    both = {"packed": {"cu_query": offsets, "cu_key": offsets}}
    for call, sequences in [
        (functools.partial(E.attention, causal=True), both),
        (E.linear_attention, {"packed": {"cu_tokens": offsets}}),
    ]:
        packed = functools.partial(call, sequences=sequences)
        alone = lambda *x: jnp.concatenate([call(*(y[:, :, a:b] for y in x)) for a, b in [(0, 4), (4, 9)]], 2)
        np.testing.assert_allclose(packed(q, k, v), alone(q, k, v), rtol=1e-5, atol=1e-6)
        for x, z in zip(*(jax.grad(scalar(f), (0, 1, 2))(q, k, v) for f in (packed, alone))):
            np.testing.assert_allclose(x, z, rtol=1e-4, atol=1e-5)
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(lambda x: E.linear_attention(q, k, v, sequences={"packed": {"cu_tokens": x}}))(offsets)


def test_attention_and_the_loss_are_those_of_jax():
    q, k, v = draw(2, 4, 33, 16), draw(2, 2, 33, 16), draw(2, 2, 33, 16)

    def attention(q, k, v):
        heads = lambda x: x.transpose(0, 2, 1, 3)
        return heads(jax.nn.dot_product_attention(heads(q), heads(k), heads(v), is_causal=True))

    def loss(h, w):
        losses = -jax.nn.log_softmax(h @ w.T)[np.arange(6), TARGETS.clip(0)]
        return jnp.where(TARGETS == -100, 0, losses).sum() / (TARGETS != -100).sum()

    own = functools.partial(E.linear_cross_entropy, targets=TARGETS)
    pairs = [
        (functools.partial(E.attention, causal=True), attention, (q, k, v)),
        (own, loss, (draw(6, 4), draw(9, 4))),
    ]
    for mine, other, inputs in pairs:
        every = tuple(range(len(inputs)))
        for f, g in [
            (mine, other),
            *((jax.grad(scalar(x), every), jax.grad(scalar(y), every)) for x, y in [(mine, other)]),
        ]:
            for x, z in zip(results(f(*inputs)), results(g(*inputs)), strict=True):
                np.testing.assert_allclose(x, z, rtol=1e-4, atol=1e-5)


def test_loops_and_checkpoints_are_differentiated():
    q, k = draw(1, 2, 6, 8), draw(1, 2, 6, 8)
    step = functools.partial(E.attention, causal=True)

    def looped(k):
        return jax.lax.scan(lambda x, _: (step(x, k, k), None), q, length=3)[0].sum()

    def unrolled(k):
        x = q
        for _ in range(3):
            x = jax.checkpoint(step)(x, k, k)
        return x.sum()

    np.testing.assert_allclose(jax.jit(jax.grad(looped))(k), jax.grad(unrolled)(k), rtol=1e-5, atol=1e-6)


def test_an_output_that_is_not_used_has_no_cotangent():
    q, k, v = (draw(1, 2, 5, at) for at in (3, 3, 2))
    only_lse = lambda *x: E.attention(*x, return_lse=True)[1].sum()
    dq, dk, dv = jax.grad(only_lse, (0, 1, 2))(q, k, v)
    expected = jax.grad(lambda *x: E.attention_lse(*x).sum(), (0, 1))(q, k)
    np.testing.assert_allclose((dq, dk), expected, rtol=1e-5, atol=1e-6)
    assert (dv == 0).all()


def test_a_donated_array_and_one_given_twice_are_read_first():
    q = draw(1, 2, 64, 16)
    expected = etalon.attention(q, q, q)
    given = jnp.array(q)
    call = jax.jit(lambda x: E.attention(x, x, x), donate_argnums=0)
    np.testing.assert_array_equal(call(given), expected)
    assert given.is_deleted()


def test_calls_come_from_many_threads(on_threads):
    q = draw(1, 2, 64, 16)
    call = jax.jit(jax.value_and_grad(lambda x: (E.attention(x, x, x) ** 2).sum()))
    (value, grad), wrong = call(q), []

    def work():
        for _ in range(20):
            y, dq = call(q)
            if y != value or not np.array_equal(dq, grad):
                wrong.append(y)

    on_threads(work)
    assert not wrong


def test_numbers_of_threads_change_no_bit():
    call, inputs = jax.jit(jax.vmap(functools.partial(E.attention, causal=True))), [draw(5, 1, 2, 40, 16)] * 3
    expected, threads = call(*inputs), etalon.get_num_threads()
    try:
        for count in (1, 3):
            etalon.set_num_threads(count)
            np.testing.assert_array_equal(call(*inputs), expected)
    finally:
        etalon.set_num_threads(threads)


def test_float64_is_float32_unless_jax_has_it():
    q = np.random.default_rng(0).standard_normal((1, 2, 5, 8))
    o = E.attention(q, q, q)
    assert o.dtype == jnp.float32
    np.testing.assert_array_equal(o, etalon.attention(*[q.astype(np.float32)] * 3))


def test_what_has_no_derivative_raises(x64):
    for name in NAMES:
        function, inputs = by_order(name, "float64")
        third = jax.grad(
            lambda x: jax.grad(lambda x: (jax.grad(scalar(function))(x, *inputs[1:]) ** 2).sum())(x).sum()
        )
        with pytest.raises(
            NotImplementedError, match=f"a derivative of third order of {algorithm(name)} is not implemented"
        ):
            third(inputs[0])
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(function, inputs, inputs)
    h, w = draw(6, 4), draw(9, 4)
    for names in ("class_weights", "token_weights"):
        weights = jnp.ones(9 if names == "class_weights" else 6, jnp.float32)
        for reduction in ("mean", "none"):

            def loss(x, h=h):
                return E.linear_cross_entropy(h, w, TARGETS, **{names: x}, reduction=reduction).sum()

            assert jnp.isfinite(jax.grad(loss, 1)(weights, h)).all()
            for derivative in (
                jax.grad(loss),
                jax.jit(jax.grad(loss)),
                jax.grad(lambda x: jax.grad(loss, 1)(x, h).sum()),
            ):
                with pytest.raises(NotImplementedError, match=f"a gradient by `{names}` is not implemented"):
                    derivative(weights)


def test_errors_name_the_tensor():
    q, k = draw(1, 2, 5, 8), draw(1, 2, 5, 8, dtype="bfloat16")
    h, w = draw(6, 4), draw(9, 4)
    for call, kind, text in [
        (lambda: E.attention(q, k, q), TypeError, "`k` must hold float32 beside q of float32, found bfloat16"),
        (lambda: E.attention(q, q[..., :-1], q), ValueError, r"`k` must have shape \[1, 2, 5, 8\], found"),
        (lambda: E.attention(q, q[0], q), ValueError, "`k` must have axes"),
        (lambda: E.attention(q, draw(1, 3, 5, 8), q), ValueError, "`query_heads` must be a multiple"),
        (
            lambda: E.attention(q > 0, q, q),
            TypeError,
            "`q` must hold float64, float32, bfloat16 or float16, found bool",
        ),
        (lambda: E.attention(q, q, q, mask=q[:, :, :, :5]), TypeError, "`mask` must hold bool, found float32"),
        (lambda: E.attention(q, q, q, mask=q[:, :, :, :4] > 0), ValueError, "`mask` must have shape"),
        (lambda: E.attention(q, q, q, mask=q[:, :, :, :5] > 0, causal=True), TypeError, "exclude each other"),
        (lambda: jax.jit(lambda s: E.attention(q, q, q, scale=s))(0.5), TypeError, "`scale` must be a number"),
        (lambda: E.linear_cross_entropy(h, w, TARGETS.astype(np.float32)), TypeError, "`targets` must hold int32"),
        (lambda: E.linear_cross_entropy(h, w, TARGETS, reduction="max"), ValueError, "reduction|max"),
        (
            lambda: E.linear_cross_entropy(h, w, TARGETS + 7).block_until_ready(),
            (ValueError, jax.errors.JaxRuntimeError),
            r"`targets\[1\]` must be a class below 9",
        ),
    ]:
        with pytest.raises(kind, match=text):
            call()


def test_calls_by_hand_are_checked():
    q, k = draw(1, 2, 4, 8), draw(1, 2, 4, 8) + 1
    problem = etalon.problem("attention_lse", q=q, k=k)
    lse = jax.ShapeDtypeStruct((1, 2, 4), jnp.float32)
    whole = dict(problem=problem.json(), pass_="forward", inputs="q k", outputs="lse")

    def call(results=lse, tensors=(q, k), aliases=None, **changed):
        run = jax.ffi.ffi_call(E.TARGET, results, input_output_aliases=aliases)
        attributes = {name: x for name, x in {**whole, **changed}.items() if x is not None}
        return jax.block_until_ready(jax.jit(lambda *x: run(*x, **attributes))(*tensors))

    np.testing.assert_array_equal(call(), etalon.attention_lse(q, k))
    for changed, text in [
        (dict(problem=None), "the call has no attribute `problem` of text"),
        (dict(problem=3), "the call has no attribute `problem` of text"),
        (dict(problem="{}"), "algorithm"),
        (dict(pass_="sideways"), "`pass` must be one of"),
        (dict(inputs="q"), "2 tensors have 1 names"),
        (dict(inputs="q q"), "q"),
        (dict(inputs="q v"), "`v` is no tensor of this pass"),
        (dict(outputs="o"), "`o` is no tensor of this pass"),
        (dict(results=jax.ShapeDtypeStruct((4,), jnp.float32)), "`lse` must have 3 axes"),
        (dict(results=jax.ShapeDtypeStruct((1, 2, 4), jnp.int8)), "`lse` must hold"),
        (dict(results=jax.ShapeDtypeStruct((3, 1, 2, 4), jnp.float32)), r"`q` must have axes \[3\]"),
        (dict(results=jax.ShapeDtypeStruct((1, 2, 5), jnp.float32)), "`lse` must have shape"),
        (dict(results=q, aliases={0: 0}, outputs="lse", inputs="q k"), "`lse` is written and must share no memory"),
    ]:
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=text):
            call(**changed)


def test_other_platforms_are_refused():
    refuse = jax.ffi.pycapsule(ctypes.c_void_p(etalon._etalon.xla_handlers()[1]))
    jax.ffi.register_ffi_target("etalon_elsewhere", refuse, platform="cpu", api_version=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="etalon.jax takes arrays of the CPU so far"):
        jax.block_until_ready(jax.ffi.ffi_call("etalon_elsewhere", jax.ShapeDtypeStruct((1,), jnp.float32))())


def test_arrays_of_a_gpu_are_refused():
    try:
        gpu = jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("there is no GPU")
    x = jax.device_put(jnp.ones((1, 2, 4, 8)), gpu)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"move them with jax.device_put"):
        jax.block_until_ready(etalon.jax.attention(x, x, x))
