"""A build without the CUDA tier says so wherever one would be used. `.ci/python` builds one."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

import etalon
from etalon._etalon import DevicePass

REASON = "this build has no CUDA tier: build with the Cargo feature `cuda`"
if DevicePass.absent is None:
    pytest.skip("this build has the CUDA tier", allow_module_level=True)


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "etalon", *arguments], capture_output=True, text=True)


def test_every_level_is_absent_with_the_reason():
    found = run("list")
    assert found.returncode == 0
    (line,) = [x for x in found.stdout.split("\n\n") if x.startswith("absent: cuda")] or [found.stdout]
    assert "(sm90a, sm90a-segments, sm80, sm80-99k, tf32, bf16x3, portable)" in " ".join(line.split())
    assert REASON in " ".join(line.split())
    case = "attention/f32/causal/plain/tiny/dense/generic/dlse/0"
    judged = run("verify", "--tier", "simd,cuda", "--case", case)
    assert judged.returncode == 2 and REASON in judged.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "--tier", "cuda"],
        ["verify", "--tier", "cuda/sm80"],
        ["bench", "--tier", "cuda"],
        ["bench", "--precision", "flash"],
        ["bench", "--device", "0"],
        ["bench", "--assume-finite"],
        ["explain", "--arch", "sm_90", "attention/f32/causal/plain/tiny/dense/generic/dlse/0"],
        ["list", "--levels"],
        ["cuda", "archive", "--arch", "sm_90", "--out", "nowhere"],
    ],
)
def test_a_command_for_a_device_is_refused(arguments):
    refused = run(*arguments)
    assert refused.returncode == 2 and refused.stdout == ""
    assert REASON in refused.stderr and refused.stderr.count("\n") == 1


def test_a_plan_has_the_reason_in_the_place_of_the_tier():
    told = run("explain", "attention/f32/causal/plain/tiny/dense/generic/dlse/0")
    assert told.returncode == 0 and "The simd tier" in told.stdout and REASON in told.stdout


def test_tensors_of_a_gpu_raise():
    problem = etalon.problem("attention", batch=1, query_heads=1, key_heads=1, queries=4, keys=4, dim=8)
    with pytest.raises(NotImplementedError, match="attention forward on GPU 0 is not supported: " + REASON):
        DevicePass(problem, "forward", [], [], device=0)


def test_stand_ins_leave_tensors_of_a_gpu_to_pytorch():
    torch = pytest.importorskip("torch")
    from etalon import _sdpa

    q = SimpleNamespace(device=torch.device("cuda:0"), is_cuda=True, dtype=torch.float32)
    assert _sdpa.unsupported(q, q, q, None, 0.0) == DevicePass.absent
