"""`python -m pytest --costs file`: where the processor seconds of the tests go; `--costs test`: by test.

Processor seconds, unlike durations, hardly depend on what else the machine does.
"""

import resource
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import pytest

_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compiling",
}
"""Wall seconds of the whole process; a program read from the cache counts too."""


def _cpu_seconds() -> tuple[float, float]:
    """User and system time of this process, and of its children that ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    own, children = (usage.ru_utime + usage.ru_stime for usage in used)
    return own, children


class Costs:
    """Measures each test's setup, call and teardown together, in each worker of pytest-xdist; the process
    that writes the summary adds them up.
    """

    def __init__(self, by: str) -> None:
        self.by = by
        self.events: Counter[Any] = Counter()
        self.sums: defaultdict[str, Counter[Any]] = defaultdict(Counter)
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, duration: float, **_: object) -> None:
        if event in _EVENTS:
            self.events[_EVENTS[event]] += duration
            self.events["programs"] += _EVENTS[event] == "compiling"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self.events.clear()
        self.started = _cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        report: Any = yield
        if call.when == "teardown":
            own, children = (now - then for now, then in zip(_cpu_seconds(), self.started, strict=True))
            costs = {"own": own, "children": children, **self.events}
            report.user_properties.append(("costs", costs))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            costs: dict[str, float] = dict(report.user_properties).get("costs", {})
            key = report.nodeid if self.by == "test" else report.nodeid.split("::")[0]
            self.sums[key].update({"tests": 1, **costs})

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        columns = ("own", "children", "tests", "programs", "compiling", "lowering", "tracing")
        terminalreporter.section("CPU seconds of this process and its children; programs, wall seconds")
        terminalreporter.line("".join(f"{name:>10}" for name in columns))
        total = Counter()
        for costs in self.sums.values():
            total.update(costs)
        rows = sorted(self.sums.items(), key=lambda row: -row[1]["own"] - row[1]["children"])
        for key, costs in [*rows, ("all", total)]:
            counts = {"tests", "programs"}
            cells = (f"{costs[name]:10.0f}" if name in counts else f"{costs[name]:10.1f}" for name in columns)
            terminalreporter.line("".join(cells) + f"  {key}")
