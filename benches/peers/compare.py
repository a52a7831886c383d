"""Measures etalon beside PyTorch, and beside ggml and faer where they are there, on this machine's CPU.

    python benches/peers/compare.py --threads 2 --rounds 7 --json .peers/peers.json

A row is one computation of one shape: f32, batch 1, 8 heads, causal, where no option says otherwise. It is measured in
rounds, in each round first by etalon and then by the peer, each in a new process, so that whatever else the machine
does slows both. README.md says what is compared with what.
"""

import argparse
import fnmatch
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent


# The compared problems.


@dataclass(frozen=True)
class Peer:
    name: str
    # An argument of torch_attention.py; None stands for the program that `--ggml` or `--faer` names.
    computation: str | None = None


@dataclass(frozen=True)
class Row:
    """One line of the table. Etalon's time is the sum of the times of its passes."""

    kind: str
    algorithm: str
    passes: tuple[str, ...]
    length: int
    dim: int
    peer: Peer

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.length}x{self.dim}"


FORWARD = ("forward",)
BACKWARD = ("forward", "backward")
BOTH = ("forward_backward",)
DOUBLE_BACKWARD = ("forward", "backward", "double_backward")

FLASH_FORWARD = Peer("PyTorch flash", "flash-forward")
FLASH_BACKWARD = Peer("PyTorch flash", "flash-backward")
MATH_DOUBLE_BACKWARD = Peer("PyTorch math", "math-double-backward")
LSE_FORWARD = Peer("PyTorch eager", "lse-forward")
LSE_BACKWARD = Peer("PyTorch eager", "lse-backward")
LAZY_FORWARD = Peer("PyTorch eager", "lazy-forward")
LAZY_BACKWARD = Peer("PyTorch eager", "lazy-backward")
LAZY_DOUBLE_BACKWARD = Peer("PyTorch eager", "lazy-double-backward")
LINEAR_FORWARD = Peer("PyTorch eager, chunked", "linear-forward")
LINEAR_BACKWARD = Peer("PyTorch eager, chunked", "linear-backward")
LINEAR_DOUBLE_BACKWARD = Peer("PyTorch eager, chunked", "linear-double-backward")
CROSS_ENTROPY_FORWARD = Peer("PyTorch eager", "cross-entropy-forward")
CROSS_ENTROPY_BACKWARD = Peer("PyTorch eager", "cross-entropy-backward")
CHUNKED_CROSS_ENTROPY_FORWARD = Peer("PyTorch fused", "chunked-cross-entropy-forward")
CHUNKED_CROSS_ENTROPY_BACKWARD = Peer("PyTorch fused", "chunked-cross-entropy-backward")
GGML = Peer("ggml")
FAER = Peer("faer")

ROWS = [
    Row("forward", "attention", FORWARD, 2048, 128, FLASH_FORWARD),
    Row("forward", "attention", FORWARD, 2048, 64, FLASH_FORWARD),
    Row("forward", "attention", FORWARD, 4096, 64, FLASH_FORWARD),
    Row("backward", "attention", BACKWARD, 2048, 128, FLASH_BACKWARD),
    Row("backward", "attention", BACKWARD, 2048, 64, FLASH_BACKWARD),
    Row("backward", "attention", BACKWARD, 4096, 64, FLASH_BACKWARD),
    Row("double-backward", "attention", DOUBLE_BACKWARD, 1024, 64, MATH_DOUBLE_BACKWARD),
    Row("lse-forward", "attention_lse", FORWARD, 2048, 64, LSE_FORWARD),
    Row("lse-backward", "attention_lse", BACKWARD, 2048, 64, LSE_BACKWARD),
    Row("lazy-forward", "lazy_attention", FORWARD, 2048, 64, LAZY_FORWARD),
    Row("lazy-backward", "lazy_attention", BACKWARD, 2048, 64, LAZY_BACKWARD),
    Row("lazy-double-backward", "lazy_attention", DOUBLE_BACKWARD, 1024, 64, LAZY_DOUBLE_BACKWARD),
    Row("linear-forward", "linear_attention", FORWARD, 4096, 64, LINEAR_FORWARD),
    Row("linear-backward", "linear_attention", BACKWARD, 4096, 64, LINEAR_BACKWARD),
    Row("linear-double-backward", "linear_attention", DOUBLE_BACKWARD, 4096, 64, LINEAR_DOUBLE_BACKWARD),
    Row("cross-entropy-forward", "linear_cross_entropy", FORWARD, 1024, 1024, CROSS_ENTROPY_FORWARD),
    Row("cross-entropy-forward-fused", "linear_cross_entropy", FORWARD, 1024, 1024, CHUNKED_CROSS_ENTROPY_FORWARD),
    Row("cross-entropy-backward", "linear_cross_entropy", BOTH, 1024, 1024, CROSS_ENTROPY_BACKWARD),
    Row("cross-entropy-backward-fused", "linear_cross_entropy", BOTH, 1024, 1024, CHUNKED_CROSS_ENTROPY_BACKWARD),
    Row("ggml-forward", "attention", FORWARD, 2048, 128, GGML),
    Row("ggml-forward", "attention", FORWARD, 2048, 64, GGML),
    Row("faer-forward", "attention", FORWARD, 2048, 128, FAER),
    Row("faer-forward", "attention", FORWARD, 2048, 64, FAER),
]


