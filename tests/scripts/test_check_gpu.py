"""check_gpu goes on where it stopped, and its report says what ran where."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_sections_run_once_and_what_failed_runs_again(tmp_path: Path) -> None:
    """Sections that are left of an earlier call: one that ran, one that failed."""
    for section, outcome in (("exact", "ran"), ("machine", "failed with exit code 1")):
        found = {"outcome": outcome, "tiny": True, "results": [{"section": section, "ms": 4}]}
        (tmp_path / f"{section}.json").write_text(json.dumps(found))
    only = "--only", "machine", "exact", "dense"
    command = [sys.executable, "scripts/check_gpu.py", "--tiny", "--check", "--out", str(tmp_path), *only]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exact: ran before" in done.stdout
    assert "=== machine" in done.stdout
    page = (tmp_path / "report.md").read_text()
    assert "**nothing here has run on a GPU.**" in page
    assert "| ms |\n| --- |\n| 4 |" in page
    assert "packed_share_of_dense" in page
    assert "## step\n\nnot yet run" in page
