"""What asks a run to stop."""

import os
import signal

import pytest

from jaxthd.data.child_process import Child
from jaxthd.run.signals import StopRequests

NAMES = ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"]


def kill(name: str) -> None:
    os.kill(os.getpid(), getattr(signal, name))


@pytest.mark.parametrize("name", NAMES)
def test_a_signal_asks_a_run_to_stop_and_what_follows_does_not_end_it(name: str) -> None:
    """Handlers of before come back at the end."""
    # A shell ignores SIGINT for what it runs in the background, and so the tests.
    of_tests = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = [signal.getsignal(getattr(signal, each)) for each in NAMES]
    with StopRequests() as stopping:
        stopping.listen()
        assert stopping() == ""
        kill(name)
        assert stopping() == f"by {name}"
        for other in NAMES:
            if other != "SIGINT":
                kill(other)
        assert stopping() == f"by {name}"
        with pytest.raises(KeyboardInterrupt):  # who presses Ctrl-C now does not want to wait
            kill("SIGINT")
    assert [signal.getsignal(getattr(signal, each)) for each in NAMES] == before
    signal.signal(signal.SIGINT, of_tests)


def test_the_time_asks_a_run_to_stop() -> None:
    with StopRequests(3600.0) as stopping:
        assert stopping() == ""
    with StopRequests(1e-6) as stopping:
        assert stopping() == "by train.max_seconds 1e-06"


def test_an_ignored_signal_stays_ignored_and_a_handler_of_the_user_s_stays() -> None:
    """nohup ignores SIGHUP."""
    seen: list[int] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        with StopRequests() as stopping:
            stopping.listen()
            kill("SIGHUP")
            kill("SIGUSR1")
            assert stopping() == ""
        assert seen == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_worker_processes_outlive_the_signals_of_a_run() -> None:
    """A queue sends its signal to all processes of a job, and what is saved may need them."""
    program = (
        "import os; from jaxthd.data.child_process import parents_end\n"
        "pipe = parents_end(); pipe.send_bytes(str(os.getpid()).encode())\n"
        "pipe.recv_bytes(); pipe.send_bytes(b'still there')"
    )
    child = Child("-c", program)
    try:
        process = int(child.receive(30.0))
        for name in NAMES:
            os.kill(process, getattr(signal, name))
        child.send(b"")
        assert child.receive(30.0) == b"still there"
    finally:
        child.end()
