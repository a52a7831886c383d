"""Measures etalon's CUDA kernels beside PyTorch's, in one process, on one GPU.

    cargo build --release -p etalon-device
    python benches/peers/compare_gpu.py --json .peers/gpu.json

A chip that is limited by its power is faster or slower from one minute to the next, and from one process to another.
So each process computes a row in rounds, in each of them every contender in turn, there and back; and there are
several processes. A time is that of as many runs in a row as take two milliseconds, between two events on the stream.
README.md names the compared computations.
"""

import argparse
import datetime
import fnmatch
import gc
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from compare import note, positive

HERE = Path(__file__).resolve().parent
LIBRARY = HERE.parents[1] / "target/release/libetalon_device.so"

# Runs in a row take so many milliseconds, where one takes less.
ROUND_MS = 2.0
MOST_IN_A_ROW = 64

# Results that are further apart are not the same computation: the error of bf16 is a hundredth of that.
FAR = 0.05

# The name of etalon's contenders of an earlier version begins so; a present one may take so much of their time.
BEFORE = "before: "
MOST_SLOWER = 1.01


# One process.


def elapsed_ms(run, times: int) -> float:
    """The time of a run, of some in a row."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # While the device sleeps, the host gets ahead by all runs, 0.2 ms each: what is timed does not wait for it.
    torch.cuda._sleep(1_000_000 + 400_000 * times)
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times


def warmed_up(contender) -> tuple | None:
    """The results of a run; what it raises makes the contender absent."""
    import torch

    try:
        results = contender.run()
        # Contenders of etalon write to the same tensors.
        results = results and tuple(x.detach().clone() for x in results)
        torch.cuda.synchronize()
        return results
    except Exception as reason:
        contender.absent = f"{type(reason).__name__}: {reason}".splitlines()[0]
        return None


def measure(name: str, contenders: list, rounds: int) -> dict:
    from gpu_rows import distance

    begin = time.monotonic()
    results = {x.name: warmed_up(x) for x in contenders if x.absent is None}
    present = [x for x in contenders if x.absent is None]
    # The first of the peers whose results can be compared.
    model = next((x.name for x in present if not x.passes and results[x.name] is not None), None)
    far = {}
    for each in present:
        if model is not None and each.name != model and results[each.name] is not None:
            far[each.name] = distance(results[each.name], results[model])
    results.clear()
    times = {x.name: max(1, min(MOST_IN_A_ROW, math.ceil(ROUND_MS / elapsed_ms(x.run, 1)))) for x in present}
    found = {x.name: [] for x in present}
    for number in range(rounds):
        for each in present if number % 2 == 0 else reversed(present):
            found[each.name].append(elapsed_ms(each.run, times[each.name]))
    note(f"{name}: {time.monotonic() - begin:.1f} s")
    return {
        "row": name,
        "model": model,
        "contenders": [
            {
                "name": x.name,
                "absent": x.absent,
                "ms": found.get(x.name, []),
                "in_a_row": times.get(x.name),
                "distance": far.get(x.name),
                "scratch_bytes": max((y.scratch_bytes for y in x.passes), default=None),
                "etalon": x.name.startswith("etalon"),
            }
            for x in contenders
        ],
    }


def made_by(row, bench) -> list:
    """The contenders of a row, on the same inputs in every process and for every library."""
    import torch

    torch.manual_seed(0)
    return row(bench)


def child(options: argparse.Namespace) -> None:
    """Measures the rows, and writes what there is after each of them."""
    import torch
    import torch._functorch.config
    from etalon_device import Library
    from gpu_rows import ROWS, Bench

    torch._functorch.config.donated_buffer = False  # a compiled backward pass is run again and again
    bench = Bench(Library(options.library), shrink=options.shrink)
    before = options.before and Bench(Library(options.before), shrink=options.shrink, without=lambda name: True)
    device = torch.cuda.get_device_properties(0)
    made = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": device.name, "rows": []}
    for name in options.row:
        bench.without = lambda peer, row=name: any(fnmatch.fnmatch(f"{row}/{peer}", x) for x in options.without)
        contenders = made_by(ROWS[name], bench)
        if before:
            earlier = [x for x in made_by(ROWS[name], before) if x.name.startswith("etalon")]
            contenders += [replace(x, name=BEFORE + x.name) for x in earlier]
        made["rows"].append(measure(name, contenders, options.rounds))
        options.json.write_text(json.dumps(made))
        for each in (x for y in contenders for x in y.passes):
            each.forget()
        del contenders
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


# All processes.


def run_children(options: argparse.Namespace) -> list[dict]:
    made = []
    for number in range(1, options.processes + 1):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "figures.json")
            command = [sys.executable, __file__, "--child", "--library", str(options.library), "--json", str(path),
                       *(["--before", str(options.before)] if options.before else []),
                       "--rounds", str(options.rounds), "--shrink", str(options.shrink), "--row", *options.row,
                       *(["--without", *options.without] if options.without else [])]  # fmt: skip
            if subprocess.run(command).returncode != 0:
                sys.exit(f"process {number} failed")
            made.append(json.loads(path.read_text()))
        note(f"process {number} of {options.processes} is done")
        # Another process may fail, or take too long.
        if options.json is not None:
            options.json.write_text(json.dumps(report(options, made), indent=2) + "\n")
    return made


def joined(processes: list[dict]) -> list[dict]:
    """For each row the times of all processes."""
    rows = []
    for row in processes[0]["rows"]:
        same = [x for each in processes for x in each["rows"] if x["row"] == row["row"]]
        contenders = []
        for at, first in enumerate(row["contenders"]):
            own = [x["contenders"][at] for x in same]
            medians = [statistics.median(x["ms"]) for x in own if x["ms"]]
            contenders.append({
                **first,
                "ms": [ms for x in own for ms in x["ms"]],
                "median_ms": statistics.median(ms for x in own for ms in x["ms"]) if medians else None,
                "process_medians_ms": medians,
            })  # fmt: skip
        # Ratios of one round, to the first of etalon's own that is there; of an earlier version, to the present one.
        first = next((x for x in contenders if x["etalon"] and x["ms"]), None)
        present = {BEFORE + x["name"]: x for x in contenders if x["ms"]}
        for each in contenders:
            own = present.get(each["name"], first)
            pairs = zip(each["ms"], own["ms"], strict=True) if own and each["ms"] else []
            ratios = [ms / own_ms for ms, own_ms in pairs]
            each["ratio"] = statistics.median(ratios) if ratios else None
        rows.append({**row, "contenders": contenders})
    return rows


def driver_version() -> str | None:
    """The version of the driver, as nvidia-smi prints it, if there is one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return next(iter(printed.split()), None)


