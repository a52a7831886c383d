"""Memory of this process, medians, and lines of JSON."""

import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import time

# A parameter of glibc's mallopt.
M_MMAP_THRESHOLD = -3


def resident(key="VmRSS"):
    """Resident memory in MB, or with "VmHWM" its peak since `reset_peak`."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith(key)) / 1024
    except OSError:
        raise SystemExit("memory is measured through /proc/self, which this system does not have") from None


def reset_peak():
    """Starts the peak of resident memory anew."""
    try:
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")
    except OSError as error:
        raise SystemExit(f"the peak of memory cannot be started anew: {error}") from None


def fix_mmap_threshold(size):
    """Has the allocator of glibc hand out blocks of `size` bytes and more as mappings of their own, for good.

    It otherwise raises this bound to 32 MB as such blocks are freed, and activations then leave holes in the heap.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not mallopt(M_MMAP_THRESHOLD, size):
        raise SystemExit("--mmap-threshold needs the allocator of glibc")


def machine():
    """CPU, cores that this process may use, versions."""
    import torch

    names = []
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {"cpu": names[0] if names else platform.processor(), "cores": cores, "threads": torch.get_num_threads()}
    return found | {"torch": torch.__version__, "load": round(os.getloadavg()[0], 2)}


def take_turns(functions, rounds):
    """Seconds of each function, by name, in `rounds` rounds in which every one takes its turn after a first call."""
    for function in functions.values():
        function()
    times = {name: [] for name in functions}
    for at in range(rounds):
        for name in rotated(list(functions), at):
            begun = time.perf_counter()
            functions[name]()
            times[name].append(time.perf_counter() - begun)
    return times


def rotated(names, by):
    """The names in an order in which each is first in its turn."""
    by %= len(names)
    return names[by:] + names[:by]


def median(values):
    return statistics.median(values)


class Log:
    """Writes lines of JSON to a file, and to the screen those that are not of single steps."""

    def __init__(self, path):
        self.file = open(path, "w") if path else None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.file:
            self.file.close()

    def __call__(self, line):
        text = json.dumps(line)
        if self.file:
            print(text, file=self.file, flush=True)
        if not self.file or "step" not in line:
            print(text, flush=True)


def alone(script, arguments):
    """The last line, as JSON, that a script prints in a process of its own."""
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])
