"""Passes: every function and every pass against formulas written out in NumPy, or against the reference."""

import re

import numpy as np
import pytest

import etalon

SHAPES = dict(batch=2, query_heads=4, key_heads=2, queries=9, keys=9, dim=8)
TOKENS = dict(batch=2, query_heads=4, key_heads=2, tokens=9, dim=8)
PROBLEMS = [
    etalon.problem("attention", **SHAPES, mask={"causal": {}}, sinks=True, bias={"batch": 1, "heads": 4}),
    etalon.problem("attention_lse", **SHAPES, mask={"window": {"left": 3, "right": 1}}),
    etalon.problem("lazy_attention", **SHAPES, mask={"causal": {}}, bias={"width": 5}),
    etalon.problem("linear_attention", **TOKENS, decay="per_head", initial_state=True, final_state=True),
    etalon.problem("linear_attention", **TOKENS, decay="per_token"),
    etalon.problem("linear_cross_entropy", tokens=9, dim=8, vocab=21, bias=True, label_smoothing=0.1),
]
PASSES = [(problem, pass_) for problem in PROBLEMS for pass_ in problem.passes if pass_ != "step"]


@pytest.mark.parametrize(("problem", "pass_"), PASSES, ids=lambda x: getattr(x, "algorithm", x))
def test_every_pass_is_judged_right(problem, pass_, dtype):
    inputs = etalon.random_inputs(problem, pass_, dtype=dtype.name)
    outputs = etalon.run(problem, pass_, inputs)
    exact = etalon.reference(problem, pass_, inputs)
    assert outputs.keys() == exact.keys()
    if dtype != np.float64:
        etalon.check(problem, inputs, outputs, pass_, profile="f32-strict").require()
    for name, x in outputs.items():
        scale = np.abs(exact[name]).max(initial=1e-6)
        assert np.abs(x.astype(float) - exact[name]).max(initial=0) <= 0.05 * scale, name


