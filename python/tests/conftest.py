import os
import threading
import time

import numpy as np
import pytest

try:
    import ml_dtypes

    BF16 = np.dtype(ml_dtypes.bfloat16)
except ImportError:
    BF16 = None

TYPES = ["float64", "float32", "float16", "bfloat16"]


@pytest.fixture(params=TYPES)
def dtype(request):
    if request.param == "bfloat16" and BF16 is None:
        pytest.skip("ml_dtypes is not installed")
    return BF16 if request.param == "bfloat16" else np.dtype(request.param)


@pytest.fixture
def on_threads():
    """Runs a function on eight threads at once, of which none may hang."""

    def run(work):
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a call hangs"

    return run


@pytest.fixture
def exit_status():
    """The exit status of a child process, which is killed where it hangs."""

    def wait(child, seconds=60):
        for _ in range(100 * seconds):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")

    return wait


@pytest.fixture
def draw():
    source = np.random.default_rng(0)
    return lambda *shape, dtype=np.float32: source.standard_normal(shape).astype(dtype)
