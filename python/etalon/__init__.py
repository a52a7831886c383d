"""Oracle, judge and fast passes for the algorithms that train transformers.

    import etalon
    import numpy as np

    q, k, v = (np.random.randn(1, 8, 256, 64).astype(np.float32) for _ in range(3))
    o, lse = etalon.attention(q, k, v, causal=True, return_lse=True)

    problem = etalon.problem("attention", q=q, k=k, v=v, causal=True)
    print(etalon.check(problem, dict(q=q, k=k, v=v), dict(o=o, lse=lse)))

Arrays are those of NumPy, or tensors of any framework on the CPU (buffers or DLPack), of float32, bfloat16 or float16,
of any strides; float64 goes to the exact reference. Results are arrays of NumPy. Passes release the interpreter's lock
and may be called from any thread, also after a fork.
"""

import os as _os

from . import _etalon
from ._etalon import (
    Problem,
    cpu_tier,
    get_num_threads,
    get_precision,
    release_memory,
    set_num_threads,
    set_precision,
)
from ._conform import conform
from ._judge import (
    Bound,
    Check,
    IncorrectError,
    UndecidedError,
    assert_correct,
    bounds,
    check,
    check_trace,
    random_inputs,
    trace,
)
from ._passes import (
    attention,
    attention_lse,
    lazy_attention,
    linear_attention,
    linear_cross_entropy,
    reference,
    run,
)
from ._problems import problem

__all__ = [
    "Bound",
    "Check",
    "IncorrectError",
    "Problem",
    "UndecidedError",
    "assert_correct",
    "attention",
    "attention_lse",
    "bounds",
    "check",
    "check_trace",
    "conform",
    "cpu_tier",
    "get_num_threads",
    "get_precision",
    "lazy_attention",
    "linear_attention",
    "linear_cross_entropy",
    "problem",
    "random_inputs",
    "reference",
    "release_memory",
    "run",
    "set_num_threads",
    "set_precision",
    "trace",
]

if hasattr(_os, "register_at_fork"):
    _os.register_at_fork(after_in_child=_etalon.after_fork)
