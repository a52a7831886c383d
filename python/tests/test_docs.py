"""Every snippet of the pages runs."""

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
    names = {}
    for text in snippets(page):
        exec(compile(text, page, "exec"), names)
    assert "PASSED: " in capsys.readouterr().out
