"""scripts/fuzz_rewards.py at a size a test can afford; and that it would notice."""

import pytest

from jaxthd.rl.rewards import Group
from jaxthd.rl.rewards.registry import BUILT_IN
from scripts import fuzz_rewards


def test_every_group_is_rewarded_or_reported(capsys: pytest.CaptureFixture[str]):
    assert fuzz_rewards.check_groups(60, 3) == []
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == list(BUILT_IN)
    assert all(int(row.split()[1]) > 10 and sum(map(int, row.split()[1:3])) == 60 for row in rows)


def test_settings_that_are_accepted_are_violations(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fuzz_rewards, "BAD_SETTINGS", [(("wer",), ()), (("wre",), ())])
    assert fuzz_rewards.check_settings() == ["rewards=['wer'] is accepted"]


def test_rewards_out_of_bounds_are_violations(monkeypatch: pytest.MonkeyPatch):
    def unbounded(seed: int, number: int) -> Group:
        return Group(key="a", reference="a", answers=("a",), tokens=(10**6,), ended=(True,))

    monkeypatch.setattr(fuzz_rewards, "random_group", unbounded)
    monkeypatch.setattr(fuzz_rewards, "BUILT_IN", {"overlong": None})
    monkeypatch.setattr(fuzz_rewards, "OPTIONS", ("overlong.penalty=5",))
    (violation,) = fuzz_rewards.check_groups(1, 0)
    assert violation.endswith("(-5.0,)")
