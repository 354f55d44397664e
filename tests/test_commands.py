"""`jaxthd` lists the commands without importing jax, and runs each by its name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxthd.__main__ import commands, listing, main

ROOT = Path(__file__).parents[1]


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, *arguments], os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)


def test_every_command_is_listed_with_what_it_does_on_a_line():
    assert set(commands()) >= {"train", "evaluate", "score", "generate", "convert", "plan", "draw", "doctor"}
    lines = listing().splitlines()
    for name, does in commands().items():
        assert does.endswith(".")
        (line,) = (line for line in lines if line.split()[:1] == [name])
        assert line.endswith(does)
        assert len(line) <= 110


def test_listing_imports_no_jax():
    """Holds without a name too, and when the module of the public names is imported as well."""
    code = (
        "import sys; from jaxthd.__main__ import main; main([]); print(sorted(sys.modules), file=sys.stderr)"
    )
    ran = run("-c", code)
    assert ran.stdout == listing() + "\n"
    assert "'jaxthd.errors'" in ran.stderr
    assert not any(f"'{name}'" in ran.stderr for name in ("jax", "numpy", "flax", "grain", "tyro"))


@pytest.mark.parametrize(
    ("name", "meant"), [("trian", "train"), ("evalaute", "evaluate"), ("errors", None), ("zzz", None)]
)
def test_an_unknown_name_is_refused_with_what_may_be_meant(name: str, meant: str | None):
    with pytest.raises(SystemExit, match=f"no command {name!r}") as raised:
        main([name])
    assert (f"did you mean {meant}?" in str(raised.value)) == (meant is not None)
    assert meant or "train" in str(raised.value)


def test_a_command_runs_by_its_name(tmp_path: Path):
    """Runs `python -m jaxthd NAME` and `python -m jaxthd.NAME`; both report an error as one message."""
    line = {"step": 1, "loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.1, "tokens_per_second": 9.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line | {"padding_ratio": 0.5}) + "\n")
    for form in (("jaxthd", "draw"), ("jaxthd.draw",)):
        ran = run("-m", *form, str(tmp_path))
        assert ran.stdout == f"{tmp_path / 'curves.png'}\n", ran.stderr
        failed = run("-m", *form, str(tmp_path / "none"))
        assert failed.returncode == 1
        assert failed.stderr.startswith("error: ")
        assert "Traceback" not in failed.stderr