def chosen_rows(options: argparse.Namespace) -> list[Row]:
    patterns = options.row or ["*"]
    names = [row.name for row in ROWS]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            sys.exit(f"no row is called {pattern}; there are: {', '.join(names)}")
    rows = [row for row in ROWS if any(fnmatch.fnmatch(row.name, pattern) for pattern in patterns)]
    absent = [peer for peer in (GGML, FAER) if getattr(options, peer.name) is None]
    rows = [row for row in rows if row.peer not in absent]
    if not rows:
        sys.exit(f"these rows need {' or '.join(f'--{peer.name}' for peer in absent)}")
    if options.dtype != "f32":
        rows = [row for row in rows if row.peer not in (GGML, FAER)]
    sizes = {name: getattr(options, name) for name in ("length", "dim") if getattr(options, name) is not None}
    rows = [replace(row, **sizes) for row in rows]
    return list(dict.fromkeys(rows))  # of one size, some are the same


# The programs, which print or write JSON.


def output_of(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(command)} failed:\n{error.stderr}")


def common_arguments(row: Row, options: argparse.Namespace) -> list[str]:
    return [
        "--heads", str(options.heads),
        "--length", str(row.length),
        "--dim", str(row.dim),
        "--threads", str(options.threads),
        "--seconds", str(options.seconds),
    ]  # fmt: skip


def precision_arguments(options: argparse.Namespace) -> list[str]:
    """Arguments that ggml and faer do not know: they have one batch element of f32."""
    return ["--batch", str(options.batch), "--dtype", options.dtype]


