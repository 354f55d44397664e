"""A run that stands still is said, with its stack; of several processes the one that holds the others up."""

import re
import threading
import time
from collections.abc import Iterator

import pytest

from jaxthd.parallel import beats
from jaxthd.run import watchdog
from jaxthd.run.watchdog import Report, Watchdog


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a watchdog says whose seconds are a hundredth."""
    for name in ("TICK_SECONDS", "REPORT_SECONDS", "STALL_SECONDS", "SILENT_SECONDS", "LAST_SECONDS"):
        monkeypatch.setattr(watchdog, name, getattr(watchdog, name) / 100)
    return []


def wait_until_said(said: list[str], text: str) -> str:
    end = time.monotonic() + 30
    while not (found := [x for x in said if text in x]):
        assert time.monotonic() < end, said
        time.sleep(0.01)
    return found[0]


def test_a_pause_is_said_with_the_stack_and_counted_as_a_stall(said: list[str]):
    pauses: list[float] = []
    with Watchdog(lambda: "data_wait", pauses.append, said.append):
        beats.beat()
        text = wait_until_said(said, "nothing done")
        assert "while data wait" in text
        assert re.search(r"test_watchdog.py:\d+ in wait_until_said", text)
        assert not pauses
        beats.beat()
        wait_until_said(said, "it goes on")
        assert len(pauses) == 1
        assert 0.3 <= pauses[0] < 30
    assert sum("nothing done" in x for x in said) == 1  # once for each pause
    beats.beat()
    assert len(pauses) == 1


def test_pauses_as_long_as_the_usual_ones_are_none(said: list[str]):
    with Watchdog(lambda: "stepping", say=said.append) as dog:
        for _ in range(3):
            time.sleep(0.25)
            beats.beat()
        deadline = time.monotonic() + 30
        while dog._usual < 0.2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.45)  # more than STALL_SECONDS, less than three times the longest before
    assert said == []


def test_compiling_is_none(said: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watchdog, "_COMPILERS", ("test_watchdog",))
    with Watchdog(lambda: "stepping", say=said.append):
        time.sleep(1.0)
    assert said == []


def report(beats: int, still: float, late: float = 0.0, number: int = 1) -> Report:
    return Report(number, "pid 7 on here", beats, still, 0.2, "saving", late, ["disk.py:3 in write"])


@pytest.fixture
def judge() -> Iterator[tuple[Watchdog, list[str]]]:
    said: list[str] = []
    with Watchdog(lambda: "stepping", say=said.append) as dog:
        yield dog, said


def test_the_process_that_is_behind_is_named_with_its_stack(judge: tuple[Watchdog, list[str]]):
    dog, said = judge
    dog._judge_others({0: report(9, 40), 1: report(7, 41), 2: report(9, 40)}, report(9, 40), 100.0)
    [text] = said
    assert "process 1 (pid 7 on here) holds the others up" in text
    assert "while saving" in text
    assert "disk.py:3 in write" in text
    dog._judge_others({0: report(9, 40), 1: report(7, 41)}, report(9, 40), 110.0)
    assert len(said) == 1  # not again so soon


def test_a_process_that_tells_nothing_is_named(judge: tuple[Watchdog, list[str]]):
    dog, said = judge
    for number, now in enumerate((100.0, 105.0, 110.0, 113.0)):
        own = report(9, now - 100, number=number)
        dog._judge_others({0: own, 1: report(8, 0.0)}, own, now)
    [text] = said
    assert "process 1 (pid 7 on here) tells nothing for 13 s" in text
    assert "disk.py:3 in write" in text


def test_a_process_that_tells_nothing_is_named_while_this_one_compiles(judge: tuple[Watchdog, list[str]]):
    dog, said = judge
    for number, now in enumerate((100.0, 112.0, 118.0)):
        dog._judge_others({0: report(9, 0, number=number), 1: report(8, 0)}, report(9, 0), now)
    assert said == []  # it may be late, and nobody waits for it
    dog._judge_others({0: report(9, 0, number=9), 1: report(8, 0)}, report(9, 0), 121.0)
    [text] = said
    assert "process 1 (pid 7 on here) tells nothing for 21 s" in text


def test_process_0_is_named_although_nobody_is_heard_without_it(
    judge: tuple[Watchdog, list[str]], monkeypatch: pytest.MonkeyPatch
):
    dog, said = judge
    monkeypatch.setattr(watchdog, "process_id", lambda: 1)
    for now in (100.0, 113.0):
        dog._judge_others({0: report(8, 0), 1: report(9, 0), 2: report(9, 0)}, report(9, now - 100), now)
    [text] = said
    assert "process 0 (pid 7 on here) tells nothing for 13 s" in text


def test_a_store_that_does_not_answer_holds_up_no_watchdog(said: list[str], monkeypatch: pytest.MonkeyPatch):
    """Process 0 was stopped, the others waited for its store, and none said so."""
    stopped, told = threading.Event(), threading.Event()

    def tell(topic: str, value: Report) -> None:
        if value.number > 1:
            told.set()
            stopped.wait(30)

    monkeypatch.setattr(watchdog, "tell", tell)
    monkeypatch.setattr(watchdog, "reports", lambda topic, of_all: {0: report(8, 0)})
    monkeypatch.setattr(watchdog, "process_id", lambda: 1)
    with Watchdog(lambda: "stepping", say=said.append):
        assert told.wait(30)
        text = wait_until_said(said, "tells nothing")
        stopped.set()
    assert "process 0 (pid 7 on here)" in text


def test_the_first_report_does_not_wait(monkeypatch: pytest.MonkeyPatch):
    """A process was stopped 2 s after its start, and known to nobody."""
    told: list[str] = []
    monkeypatch.setattr(watchdog, "tell", lambda topic, value: told.append(topic))
    with Watchdog(lambda: "starting"):
        end = time.monotonic() + watchdog.REPORT_SECONDS / 2
        while not told and time.monotonic() < end:
            time.sleep(0.01)
        assert told == ["watchdog"]


def test_process_0_is_asked_for_until_it_is_known(monkeypatch: pytest.MonkeyPatch):
    asked: list[float] = []
    known = threading.Event()

    def reports(topic: str, of_all: bool) -> dict[int, Report]:
        asked.append(time.monotonic())
        if len(asked) > 2:
            known.set()
        return {0: report(8, 0)} if len(asked) > 2 else {}

    monkeypatch.setattr(watchdog, "is_first", lambda: False)
    monkeypatch.setattr(watchdog, "REPORT_SECONDS", 60.0)
    monkeypatch.setattr(watchdog, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "reports", reports)
    with Watchdog(lambda: "starting", say=lambda text: None):
        assert known.wait(30)
        time.sleep(0.2)
    assert len(asked) <= 4


def test_a_slow_process_is_named_and_a_busy_machine_is_not(judge: tuple[Watchdog, list[str]]):
    dog, said = judge
    dog._judge_others({0: report(9, 0, 0.6), 1: report(9, 0, 0.7)}, report(9, 0), 100.0)
    assert said == []
    dog._judge_others({0: report(9, 0), 1: report(9, 0, 0.7), 2: report(9, 0)}, report(9, 0), 100.0)
    [text] = said
    assert "process 1 (pid 7 on here) is slow: it waits 70%" in text
