"""The suite on kernels in Python, bounds, descriptions of problems, and the plugin for pytest."""

import dataclasses
import importlib.metadata
import json
import subprocess
import sys
import threading

import numpy as np
import pytest

import etalon
from etalon import problems

pytest_plugins = ["pytester"]

# pytest finds the plugin of an installed etalon by itself.
INSTALLED = any(point.value == "etalon_pytest" for point in importlib.metadata.entry_points(group="pytest11"))
WITH_PLUGIN = () if INSTALLED else ("-p", "etalon_pytest")

CAUSAL = {
    "limits": {"dim": {"one_of": [32, 64]}, "queries": {"at_least": 1}, "query_heads": {"at_least": 1}},
    "equal": [["queries", "keys"], ["dim", "value_dim"]],
    "masks": ["causal"],
    "sequences": ["dense"],
    "options": {},
    "omits": ["lse"],
}


def kernel(problem, q, k, v, ahead=0):
    """Causal attention in NumPy, for as many queries as keys; with `ahead` a row sees keys that come after it."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    s = np.einsum("bhid,bhjd->bhij", q, k) * np.float32(q.shape[-1] ** -0.5)
    s = np.where(np.tri(q.shape[2], k=ahead, dtype=bool), s, -np.inf).astype(np.float32)
    p = np.exp(s - s.max(-1, keepdims=True))
    # A forbidden pair adds nothing, not even where the value is NaN.
    hidden = np.nan_to_num(v, nan=0, posinf=0, neginf=0)
    o = p @ hidden / p.sum(-1, keepdims=True)
    for b, h, j, e in np.argwhere(~np.isfinite(v)):
        o[b, h, max(0, j - ahead) :, e] += v[b, h, j, e]
    return o


def own(pass_):
    return lambda problem, **inputs: etalon.run(problem, pass_, inputs)


@pytest.mark.parametrize("algorithm", ["attention_lse", "linear_attention", "linear_cross_entropy"])
def test_own_passes_conform(algorithm):
    check = etalon.conform({name: own(name) for name in ("forward", "backward")}, algorithm, dtypes=["bfloat16"])
    assert check and check.details["checks"] > 20
    assert str(check).startswith("PASSED: ")


def test_a_kernel_is_asked_on_this_thread_and_within_its_capabilities():
    seen, here = [], threading.get_ident()

    def counted(problem, **inputs):
        assert threading.get_ident() == here
        seen.append(problem.options)
        assert all(x.flags.writeable and x.dtype == np.float32 for x in inputs.values())
        return kernel(problem, **inputs)

    check = etalon.conform(counted, "attention", capabilities=CAUSAL)
    assert check.details["status"] == "passed"
    assert {options["dim"] for options in seen} <= {32, 64}
    assert all(options["queries"] == options["keys"] for options in seen)


def test_a_wrong_kernel_fails_with_the_simplest_case():
    with pytest.raises(etalon.IncorrectError, match="simplest case for ") as error:
        etalon.conform(lambda problem, **x: kernel(problem, **x, ahead=1), "attention", capabilities=CAUSAL)
    assert str(error.value).startswith("FAILED: ")


def test_what_a_kernel_raises():
    def broken(problem, **inputs):
        raise ZeroDivisionError("no luck")

    with pytest.raises(etalon.IncorrectError, match="raised ZeroDivisionError: no luck"):
        etalon.conform(broken, "attention", capabilities=CAUSAL)

    def declines(problem, **inputs):
        raise NotImplementedError("not today")

    with pytest.raises(ValueError, match="nothing was checked.*not today"):
        etalon.conform(declines, "attention", capabilities=CAUSAL)

    def interrupted(problem, **inputs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        etalon.conform(interrupted, "attention", capabilities=CAUSAL)


def test_what_a_kernel_returns_is_looked_at():
    with pytest.raises(etalon.IncorrectError, match="returned something else: .*`o`"):
        etalon.conform(lambda problem, **x: kernel(problem, **x)[..., 1:], "attention", capabilities=CAUSAL)
    with pytest.raises(etalon.IncorrectError, match="raised "):
        etalon.conform(lambda problem, **x: "o", "attention", capabilities=CAUSAL)


def test_a_mask_of_arrays_comes_with_its_arrays():
    seen = []

    def masked(problem, **inputs):
        seen.extend(problem.arrays.values())
        return etalon.run(problem, "forward", inputs)

    assert etalon.conform(masked, "attention", capabilities={"masks": ["array"], "cotangents": ["dlse"]})
    assert seen and all(x.dtype == bool and x.ndim == 4 for x in seen)


def test_words_that_are_none():
    for options, part in [
        (dict(capabilities={"mask": ["causal"]}), "`mask`"),
        (dict(depth="deep"), "`depth`"),
        (dict(profile="auto"), "`profile`"),
        (dict(laws=["bounds"]), 'did you mean "bound"'),
        (dict(cases=["attention/f32"]), "`case`"),
    ]:
        with pytest.raises(ValueError, match=part):
            etalon.conform(kernel, "attention", **options)
    with pytest.raises(ValueError, match="`algorithm`"):
        etalon.conform(kernel, "atention")


def test_capabilities_may_be_a_file(tmp_path):
    file = tmp_path / "capabilities.json"
    file.write_text(json.dumps({"kernels": [{"algorithm": "attention", "passes": ["forward"], **CAUSAL}]}))
    assert etalon.conform(kernel, "attention", capabilities=file, dtypes=["float32"])


def test_bounds_are_those_of_the_check():
    problem = etalon.problem("attention", batch=1, query_heads=2, key_heads=1, queries=9, keys=9, dim=8)
    inputs = etalon.random_inputs(problem)
    got = etalon.run(problem, "forward", inputs)
    exact = etalon.reference(problem, "forward", inputs)
    found = etalon.bounds(problem, inputs)
    for name, (value, bound) in found.items():
        assert np.array_equal(value, exact[name]) and (bound > 0).all()
        assert (abs(got[name] - value) <= bound).all()
    wrong = {name: (value + 1.5 * bound).astype(np.float32) for name, (value, bound) in found.items()}
    assert etalon.check(problem, inputs, wrong).status == "failed"
    wider = etalon.bounds(problem, inputs, stored={"o": "bfloat16"})
    assert (wider["o"].bound > found["o"].bound).all()
    with pytest.raises(ValueError, match="`profile`"):
        etalon.bounds(problem, inputs, profile="auto")
    with pytest.raises(TypeError, match="`dq`"):
        etalon.bounds(problem, inputs, stored={"dq": "float32"})


def test_descriptions_have_the_keys_of_problem_files():
    text = subprocess.run(
        [sys.executable, "-m", "etalon", "list", "--schema", "problem"], capture_output=True, text=True, check=True
    ).stdout
    for schema in json.loads(text)["oneOf"]:
        algorithm = schema["properties"]["algorithm"]["const"]
        own = next(x for x in vars(problems).values() if getattr(x, "_algorithm", None) == algorithm)
        fields = {field.name: field for field in dataclasses.fields(own)}
        assert set(fields) == set(schema["properties"]) - {"algorithm"} | {"arrays"}
        required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
        assert required == set(schema["required"]) - {"algorithm"}


def test_a_description_is_taken_for_its_problem():
    described = problems.Attention(
        batch=1, query_heads=4, key_heads=2, queries=32, keys=32, dim=16, mask={"causal": {}}, softcap=30.0
    )
    keys = {field.name: getattr(described, field.name) for field in dataclasses.fields(described)}
    keys = {name: value for name, value in keys.items() if value not in (None, False)}
    assert described.problem() == etalon.problem("attention", **keys)
    inputs = etalon.random_inputs(described)
    assert etalon.check(described, inputs, etalon.run(described, "forward", inputs))
    with pytest.raises(ValueError, match="query_heads"):
        dataclasses.replace(described, query_heads=3).problem()


PLUGIN = """
    import etalon
    import pytest

    @pytest.mark.etalon("attention", passes=["backward"], capabilities={"masks": ["causal"], "sequences": ["dense"]})
    def test_right(etalon_case):
        etalon_case.conform(lambda problem, **x: etalon.run(problem, "backward", x))

    @pytest.mark.etalon("attention_lse", cases=["attention_lse/f32/full/plain/tiny/dense/generic/dlse/0"])
    def test_wrong(etalon_case):
        etalon_case.conform(lambda problem, **x: etalon.run(problem, "forward", x)["lse"] + 1)
