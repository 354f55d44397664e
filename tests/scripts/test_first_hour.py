"""The first hour's script: sections run once, what failed runs again, and the report says what ran where."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import check_gpu, first_hour


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sections that say which command they were, and of which exact fails the first time."""
    calls: list[str] = []

    def run_section(command: list[str], left: float) -> tuple[str, str]:
        name = command[command.index("--section") + 1]
        calls.append(name)
        told = {"section": name, "device": "H100", "ms": len(calls)}
        outcome = "failed with exit code 1" if name == "exact" and calls.count("exact") == 1 else ""
        return f"some words\n{check_gpu.RESULT}{json.dumps(told)}\n", outcome

    monkeypatch.setattr(check_gpu, "run_section", run_section)
    return tmp_path


def started(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["first_hour.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        first_hour.main()
    return int(ended.value.code or 0)


def test_it_goes_on_where_it_failed(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "--out", str(out), "--only", "machine", "exact", "dense"
    assert started(monkeypatch, *arguments) == 1
    assert "to run again: exact" in capsys.readouterr().out
    assert "## exact\n\nfailed with exit code 1" in (out / "report.md").read_text()
    assert started(monkeypatch, *arguments) == 0
    printed = capsys.readouterr().out
    assert "machine: ran before" in printed
    assert "exact: ran\n" in printed
    page = (out / "report.md").read_text()
    assert "| device | ms |\n| --- | --- |\n| H100 | 4 |" in page
    assert "## step\n\nnot yet run" in page
    assert "nothing here has run on a GPU" not in page
    # A trial does not count as the hour.
    assert started(monkeypatch, *arguments, "--tiny") == 0
    assert "ran before" not in capsys.readouterr().out


@pytest.mark.exhaustive
def test_tiny_on_a_cpu(tmp_path: Path) -> None:
    """The sections that are this script's own, and the machine."""
    only = "--only", "machine", "models", "dense"
    command = [sys.executable, first_hour.__file__, "--tiny", "--out", str(tmp_path), *only]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "report.md").read_text()
    assert "**nothing here has run on a GPU.**" in page
    assert "packed_share_of_dense" in page