def run_etalon(row: Row, options: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figures.json")
        output_of([
            str(options.etalon), "bench",
            "--algorithm", row.algorithm,
            "--pass", ",".join(row.passes),
            "--mask", "causal",
            *common_arguments(row, options),
            *precision_arguments(options),
            *([] if options.level is None else ["--level", options.level]),
            "--json", str(path),
        ])  # fmt: skip
        made = json.loads(path.read_text())
    passes = {figure["pass"]: figure["median_ns"] for figure in made["figures"]}
    if len(made["figures"]) != len(row.passes) or set(passes) != set(row.passes):
        sys.exit(f"{row.name}: etalon measured {', '.join(passes)} and not {', '.join(row.passes)}")
    return {
        "version": made["etalon"],
        "level": made["tier"],
        "peak_gflops": made["peak_gflops"],
        "passes_ns": passes,
        "median_ns": sum(passes.values()),
    }


def run_peer(row: Row, options: argparse.Namespace) -> dict:
    if row.peer.computation is None:
        program = [str(getattr(options, row.peer.name))]
    else:
        script = [sys.executable, str(HERE / "torch_attention.py")]
        program = [*script, row.peer.computation, *precision_arguments(options)]
    return json.loads(output_of([*program, *common_arguments(row, options)]))


# Measuring.


def foreign_seconds() -> float | None:
    """The seconds of core time of others than this script, of this system or beside it on the same host."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.read_text().split()[1:9])
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])  # less our own and our children's


def measure_round(row: Row, options: argparse.Namespace) -> dict:
    begin, foreign = time.monotonic(), foreign_seconds()
    etalon = run_etalon(row, options)
    peer = run_peer(row, options)
    taken = None if foreign is None else max(0.0, foreign_seconds() - foreign) / (time.monotonic() - begin)
    return {"etalon": etalon, "peer": peer, "ratio": peer["median_ns"] / etalon["median_ns"], "taken_cores": taken}


def measure_row(row: Row, options: argparse.Namespace) -> dict:
    rounds = []
    for number in range(1, options.rounds + 1):
        rounds.append(measure_round(row, options))
        note(f"{row.name}, round {number} of {options.rounds}: peer / etalon = {rounds[-1]['ratio']:.2f}")
    peer = rounds[-1]["peer"]
    if "operators" in peer:
        note(f"{row.name}: PyTorch called {', '.join(peer['operators'])}")
    ratios = [each["ratio"] for each in rounds]
    return {
        "row": row.name,
        "passes": row.passes,
        "peer": row.peer.name,
        "etalon_ns": statistics.median(each["etalon"]["median_ns"] for each in rounds),
        "peer_ns": statistics.median(each["peer"]["median_ns"] for each in rounds),
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "taken_cores": max((each["taken_cores"] for each in rounds if each["taken_cores"] is not None), default=None),
        "rounds": rounds,
    }


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def programs(results: list[dict]) -> dict[str, str]:
    """The version of each program, and the instruction set that it used."""
    found = {}
    for result in results:
        latest = result["rounds"][-1]
        for name, made in [("etalon", latest["etalon"]), (result["peer"].split()[0], latest["peer"])]:
            found[name] = f"{made['version']} ({made['level']})"
    return found


# Printing.


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def heading(report: dict) -> str:
    programs = ", ".join(f"{name} {version}" for name, version in report["programs"].items())
    return (
        f"{programs}; {report['processor']}; {report['threads']} thread(s), "
        f"{report['rounds']} round(s) of {report['seconds']:g} s; {report['dtype']}, batch {report['batch']}, "
        f"{report['heads']} heads, causal"
    )


def table(results: list[dict]) -> str:
    lines = [
        "| row | passes | peer | etalon, ms | peer, ms | peer / etalon | min – max | cores taken |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        ratio = result["ratio"]
        cells = [
            result["row"],
            " + ".join(result["passes"]),
            result["peer"],
            f"{result['etalon_ns'] * 1e-6:.2f}",
            f"{result['peer_ns'] * 1e-6:.2f}",
            f"{ratio['median']:.2f}",
            f"{ratio['min']:.2f} – {ratio['max']:.2f}",
            "?" if result["taken_cores"] is None else f"{result['taken_cores']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# The command.


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measures etalon beside PyTorch, and in f32 beside ggml and faer.",
        epilog=f"Rows: {' '.join(row.name for row in ROWS)}",
    )
    add = parser.add_argument
    add("--etalon", metavar="PATH", type=Path, default=HERE.parents[1] / "target/release/etalon",
        help="the etalon binary (default: target/release/etalon of this repository)")  # fmt: skip
    add("--ggml", metavar="PATH", type=Path, help="the program that ggml/build.sh built; its rows are absent without it")
    add("--faer", metavar="PATH", type=Path, help="the program of the package in faer; its rows are absent without it")
    add("--threads", metavar="N", type=positive, default=os.cpu_count(),
        help="threads of each side (default: as many as there are cores)")  # fmt: skip
    add("--rounds", metavar="R", type=positive, default=5, help="rounds of each row (default: 5)")
    add("--seconds", metavar="S", type=float, default=1.0,
        help="a time is the median of as many runs as fit into this, but of three at least (default: 1)")  # fmt: skip
    add("--row", metavar="NAME", nargs="+", help="only these rows; * stands for anything")
    add("--dtype", choices=["f32", "bf16", "f16"], default="f32", help="elements of the operands (default: f32)")
    add("--level", metavar="LEVEL", help="etalon's level, as of `etalon bench --level` (default: the best)")
    add("--batch", metavar="B", type=positive, default=1, help="batch elements, of all but cross-entropy (default: 1)")
    add("--heads", metavar="H", type=positive, default=8, help="heads, of all but cross-entropy (default: 8)")
    add("--length", metavar="N", type=positive, help="this length in every row; a short one tries the script quickly")
    add("--dim", metavar="D", type=positive, help="this D in every row")
    add("--json", metavar="PATH", type=Path, help="also write everything that was measured")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.batch > 1 and (options.ggml or options.faer):
        sys.exit("ggml and faer have one batch element: leave out --batch, or --ggml and --faer")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    results = [measure_row(row, options) for row in chosen_rows(options)]
    report = {
        "programs": programs(results),
        "processor": processor(),
        "threads": options.threads,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "batch": options.batch,
        "heads": options.heads,
        "dtype": options.dtype,
        "mask": "causal",
        "rows": results,
    }
    print(heading(report), table(results), sep="\n\n")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
