"""Every snippet of the pages runs."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "docs/python.md"]


def snippets(page):
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_snippets_run_in_their_order(page, capsys):
    assert snippets(page), "no snippet"
    names, left_out = {}, []
    for text in snippets(page):
        lacking = [x for x in ("torch", "jax") if f"import {x}" in text and importlib.util.find_spec(x) is None]
        if lacking:
            left_out.extend(lacking)
            continue
        exec(compile(text, page, "exec"), names)
    assert "PASSED: " in capsys.readouterr().out
    if left_out:
        pytest.skip(f"snippets need {', '.join(left_out)}, not installed here; the others ran")


def test_the_picture_is_that_of_the_report():
    """Numbers may differ in a digit where a library computes an exponential otherwise."""
    script = [sys.executable, ROOT / "docs/assets/verdict.py"]
    made = subprocess.run(script, capture_output=True, text=True, check=True, encoding="utf-8").stdout
    without_numbers = lambda text: re.sub(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?|─+| +", " ", text)
    drawn = (ROOT / "docs/assets/verdict.svg").read_text(encoding="utf-8")
    assert without_numbers(drawn) == without_numbers(made)
    assert "mask-one-more" in drawn
