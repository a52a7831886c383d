"""The suite on a kernel: its cases, laws and probes, within what the kernel takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from . import _etalon
from ._judge import SHORT, Check, _by_name

# The name of a capabilities file, or one of its kernels, or several.
Capabilities: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None"


def conform(
    kernels: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    algorithm: str,
    *,
    capabilities: Capabilities = None,
    dtypes: Iterable[str] | None = None,
    depth: str = "smoke",
    seed: int = 0,
    profile: str = "usual",
    cases: Iterable[str] = (),
    laws: Iterable[str] = (),
) -> Check:
    """Runs the suite on a kernel: the gate on every case, probes with known answers, and laws, such as what a masked
    key must not change. A failure is shrunk to the simplest case that shows it.

    `kernels` is a function, the forward pass, or a dictionary of functions by the name of their pass. Each is called
    on this thread as ``fn(problem, **inputs)`` and returns as for `assert_correct`; `problem.options` and
    `problem.arrays` say what is asked. NotImplementedError declines a problem; another exception is a failure.

    `capabilities` says what the kernel takes, so that nothing else is asked: the keys of one kernel of a capabilities
    file, ``{"limits": {"dim": {"one_of": [64, 128]}}, "masks": ["causal"], "omits": ["lse"]}``, a list of such, or the
    name of a file. Extents of cases are made to fit. `dtypes` are the storage types, of which "float32" is taken if
    neither says more. `depth` is "smoke" (seconds), "core" or "full"; `cases` and `laws` name what is run alone.

    Returns the Check; raises IncorrectError, whose message is the report, UndecidedError where something could not be
    judged, and ValueError where nothing was checked.
    """
    if callable(kernels):
        kernels = {"forward": kernels}

    def call(problem, pass_, inputs):
        return _by_name(problem, pass_, kernels[pass_](problem, **inputs))

    text = capabilities_text(algorithm, list(kernels), capabilities, dtypes)
    names, others = list(cases), list(laws)
    found = _etalon.conform(call, algorithm, text, depth=depth, seed=seed, profile=profile, cases=names, laws=others)
    return Check(*found).require()


def cases(
    algorithm: str,
    *,
    passes: Iterable[str] = ("forward",),
    capabilities: Capabilities = None,
    dtypes: Iterable[str] | None = None,
    depth: str = "smoke",
    seed: int = 0,
) -> list[str]:
    """The names of the cases that `conform` runs."""
    text = capabilities_text(algorithm, list(passes), capabilities, dtypes)
    return _etalon.cases(algorithm, text, depth, seed)


def capabilities_text(algorithm, passes, capabilities, dtypes):
    """A capabilities file of what is declared, limited to these passes and types."""
    import json

    if isinstance(capabilities, (str, os.PathLike)):
        with open(capabilities, encoding="utf-8") as file:
            if dtypes is None:
                return file.read()
            capabilities = json.load(file)["kernels"]
    if capabilities is None or isinstance(capabilities, dict):
        capabilities = [capabilities or {}]
    listed = [SHORT.get(dtype, dtype) for dtype in dtypes or ("float32",)]
    default = {"algorithm": algorithm, "passes": passes, "dtypes": listed}
    kernels = [default | kernel for kernel in capabilities]
    if dtypes is not None:
        kernels = [kernel | {"dtypes": listed} for kernel in kernels]
    return json.dumps({"kernels": kernels})
