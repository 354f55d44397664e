"""Rewards from worker processes: in order, the same whoever computes them, whatever functions do."""

import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxthd.config import Config, RolloutConfig
from jaxthd.errors import UserError
from jaxthd.rl.rewards import Rewarded, rewarder
from jaxthd.rl.rewards.registry import RewardSetting
from jaxthd.rl.rewards.rewarder import Rewarder
from tests.rl.rewards.groups import group
from tests.rl.rewards.misbehaving import HANGING

HERE = "tests.rl.rewards.functions"


def setting(name: str, weight: float = 1.0) -> RewardSetting:
    return RewardSetting(name, weight, {}, {})


MISBEHAVE = setting("tests.rl.rewards.misbehaving.misbehave")


def compute(rewards: Rewarder, *groups) -> list[Rewarded]:
    for number, each in enumerate(groups):
        rewards.submit(number, each)
    return rewards.collect()


def is_running(process: int) -> bool:
    """Whether it runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(process: int) -> bool:
    """Whether a process that was killed ends, once it gets its turn."""
    end = time.monotonic() + 10
    while is_running(process) and time.monotonic() < end:
        time.sleep(0.01)
    return not is_running(process)


@pytest.fixture(scope="module")
def patient() -> Iterator[Rewarder]:
    with Rewarder([MISBEHAVE], seconds=30.0, max_failed_share=1.0) as made:
        yield made


def test_rewards_are_weighted_sums_in_the_order_asked_for():
    config = Config(rollout=RolloutConfig(rewards=("wer=2", f"{HERE}.words=0.5", "length=0")))
    groups = [group("one", "one two", "", reference="one two", key=str(n)) for n in range(6)]
    with Rewarder.of(config) as rewards:
        for number in reversed(range(6)):
            rewards.submit(number, groups[number])
        found = rewards.collect()
    assert [each.group.key for each in found] == list("012345")
    for each in found:
        assert each.by_function == {
            "wer": (-0.5, 0, -1),
            f"{HERE}.words": (1, 2, 0),
            "length": (-0.5, 0, -1),
        }
        assert each.rewards == (2 * -0.5 + 0.5 * 1, 0 + 0.5 * 2, 2 * -1)
        assert each.failure is None


def test_results_do_not_depend_on_the_workers_nor_on_what_they_computed_before():
    names = [setting(f"{HERE}.slow_first"), setting(f"{HERE}.where")]
    found = []
    for workers in (1, 3):
        with Rewarder(names, workers=workers) as rewards:
            found.append(compute(rewards, *(group(*"abcde", key=str(n)) for n in range(6 * workers))))
    alone, shared = found
    drawn = [[each.by_function[f"{HERE}.slow_first"] for each in which] for which in (alone, shared[:6])]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 6
    where = [each.by_function[f"{HERE}.where"] for each in alone + shared]
    assert {each[0] for each in where} == {0.0}, "a worker imported jax"
    assert os.getpid() not in {each[1] for each in where}
    assert os.getsid(0) not in {each[2] for each in where}, "Ctrl-C reaches the workers"
    assert len({each[4] for each in where}) == 1
    assert [each[3] for each in where[:6]] == [each[3] for each in where[6:12]]
    assert not any(is_running(int(each[1])) for each in where)


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("raise", r"ValueError: of key raise in two lines \(misbehaving\.py, line \d+\)"),
        ("exit", r"SystemExit: 3"),
        ("nan", r"for answer 1 it returned nan; expected a finite number"),
        ("infinite", r"for answer 1 it returned -inf"),
        ("too few", r"it returned 1 values; expected one for each of the 2 answers"),
        ("too many", r"it returned more than 2 values"),
        ("number", r"it returned 1\.0 of type float; expected a list of 2 numbers"),
        ("nothing", r"it returned None"),
        ("dict", r"it returned \{.* of type dict"),
        ("text", r"it returned '12' of type str"),
        ("texts", r"for answer 0 it returned '1' of type str; expected a number"),
        ("lock", r"for answer 0 it returned <.* of type lock"),
        ("complex", r"for answer 1 it returned 1j of type complex"),
        ("os._exit", r"its process is lost: exit status 7"),
        ("segfault", r"its process is lost: SIGSEGV"),
        ("kill", r"its process is lost: SIGKILL"),
    ],
)
def test_what_a_function_does_wrong_is_reported_and_its_group_has_no_rewards(
    patient: Rewarder, way: str, reason: str
):
    bad, good = compute(
        patient, group("a", "bcd", key=f"key {way}", way=way), group("a", "bcd", key="good", way="well")
    )
    assert bad.rewards is None
    assert bad.by_function == {}
    assert bad.failure is not None
    assert bad.failure[:2] == (MISBEHAVE.name, f"key {way}")
    assert re.fullmatch(f"{reason}.*", bad.failure.reason), bad.failure.reason
    assert good.rewards == (1, 3)


def test_a_function_that_forks_answers_once(patient: Rewarder):
    groups = [group("a" * n, "b", way="fork") for n in range(20)]
    assert [each.rewards for each in compute(patient, *groups)] == [(n, 1) for n in range(20)]


def test_whole_numbers_are_numbers(patient: Rewarder):
    (found,) = compute(patient, group("a", "b", way="whole numbers"))
    assert found.rewards == (1, 1)


def test_what_a_function_prints_goes_to_stderr(patient: Rewarder, capfd: pytest.CaptureFixture[str]):
    with Rewarder([MISBEHAVE]) as rewards:
        (found,) = compute(rewards, group("a", "b", way="print"))
    out, err = capfd.readouterr()
    assert found.rewards == (1, 2)
    assert out == ""
    assert "printed by a reward function\nwritten by a reward function\n" in err


def test_functions_that_hang_are_killed_with_what_they_started_and_others_go_on(tmp_path: Path):
    file = tmp_path / "process"
    groups = [group("a", "b", key=way, way=way, file=str(file)) for way in HANGING]
    with Rewarder([MISBEHAVE], seconds=1.0, workers=5, max_failed_share=1.0) as rewards:
        started = time.monotonic()
        found = compute(rewards, *groups)
        assert time.monotonic() - started < 30
    for way, each in zip(HANGING, found, strict=True):
        assert each.failure == (MISBEHAVE.name, way, "its process is lost: no answer in 1 s")
    assert ends(int(file.read_text()))


def test_weights_that_overflow_are_a_failure():
    with Rewarder([setting(f"{HERE}.words", 1.5e308)]) as rewards:
        fine, bad = compute(rewards, group("a", "b"), group("a b", "b"))
    assert fine.rewards == (1.5e308, 1.5e308)
    assert bad.failure is not None
    assert "expected finite numbers" in bad.failure.reason


def test_too_many_failures_stop_the_run_and_name_the_last():
    with Rewarder([MISBEHAVE], max_failed_share=0.02) as rewards:
        compute(rewards, *(group("a", key=f"{n}", way="raise" if n % 60 < 2 else "well") for n in range(60)))
        with pytest.raises(UserError) as stopped:
            compute(rewards, group("a", key="last", way="raise"))
        message = str(stopped.value)
        for part in (
            "3 of the last 61 groups",
            "2% of 100",
            MISBEHAVE.name,
            "'last'",
            "ValueError: of last",
        ):
            assert part in message
        # Those of the newest hundred groups count.
        compute(rewards, *(group("a", key=f"{n}") for n in range(100)), group("a", way="raise"))


TRIALS = """
import os, time
def raises(group): raise KeyError("field")
def needs_a_name(group): return wrod(group)
def needs_an_attribute(group): return [len(a) for a in group.answer]
def one(group): return 1.0
def none(group): [0.0 for _ in group.answers]
def ends(group): os._exit(3)
def hangs(group): time.sleep(600)
def fields(group): return [group.fields["x"] for _ in group.answers]
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("needs_a_name", r"NameError: name 'wrod' is not defined.*my_trials\.py, line 4"),
        ("needs_an_attribute", r"AttributeError: 'Group' object has no attribute 'answer'"),
        ("one", r"'a made-up example': it returned 1\.0 of type float; expected a list of 3 numbers"),
        ("none", r"it returned None"),
        ("ends", r"its process is lost: exit status 3; expected one that comes back"),
        ("hangs", r"its process is lost: no answer in 1 s"),
        ("wrong", r"my_trials\.py has no 'wrong'"),
    ],
)
def test_a_function_that_never_works_is_found_at_the_start(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "my_trials.py").write_text(TRIALS)
    if name == "hangs":
        monkeypatch.setattr(rewarder, "FIRST_CALL_SECONDS", 1.0)
    with pytest.raises(UserError, match=f"my_trials\\.{name}.*{message}"):
        Rewarder([setting(f"my_trials.{name}")], seconds=1.0, folders=[str(tmp_path)])


