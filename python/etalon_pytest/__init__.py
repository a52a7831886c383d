"""A plugin for pytest: the suite of etalon, one test for each of its cases.

    @pytest.mark.etalon("attention", dtypes=["bfloat16"], capabilities={"masks": ["causal", "full"]})
    def test_my_kernel(etalon_case):
        etalon_case.conform(my_attention)

Keywords of the marker are those of `etalon.conform`, and `passes`, the names of passes, "forward" if absent. The name
of a test ends in that of its case; a summary says how much was checked. Nothing of etalon is imported where no test
has the marker.
"""

import dataclasses
from typing import Any

import pytest

# The property of a test in reports, of JUnit too: how many checks its case had.
CHECKS = "etalon_checks"


@dataclasses.dataclass(frozen=True)
class Case:
    """One case of the suite; `name` makes it again in `etalon.conform(…, cases=[name])`."""

    name: str
    algorithm: str
    passes: tuple[str, ...]
    options: dict[str, Any]
    _checks: list = dataclasses.field(default_factory=list, repr=False)

    def conform(self, kernels):
        """Runs the laws and probes of this case on a kernel, as `etalon.conform` does: a function for the one pass of
        the marker, or a dictionary of functions by the name of their pass. Returns the Check, or raises."""
        import etalon

        if callable(kernels):
            if len(self.passes) != 1:
                raise ValueError(f"`kernels` must be a dictionary with {', '.join(self.passes)}, found a function")
            kernels = {self.passes[0]: kernels}
        check = etalon.conform(kernels, self.algorithm, cases=[self.name], **self.options)
        self._checks.append(check)
        return check


def pytest_configure(config):
    config.addinivalue_line("markers", "etalon(algorithm, passes=('forward',), **options): cases of etalon's suite")


def pytest_generate_tests(metafunc):
    mark = metafunc.definition.get_closest_marker("etalon")
    if "etalon_case" not in metafunc.fixturenames:
        return
    if mark is None or not mark.args:
        raise pytest.UsageError(f'{metafunc.definition.nodeid}: `etalon_case` needs the marker etalon("ALGORITHM")')
    from etalon import _conform

    algorithm, options = mark.args[0], dict(mark.kwargs)
    passes = tuple(options.pop("passes", ("forward",)))
    chosen = {name: options.pop(name) for name in ("depth", "seed") if name in options}
    limits = {name: options[name] for name in ("capabilities", "dtypes") if name in options}
    names = options.pop("cases", None) or _conform.cases(algorithm, passes=passes, **limits, **chosen)
    cases = [Case(name, algorithm, passes, options) for name in names]
    metafunc.parametrize("etalon_case", cases, ids=[case.name for case in cases])


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    yield
    case = getattr(item, "funcargs", {}).get("etalon_case")
    if isinstance(case, Case) and case._checks:
        item.user_properties.append((CHECKS, sum(check.details["checks"] for check in case._checks)))


def pytest_terminal_summary(terminalreporter):
    # By the reports, which come from the processes of pytest-xdist, too.
    passed = [dict(report.user_properties) for report in terminalreporter.stats.get("passed", ())]
    counts = [properties[CHECKS] for properties in passed if CHECKS in properties]
    if counts:
        terminalreporter.write_sep("-", "etalon")
        terminalreporter.write_line(f"{sum(counts)} checks passed in {len(counts)} cases")
