"""What a command has made goes where it fails; what was there, and what a run has learned, stays."""

from pathlib import Path

import pytest

from jaxthd.config import Config
from jaxthd.errors import UserError
from jaxthd.run.on_failure import RemovedOnFailure
from jaxthd.run.workdir import opened


def paths(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("failure", [UserError, OSError, KeyboardInterrupt, SystemExit, ZeroDivisionError])
def test_new_paths_go_and_old_ones_stay(failure: type[BaseException], tmp_path: Path):
    old, deep = tmp_path / "old", tmp_path / "a" / "b" / "c"
    old.mkdir()
    (old / "file").write_text("old")

    def fail() -> None:
        with RemovedOnFailure(old, old / "file", old / "new", deep):
            (old / "new").write_text("new")
            (old / "file").write_text("changed")
            (old / "other").write_text("not named")
            (deep / "d").mkdir(parents=True)
            (tmp_path / "a" / "e").write_text("of another program")
            raise failure

    with pytest.raises(failure):
        fail()
    assert paths(tmp_path) == {"old", "old/file", "old/other", "a", "a/e"}


def test_what_succeeds_stays(tmp_path: Path):
    with RemovedOnFailure(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b").mkdir(parents=True)
    assert paths(tmp_path) == {"a", "a/b"}


@pytest.mark.parametrize("holds", ["", "metrics.jsonl", "checkpoints/5", "reference.jsonl", "rollouts.jsonl"])
def test_a_run_stays_once_it_has_results(holds: str, tmp_path: Path):
    workdir = tmp_path / "runs" / "my"

    def fail() -> None:
        with opened(workdir, Config()) as run:
            run.keep(0)
            (workdir / "skipped.jsonl").write_text("{}\n")
            if "/" in holds:
                (workdir / holds).mkdir(parents=True)
            elif holds:
                (workdir / holds).write_text("{}\n")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert bool(paths(tmp_path)) == bool(holds)
    assert (workdir / "config.json").exists() == bool(holds)


def test_a_folder_that_another_run_holds_stays(tmp_path: Path):
    workdir = tmp_path / "my"
    with opened(workdir, Config()):
        with pytest.raises(UserError, match="in use"), opened(workdir, Config()):
            pass
        assert (workdir / "lock").exists()
