"""Programs that `etalon verify --candidate` asks: that in NumPy, with this Python."""

import pathlib
import subprocess
import sys

PROGRAM = pathlib.Path(__file__).parents[2] / "examples" / "candidates" / "attention_numpy.py"


def test_the_program_in_numpy_passes():
    candidate = f"'{sys.executable}' '{PROGRAM}'"
    command = [sys.executable, "-m", "etalon", "verify", "--depth", "smoke", "--candidate", candidate]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("PASSED: ")
