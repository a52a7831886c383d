"""Draws verdict.svg: what `etalon.check` says of a kernel whose mask shows one key too many.

python docs/assets/verdict.py > docs/assets/verdict.svg
"""

import os
from html import escape

os.environ["COLUMNS"] = "100"
import etalon  # noqa: E402

EXTENTS = dict(batch=1, query_heads=2, key_heads=1, queries=64, keys=64, dim=32)
# Pixels of a character and of a line, in a font of that size.
SIZE, ADVANCE, LINE, MARGIN = 14, 8.43, 20, 20
STYLE = f"""
  rect {{ fill: #16181d }}
  text {{ fill: #d7dae0; font: {SIZE}px ui-monospace, "DejaVu Sans Mono", Menlo, monospace; white-space: pre }}
  .prompt {{ fill: #7f8794 }}
  .verdict {{ fill: #ff6b68; font-weight: bold }}
  .reason {{ fill: #ffd166 }}
"""


def report():
    """The report, of one line for each line of a terminal."""
    right = etalon.problem("attention", mask={"causal": {}}, **EXTENTS)
    wrong = etalon.problem("attention", mask={"window": {"right": 1}}, **EXTENTS)
    inputs = etalon.random_inputs(right, dtype="bfloat16")
    return str(etalon.check(right, inputs, etalon.run(wrong, "forward", inputs)))


def lines():
    """Lines of the picture, each with its class."""
    found = [">>> print(etalon.check(problem, inputs, my_kernel(**inputs)))", *report().splitlines()]
    explained = next(at for at, line in enumerate(found) if line.startswith("What explains it"))
    for at, line in enumerate(found):
        kind = "prompt" if at == 0 else "verdict" if line.startswith("FAILED") else "reason" if at > explained else ""
        yield line, kind


def svg(shown):
    """The picture of some lines."""
    width = round(2 * MARGIN + ADVANCE * max(len(line) for line, _ in shown))
    height = 2 * MARGIN + LINE * len(shown)
    texts = [
        f'  <text x="{MARGIN}" y="{MARGIN + LINE * (at + 1) - 5}" class="{kind}">{escape(line)}</text>'
        for at, (line, kind) in enumerate(shown)
        if line
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img">'
    title = "<title>The report of etalon on a kernel whose mask shows one key too many</title>"
    box = f'<rect width="{width}" height="{height}" rx="8"/>'
    return "\n".join([head, title, f"<style>{STYLE}</style>", box, *texts, "</svg>"])


if __name__ == "__main__":
    print(svg(list(lines())))