def test_what_a_function_raises_on_the_example_is_a_warning(tmp_path: Path):
    (tmp_path / "my_trials.py").write_text(TRIALS)
    names = [setting("my_trials.raises"), setting("my_trials.fields"), setting("wer")]
    with Rewarder(names, folders=[str(tmp_path)]) as rewards:
        assert [each.function for each in rewards.warnings] == ["my_trials.raises", "my_trials.fields"]
        assert rewards.warnings[0].reason == "KeyError: 'field' (my_trials.py, line 3)"


def test_a_bad_setting_of_a_built_in_function_is_found_at_the_start():
    with pytest.raises(UserError, match=r"format was .* format\.pattern '\(' is no regular expression"):
        Rewarder([RewardSetting("format", 1.0, {"pattern": "("}, {})])


def test_closing_ends_the_processes_at_once_and_unfinished_groups_raise():
    with Rewarder([setting(f"{HERE}.where"), MISBEHAVE], max_failed_share=1.0) as rewards:
        process = compute(rewards, group(*"abcde"))[0].by_function[f"{HERE}.where"][1]
        hanging = rewards.submit(0, group(*"abcde", way="sleep"))
        while not hanging.running():
            time.sleep(0.01)
    with pytest.raises(RuntimeError, match="closed"):
        hanging.result()
    with pytest.raises(RuntimeError, match="after shutdown"):
        rewards.submit(0, group("a"))
    assert not is_running(int(process))


def test_a_rewarder_that_nobody_holds_ends_its_processes():
    rewards = Rewarder([setting(f"{HERE}.where")])
    process = compute(rewards, group(*"abcde"))[0].by_function[f"{HERE}.where"][1]
    del rewards
    gc.collect()
    assert not is_running(int(process))


SCRIPT = """
import sys, time
from jaxthd.rl.rewards.rewarder import Rewarder
from tests.rl.rewards.groups import group
from tests.rl.rewards.test_rewarder import MISBEHAVE
rewards = Rewarder([MISBEHAVE], seconds=float(sys.argv[1]), workers=2)
for way in sys.argv[2:]:
    rewards.submit(0, group("a", way=way))
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("seconds", "ways"), [("600", ["endless loop", "sleep"]), ("1", ["hold the lock"])])
def test_no_process_outlives_the_one_that_started_it(seconds: str, ways: list[str]):
    """Not even one that hangs in a function; one that stops Python's other threads ends after its time."""
    command = [sys.executable, "-c", SCRIPT, seconds, *ways]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "started\n"
        time.sleep(0.3)
        parent.kill()
        # The workers have inherited stderr: it ends with the last of them.
        parent.communicate(timeout=20)
    assert parent.returncode == -signal.SIGKILL
