"""The judge: whether a kernel's results are those of its arithmetic."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from . import _etalon, _passes, _problems
from ._etalon import Problem

if TYPE_CHECKING:
    import numpy

    from .problems import Description

# Storage types as problem files and reports have them.
SHORT = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class IncorrectError(AssertionError):
    """Results are wrong. The message is the report, with the verdict in its first line."""


class UndecidedError(AssertionError):
    """Nothing shows that results are wrong, nor that they are right."""


class Check:
    """A verdict on results.

    `status` is "passed", "undecided" or "failed"; a check is true where it passed. `str(check)` is the report with the
    verdict in its first line, and `details` the same as a dictionary, as `etalon check --report json=PATH` writes it.
    """

    def __init__(self, status: str, text: str, details: str) -> None:
        self.status, self._text, self._details = status, text, details

    def __bool__(self) -> bool:
        return self.status == "passed"

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"<Check {self._text.partition(chr(10))[0]}>"

    @property
    def details(self) -> dict[str, Any]:
        """The report as a dictionary."""
        import json

        return json.loads(self._details)

    def require(self) -> Check:
        """Raises IncorrectError or UndecidedError unless it passed."""
        if self.status == "failed":
            raise IncorrectError(self._text)
        if self.status != "passed":
            raise UndecidedError(self._text)
        return self


def check(
    problem: Problem | Description,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    pass_: str = "forward",
    *,
    profile: str = "usual",
    only: Iterable[str] = (),
    generic: bool | None = None,
) -> Check:
    """Judges the outputs of a pass on these inputs, element by element, against the exact result and its proven bound.

    `outputs` holds results by name, each in the type in which the kernel stores it. `profile` is the arithmetic that
    the kernel claims: a name that `etalon list` has, a JSON file, "usual" for that which goes with the type of the
    first input, or "auto" for the strictest that holds. `only` names the outputs to be judged; `generic` says whether
    the inputs are random, where that is not to be guessed. Raises TypeError or ValueError for tensors that are not
    those of the pass.
    """
    given = _etalon.check(
        _problems.made(problem), pass_, inputs, outputs, profile=profile, only=list(only), generic=generic
    )
    return Check(*given)


def random_inputs(
    problem: Problem | Description, pass_: str = "forward", *, dtype: str = "float32", seed: int = 0
) -> dict[str, numpy.ndarray]:
    """Random inputs of a pass, by name: normal numbers of variance 1, with scores of a deviation of about 1. What a
    later pass reads of the forward pass (o, lse) is computed by the reference and stored in the type of the pass."""
    import numpy

    own = _problems.made(problem)
    draw = numpy.random.default_rng(seed)
    wide = "float64" if dtype == "float64" else "float32"
    types = {name: _passes.numpy_type(name) for name in (dtype, wide)}
    found, saved = {}, []
    for name, role, shape, precision in own.operands(pass_):
        if role in ("saved", "optional_saved"):
            saved.append((name, precision))
        if role not in ("input", "cotangent", "optional_cotangent"):
            continue
        if precision == "integer":
            found[name] = draw.integers(0, own.extent("V"), shape)
            continue
        x = draw.standard_normal(shape)
        x = -numpy.abs(x) / 8 if name in ("g", "g_gamma") else x
        x = numpy.abs(x) if name in ("class_weights", "token_weights") else x
        found[name] = x.astype(types[dtype if precision == "storage" else wide])
    if saved:
        names = {name for name, role, *_ in own.operands("forward") if role == "output"}
        forward = {name: role for name, role, *_ in own.operands("forward")}
        given = {name: x for name, x in found.items() if forward.get(name) == "input"}
        exact = _passes.reference(own, "forward", given)
        for name, precision in saved:
            if name in names:
                found[name] = exact[name].astype(types[dtype if precision == "storage" else wide])
    return found


def _by_name(problem, pass_, results, only=()):
    """Results by name, of a function that returns a dictionary, a tuple in the order of the outputs, or one result."""
    if isinstance(results, dict):
        return results
    results = results if isinstance(results, (tuple, list)) else (results,)
    names = list(only) or [name for name, role, *_ in problem.operands(pass_) if role == "output"]
    if len(results) > len(names):
        raise ValueError(f"the function returned {len(results)} results, but {pass_} has {', '.join(names)}")
    return dict(zip(names, results))


def assert_correct(
    fn: Callable[..., Any],
    problem: Problem | Description,
    pass_: str = "forward",
    *,
    dtype: str = "float32",
    seed: int = 0,
    inputs: Mapping[str, Any] | None = None,
    profile: str = "usual",
    only: Iterable[str] = (),
) -> Check:
    """Calls `fn` with the inputs of a pass by name, random ones unless given, and judges what it returns: a dictionary
    by name, a tuple in the order of the outputs, or a single result. Returns the Check; raises IncorrectError, whose
    message is the report with the verdict in its first line, or UndecidedError.
    """
    problem = _problems.made(problem)
    if inputs is None:
        inputs = random_inputs(problem, pass_, dtype=dtype, seed=seed)
    results = fn(**inputs)
    found = _by_name(problem, pass_, results, only)
    if not isinstance(results, dict):
        only = list(found)
    return check(problem, inputs, found, pass_, profile=profile, only=only).require()


class Bound(typing.NamedTuple):
    """The exact values of an output, and how far from each a right result of the profile may lie; infinity where the
    profile requires nothing."""

    value: numpy.ndarray
    bound: numpy.ndarray


def bounds(
    problem: Problem | Description,
    inputs: Mapping[str, Any],
    pass_: str = "forward",
    *,
    profile: str = "usual",
    stored: Mapping[str, str] | None = None,
) -> dict[str, Bound]:
    """The exact results of a pass and their proven bounds: of each output by name a Bound, two arrays of float64.

    `profile` is the arithmetic of a kernel, as in `check`; `stored` names outputs that the kernel stores in another
    type than goes with the first input, as in {"dq": "float32"}. Equations: docs/numerics.md.
    """
    own = [(name, SHORT.get(dtype, dtype)) for name, dtype in (stored or {}).items()]
    found = _etalon.bounds(_problems.made(problem), pass_, inputs, profile=profile, stored=own)
    return {name: Bound(*pair) for name, pair in found.items()}


def trace(
    problem: Problem | Description,
    inputs: Mapping[str, Any],
    pass_: str = "forward",
    *,
    walk: Mapping[str, Any],
    only: Iterable[str] = (),
) -> dict[str, numpy.ndarray]:
    """The exact trace of attention or linear attention, that a right kernel holds after each tile: lse, o, p, dS, dq, dk
    and dv, or state and dstate, as far as the pass has them, by name in float64; NaN where right kernels may differ.

    `walk` is the order of the kernel, as in {"tile": {"queries": 64, "keys": 128}} or {"chunk": 64}; its other keys,
    among them `heads` and `rows` for a part, and the shapes of the tensors: docs/guide.md, "Traces". `only` names the
    tensors that are wanted. Raises ValueError for a walk that does not fit the problem.
    """
    import json

    return _etalon.trace(_problems.made(problem), pass_, inputs, json.dumps(walk), list(only))


def check_trace(
    problem: Problem | Description,
    inputs: Mapping[str, Any],
    steps: Mapping[str, Any],
    pass_: str = "forward",
    *,
    walk: Mapping[str, Any],
    profile: str = "usual",
) -> Check:
    """Judges what a kernel held after each tile, and names the first tile and step that is off.

    `steps` holds tensors of `trace` by name, each in the type in which the kernel has it; any may be absent. `walk` is
    as in `trace`, and `profile` as in `check`, but for "auto".
    """
    import json

    own = _problems.made(problem)
    return Check(*_etalon.check_trace(own, pass_, inputs, steps, json.dumps(walk), profile=profile))
