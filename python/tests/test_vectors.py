"""Test vectors serve without etalon: a reader in plain Python judges a softmax attention with them."""

import json
import math
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

READER = Path(__file__).resolve().parents[2] / "examples" / "vectors" / "reader.py"


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("set") / "vectors"
    made = subprocess.run([sys.executable, "-m", "etalon", "export", str(folder)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return folder


def test_the_reader_needs_nothing(vectors):
    # -S leaves out whatever is installed, -I the folder and the environment.
    read = subprocess.run([sys.executable, "-I", "-S", str(READER), str(vectors)], capture_output=True, text=True)
    assert read.returncode == 0, read.stdout + read.stderr
    right, of, count = read.stdout.split()[:3]
    assert (of, right) == ("of", count) and int(count) >= 8, read.stdout
    assert len(READER.read_text().splitlines()) <= 60


def test_the_reader_notices_mistakes(vectors):
    reader = runpy.run_path(str(READER))
    judge, attention = reader["judge"], reader["attention"]
    assert all(right for _, right in judge(vectors))

    def without_scale(problem, x):
        # With q that is √D times as large, σ = 1/√D does nothing.
        q = [value * math.sqrt(problem["dim"]) for value in x.get("q", [])]
        return attention(problem, {**x, "q": q})

    def one_key_more(problem, x):
        return attention({**problem, "mask": "full"}, x)

    def takes_any(problem, x):
        return {}

    wrong = {
        kernel: {name for name, right in judge(vectors, kernel) if not right}
        for kernel in (without_scale, one_key_more, takes_any)
    }
    assert all(wrong.values())
    assert all(".mask=causal" in name for name in wrong[one_key_more])
    assert all(".invalid." in name for name in wrong[takes_any])


def test_the_reader_refuses_what_was_changed(vectors):
    manifest = json.loads((vectors / "manifest.json").read_text())
    taken = next(x for x in manifest["vectors"] if x["id"] == "attention.forward.f32.shape=row")
    for name in (taken["problem"]["file"], taken["tensors"]["file"]):
        whole = (vectors / name).read_bytes()
        (vectors / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        read = subprocess.run([sys.executable, str(READER), str(vectors)], capture_output=True, text=True)
        (vectors / name).write_bytes(whole)
        assert read.returncode == 1 and read.stderr.strip() == f"{name}: it was changed"
