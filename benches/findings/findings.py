"""Writes the tables of docs/findings.md from the recordings in docs/results/findings.

    python3 benches/findings/findings.py            # writes the page
    python3 benches/findings/findings.py --check    # fails if the page is another

A part of the page stands between two markers, of which the first names it; its words are those of judgements.json:

    <!-- findings: verdicts -->
    <!-- end of findings -->

A failure without a judgement is an error: somebody must look at it, and say what it is.
"""

import argparse
import fnmatch
import json
import re
import sys
import textwrap
from pathlib import Path

from contenders import CONTENDERS
from recording import LADDERS, Damaged, holding, kind_of, read, runs_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs/findings.md"
RESULTS = ROOT / "docs/results/findings"
PLACE = re.compile(r"(?<=<!-- findings: )(?P<name>[\w-]+) -->\n.*?(?=<!-- end of findings -->)", re.DOTALL)
COLUMNS = 119
VERDICTS = ["convention", "arithmetic", "fault", "open"]


def recordings(folder: Path) -> list[dict]:
    """In the order of the contenders, the CPU first."""
    found = {path.stem: read(path) for path in sorted(folder.glob("*.json")) if path.name != "faults.json"}
    names = [f"{name}-{device}" for name in CONTENDERS for device in ("cpu", "cuda")]
    unknown = sorted(found.keys() - set(names))
    if unknown:
        raise Damaged(f"{folder}: expected recordings of contenders, found {', '.join(unknown)}")
    return [found[name] for name in names if name in found]


