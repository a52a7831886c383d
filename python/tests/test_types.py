"""Annotations of the public functions, as a type checker reads them."""

import os
from pathlib import Path

import pytest

import etalon

api = pytest.importorskip("mypy.api", reason="the type checker mypy is not installed")

USES = """
import numpy as np
import etalon
from etalon import problems

x = np.zeros((1, 2, 8, 4), np.float32)
own = etalon.problem("attention", q=x, k=x, v=x, causal=True)
described = problems.Attention(batch=1, query_heads=2, key_heads=2, queries=8, keys=8, dim=4)
check = etalon.check(described, {"q": x, "k": x, "v": x}, {"o": x}, only=["o"])
reveal_type(check.status)
reveal_type(etalon.bounds(own, {"q": x})["o"].bound.ndim)
etalon.conform(lambda problem, **inputs: x, "attention", capabilities={"masks": ["causal"]})
etalon.attention(x, x, x, causal="yes")
problems.Attention(batch=1)
"""


def test_a_type_checker_reads_the_annotations(tmp_path, monkeypatch):
    monkeypatch.setenv("MYPYPATH", str(Path(etalon.__file__).parents[1]))
    file = tmp_path / "uses.py"
    file.write_text(USES)
    report, errors, status = api.run(["--no-incremental", "--cache-dir", os.devnull, str(file)])
    lines = [line.partition("uses.py:")[2] for line in report.splitlines() if ": " in line]
    wrong = {line.partition(":")[0] for line in lines if "error:" in line}
    assert status == 1 and not errors and wrong == {"13", "14"}, report
    revealed = [line.split('"')[1] for line in lines if "Revealed type" in line]
    assert revealed == ["str", "int"], report
