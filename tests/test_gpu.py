"""scripts/check_gpu.py, the one command for a machine with a GPU, in its small version on a CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "check_gpu.py"
SECTIONS = ("machine", "kernels", "exact", "step", "packing", "attention", "options", "conditionals")


@pytest.mark.nightly
@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_runs(section: str):
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", "--check", "--minutes", "30", "--only", section],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
