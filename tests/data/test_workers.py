"""Worker processes: what they compute comes back in order, whatever becomes of them; none stays behind."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from jaxthd.data.skipped import Skipped
from jaxthd.data.workers import Workers
from jaxthd.errors import UserError
from tests.data.items import Killer, Told, fail, lock, where


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(2)
    yield made
    made.close()


def groups(items: int = 12, size: int = 5) -> list[list[tuple[int, int]]]:
    return [[(i, i // 2) for i in range(start, min(start + size, items))] for start in range(0, items, size)]


def compute(workers: Workers, load, items: int = 12) -> list:
    answers = [workers.submit(load, group) for group in groups(items)]
    return [found for answer in answers for found in answer.result()]


def test_results_come_in_order_from_lean_processes_of_their_own(workers: Workers):
    found = compute(workers, where) + compute(workers, where)
    assert [x[:2] for x in found] == [(i, i // 2) for i in range(12)] * 2
    processes, sessions = {x[2] for x in found}, {x[3] for x in found}
    assert 1 <= len(processes) <= 2
    assert os.getpid() not in processes
    assert os.getsid(0) not in sessions, "Ctrl-C reaches the workers"
    assert all(x[4] == set() for x in found)


@pytest.mark.parametrize(
    ("way", "reason"), [("exit", "exit status 7"), ("kill", "SIGKILL"), ("hang", "no answer in 1 s")]
)
def test_an_item_that_kills_its_worker_twice_is_skipped_and_the_others_are_computed(way: str, reason: str):
    workers = Workers(2, answer_seconds=1.0)
    found = compute(workers, Killer(way))
    assert found == [0, 1, 2, Skipped("3", f"its worker process died twice: {reason}"), *range(4, 12)]
    workers.close()


def test_an_item_whose_worker_died_once_is_computed(workers: Workers, tmp_path: Path):
    assert compute(workers, Killer("kill", once=tmp_path / "died")) == list(range(12))


def test_what_load_raises_is_raised_with_its_traceback_and_the_workers_go_on(workers: Workers):
    with pytest.raises(RuntimeError, match=r"could not read \(11, 5\): [^$]*ZeroDivisionError: our defect"):
        compute(workers, fail)
    with pytest.raises(RuntimeError, match="cannot pickle"):
        compute(workers, lock)
    assert [x[0] for x in compute(workers, where)] == list(range(12))


def test_a_worker_is_told_of_the_items_of_a_request_at_once(workers: Workers):
    assert workers.submit(Told(), [(n, 0) for n in range(4, 7)]).result() == [
        (n, [4, 5, 6]) for n in range(4, 7)
    ]


def test_closing_ends_processes_and_threads_at_once():
    workers = Workers(1)
    process = compute(workers, where, 1)[0][2]
    running, waiting = (workers.submit(Killer("hang"), [(3, 0)]) for _ in range(2))
    while not running.running():
        time.sleep(0.01)
    workers.close()
    workers.close()
    with pytest.raises(RuntimeError, match="workers are closed"):
        running.result()
    with pytest.raises(CancelledError):
        waiting.result()
    with pytest.raises(RuntimeError, match="after shutdown"):
        workers.submit(fail, [(1, 0)])
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("workers")]


def test_workers_that_nobody_holds_end():
    workers = Workers(1)
    process = compute(workers, where, 1)[0][2]
    del workers
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


SCRIPT = """
import time
from jaxthd.data.workers import Workers
from tests.data.items import Killer, where
workers = Workers(2)
for answer in [workers.submit(where, [(i, 0)]) for i in range(4)]:
    answer.result()
print("started", flush=True)
"""


@pytest.mark.parametrize("killed", [False, True])
def test_no_process_outlives_the_one_that_started_it(killed: bool):
    wait = "time.sleep(600)" if killed else ""
    with subprocess.Popen([sys.executable, "-c", SCRIPT + wait], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "started\n"
        if killed:
            parent.kill()
        # The workers have inherited this pipe: it ends with the last of them.
        assert parent.communicate(timeout=20)[0] == ""
    assert parent.returncode == (-signal.SIGKILL if killed else 0)


def test_workers_that_cannot_start_are_a_users_matter(monkeypatch: pytest.MonkeyPatch):
    workers = Workers(1)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UserError, match=r"did not start \(exit status 1.*data\.workers=0"):
        compute(workers, where)
    workers.close()
