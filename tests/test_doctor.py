"""The doctor prints what is true of this machine, which has no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxthd import doctor
from jaxthd.ops.attention.backends import BACKENDS, VERIFIED

ROOT = Path(__file__).parents[1]
BARE = """
import sys
for name in ("grain", "tyro", "flax", "optax", "orbax", "soundfile", "transformer_engine"):
    sys.modules[name] = None  # importing it fails
from jaxthd import doctor
doctor.main(["--json"])
"""


def test_the_doctor_tells_the_truth_with_little_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """In a process that can import jax, NumPy and little else; then from what was measured there."""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", BARE], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    report = json.loads(found.stdout)
    assert report["machine"]["platform"] == "cpu"
    assert report["machine"]["jax"] == jax.__version__
    assert report["machine"]["cudnn"] is None
    assert report["machine"]["transformer_engine"] is None
    assert [x["backend"] for x in report["attention"]] == list(BACKENDS)
    for backend in report["attention"]:
        if backend["backend"] == "xla":
            assert backend["refusal"] is None
            assert 0 < max(backend["errors"].values()) < backend["bound"]
            assert not backend["is_cached"]
        else:
            assert backend["refusal"] == "it runs on NVIDIA GPUs, and this is cpu"
            assert not backend["errors"]
            assert "not yet run" in backend["verified"]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = next((tmp_path / "jaxthd" / "attention").glob("xla-*.json"))
    before = measured.stat().st_mtime_ns
    doctor.main([])
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split()[0]: line.split() for line in lines if line.startswith("  ")}
    assert cells["te"][1] == cells["cudnn"][1] == "no"
    assert cells["xla"][1] == "yes"
    largest = max(float(x) for x in cells["xla"][2:7])
    (xla,) = (x for x in report["attention"] if x["backend"] == "xla")
    assert largest == pytest.approx(max(xla["errors"].values()), rel=0.05)
    assert cells["cudnn:"][1:] == ["it", "runs", "on", "NVIDIA", "GPUs,", "and", "this", "is", "cpu"]
    assert jax.__version__ in cells["jax"]
    assert measured.stat().st_mtime_ns == before


def test_a_config_s_problem_is_what_is_measured(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    doctor.main(["--config", str(ROOT / "configs" / "single.py")])
    assert "Attention: float32, 4 query and 2 key/value heads of dim" in capsys.readouterr().out


def test_the_readme_says_where_each_back_end_ran():
    text = (ROOT / "README.md").read_text()
    for name, where in VERIFIED.items():
        assert f"| `{name}` |" in text
        assert any(where in line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
