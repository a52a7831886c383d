"""Writes the tables of docs/gpu_results.md from the recordings in docs/results.

    python3 benches/peers/gpu_results.py            # writes the page
    python3 benches/peers/gpu_results.py --check    # fails if the page is another

A table of the page stands between two markers, of which the first names its recording, docs/results/NAME.json:

    <!-- results: NAME -->
    <!-- end of results -->

README.md beside this script has the schema of a recording. Figures keep their recorded digits: 0.450 stays 0.450.
"""

import argparse
import json
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/gpu_results.md"
RECORDINGS = ROOT / "docs/results"

PLACE = re.compile(r"(?<=<!-- results: )(?P<name>[\w-]+) -->\n.*?(?=<!-- end of results -->)", re.DOTALL)
COLUMNS = 119

# Keys that every recording may have, and those of each kind.
COMMON = {"date", "device", "driver", "nvrtc", "pytorch", "command", "method"}
KINDS = {
    "compare": {"torch", "cuda", "processes", "rounds", "shrink", "rows"},
    "verify": {"checks"},
    "table": {"columns", "rows"},
}
DTYPES = ["f32", "bf16", "f16"]


class Recording:
    """A file of docs/results. Numbers are text, as they stand there."""

    def __init__(self, name: str):
        self.name = name
        path = RECORDINGS / f"{name}.json"
        try:
            self.data = json.loads(path.read_text(), parse_float=str, parse_int=str)
        except (OSError, ValueError) as reason:
            sys.exit(f"{path}: {reason}")
        self.kind = self.data.get("kind", "compare")
        if self.kind not in KINDS:
            sys.exit(f"{path}: kind must be one of {', '.join(KINDS)}, found {self.kind}")
        unknown = self.data.keys() - COMMON - KINDS[self.kind] - {"kind"}
        if unknown:
            sys.exit(f"{path}: unknown keys: {', '.join(sorted(unknown))}")
        if not self.data.get("date"):
            sys.exit(f"{path}: a recording has a date")

    def caption(self) -> str:
        """When, where, with what versions, and how."""
        data = self.data
        parts = [data["date"], data.get("device")]
        pytorch = data.get("pytorch", data.get("torch"))
        for title, value in [("driver", data.get("driver")), ("NVRTC", data.get("nvrtc")), ("PyTorch", pytorch)]:
            parts.append(value and f"{title} {value}")
        sentences = [", ".join(x for x in parts if x)]
        if data.get("command"):
            sentences.append(f"`{data['command']}`")
        if self.kind == "compare" and "method" not in data:
            sentences.append(f"{data['processes']} process(es) of {data['rounds']} rounds, medians in ms, in brackets ÷ etalon's")
        elif data.get("method"):
            sentences.append(data["method"])
        return wrapped(". ".join(x.rstrip(".") for x in sentences) + ".")

    def table(self) -> str:
        return {"compare": compared, "verify": verified, "table": plain}[self.kind](self.data)


def wrapped(text: str) -> str:
    """Lines of a paragraph; a command is not broken that fits a line."""

    def code(found: re.Match) -> str:
        return found[0].replace(" ", "\0") if len(found[0]) < COLUMNS else found[0]

    whole = re.sub(r"`[^`]*`", code, text)
    lines = textwrap.wrap(whole, COLUMNS, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def shown(cell, decimals: int | None = None) -> str:
    """A cell: text, a number as it was recorded (rounded if it has more decimals), [number, text in brackets]."""
    if cell is None:
        return "–"
    if isinstance(cell, list):
        first, *others = [shown(x, decimals) for x in cell]
        return f"{first} ({', '.join(others)})" if others else first
    if decimals is not None and re.fullmatch(r"-?\d+\.\d+", cell) and len(cell.split(".")[1]) > decimals:
        return f"{float(cell):.{decimals}f}"
    return cell


def lines(columns: list[str], rows: list[list[str]], right: int) -> str:
    """A table, whose columns from `right` on are numbers."""
    rule = "|".join("---" if at < right else "---:" for at in range(len(columns)))
    heading, *others = [f"| {' | '.join(row)} |" for row in [columns, *rows]]
    return "\n".join([heading, f"|{rule}|", *others])


def plain(data: dict) -> str:
    wrong = [row for row in data["rows"] if len(row) != len(data["columns"])]
    if wrong:
        sys.exit(f"{len(data['columns'])} columns, but a row is {wrong[0]}")
    return lines(data["columns"], [[shown(x) for x in row] for row in data["rows"]], len(data["columns"]))


def verified(data: dict) -> str:
    """The worst margin and the number of checks of each pass on each level, and the sum of the checks."""
    found = [[row.get(x) for x in DTYPES] for row in data["checks"]]
    rows = [
        [row["pass"], row["level"], *(shown(x and [x["margin"], x["checks"]]) for x in each)]
        for row, each in zip(data["checks"], found, strict=True)
    ]
    total = sum(int(x["checks"]) for each in found for x in each if x)
    return lines(["pass", "level", *DTYPES], rows, 5) + f"\n\n{total:,} checks."


def compared(data: dict) -> str:
    """Rows of compare_gpu.py, a contender in each column: its median, and in brackets its ratio to etalon's first."""
    names = list(dict.fromkeys(x["name"] for row in data["rows"] for x in row["contenders"]))

    def cell(row: dict, name: str) -> str:
        of = next((x for x in row["contenders"] if x["name"] == name), None)
        if of is None:
            return ""
        if of.get("median_ms") is None:
            return "absent"
        first = name.startswith("etalon") and float(of.get("ratio") or 1) == 1
        return shown(of["median_ms"] if first or not of.get("ratio") else [of["median_ms"], shown(of["ratio"], 2)], 3)

    rows = [[row["row"], *(cell(row, name) for name in names)] for row in data["rows"]]
    return lines(["row, ms", *names], rows, 1)


def rendered(page: str) -> str:
    """The page with the tables of the recordings that it names."""

    def place(found: re.Match) -> str:
        each = Recording(found["name"])
        return f"{each.name} -->\n{each.caption()}\n\n{each.table()}\n\n"

    return PLACE.sub(place, page)


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the tables of docs/gpu_results.md from docs/results/*.json.")
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if the page is another")
    check = parser.parse_args().check
    page = PAGE.read_text()
    named = [found["name"] for found in PLACE.finditer(page)]
    missing = sorted({path.stem for path in RECORDINGS.glob("*.json")} - set(named))
    if missing:
        sys.exit(f"{PAGE} has no place for: {', '.join(missing)}")
    made = rendered(page)
    if check and made != page:
        sys.exit(f"{PAGE} is not what its recordings say: run python3 benches/peers/gpu_results.py")
    if not check:
        PAGE.write_text(made)


if __name__ == "__main__":
    main()
