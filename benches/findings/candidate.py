"""A contender as a program that etalon asks:

    etalon verify --candidate 'python benches/findings/candidate.py sdpa-math --dtypes f32'

`--probe` prints the versions that are there, or why the contender cannot run, as JSON.
"""

import argparse
import importlib
import json
import platform
import subprocess
import sys
from pathlib import Path

from contenders import CONTENDERS, version
from frames import serve


def parsed():
    parser = argparse.ArgumentParser(description="Answers etalon's requests with a library's kernel.")
    parser.add_argument("name", choices=CONTENDERS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtypes", help="these storage types alone, as f32,bf16")
    parser.add_argument("--passes", help="these passes alone, as forward,backward")
    parser.add_argument("--probe", action="store_true", help="print versions and the device as JSON")
    return parser.parse_args()


def capabilities(contender, options):
    """Capabilities of the contender, with the types and passes that are asked for."""
    kernels = [dict(kernel) for kernel in contender.kernels(options.device)]
    for key, chosen in (("dtypes", options.dtypes), ("passes", options.passes)):
        if chosen:
            kernels = [k | {key: [x for x in k[key] if x in chosen.split(",")]} for k in kernels]
    return {"kernels": [k for k in kernels if k["dtypes"] and k["passes"]]}


def built(contender, device):
    module = importlib.import_module(contender.module)
    return contender.build(module, device)


def hardware(device):
    """The name of the processor that computes."""
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def probe(contender, device):
    """The place as recordings name it, with `absent` where the contender cannot run in it."""
    found = {"python": platform.python_version(), "versions": {x: version(x) for x in contender.packages}}
    missing = [name for name, at in found["versions"].items() if at is None]
    if device not in contender.devices:
        found["absent"] = contender.devices_text
    elif missing:
        found["absent"] = f"not installed: {', '.join(missing)}"
    else:
        try:
            found["hardware"] = hardware(device)
            built(contender, device)
        except Exception as error:
            found["absent"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    print(json.dumps(found))


def main():
    options = parsed()
    contender = CONTENDERS[options.name]
    if options.probe:
        return probe(contender, options.device)
    serve(options.name, capabilities(contender, options), lambda: built(contender, options.device))


if __name__ == "__main__":
    sys.exit(main())