def loaded(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as reason:
        raise Damaged(f"{path}: expected JSON, found {reason}") from reason


class Judgements:
    """The words of somebody who looked at the failures: the first that matches a failure says what it is."""

    def __init__(self, path: Path):
        self.all = loaded(path)
        for each in self.all:
            wrong = {"id", "verdict", "title", "text", "match"} - each.keys()
            if wrong or each["verdict"] not in VERDICTS:
                raise Damaged(f"{path}: {each.get('id')}: expected {', '.join(VERDICTS)}, and {', '.join(wrong)}")

    def of(self, recording: dict, run: dict, failure: dict) -> dict | None:
        fields = {"contender": recording["contender"], "device": recording["device"], "dtype": run["dtype"]}
        fields |= {name: failure[name] for name in ("pass", "law", "kind", "reason")} | {"case": failure["cases"]}
        for each in self.all:
            if any(all(_matches(fields[key], want) for key, want in one.items()) for one in each["match"]):
                return each
        return None


def _matches(value: str | list, want: str | list) -> bool:
    """A value matches one of the patterns; all cases of a failure do."""
    values, patterns = ([x] if isinstance(x, str) else x for x in (value, want))
    return all(any(fnmatch.fnmatchcase(one, pattern) for pattern in patterns) for one in values)


class Findings:
    """All that the page says."""

    def __init__(self, folder: Path = RESULTS, words: Path = HERE):
        self.recordings = recordings(folder)
        self.judgements = Judgements(words / "judgements.json")
        self.promises = loaded(words / "promises.json")
        faults = folder / "faults.json"
        self.outputs = loaded(faults) if faults.exists() else {}
        self.faults = words / "faults"
        # By id, (recording, run, failure) in the order of the page.
        self.shown = {each["id"]: [] for each in self.judgements.all}
        self.unjudged = []

    def verdicts(self) -> str:
        """A row for each contender, device and pass, a column for each type."""
        types = ["f32", "bf16", "f16"]
        rows = []
        for recording in self.recordings:
            name, contender = recording["contender"], CONTENDERS[recording["contender"]]
            passes = sorted({p for run in recording["runs"] for p in run["passes"]}, key=["forward", "backward"].index)
            for of_pass in passes:
                cells = [self.cell(recording, contender.algorithm, dtype, of_pass) for dtype in types]
                rows.append([f"`{name}`", recording["device"], of_pass, *cells])
        return table(["contender", "device", "pass", *types], rows)

    def cell(self, recording: dict, algorithm: str, dtype: str, of_pass: str) -> str:
        """The strictest profile that holds, the checks, and the notes of what fails whatever the profile."""
        if not any(run["dtype"] == dtype and of_pass in run["passes"] for run in recording["runs"]):
            kernels = CONTENDERS[recording["contender"]].kernels(recording["device"])
            return "not run" if any(dtype in x["dtypes"] and of_pass in x["passes"] for x in kernels) else ""
        held = holding(recording, algorithm, dtype, of_pass)
        if held is None:
            return "widest not run"
        profile, run = held
        notes = dict.fromkeys(self.note(recording, run, x) for x in run["failures"] if x["pass"] == of_pass)
        counts = run["by_pass"].get(of_pass, {"checks": 0, "failed": 0, "undecided": 0})
        judged = counts["checks"] - counts["undecided"]
        if judged == 0:
            return "refused" if counts["undecided"] else "nothing asked"
        others = "".join(f" {note}" for note in notes)
        refused = f", {counts['undecided']} refused" if counts["undecided"] else ""
        ladder, runs = LADDERS[algorithm][dtype], runs_of(recording, dtype, of_pass)
        if any(stricter not in runs for stricter in ladder[: ladder.index(profile)]):
            profile += " or stricter"
        return f"{profile}{others} ({judged - counts['failed']}/{judged}{refused})"

    def note(self, recording: dict, run: dict, failure: dict) -> str:
        found = self.judgements.of(recording, run, failure)
        if found is None:
            self.unjudged.append((recording, run, failure))
            return "?"
        self.shown[found["id"]].append((recording, run, failure))
        return f"[{found['id']}](#{found['id'].lower()})"

    def contenders(self) -> str:
        """The table of what was called, and where."""
        rows = []
        for recording in self.recordings:
            if not recording["runs"]:
                continue
            contender = CONTENDERS[recording["contender"]]
            versions = ", ".join(f"{package} {at}" for package, at in recording["versions"].items())
            depths = sorted({run["depth"] for run in recording["runs"]})
            dates = sorted(run["date"][:10] for run in recording["runs"])
            where = f"{recording['hardware']}, Python {recording['python']}"
            last = dates[-1] if dates else ""
            cells = [f"`{recording['contender']}`", f"`{contender.call}`", contender.algorithm]
            rows.append([*cells, versions, where, ", ".join(depths), last])
        return table(["contender", "call", "algorithm", "versions", "where", "depth", "date"], rows)

    def absent(self) -> str:
        why = lambda x: plain(x["absent"]) if "absent" in x else "cut before a run was complete"
        rows = [[f"`{x['contender']}`", x["device"], why(x)] for x in self.recordings if not x["runs"]]
        there = {(x["contender"], x["device"]) for x in self.recordings}
        for device in ("cpu", "cuda"):
            never = [f"`{n}`" for n, c in CONTENDERS.items() if device in c.devices and (n, device) not in there]
            if never:
                rows.append([", ".join(never), device, "not run yet"])
        return table(["contender", "device", "why"], rows)

    def promised(self) -> str:
        """The promises of each library about its numbers, in its own words."""
        used = {contender.promise for contender in CONTENDERS.values()}
        if used != self.promises.keys():
            raise Damaged(f"promises.json: expected {', '.join(sorted(used))}, found {', '.join(self.promises)}")
        parts = []
        for each in self.promises.values():
            names = ", ".join(f"`{n}`" for n, c in CONTENDERS.items() if self.promises[c.promise] is each)
            parts.append(wrapped(f"**{each['library']}** ({names}):"))
            for quote in each["quotes"]:
                parts.append(quoted(quote["text"]) + "\n>\n" + wrapped(f"— {linked(quote['source'])}", "> "))
            if each.get("remark"):
                parts.append(wrapped(each["remark"]))
        return "\n\n".join(parts)

    def judged(self, verdict: str) -> str:
        """The judgements of one kind, each with the runs that show it, the simplest problem and the replay."""
        parts = []
        for each in self.judgements.all:
            if each["verdict"] == verdict and self.shown[each["id"]]:
                parts.append(self.judgement(each))
        return "\n\n".join(parts) or "None."

    def judgement(self, each: dict) -> str:
        found = self.shown[each["id"]]
        lines = [f'<a id="{each["id"].lower()}"></a>**{each["id"]}. {each["title"]}**', "", wrapped(each["text"]), ""]
        where = {}
        for recording, run, failure in found:
            at = f"`{recording['contender']}` ({recording['device']})"
            where.setdefault(at, {}).setdefault(f"{failure['pass']} `{failure['law']}`", set()).add(run["dtype"])
        for at, laws in where.items():
            said = ", ".join(f"{law} ({', '.join(sorted(types))})" for law, types in laws.items())
            lines.append(wrapped(f"{at}: {said}.", "* ", "  "))
        lines += ["", *self.example(found)]
        for name in each.get("reproductions", []):
            lines += ["", *self.reproduction(name)]
        return "\n".join(lines)

    @staticmethod
    def example(found: list) -> list[str]:
        """The simplest problem that was shrunk, if possible in a type that is shown, and the command that asks again."""
        same = lambda a, b: all(a[key] == b[key] for key in ("pass", "law", "kind"))
        alike = [(r, run, x) for r, _, y in found for run in r["runs"] for x in run["failures"] if same(x, y)]
        known = [(r, run, x, shrunk(x)) for r, run, x in alike]
        types = {run["dtype"] for _, run, _ in found}
        recording, run, failure, one = max(known, key=lambda x: (len(x[3]), x[1]["dtype"] in types))
        program = f"python benches/findings/candidate.py {recording['contender']} --device {recording['device']}"
        program += f" --dtypes {run['dtype']} --passes {failure['pass']}"
        profile = f"benches/findings/profiles/{run['profile']}.json"
        profile = profile if (ROOT / profile).exists() else run["profile"]
        lines = [wrapped(f"For example {plain(one['symptom'])}:"), ""]
        if "problem" in one:
            problem = json.dumps(one["problem"], separators=(", ", ": "))
            lines += ["```json", *textwrap.wrap(problem, COLUMNS, break_long_words=False), "```", ""]
        asked = [f"    --profile {profile} \\", f"    --case {one['case']} --law {failure['law']}"]
        return [*lines, "```sh", f"etalon verify --candidate '{program}' \\", *asked, "```"]

    def reproduction(self, name: str) -> list[str]:
        """Ten lines without etalon, and what they printed."""
        lines = [f"Without etalon ([{name}.py](../benches/findings/faults/{name}.py)):", "", "```python"]
        source = (self.faults / f"{name}.py").read_text(encoding="utf-8")
        lines += [source.strip(), "```"]
        printed = {device: self.outputs.get(f"{name}-{device}") for device in ("cpu", "cuda")}
        for device, text in printed.items():
            if text is not None:
                lines += ["", f"It printed, on {device}:", "", "```text", text.strip(), "```"]
        if not any(printed.values()):
            raise Damaged(f"faults.json: expected what {name}.py printed, found nothing: record.py --faults")
        return lines

    def part(self, name: str) -> str:
        made = {
            "verdicts": self.verdicts,
            "contenders": self.contenders,
            "absent": self.absent,
            "promises": self.promised,
            "conventions": lambda: self.judged("convention"),
            "arithmetic": lambda: self.judged("arithmetic"),
            "faults": lambda: self.judged("fault"),
            "open": lambda: self.judged("open"),
        }
        if name not in made:
            raise Damaged(f"{PAGE}: expected a part of {', '.join(made)}, found {name}")
        return made[name]()


def shrunk(failure: dict) -> dict:
    """The simplest problem that fails as the failure does, or its first case: shrinking may meet another failure."""
    one = failure.get("shrunk")
    if one and kind_of(one["symptom"]) == failure["kind"]:
        return one
    return {"case": failure["cases"][0], "symptom": failure["reason"]}


def plain(text: str) -> str:
    """A text of a library or of etalon, harmless in a page, where [0] would be a link."""
    text = re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
    return re.sub(r"\[(\w+)\]", r"\\[\1\\]", text)


def wrapped(text: str, first: str = "", others: str | None = None) -> str:
    others = first if others is None else others
    indents = {"initial_indent": first, "subsequent_indent": others}
    return "\n".join(textwrap.wrap(text, COLUMNS, break_long_words=False, break_on_hyphens=False, **indents))


def linked(text: str) -> str:
    """Addresses as links, which rustdoc wants in brackets."""
    return re.sub(r"https?://[^\s,]+", r"<\g<0>>", text)


def quoted(text: str) -> str:
    return wrapped(text, "> ")


def table(columns: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return "None."
    return "\n".join(f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *rows])


def rendered(page: str, findings: Findings) -> str:
    """The page with its parts. Verdicts stand first: judgements show what they have met."""
    names = [found["name"] for found in PLACE.finditer(page)]
    if "verdicts" not in names or names.index("verdicts") != 0:
        raise Damaged(f"{PAGE}: expected the part verdicts first, found {', '.join(names) or 'none'}")
    made = PLACE.sub(lambda found: f"{found['name']} -->\n{findings.part(found['name'])}\n\n", page)
    if findings.unjudged:
        lines = [
            f"  {r['contender']} {r['device']} {run['dtype']} {x['pass']} {x['law']} {x['kind']}: {x['reason'][:150]}"
            for r, run, x in findings.unjudged
        ]
        raise Damaged("failures without a judgement in judgements.json:\n" + "\n".join(lines))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes docs/findings.md from docs/results/findings/*.json.")
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if the page is another")
    check = parser.parse_args().check
    page = PAGE.read_text(encoding="utf-8")
    try:
        made = rendered(page, Findings())
    except Damaged as reason:
        sys.exit(str(reason))
    if check and made != page:
        sys.exit(f"{PAGE} is not what its recordings say: run python3 benches/findings/findings.py")
    if not check:
        PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
