"""The command in the same library, and what an import costs."""

import subprocess
import sys


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "etalon", *arguments], capture_output=True, text=True)


def test_the_command_has_its_exit_status():
    assert run("--version").stdout.startswith("etalon ")
    assert "lse" in run("list").stdout
    wrong = run("verify", "--depth", "shallow")
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: ")
    case = "attention/f32/causal/plain/tiny/dense/generic/dlse/0"
    judged = run("verify", "--tier", "simd", "--case", case)
    assert judged.returncode == 0, judged.stdout + judged.stderr


def test_an_import_loads_no_framework():
    code = "import sys, etalon; print(*[x for x in ('numpy', 'torch', 'jax') if x in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
