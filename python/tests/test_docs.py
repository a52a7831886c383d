"""Every snippet of the pages runs."""

import importlib.util
import re
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
        if "import torch" in text and importlib.util.find_spec("torch") is None:
            left_out.append(text)
            continue
        exec(compile(text, page, "exec"), names)
    assert "PASSED: " in capsys.readouterr().out
    if left_out:
        pytest.skip(f"PyTorch is not installed, which {len(left_out)} snippets need; the others ran")
