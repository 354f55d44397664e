"""Runs survive kill -9, SIGTERM and damage: scripts/check_survival.py at the counts of its defaults."""

from pathlib import Path

import pytest

from tests.survival import Row, grpo_rows, train_rows

pytestmark = pytest.mark.nightly


def assert_all_hold(rows: list[Row]) -> None:
    assert not [row for row in rows if not row.holds]
    assert len(rows) > 1


def test_a_training_run_survives(tmp_path: Path):
    assert_all_hold(train_rows(tmp_path, kills=10, damages=20, seed=0))


def test_a_run_of_grpo_survives(tmp_path: Path):
    assert_all_hold(grpo_rows(tmp_path, kills=10, seed=0))