"""


def test_the_plugin_has_a_test_for_each_case(pytester):
    pytester.makepyfile(PLUGIN)
    result = pytester.runpytest_subprocess(*WITH_PLUGIN, "--junitxml=junit.xml", "--strict-markers")
    outcomes = result.parseoutcomes()
    assert outcomes["failed"] == 1 and outcomes["passed"] >= 4
    result.stdout.fnmatch_lines(["*FAILED: * checks, * negative*", f"* checks passed in {outcomes['passed']} cases"])
    junit = (pytester.path / "junit.xml").read_text()
    assert 'name="test_wrong[attention_lse/f32/full/plain/tiny/dense/generic/dlse/0]"' in junit
    assert 'name="etalon_checks"' in junit


def test_the_plugin_imports_nothing_before_it_is_used(pytester):
    pytester.makepyfile(
        "import sys\ndef test_it():\n    assert 'etalon' not in sys.modules and 'numpy' not in sys.modules"
    )
    assert pytester.runpytest_subprocess(*WITH_PLUGIN).parseoutcomes() == {"passed": 1}


def test_the_plugin_says_what_it_lacks(pytester):
    pytester.makepyfile("def test_it(etalon_case):\n    pass")
    result = pytester.runpytest_subprocess(*WITH_PLUGIN)
    result.stdout.fnmatch_lines(['*`etalon_case` needs the marker etalon("ALGORITHM")*'])
