from collections.abc import Callable, Mapping, Sequence
from typing import Any

class Problem:
    def __new__(cls, text: str, arrays: Mapping[str, Any] | None = None) -> Problem: ...
    @property
    def algorithm(self) -> str: ...
    @property
    def passes(self) -> list[str]: ...
    @property
    def options(self) -> dict[str, Any]: ...
    @property
    def arrays(self) -> dict[str, Any]: ...
    def json(self) -> str: ...
    def extent(self, axis: str) -> int: ...
    def operands(self, pass_: str = "forward") -> list[tuple[str, str, list[int], str]]: ...
    def families(self) -> list[tuple[str, bool, tuple[str, str, str, str] | None]]: ...
    def run(
        self,
        pass_: str,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        tier: str = "auto",
        recompute: bool = False,
        memory_budget: int | None = None,
    ) -> None: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

class DevicePass:
    absent: str | None
    def __new__(
        cls,
        problem: Problem,
        pass_: str,
        inputs: Sequence[tuple[str, int, Sequence[int], Sequence[int], str]],
        outputs: Sequence[tuple[str, int, Sequence[int], Sequence[int], str]],
        *,
        device: int,
    ) -> DevicePass: ...
    @staticmethod
    def of_shards(
        problem: Problem,
        step: str,
        classes: Sequence[tuple[int, int]],
        inputs: Sequence[tuple[str, int, Sequence[int], Sequence[int], str]],
        outputs: Sequence[tuple[str, int, Sequence[int], Sequence[int], str]],
        *,
        device: int,
    ) -> DevicePass: ...
    @property
    def scratch_bytes(self) -> int: ...
    def enqueue(self, stream: int, inputs: Sequence[int], outputs: Sequence[int], scratch: int) -> None: ...

def check(
    problem: Problem,
    pass_: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    *,
    profile: str = "usual",
    only: Sequence[str] = (),
    generic: bool | None = None,
) -> tuple[str, str, str]: ...
def bounds(
    problem: Problem,
    pass_: str,
    inputs: Mapping[str, Any],
    *,
    profile: str,
    stored: Sequence[tuple[str, str]],
) -> dict[str, tuple[Any, Any]]: ...
def trace(
    problem: Problem, pass_: str, inputs: Mapping[str, Any], walk: str, only: Sequence[str]
) -> dict[str, Any]: ...
def check_trace(
    problem: Problem,
    pass_: str,
    inputs: Mapping[str, Any],
    steps: Mapping[str, Any],
    walk: str,
    *,
    profile: str = "usual",
) -> tuple[str, str, str]: ...
def conform(
    call: Callable[[Problem, str, dict[str, Any]], Mapping[str, Any]],
    algorithm: str,
    capabilities: str,
    *,
    depth: str,
    seed: int,
    profile: str,
    cases: Sequence[str],
    laws: Sequence[str],
) -> tuple[str, str, str]: ...
def cases(algorithm: str, capabilities: str, depth: str, seed: int) -> list[str]: ...
def count_nodes(problem: Problem, start: int, end: int) -> int: ...
def run_shard(
    problem: Problem,
    step: str,
    classes: Sequence[tuple[int, int]],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    *,
    memory_budget: int | None = None,
) -> None: ...
def xla_handlers() -> tuple[int, int]: ...
def command(program: Sequence[str], arguments: Sequence[str]) -> int: ...
def set_num_threads(threads: int) -> None: ...
def get_num_threads() -> int: ...
def set_precision(precision: str) -> None: ...
def get_precision() -> str: ...
def cpu_tier() -> str: ...
def release_memory() -> int: ...
def after_fork() -> None: ...
def find_openmp() -> bool: ...
