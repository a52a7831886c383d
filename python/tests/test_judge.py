"""The judge: right kernels pass, wrong ones fail with a report, and what cannot be judged raises, too."""

import numpy as np
import pytest

import etalon

PROBLEM = etalon.problem(
    "attention", batch=1, query_heads=4, key_heads=2, queries=64, keys=64, dim=32, mask={"causal": {}}
)


def kernel(q, k, v, scale=32**-0.5, ahead=0):
    """Attention in NumPy; with `ahead` a row sees keys that come after it."""
    k, v = (np.repeat(x, 2, axis=1) for x in (k, v))
    s = scale * np.einsum("bhid,bhjd->bhij", q, k)
    i, j = np.arange(64)[:, None], np.arange(64)
    s = np.where(j <= i + ahead, s, -np.inf).astype(np.float32)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    return (p @ v / total).astype(q.dtype), (np.log(total) + top)[..., 0].astype(np.float32)


def test_a_right_kernel_passes():
    check = etalon.assert_correct(kernel, PROBLEM)
    assert check and check.status == "passed"
    assert str(check).startswith("PASSED: 2 outputs of attention forward in f32 within the bounds of ")
    assert check.details["outputs"][0]["off"] == 0


def test_one_result_or_names_may_be_returned():
    assert etalon.assert_correct(lambda **x: kernel(**x)[0], PROBLEM)
    assert etalon.assert_correct(lambda **x: {"lse": kernel(**x)[1]}, PROBLEM, only=["lse"])


def test_a_wrong_kernel_fails_with_its_report():
    with pytest.raises(etalon.IncorrectError) as error:
        etalon.assert_correct(lambda **x: kernel(**x, ahead=1), PROBLEM)
    lines = str(error.value).splitlines()
    assert lines[0].startswith("FAILED: 2 of 2 outputs of attention forward in f32 beyond the bounds of ")
    assert any("What explains it" in line for line in lines), error.value
    assert isinstance(error.value, AssertionError)


def test_what_cannot_be_judged_raises():
    inputs = etalon.random_inputs(PROBLEM)
    inputs["q"] *= 1e6  # scores that no arithmetic of 24 bits knows
    o, lse = kernel(**inputs)
    check = etalon.check(PROBLEM, inputs, dict(o=o[:, :, ::-1].copy(), lse=lse))
    assert check.status in ("undecided", "failed") and not check
    with pytest.raises(AssertionError):
        check.require()


def test_a_profile_is_a_claim():
    inputs = etalon.random_inputs(PROBLEM)
    o, lse = kernel(**{name: x.astype(np.float16).astype(np.float32) for name, x in inputs.items()})
    strict = etalon.check(PROBLEM, inputs, dict(o=o, lse=lse), profile="f32-strict")
    assert strict.status == "failed"
    with pytest.raises(ValueError, match="f33"):
        etalon.check(PROBLEM, inputs, dict(o=o, lse=lse), profile="f33")


def test_results_must_be_those_of_the_pass():
    inputs = etalon.random_inputs(PROBLEM)
    o, lse = kernel(**inputs)
    for outputs, text in [
        (dict(o=o), "lse"),
        (dict(o=o, lse=lse[..., :-1]), "`lse` must have shape"),
        (dict(o=o, lse=lse, p=o), "`p` was given"),
    ]:
        with pytest.raises((TypeError, ValueError), match=text):
            etalon.check(PROBLEM, inputs, outputs)
    with pytest.raises(TypeError, match="`k` is missing"):
        etalon.check(PROBLEM, dict(q=inputs["q"]), dict(o=o, lse=lse))


def test_a_profile_without_bounds_is_not_supported():
    inputs = etalon.random_inputs(PROBLEM, "double_backward", dtype="float16")
    outputs = etalon.run(PROBLEM, "double_backward", inputs)
    with pytest.raises(NotImplementedError, match="`f16-flash` stores weights in a low precision"):
        etalon.check(PROBLEM, inputs, outputs, "double_backward")


def steps_of(q, k, v, tile, forget=None):
    """lse and o of causal attention in NumPy after each tile of keys, in float32; in tile `forget` acc is not rescaled."""
    k, v = (np.repeat(x, 2, axis=1) for x in (k, v))
    s = np.where(np.tri(64, dtype=bool), np.einsum("bhid,bhjd->bhij", q, k) * 32**-0.5, -np.inf).astype(np.float32)
    top, l, acc, steps = np.full((*q.shape[:3], 1), -np.inf, np.float32), 0, 0, {"lse": [], "o": []}
    with np.errstate(divide="ignore", invalid="ignore"):
        for t, j in enumerate(range(0, 64, tile)):
            high = np.maximum(top, s[..., j : j + tile].max(-1, keepdims=True))
            p = np.where(s[..., j : j + tile] > -np.inf, np.exp(s[..., j : j + tile] - high), 0)
            old = np.where(top > -np.inf, np.exp(top - high), 0)
            l = l * old + p.sum(-1, keepdims=True)
            acc = acc * (1 if t == forget else old) + p @ v[:, :, j : j + tile]
            top = high
            steps["lse"].append((top + np.log(l))[..., 0])
            steps["o"].append(acc / l)
    return {name: np.stack(all_).astype(np.float32) for name, all_ in steps.items()}


WALK = {"tile": {"queries": 64, "keys": 16}}


def test_a_trace_is_what_a_kernel_holds():
    inputs = etalon.random_inputs(PROBLEM)
    exact = etalon.trace(PROBLEM, inputs, walk=WALK)
    assert {name: x.shape for name, x in exact.items()} == {
        "lse": (4, 1, 4, 64), "o": (4, 1, 4, 64, 32), "p": (1, 4, 64, 64)
    }  # fmt: skip
    whole = etalon.reference(PROBLEM, "forward", {name: x.astype(np.float64) for name, x in inputs.items()})
    np.testing.assert_allclose(exact["o"][-1], whole["o"], rtol=1e-12)  # sums in f64, in other orders
    check = etalon.check_trace(PROBLEM, inputs, steps_of(**inputs, tile=16), walk=WALK)
    assert check, check
    assert list(etalon.trace(PROBLEM, inputs, walk=WALK, only=["lse"])) == ["lse"]


def test_a_wrong_step_is_named():
    inputs = etalon.random_inputs(PROBLEM)
    check = etalon.check_trace(PROBLEM, inputs, steps_of(**inputs, tile=16, forget=2), walk=WALK)
    first = check.details["trace"]["first"]
    assert (check.status, first["step"], first["key_tile"]["number"]) == ("failed", "o", 2)
    assert "key tile 2 (keys 32..48), step o" in str(check)


@pytest.mark.parametrize(
    ("walk", "said"),
    [({}, "tile"), ({"chunk": 16}, "tile"), ({"tile": {"queries": 0, "keys": 16}}, "queries"), ({"til": 1}, "til")],
)
def test_a_walk_that_does_not_fit_is_an_error(walk, said):
    inputs = etalon.random_inputs(PROBLEM)
    with pytest.raises((ValueError, TypeError), match=said):
        etalon.trace(PROBLEM, inputs, walk=walk)
    with pytest.raises((ValueError, TypeError), match=said):
        etalon.check_trace(PROBLEM, inputs, steps_of(**inputs, tile=16), walk=walk)
