"""Tests marked nightly: a part of them is a file, and goes on where it stopped.

    python -m pytest -m nightly tests/test_families.py

What held at this commit, in a work tree without changes, stands in runs/nightly/COMMIT.jsonl with the figures
that it recorded with record_property, and is not run again. At the end stand the figures of all tests, and a
line that counts what holds; the claims of docs/claims/claims.toml read it.
"""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HELD = "held before at this commit"


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()


class Nightly:
    """Counts nightly tests and remembers those that hold."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.figures: list[str] = []
        self.file: Path | None = None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        commit = _git("rev-parse", "--short=7", "HEAD") if nightly else ""
        if not commit or _git("status", "--porcelain", "--", ".", ":!docs", ":!README.md"):
            return
        self.file = ROOT / "runs" / "nightly" / f"{commit}.jsonl"
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        held = dict(map(json.loads, lines))
        for item in nightly:
            if item.nodeid in held:
                item.user_properties += map(tuple, held[item.nodeid])
                item.add_marker(pytest.mark.skip(reason=HELD))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "nightly" not in report.keywords or (report.when != "call" and report.passed):
            return
        before = report.skipped and HELD in str(report.longrepr)
        outcome = "holds" if report.passed or before else "not run" if report.skipped else "fails"
        self.outcomes[report.nodeid] = outcome
        self.figures += [f"{report.nodeid}: {name} {value}" for name, value in report.user_properties]
        if report.passed and self.file:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a") as file:
                file.write(json.dumps([report.nodeid, report.user_properties]) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if found := list(self.outcomes.values()):
            for line in self.figures:
                terminalreporter.write_line(line)
            counts = f"{found.count('holds')} of {len(found)} hold, {found.count('not run')} not run"
            terminalreporter.write_line(f"nightly: {counts}")