def report(options: argparse.Namespace, processes: list[dict]) -> dict:
    return {
        "date": datetime.date.today().isoformat(),
        "driver": driver_version(),
        **{key: processes[0][key] for key in ["torch", "cuda", "device"]},
        "processes": len(processes),
        "rounds": options.rounds,
        "shrink": options.shrink,
        "rows": joined(processes),
    }


def heading(report: dict) -> str:
    return f"{report['device']}, PyTorch {report['torch']}; {report['processes']} process(es) of {report['rounds']} rounds"


def cells(row: dict, each: dict) -> list[str]:
    if not each["ms"]:
        return [row["row"], each["name"], "–", "–", "–", f"absent: {each['absent']}"]
    medians = each["process_medians_ms"]
    beside = "" if each["distance"] is None else f"{each['distance']:.1e} from {row['model']}"
    return [
        row["row"],
        each["name"],
        f"{each['median_ms']:.3f}",
        f"{min(medians):.3f} – {max(medians):.3f}",
        "" if each["ratio"] is None else f"{each['ratio']:.3f}",
        beside,
    ]


def table(rows: list[dict]) -> str:
    lines = [
        "| row | contender | ms | medians of the processes | ÷ etalon | results |",
        "|---|---|---:|---:|---:|---|",
    ]
    lines += [f"| {' | '.join(cells(row, each))} |" for row in rows for each in row["contenders"]]
    return "\n".join(lines)


def slower(rows: list[dict]) -> list[str]:
    """Contenders that take more than MOST_SLOWER of the time of the version before, in every process."""
    found = []
    for row in rows:
        medians = {x["name"]: x["process_medians_ms"] for x in row["contenders"]}
        for name, own in medians.items():
            ratios = [x / y for x, y in zip(own, medians.get(BEFORE + name, []))]
            if ratios and min(ratios) > MOST_SLOWER:
                found.append(f"{row['row']}: {name}, {', '.join(f'{x:.3f}' for x in ratios)}")
    return found


# The command.


def parse() -> argparse.Namespace:
    from gpu_rows import ROWS

    parser = argparse.ArgumentParser(
        description="Measures etalon's CUDA kernels beside PyTorch's, in one process, on one GPU.",
        epilog=f"Rows: {' '.join(ROWS)}",
    )
    add = parser.add_argument
    add("--library", metavar="PATH", type=Path, default=LIBRARY,
        help="library of `cargo build -p etalon-device` (default: target/release/libetalon_device.so of this repository)")  # fmt: skip
    add("--before", metavar="PATH", type=Path, help="library of an earlier version, which takes turns with the present one")
    add("--processes", metavar="P", type=positive, default=3, help="processes, one after the other (default: 3)")
    add("--rounds", metavar="R", type=positive, default=20, help="rounds of each row in a process (default: 20)")
    add("--row", metavar="NAME", nargs="+", default=["*"], help="only these rows; * stands for anything")
    add("--without", metavar="ROW/PEER", nargs="+", default=[],
        help="not these peers, as in linear-backward/FLA, which tunes itself for minutes")  # fmt: skip
    add("--shrink", metavar="N", type=positive, default=1, help="N times fewer tokens in every row, to try the script quickly")
    add("--json", metavar="PATH", type=Path, help="also write everything that was measured")
    add("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for pattern in options.row:
        if not fnmatch.filter(ROWS, pattern):
            sys.exit(f"no row is called {pattern}; there are: {', '.join(ROWS)}")
    options.row = [name for name in ROWS if any(fnmatch.fnmatch(name, pattern) for pattern in options.row)]
    return options


def main() -> None:
    options = parse()
    if options.child:
        child(options)
        return
    for library in filter(None, [options.library, options.before]):
        if not library.exists():
            sys.exit(f"{library} is not there: cargo build --release -p etalon-device")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    made = report(options, run_children(options))
    print(heading(made), table(made["rows"]), sep="\n\n")
    wrong = [
        f"{row['row']}: {each['name']} is {each['distance']:.2g} from {row['model']}"
        for row in made["rows"]
        for each in row["contenders"]
        if each["distance"] is not None and each["distance"] > FAR
    ]
    if wrong:
        sys.exit("not the same computation:\n" + "\n".join(wrong))
    if found := slower(made["rows"]):
        sys.exit("slower than before, in every process:\n" + "\n".join(found))


if __name__ == "__main__":
    main()
