"""scripts/check_gpu.py, the one command for a machine with a GPU, in its small version on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "check_gpu.py"
SECTIONS = (
    "machine",
    "kernels",
    "exact",
    "models",
    "dense",
    "step",
    "packing",
    "attention",
    "options",
)


@pytest.mark.nightly
@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_runs(section: str):
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", "--check", "--minutes", "30", "--only", section],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]


@pytest.mark.exhaustive
def test_sections_run_once_and_what_failed_runs_again(tmp_path: Path) -> None:
    """Sections that are left of an earlier call: one that ran, one that failed."""
    for section, outcome in (("exact", "ran"), ("machine", "failed with exit code 1")):
        found = {"outcome": outcome, "tiny": True, "results": [{"section": section, "ms": 4}]}
        (tmp_path / f"{section}.json").write_text(json.dumps(found))
    only = "--only", "machine", "exact", "dense"
    command = [sys.executable, str(SCRIPT), "--tiny", "--check", "--out", str(tmp_path), *only]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exact: ran before" in done.stdout
    assert "=== machine" in done.stdout
    page = (tmp_path / "report.md").read_text()
    assert "**nothing here has run on a GPU.**" in page
    assert "| ms |\n| --- |\n| 4 |" in page
    assert "packed_share_of_dense" in page
    assert "## step\n\nnot yet run" in page