def softmax_attention(q, k, v, visible, scale):
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    s = np.where(visible, scale * np.einsum("bhid,bhjd->bhij", q, k), -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    return p @ v / total, (np.log(total) + top)[..., 0]


def test_attention_is_the_formula(draw):
    q, k, v = draw(2, 4, 5, 8), draw(2, 2, 9, 8), draw(2, 2, 9, 6)
    i, j = np.arange(5)[:, None] + 4, np.arange(9)
    masks = [
        (dict(), np.full((5, 9), True)),
        (dict(causal=True), j <= i),
        (dict(window=(2, 1)), (i - 2 <= j) & (j <= i + 1)),
        (dict(window=(2, None)), i - 2 <= j),
        (dict(mask={"causal": {"align": "top_left"}}), j <= i - 4),
    ]
    ragged = np.random.default_rng(1).random((2, 1, 5, 9)) < 0.6
    ragged[..., 0] = True
    for keywords, visible in [*masks, (dict(mask=ragged), ragged)]:
        for scale in (None, 0.3):
            o, lse = etalon.attention(q, k, v, scale=scale, return_lse=True, **keywords)
            expected = softmax_attention(q, k, v, visible, scale or 8**-0.5)
            np.testing.assert_allclose(o, expected[0], rtol=2e-5, atol=2e-6)
            np.testing.assert_allclose(lse, expected[1], rtol=2e-5, atol=2e-6)
            again = etalon.attention_lse(q, k, scale=scale, **keywords)
            np.testing.assert_allclose(again, expected[1], rtol=2e-5, atol=2e-6)


def test_linear_attention_is_the_formula(draw):
    q, k, v, g_gamma = draw(1, 2, 6, 4), draw(1, 2, 6, 4), draw(1, 2, 6, 3), np.float32([-0.1, -0.7])
    state = draw(1, 2, 4, 3)
    o, final = etalon.linear_attention(
        q, k, v, g_gamma=g_gamma, initial_state=state, return_final_state=True, scale=0.5
    )
    s, rows = state[0].astype(float), []
    for t in range(6):
        s = np.exp(g_gamma)[:, None, None] * s + np.einsum("hd,he->hde", k[0, :, t], v[0, :, t])
        rows.append(0.5 * np.einsum("hd,hde->he", q[0, :, t], s))
    np.testing.assert_allclose(o[0], np.stack(rows, 1), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(final[0], s, rtol=2e-5, atol=2e-6)


def test_linear_cross_entropy_is_the_formula(draw):
    h, w, targets = draw(6, 4), draw(9, 4), np.array([0, 8, -100, 3, 3, 1])
    z = h.astype(float) @ w.T
    losses = np.log(np.exp(z).sum(-1)) - z[np.arange(6), targets.clip(0)]
    losses[2] = 0
    np.testing.assert_allclose(etalon.linear_cross_entropy(h, w, targets), losses.sum() / 5, rtol=1e-5)
    none = etalon.linear_cross_entropy(h, w, targets, reduction="none")
    np.testing.assert_allclose(none, losses, rtol=1e-5, atol=1e-6)


def test_a_problem_of_tensors_is_the_one_of_keys(draw):
    q, k, v = draw(2, 4, 9, 8), draw(2, 2, 9, 8), draw(2, 2, 9, 8)
    own = etalon.problem("attention", q=q, k=k, v=v, causal=True)
    keys = etalon.problem("attention", **SHAPES, mask={"causal": {}})
    assert own == keys and hash(own) == hash(keys) and own != PROBLEMS[0]


def test_names_of_other_libraries_have_an_answer(draw):
    q = draw(1, 1, 4, 8)
    for keyword, text in [
        (dict(is_causal=True), "top_left"),
        (dict(softmax_scale=1.0), "scale"),
        (dict(window_size=(1, 0)), "inclusive"),
        (dict(dropout_p=0.1), "there is no dropout"),
        (dict(causl=True), "has no `causl`"),
    ]:
        with pytest.raises(TypeError, match=text):
            etalon.attention(q, q, q, **keyword)
    with pytest.raises(TypeError, match="exclude each other"):
        etalon.attention(q, q, q, causal=True, window=(1, 0))


def test_a_wrong_problem_names_its_key():
    for keys, text in [
        (dict(SHAPES, dimm=3), "dimm"),
        (dict(SHAPES, dim=0), "`dim` must be at least 1, found 0"),
        (dict(SHAPES, key_heads=3), "`query_heads` must be a multiple of key_heads"),
        (dict(SHAPES, mask={"causal": {"align": "left"}}), "left"),
        (dict(SHAPES, dim="8"), "dim"),
    ]:
        with pytest.raises(ValueError, match=text) as error:
            etalon.problem("attention", **keys)
        assert "line" not in str(error.value) and "file" not in str(error.value)
    with pytest.raises(ValueError, match="atention"):
        etalon.problem("atention", **SHAPES)
    with pytest.raises(ValueError, match="`pass` must be one of"):
        etalon.run(PROBLEMS[0], "sideways", {})
    with pytest.raises(ValueError, match="`tier` must be one of auto, reference, simd"):
        inputs = etalon.random_inputs(PROBLEMS[1])
        etalon.run(PROBLEMS[1], "forward", inputs, tier="gpu")


def test_nothing_is_written_where_a_call_fails(draw):
    problem, o = PROBLEMS[0], np.full((2, 4, 9, 8), 7, np.float32)
    inputs = etalon.random_inputs(problem)
    with pytest.raises(TypeError):
        etalon.run(problem, "forward", inputs | dict(sinks=inputs["sinks"].astype(np.float16)), out=dict(o=o))
    assert (o == 7).all()


def test_advice_on_packed_sequences_is_right():
    offsets = np.array([0, 2, 5])
    x = np.random.default_rng(0).standard_normal((1, 1, 5, 4)).astype(np.float32)
    for function, keyword in ((etalon.attention, "cu_seqlens_q"), (etalon.linear_attention, "cu_seqlens")):
        with pytest.raises(TypeError) as error:
            function(x, x, x, **{keyword: offsets})
        text = str(error.value).partition("sequences=")[2].partition(" with")[0].replace("OFFSETS", "offsets")
        packed = eval(text, {"offsets": offsets})
        whole = function(x, x, x, sequences=packed)
        np.testing.assert_allclose(whole[:, :, 2:], function(*[x[:, :, 2:]] * 3), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision, profile", [("split2", "bf16-split2"), ("flash", "bf16-flash")])
def test_a_precision_holds_for_calls_that_name_no_tier(precision, profile):
    problem = PROBLEMS[0]
    inputs = etalon.random_inputs(problem, dtype="bfloat16")
    assert etalon.get_precision() == "strict" and not re.search("amx|bf16", etalon.cpu_tier())
    etalon.set_precision(precision)
    try:
        assert etalon.get_precision() == precision
        found = etalon.run(problem, "forward", inputs)
        named = etalon.run(problem, "forward", inputs, tier=etalon.cpu_tier())
    finally:
        etalon.set_precision("strict")
    assert {name: x.tobytes() for name, x in found.items()} == {name: x.tobytes() for name, x in named.items()}
    etalon.check(problem, inputs, found, profile=profile).require()
    with pytest.raises(ValueError, match="precision"):
        etalon.set_precision("fast")
