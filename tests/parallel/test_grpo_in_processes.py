"""Two processes of jaxthd grpo are one run: they draw, reward and train as one does, and end together."""

import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxthd.config import Config, MeshConfig
from jaxthd.files.jsonl import read_lines
from jaxthd.grpo import grpo
from jaxthd.run.metrics_file import read_metrics
from tests.parallel.test_distributed import CLOCK, end, two, until
from tests.test_grpo import config_of, write_prompts

STEPS = 12
FAILS = '''
def sometimes(group):
    """Raises for the prompts of two lines, which different processes reward."""
    if group.fields["total"] in (3, 8):
        raise ValueError("not these")
    return [float(len(answer)) for answer in group.answers]
'''


def config(manifest: Path) -> Config:
    """On the mesh of every run here. A function fails on some prompts."""
    base = config_of(manifest)
    rewards = (*base.rollout.rewards, "fails_on_some.sometimes=0.1")
    rollout = replace(
        base.rollout, rewards=rewards, reward_folders=(str(manifest.parent),), max_failed_rewards=1.0
    )
    train = replace(base.train, steps=STEPS, validate_every=STEPS)
    return replace(base, mesh=MeshConfig(data=2, context=2), rollout=rollout, train=train)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    manifest = write_prompts(folder)
    (folder / "fails_on_some.py").write_text(FAILS)
    (folder / "settings.py").write_text(
        "from pathlib import Path\nfrom tests.parallel.test_grpo_in_processes import config as make\n\n\n"
        f"def config():\n    return make(Path({str(manifest)!r}))\n"
    )
    return manifest


@pytest.fixture(scope="module")
def one(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process with four devices."""
    workdir = tmp_path_factory.mktemp("one")
    grpo(config(manifest), workdir)
    return workdir


def compared(workdir: Path, one: Path) -> int:
    """Asserts that a run equals the one process's, up to rounding; returns its last step."""
    lines, all_of_one = read_metrics(workdir), read_metrics(one)
    for got, want in zip(lines, all_of_one[: len(lines)], strict=True):
        assert got.keys() - {"changed"} == want.keys()
        for name in want.keys() - CLOCK:
            if not name.endswith(("_seconds", "_per_second")) and "difference" not in name:
                assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-5), (got["step"], name)
    last = int(lines[-1]["step"])
    for name in ("rollouts.jsonl", "failures.jsonl"):
        got, want = ([rounded(x) for x in read_lines(folder / name)] for folder in (workdir, one))
        assert got == [x for x in want if x["step"] <= last]
        assert got
    return last


def rounded(line: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in line.items() if k != "log_prob"}


@pytest.mark.exhaustive
def test_two_processes_draw_reward_and_train_as_one_through_a_kill_and_a_signal(
    manifest: Path, one: Path, tmp_path: Path
) -> None:
    """Killed; continued by two processes until a signal; continued by one process to the end."""
    with two(manifest, tmp_path, name="grpo") as processes:
        output = end(processes, 1, signal.SIGKILL, after="[3-5]")
        assert processes.wait() == 128 + signal.SIGKILL
    assert re.search(r"^\[0\] error: process 1 \(pid \d+ on .*\) is gone", output, re.MULTILINE)
    assert "Traceback" not in output
    assert compared(tmp_path, one) >= 3

    with two(manifest, tmp_path, name="grpo") as processes:
        output = end(processes, 1, signal.SIGTERM, after="[4-9]")
        assert processes.wait() == 0, output
    assert re.search(r"^\[0\] continuing from step [24]", output, re.MULTILINE)
    last = compared(tmp_path, one)
    assert f"stopped by a signal after step {last}, which is saved" in output
    assert last < STEPS, "the signal came too late to show anything"

    grpo(config(manifest), tmp_path)
    assert compared(tmp_path, one) == STEPS
    assert {x["function"] for x in read_lines(tmp_path / "failures.jsonl")} == {"fails_on_some.sometimes"}
    skipped = [x["key"] for x in read_lines(tmp_path / "skipped.jsonl")]
    assert len(skipped) == 1
    assert skipped[0].endswith("missing.wav")


@pytest.mark.exhaustive
def test_two_processes_that_share_every_row_draw_on_another_mesh(
    manifest: Path, one: Path, tmp_path: Path
) -> None:
    """They continue on (data, context) = (1, 4) what one began on (2, 2), and draw on (4, 1)."""
    shutil.copytree(one, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / str(STEPS))
    meshes = ["--mesh.data", "1", "--mesh.context", "4", "--rollout.mesh.data", "4"]
    with two(manifest, tmp_path, *meshes, name="grpo") as processes:
        output = "".join(until(processes, "(?!)"))
        assert processes.wait() == 0, output
    assert f"continuing from step {STEPS - 2}" in output
    assert compared_draws(tmp_path) == compared_draws(one)


def compared_draws(workdir: Path) -> list[tuple[Any, ...]]:
    return [(x["step"], x["key"], x["answer"], x["reward"]) for x in read_lines(workdir / "rollouts.jsonl")]
