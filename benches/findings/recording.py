"""Recordings of runs: what docs/results/findings holds, how two of them merge, and which profile holds.

A recording is a file NAME-DEVICE.json of one contender on one device:

    schema, contender, device, hardware, python, versions
    absent     why it cannot run there; then there are no runs
    runs       of each type, profile and set of passes: dtype, profile, passes, depth, seed, date, etalon, checks,
               by_pass (checks, failed, undecided and the worst margin of each pass),
               status, failures (pass, law, kind, cases, reason; shrunk: case, problem, reason; replay),
               unanswered (reasons and counts of what the library refused)
"""

import json
import re
from pathlib import Path

SCHEMA = 1
KEYS = {"schema", "contender", "device", "hardware", "python", "versions", "absent", "runs"}
RUN_KEYS = {"dtype", "profile", "passes", "depth", "seed", "date", "etalon", "checks", "by_pass", "failures"}
RUN_KEYS |= {"unanswered", "status"}
COUNT_KEYS = {"checks", "failed", "undecided", "margin"}
FAILURE_KEYS = {"pass", "law", "kind", "cases", "reason"}

# From the strictest arithmetic on. A name that is none of etalon's is that of a file in profiles/.
SUMS = ["f32-strict", "f32-bf16x3", "f32-tf32"]
LADDERS = {
    "attention": {
        "f32": SUMS,
        "bf16": ["f32-strict", "bf16-flash", "bf16-eager"],
        "f16": ["f32-strict", "f16-flash", "f16-eager"],
    },
    "linear_attention": {"f32": SUMS, "bf16": ["f32-strict", "bf16-flash"], "f16": ["f32-strict", "f16-flash"]},
    "linear_cross_entropy": {
        "f32": SUMS,
        "bf16": ["f32-strict", "bf16-flash", "bf16-chunked"],
        "f16": ["f32-strict", "f16-flash", "f16-chunked"],
    },
}


class Damaged(Exception):
    """A recording that cannot be read: the file, what was expected, what was found."""


def read(path: Path) -> dict:
    """A recording, with the keys that it must have."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as reason:
        raise Damaged(f"{path}: expected a recording in JSON, found {reason}") from reason
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        at = found.get("schema") if isinstance(found, dict) else type(found).__name__
        raise Damaged(f"{path}: expected schema {SCHEMA}, found {at}")
    wrong = (found.keys() ^ KEYS) - {"absent"}
    if wrong:
        raise Damaged(f"{path}: missing or unknown keys: {', '.join(sorted(wrong))}")
    if path.stem != f"{found['contender']}-{found['device']}":
        raise Damaged(f"{path}: expected the recording of its name, found {found['contender']}-{found['device']}")
    if not isinstance(found["runs"], list):
        raise Damaged(f"{path}: expected a list of runs, found {type(found['runs']).__name__}")
    for run in found["runs"]:
        _has(path, "run", run, RUN_KEYS)
        for counts in run["by_pass"].values():
            _has(path, "count", counts, COUNT_KEYS)
        for failure in run["failures"]:
            _has(path, "failure", failure, FAILURE_KEYS, {"shrunk"})
    return found


def _has(path: Path, name: str, found: object, keys: set[str], perhaps: set[str] = frozenset()) -> None:
    """Raises unless it is an object with these keys."""
    wrong = (found.keys() ^ keys) - perhaps if isinstance(found, dict) else {type(found).__name__}
    if wrong:
        raise Damaged(f"{path}: missing or unknown keys of a {name}: {', '.join(sorted(wrong))}")


def write(path: Path, recording: dict) -> None:
    """The file appears when it is complete."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(recording, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)


def key(run: dict) -> tuple:
    """A run replaces another with the same key. A profile judges all passes, or those that others left over."""
    return run["dtype"], run["profile"], tuple(run["passes"])


def same_place(a: dict, b: dict) -> bool:
    return all(a[name] == b[name] for name in ("contender", "device", "hardware", "versions", "python"))


def merged(old: dict | None, new: dict) -> dict:
    """Runs of both, the newer of each; of another place, version or reason of absence the new recording alone."""
    if old is None or not same_place(old, new) or old.get("absent") != new.get("absent"):
        return new
    runs = {key(run): run for run in old["runs"]}
    for run in new["runs"]:
        if key(run) not in runs or runs[key(run)]["date"] <= run["date"]:
            runs[key(run)] = run
    return new | {"runs": [runs[at] for at in sorted(runs)]}


def kind_of(reason: str) -> str:
    """The look of a failure: a number, NaN, infinity, an error of the program."""
    for kind, words in [
        ("nan", r"= NaN|is NaN"),
        ("not nan", r"expected NaN"),
        ("infinity", r"(=|is) -?inf"),
        ("error", r"^the program|^.{0,40}(Error|Exception)|ended|did not answer"),
    ]:
        if re.search(words, reason):
            return kind
    return "value"


def failing(run: dict, of_pass: str) -> set[tuple]:
    """Law and case of what fails in a pass."""
    return {(x["law"], case) for x in run["failures"] if x["pass"] == of_pass for case in x["cases"]}


def runs_of(recording: dict, dtype: str, of_pass: str) -> dict[str, dict]:
    """By profile, the newest run that has the pass."""
    runs = [run for run in recording["runs"] if run["dtype"] == dtype and of_pass in run["passes"]]
    return {run["profile"]: run for run in sorted(runs, key=lambda run: run["date"])}


def holding(recording: dict, algorithm: str, dtype: str, of_pass: str) -> tuple[str, dict] | None:
    """The strictest profile that holds, and its run: what fails in it fails in the widest, too.

    None where the widest was not run: what no profile explains is not known then.
    """
    ladder = LADDERS[algorithm][dtype]
    runs = runs_of(recording, dtype, of_pass)
    widest = runs.get(ladder[-1])
    if widest is None:
        return None
    for profile in ladder:
        run = runs.get(profile)
        if run and failing(run, of_pass) <= failing(widest, of_pass):
            return profile, run
    return None
