"""The doctor prints what is true of this machine, which has no GPU."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxthd import doctor
from jaxthd.errors import UserError
from jaxthd.kernels.machine import GPU
from jaxthd.ops.attention import backends as attention
from jaxthd.ops.scan import backends as scan
from jaxthd.run.installation import PURPOSES, unmet
from jaxthd.terminal.tables import size_text

KINDS = ("attention", attention.BACKENDS), ("scan", scan.BACKENDS)
TITLES = {"attention": "`compute.attention_backend`", "scan": "Mamba2's scan"}
ROOT = Path(__file__).parents[1]
TABLES = ROOT / "docs" / "kernels.md"
BARE = """
import sys
for name in ("grain", "tyro", "flax", "optax", "orbax", "soundfile", "transformer_engine"):
    sys.modules[name] = None  # importing it fails
from jaxthd import doctor
doctor.main(["--json", "True", "--kernels"])
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
    doctor.main(["--kernels"])
    out = capsys.readouterr().out
    assert jax.__version__ in out
    _, _, *tables, encoder = out.split("\n\n")
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


def test_the_machine_and_the_extras_are_shown_at_once(capsys, monkeypatch: pytest.MonkeyPatch):
    """Nothing is compiled. The numbers are compared with what the standard library counts."""
    monkeypatch.setattr(doctor, "admit", None)
    host, free = doctor.this_host(), shutil.disk_usage(Path.cwd()).free
    assert host.cores == len(os.sched_getaffinity(0))
    assert host.free_disk == pytest.approx(free, rel=0.05)
    assert host.free_memory is not None
    assert 0 < host.free_memory <= host.memory
    doctor.main([])
    machine, extras = capsys.readouterr().out.split("\n\n")
    facts = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in machine.splitlines()[1:])
    assert facts["memory"].startswith(size_text(host.memory))
    assert facts["CPU"].endswith(f"{host.cores} cores")
    assert facts["disk"].endswith(f"of {size_text(host.disk)}, for the working folder")
    assert facts["jax"].startswith(f"{jax.__version__}, jaxlib ")
    assert facts["NVIDIA driver"] == "none"
    rows = {line.split()[0]: line.split()[1] for line in extras.splitlines()[2:]}
    assert rows == {name: "no" if unmet(name) else "yes" for name in PURPOSES}
    assert rows["test"] == "yes"


@pytest.mark.parametrize(
    ("driver", "asked", "expected"),
    [
        ("580.159", "", "jax does not use the GPU: pip install -e '.[cuda13]'"),
        ("550.54", "", "jax does not use the GPU: pip install -e '.[cuda12]'"),
        ("580.159", "cpu", "jax does not use the GPU, since JAX_PLATFORMS is cpu: leave it unset"),
    ],
)
def test_a_gpu_that_jax_does_not_use_is_what_there_is_to_do(
    driver: str, asked: str, expected: str, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JAX_PLATFORMS", asked)
    gpus = [GPU("NVIDIA L4", 23034 << 20, 20000 << 20, driver)] * 2
    monkeypatch.setattr(doctor, "nvidia_gpus", lambda: gpus)
    doctor.main([])
    machine, _, to_do = capsys.readouterr().out.strip().split("\n\n")
    assert re.search(r"GPUs +2 x NVIDIA L4, 22.49 GiB, 19.53 GiB free\n", machine)
    assert re.search(rf"NVIDIA driver +{driver}\n", machine)
    assert to_do == f"To do\n  {expected}"


def test_a_jax_that_cannot_start_is_told_with_the_rest(capsys, monkeypatch: pytest.MonkeyPatch):
    def broken() -> None:
        raise UserError("jax cannot start a device (no CUDA): correct its driver")

    monkeypatch.setattr(doctor, "this_machine", broken)
    doctor.main([])
    out = capsys.readouterr().out
    assert "cannot start: see below" in out
    assert out.endswith("To do\n  jax cannot start a device (no CUDA): correct its driver\n")
    doctor.main(["--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["machine"] == {"error": report["advice"][0]}
    with pytest.raises(UserError, match="cannot start"):
        doctor.main(["--kernels"])


def test_a_config_s_problem_is_what_is_measured(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    doctor.main(["--kernels", str(ROOT / "configs" / "single.py")])
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
