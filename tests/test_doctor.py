"""The doctor prints what is true of this machine, which has no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxthd import doctor
from jaxthd.ops.attention import backends as attention
from jaxthd.ops.scan import backends as scan

KINDS = ("attention", attention.BACKENDS), ("scan", scan.BACKENDS)
TITLES = {"attention": "`compute.attention_backend`", "scan": "Mamba2's scan"}
ROOT = Path(__file__).parents[1]
TABLES = ROOT / "docs" / "kernels.md"
BARE = """
import sys
for name in ("grain", "tyro", "flax", "optax", "orbax", "soundfile", "transformer_engine"):
    sys.modules[name] = None  # importing it fails
from jaxthd import doctor
doctor.main(["--json"])
"""


@pytest.mark.exhaustive
def test_the_doctor_tells_the_truth_with_little_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Runs in a process that can import jax, NumPy and little else; then again from the kept measurements."""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", BARE], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    report = json.loads(found.stdout)
    assert report["machine"]["platform"] == "cpu"
    assert report["machine"]["jax"] == jax.__version__
    assert report["machine"]["cudnn"] is None
    assert report["machine"]["transformer_engine"] is None
    where = "it runs on NVIDIA GPUs, and this is cpu"
    for kind, backends in KINDS:
        found = report[kind]["backends"]
        assert [x["backend"] for x in found] == list(backends)
        for backend in found:
            assert backend["verified"] == backends[backend["backend"]].verified
            if backend["backend"] == "xla":
                assert backend["refusal"] is None
                assert 0 < max(backend["errors"].values()) < backend["bound"]
                assert not backend["is_cached"]
            else:
                assert backend["refusal"] == where
                assert not backend["errors"]
                assert backend["verified"].startswith(("not yet run", "one H200"))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = list((tmp_path / "jaxthd" / "admission").glob("*-xla-*.json"))
    before = [path.stat().st_mtime_ns for path in measured]
    assert len(before) == 2
    doctor.main([])
    out = capsys.readouterr().out
    assert jax.__version__ in out
    _, *tables, encoder = out.split("\n\n")
    assert encoder.startswith("Encoder attention: bfloat16, ")
    assert encoder.endswith(f"  pallas: {where}\n")
    for (kind, backends), text in zip(KINDS, tables, strict=True):
        title, *lines = text.splitlines()
        assert title.startswith(f"{kind.capitalize()}: bfloat16, ")
        cells = {line.split()[0]: line.split() for line in lines}
        assert cells["xla"][1] == "yes"
        (xla,) = (x for x in report[kind]["backends"] if x["backend"] == "xla")
        shown = [float(x) for x in cells["xla"][2 : 2 + len(xla["errors"])]]
        assert shown == pytest.approx(list(xla["errors"].values()), rel=0.05)
        for name in set(backends) - {"xla"}:
            assert cells[name][1] == "no"
            assert cells[f"{name}:"][1:] == where.split()
    assert [path.stat().st_mtime_ns for path in measured] == before


def test_a_config_s_problem_is_what_is_measured(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    doctor.main(["--config", str(ROOT / "configs" / "single.py")])
    out = capsys.readouterr().out
    assert "Attention: float32, 4 query and 2 key/value heads of dim" in out
    assert "Scan: float32, 8 heads of dim" in out


def test_the_documentation_says_where_each_back_end_ran():
    """There is a table for each setting; its rows are exactly the existing back-ends."""
    text = TABLES.read_text()
    for kind, backends in KINDS:
        _, table = text.split(f"| {TITLES[kind]} |")
        rows = [line for line in table.split("\n\n")[0].splitlines() if line.startswith("| `")]
        assert len(rows) == len(backends)
        for row, (name, backend) in zip(rows, backends.items(), strict=True):
            assert row.startswith(f"| `{name}` |")
            assert row.endswith(f"| {backend.verified} |")
    (row,) = (line for line in text.splitlines() if "attention/relative.py" in line)
    assert row.startswith("| `pallas` |")
    assert row.endswith(f"| {attention.pallas.VERIFIED} |")
