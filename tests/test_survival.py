"""Runs survive faults of every kind, and a soak notices a broken jaxthd: scripts/soak.py, in parts."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.survival.broken import BROKEN, broken_copy
from tests.survival.faults import FAULTS, KILL
from tests.survival.goodput import Preemption, Saving, day
from tests.survival.runs import Kind
from tests.survival.soak import KINDS, OTHERS, Soak, holds, summary


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the compiled programs and the runs without faults of all tests here."""
    if not shutil.which("gcc") or not shutil.which("mount"):
        pytest.skip("needs gcc and mount")
    return tmp_path_factory.mktemp("soak")


@pytest.fixture
def soak(folder: Path) -> Iterator[Soak]:
    (folder / "faults.jsonl").unlink(missing_ok=True)
    made = Soak(folder, seed=3)
    yield made
    made.close()


def of_kind(name: str) -> Kind:
    return next(kind for kind in KINDS if FAULTS[name].kinds(kind))


@pytest.mark.parametrize("kind", dict.fromkeys(KINDS), ids=lambda kind: kind.name)
@pytest.mark.nightly
def test_a_killed_run_ends_bit_identical(soak: Soak, kind: Kind):
    soak.go_on(8, [KILL], [kind])
    assert all(map(holds, soak.lines)), "\n".join(summary(soak.lines))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.nightly
def test_every_other_fault_ends_so_or_is_named(soak: Soak, name: str):
    soak.go_on(2, [name], [of_kind(name)])
    assert all(map(holds, soak.lines)), "\n".join(summary(soak.lines))


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.nightly
def test_a_broken_build_is_noticed(folder: Path, how: str):
    """Runs of it are compared with runs of the whole one."""
    (folder / "faults.jsonl").unlink(missing_ok=True)
    soak = Soak(folder, seed=3, package=broken_copy(how, folder / "package"))
    try:
        soak.go_on(12, [BROKEN[how][-1]], [Kind()])
    finally:
        soak.close()
    assert not all(map(holds, soak.lines))


def test_a_days_goodput_by_what_preemptions_took():
    startup = {"starting": 10.0, "restoring": 5.0, "compiling": 15.0}
    found = [Preemption("SIGTERM", 9, 6.0, startup, 0.0), Preemption("SIGKILL", 19, 0.0, startup, 7.0)]
    (_, notice, without), is_held = day(found, Saving(0.5, 2.0, 1.0, 1.0, 10**8, 10**8))
    # With notice 10 + 5 + 15 + 6 s of 3,600; without, half of a checkpoint's interval as often as it pays:
    # sqrt(2 * 3600 * 0.5) = 60 s, so 30 s of lost steps and 59 saves of 0.5 s.
    assert "goodput of the day 99.00%" in notice
    assert "checkpoint every 1.0 min" in without
    assert f"{1 - (30 + 30 + 29.5) / 3600:.2%}" in without
    assert is_held
    (*_, slow), is_held = day(found, Saving(5.0, 20.0, 1.0, 1.5, 10**10, 10**10))
    assert "under 97%" in slow
    assert not is_held
