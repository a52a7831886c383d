"""Threads: results do not depend on them, and passes work from any thread, after a fork and under a quota."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import etalon

SMALL = etalon.problem("attention", batch=1, query_heads=1, key_heads=1, queries=4, keys=4, dim=8)
LARGE = etalon.problem("attention", batch=1, query_heads=4, key_heads=4, queries=256, keys=256, dim=32)
INPUTS = {problem: etalon.random_inputs(problem) for problem in (SMALL, LARGE)}


def o(problem):
    return etalon.run(problem, "forward", INPUTS[problem])["o"]


@pytest.fixture(autouse=True)
def usual_threads():
    threads = etalon.get_num_threads()
    yield
    etalon.set_num_threads(threads)


def test_bits_do_not_depend_on_the_number_of_threads():
    expected = {problem: o(problem) for problem in INPUTS}
    for threads in (1, 2, 3, 7):
        etalon.set_num_threads(threads)
        assert etalon.get_num_threads() == threads
        for problem, bits in expected.items():
            np.testing.assert_array_equal(o(problem), bits)
    with pytest.raises(ValueError, match="`threads` must be at least 1"):
        etalon.set_num_threads(0)


def test_passes_may_be_called_from_many_threads_at_once(on_threads):
    expected = {problem: o(problem) for problem in INPUTS}
    wrong = []

    def work():
        for _ in range(20):
            for problem, bits in expected.items():
                if not np.array_equal(o(problem), bits):
                    wrong.append(problem)

    on_threads(work)
    assert not wrong


def test_the_lock_of_the_interpreter_is_released():
    problem = etalon.problem("attention", batch=1, query_heads=8, key_heads=8, queries=1024, keys=1024, dim=64)
    inputs = etalon.random_inputs(problem)
    counted, stop = 0, threading.Event()

    def count():
        nonlocal counted
        while not stop.is_set():
            counted += 1

    thread = threading.Thread(target=count)
    etalon.run(problem, "forward", inputs)
    thread.start()
    try:
        while counted == 0:
            time.sleep(0.001)
        before = counted
        etalon.run(problem, "forward", inputs)
        assert counted > before, "nothing ran beside a pass"
    finally:
        stop.set()
        thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_computes(exit_status):
    expected = {problem: o(problem) for problem in INPUTS}
    for _ in range(3):
        child = os.fork()
        if child == 0:
            right = all(np.array_equal(o(problem), bits) for problem, bits in expected.items())
            os._exit(0 if right else 1)
        assert exit_status(child) == 0
        assert all(np.array_equal(o(problem), bits) for problem, bits in expected.items())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_beside_running_passes_is_safe(exit_status):
    stop = threading.Event()

    def work():
        while not stop.is_set():
            o(LARGE)

    expected, thread = o(LARGE), threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                os._exit(0 if np.array_equal(o(LARGE), expected) else 1)
            assert exit_status(child) == 0
    finally:
        stop.set()
        thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux OpenMP is looked for")
def test_threads_of_openmp_end_before_a_long_pass(on_threads, exit_status):
    torch = pytest.importorskip("torch")
    import etalon.torch

    assert etalon._etalon.find_openmp()
    q = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 4, 1024, 64), dtype=np.float32))
    etalon.set_num_threads(2)
    expected = etalon.torch.attention(q, q, q).numpy()
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        (torch.ones(1 << 20) + 1).sum()
        before = len(os.listdir("/proc/self/task"))
        etalon.torch.attention(q, q, q)
        assert len(os.listdir("/proc/self/task")) == before - 3
        found = []

        def work():
            q.clone().add_(1)
            found.append(np.array_equal(etalon.torch.attention(q, q, q).numpy(), expected))

        on_threads(work)
        assert found == [True] * 8
        q.clone().add_(1)
        child = os.fork()
        if child == 0:
            os._exit(0 if np.array_equal(etalon.attention(q, q, q), expected) else 1)
        assert exit_status(child) == 0
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_the_usual_number_of_threads_is_what_the_process_may_use():
    one = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    assert answer(one + "import etalon; print(etalon.get_num_threads())", {}) == "1"
    assert answer("import etalon; print(etalon.get_num_threads())", {"ETALON_NUM_THREADS": "5"}) == "5"
    text = "try: import etalon; etalon.get_num_threads()\nexcept ValueError as error: print(error)"
    assert (
        answer(text, {"ETALON_NUM_THREADS": "many"}) == 'ETALON_NUM_THREADS must be a number from 1 on, found "many"'
    )


def answer(code, variables):
    environment = os.environ | variables
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_memory_is_given_back():
    o(LARGE)
    assert etalon.release_memory() > 0
    assert etalon.release_memory() == 0
