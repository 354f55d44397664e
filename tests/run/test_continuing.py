"""What a new run needs is done by its command, once; what fails, or would be done several times, is said."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from jaxthd.config import Config, TrainConfig
from jaxthd.errors import UserError
from jaxthd.run.continuing import run_before
from jaxthd.terminal.arguments import CommandLine


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)


def line(folder: Path, *commands: str, run: str | None = None, processes: int | None = None) -> CommandLine:
    config = replace(Config(), train=TrainConfig(before=commands))
    return CommandLine(config, folder / "my.py", run, Namespace(processes=processes), ())


def test_commands_run_in_the_configs_folder_one_after_the_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """The package need not be installed, and the working directory does not matter."""
    run_before(line(tmp_path, "--help", "--help"), tmp_path / "run")
    said = capfd.readouterr().out
    assert said.count("before this run: jaxthd --help") == 2
    assert said.count("jaxthd COMMAND [OPTIONS]") == 2


def test_a_command_that_fails_ends_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(UserError, match=r"`jaxthd traim x.py`.*ended with status 1; expected 0"):
        run_before(line(tmp_path, "traim x.py", "--help"), tmp_path / "run")
    assert "did you mean train" in capfd.readouterr().err


def test_what_was_begun_needs_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    run_before(line(tmp_path, "traim", run="runs/my"), tmp_path / "run")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    run_before(line(tmp_path, "traim"), tmp_path / "run")
    run_before(line(tmp_path), tmp_path / "new")
    assert not capfd.readouterr().out


@pytest.mark.parametrize("by_slurm", [True, False])
def test_several_processes_do_not_all_do_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_slurm: bool):
    if by_slurm:
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(UserError, match=r"run `jaxthd train a.py` .* first"):
        run_before(line(tmp_path, "train a.py", processes=None if by_slurm else 2), tmp_path / "run")
