"""Runs contenders under `etalon verify --candidate` and records what holds:

    python benches/findings/record.py --etalon target/release/etalon                 # all of this machine's CPU
    python benches/findings/record.py --etalon … --device cuda --seconds 280 --jobs 4 # a part; again for the next
    python benches/findings/record.py --merge FOLDER                                  # recordings of another machine
    python benches/findings/record.py --faults --device cpu                           # runs the reproductions

It needs Python and the command; contenders run in processes of their own, with --python, which has the libraries.
A run that is recorded is not repeated, unless versions changed or --again is given. What --seconds cuts goes on next
time.
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from contenders import CONTENDERS
from recording import LADDERS, SCHEMA, Damaged, failing, kind_of, merged, read, runs_of, write

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "docs/results/findings"
FAULTS = HERE / "faults"


def parsed():
    parser = argparse.ArgumentParser(description="Records which profile holds for kernels of other libraries.")
    parser.add_argument("--etalon", default="etalon", help="the command")
    parser.add_argument("--python", default=sys.executable, help="the Python that has the libraries")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", help="these contenders alone, as sdpa-math,flex")
    parser.add_argument("--depth", choices=["smoke", "core", "full"], help="if absent core, or that of the contender")
    parser.add_argument("--seed", type=int, default=44)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin nothing after this, and cut what runs"
    )
    parser.add_argument("--jobs", type=int, default=1, help="contenders at once")
    parser.add_argument("--threads", type=int, help="threads of etalon; as many as there are cores if absent")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=ROOT / ".peers/findings", help="reports and runs that were cut")
    parser.add_argument("--shrink", type=int, default=8, help="failures of a run whose simplest case is looked for")
    parser.add_argument("--again", action="store_true", help="repeat what is recorded")
    parser.add_argument("--merge", type=Path, metavar="FOLDER", help="take in the recordings of a folder")
    parser.add_argument("--faults", action="store_true", help="run the reproductions in faults/")
    return parser.parse_args()


class Cut(Exception):
    """The time is over."""


class Runner:
    def __init__(self, options):
        self.options = options
        self.deadline = time.monotonic() + options.seconds
        options.work.mkdir(parents=True, exist_ok=True)
        options.results.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def call(self, command: list[str]) -> subprocess.CompletedProcess:
        """A command in a group of its own, which ends with it or with the time."""
        if self.left() <= 0:
            raise Cut
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes, start_new_session=True, errors="replace") as process:
            try:
                limit = None if self.left() == float("inf") else self.left()
                output, errors = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired as expired:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.communicate(timeout=10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                raise Cut from expired
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def program(self, name: str, *more: str) -> list[str]:
        return [self.options.python, str(HERE / "candidate.py"), name, "--device", self.options.device, *more]

    def probe(self, name: str) -> dict:
        """Versions, and why the contender is absent, by its own process."""
        done = self.call(self.program(name, "--probe"))
        try:
            found = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            found = {"python": "", "versions": {}, "absent": f"its process ended with {done.returncode}: {last[:200]}"}
        place = {"hardware": found.pop("hardware", ""), "runs": [], "schema": SCHEMA}
        return place | found | {"contender": name, "device": self.options.device}

    def verify(self, name: str, dtype: str, passes: list[str], profile: str, more: list[str]) -> list[str]:
        contender = CONTENDERS[name]
        file = HERE / "profiles" / f"{profile}.json"
        candidate = shlex.join(self.program(name, "--dtypes", dtype, "--passes", ",".join(passes)))
        command = [self.options.etalon, "verify", "--candidate", candidate, "--limit", str(contender.limit)]
        command += ["--profile", str(file) if file.exists() else profile, "--progress", "1000", *more]
        return command + (["--threads", str(self.options.threads)] if self.options.threads else [])

    def depth(self, name: str) -> str:
        return self.options.depth or CONTENDERS[name].depth.get(self.options.device, "core")

    def run(self, name: str, dtype: str, passes: list[str], profile: str) -> dict:
        """One run of the suite, without shrinking."""
        depth = self.depth(name)
        stem = self.options.work / f"{name}-{self.options.device}-{dtype}-{profile}-{'-'.join(passes)}-{depth}"
        report, kept = Path(f"{stem}.json"), Path(f"{stem}.kept")
        report.unlink(missing_ok=True)
        asked = ["--depth", depth, "--seed", str(self.options.seed), "--restarts", "50"]
        asked += ["--continue", str(kept), "--report", f"json={report}"]
        done = self.call(self.verify(name, dtype, passes, profile, asked))
        kept.unlink(missing_ok=True)
        if not report.exists():
            raise RuntimeError(f"{name} {dtype} {profile}: {(done.stderr or done.stdout).strip()[-400:]}")
        found = json.loads(report.read_text())
        if late := too_slow(found):
            raise RuntimeError(f"{name} {dtype} {profile}: {late} answers came too late: a busy machine, or a hang")
        return recorded(found, dtype, profile, passes, depth, self.options.seed)

    def shrink(self, name: str, run: dict, recording: dict) -> None:
        """The simplest case of each pass, law and kind that fails, unless another type of the contender has it."""
        what = lambda failure: (failure["pass"], failure["law"], failure["kind"])
        whole = lambda failure: "problem" in failure.get("shrunk", {})
        there = {what(x) for other in recording["runs"] for x in other["failures"] if whole(x)}
        for failure in [x for x in run["failures"] if what(x) not in there][: self.options.shrink]:
            one = ["--case", failure["cases"][0], "--law", failure["law"], "--json"]
            done = self.call(self.verify(name, run["dtype"], [failure["pass"]], run["profile"], one))
            try:
                first = json.loads(done.stdout).get("first")
            except ValueError:
                first = None
            if first is None:
                continue
            failure["shrunk"] = {x: first[x] for x in ("case", "problem", "symptom") if x in first}

    def contender(self, name: str) -> str:
        """Probes and records a contender; returns a line that says what was done."""
        path = self.options.results / f"{name}-{self.options.device}.json"
        place = self.probe(name)
        old = read(path) if path.exists() and not self.options.again else None
        recording = merged(old, place) if old else place
        settings = self.depth(name), self.options.seed
        recording["runs"] = [run for run in recording["runs"] if (run["depth"], run["seed"]) == settings]
        write(path, recording)
        if "absent" in recording:
            return f"{name}: absent: {recording['absent']}"
        contender, count = CONTENDERS[name], 0
        kernels = contender.kernels(self.options.device)
        for dtype, ladder in LADDERS[contender.algorithm].items():
            passes = sorted({p for k in kernels if dtype in k["dtypes"] for p in k["passes"]})
            if not passes:
                continue
            # The widest first: no profile explains what fails in it. Then from the strictest on, what it leaves over.
            for profile in [ladder[-1], *ladder[:-1]]:
                left = [p for p in passes if not self.settled(recording, ladder, dtype, p, profile)]
                if not left:
                    continue
                run = self.run(name, dtype, left, profile)
                if profile == ladder[-1]:
                    self.shrink(name, run, recording)
                recording = merged(recording, place | {"runs": [run]})
                write(path, recording)
                count += 1
        return f"{name}: {count} runs"

    @staticmethod
    def settled(recording: dict, ladder: list[str], dtype: str, of_pass: str, profile: str) -> bool:
        """True if the pass was run with the profile, or holds with a stricter one."""
        runs = runs_of(recording, dtype, of_pass)
        if profile in runs:
            return True
        stricter = [runs[x] for x in ladder[: ladder.index(profile)] if x in runs]
        widest = runs.get(ladder[-1])
        return widest is not None and any(failing(x, of_pass) <= failing(widest, of_pass) for x in stricter)


def too_slow(report: dict) -> int:
    """The number of answers that came too late. That may be a busy machine, and is nothing to record of a library."""
    reasons = [record.get("reason", "") for record in report["records"]]
    return sum("did not answer within" in reason for reason in reasons)


def recorded(report: dict, dtype: str, profile: str, passes: list[str], depth: str, seed: int) -> dict:
    """The part of a report that a recording keeps."""
    failures, by_pass, unanswered = {}, {}, Counter()
    for record in report["records"]:
        of_pass, verdict, reason = record["pass"], record["verdict"], record.get("reason", "")
        if verdict == "unsupported" or of_pass not in passes:
            continue
        counts = by_pass.setdefault(of_pass, {"checks": 0, "failed": 0, "undecided": 0, "margin": 0.0})
        if verdict == "not asked":
            continue
        counts["checks"] += 1
        if verdict in ("fail", "convention", "vacuous"):
            counts["failed"] += 1
            at = of_pass, record["check"], kind_of(reason)
            entry = failures.setdefault(
                at, {"pass": at[0], "law": at[1], "kind": at[2], "cases": [], "reason": reason}
            )
            entry["cases"].append(record["case"])
        elif verdict == "pass":
            counts["margin"] = max(counts["margin"], round(record.get("margin") or 0.0, 4))
        else:
            counts["undecided"] += 1
            unanswered[f"{verdict}: {re.sub(r'[0-9]+', '#', reason)[:160]}"] += 1
    for one in report.get("simplest", []):
        at = one["of"]["pass"], one["of"]["check"], kind_of(one["of"].get("reason", ""))
        if at in failures:
            failures[at]["shrunk"] = {"case": one["case"], "symptom": one["reason"]}
    return {
        "dtype": dtype,
        "profile": profile,
        "passes": sorted(passes),
        "depth": depth,
        "seed": seed,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "etalon": report["etalon"],
        "status": report["status"],
        "checks": sum(counts["checks"] for counts in by_pass.values()),
        "by_pass": by_pass,
        "failures": [failures[at] for at in sorted(failures)],
        "unanswered": dict(unanswered.most_common(6)),
    }


def chosen(options) -> list[str]:
    names = options.only.split(",") if options.only else list(CONTENDERS)
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        sys.exit(f"unknown contenders: {', '.join(unknown)}; there are {', '.join(CONTENDERS)}")
    return names


def record(options) -> int:
    """All contenders; 1 if one failed, 3 if the time was over."""
    runner, status = Runner(options), 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        waiting = {pool.submit(runner.contender, name): name for name in chosen(options)}
        for done in concurrent.futures.as_completed(waiting):
            try:
                print(done.result(), flush=True)
            except Cut:
                print(f"{waiting[done]}: cut, goes on next time", flush=True)
                status = status or 3
            except Exception as error:
                print(f"{waiting[done]}: FAILED: {error}", flush=True)
                status = 1
    return status


def merge(options) -> int:
    """The recordings of another folder, into those of this one."""
    files = sorted(x for x in options.merge.glob("*.json") if x.name != "faults.json")
    if not files:
        sys.exit(f"{options.merge}: expected recordings, found none")
    options.results.mkdir(parents=True, exist_ok=True)
    for file in files:
        path = options.results / file.name
        write(path, merged(read(path) if path.exists() else None, read(file)))
        print(path)
    faults = options.merge / "faults.json"
    if faults.exists():
        path = options.results / "faults.json"
        old = json.loads(path.read_text()) if path.exists() else {}
        write(path, old | json.loads(faults.read_text()))
    return 0


def faults(options) -> int:
    """Runs the reproductions that are for this device, and keeps what they print."""
    path = options.results / "faults.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for file in sorted(FAULTS.glob("*.py")):
        devices = re.match(r"# device: ([a-z, ]+)\. ", file.read_text(encoding="utf-8"))
        if devices is None:
            sys.exit(f"{file}: expected a first line '# device: cpu. …'")
        if options.device not in devices[1].split(", "):
            continue
        done = subprocess.run([options.python, str(file)], capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            sys.exit(f"{file}: ended with {done.returncode}: {done.stderr.strip()[-400:]}")
        found[f"{file.stem}-{options.device}"] = done.stdout
        print(f"{file.stem}:\n{done.stdout}", end="")
    options.results.mkdir(parents=True, exist_ok=True)
    write(path, found)
    return 0


def main() -> int:
    options = parsed()
    try:
        if options.merge:
            return merge(options)
        return faults(options) if options.faults else record(options)
    except Damaged as reason:
        sys.exit(str(reason))


if __name__ == "__main__":
    sys.exit(main())
