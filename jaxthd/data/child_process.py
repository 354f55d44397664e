"""A child process that runs a Python program, with a pipe to it.

It is started as a command, not by multiprocessing. So it imports only what its program needs, not the
training script and not jax. It ends by itself once this process has ended in any way: its program reads from
the pipe, which is then closed.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe

from jaxthd.files.unread_output import keep_going_unread

OF_THE_RUN = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)
"""Signals that ask a run to stop (jaxthd.run.signals)."""


class LostError(Exception):
    """The process ended or did not answer in time; the message says which."""


class Child:
    """Runs `python PROGRAM... FD`, where FD is the file descriptor of the child's end of the pipe.

    program: arguments of the interpreter. environment: variables added to those of this process.
    """

    def __init__(self, *program: str, **environment: str) -> None:
        self._pipe, childs_end = Pipe()
        with childs_end:
            fd = childs_end.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", *program, str(fd)],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
                start_new_session=True,  # Ctrl-C reaches this process only, which ends the child
            )

    def send(self, message: bytes) -> None:
        """Sends a message. Raises LostError if the process has ended."""
        try:
            self._pipe.send_bytes(message)
        except OSError as gone:
            raise LostError(self.kill()) from gone

    def receive(self, seconds: float) -> bytes:
        """Returns the next message. Raises LostError if the process has ended.

        After `seconds` without a message it kills the process and raises LostError too.
        """
        try:
            if self._pipe.poll(seconds):
                return self._pipe.recv_bytes()
        except (EOFError, OSError) as gone:
            raise LostError(self.kill()) from gone
        self.kill()
        raise LostError(f"no answer in {seconds:g} s")

    def kill(self) -> str:
        """Kills the process and those that it started, unless it has ended. Returns how it ended."""
        if self._process.returncode is None:  # not waited for, so its number is still its own
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        status = self._process.wait()
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"

    @property
    def status(self) -> int | None:
        """The exit status, or minus the number of the signal that ended the process. None while it runs."""
        return self._process.returncode

    def end(self) -> None:
        """Lets the process end, within a second."""
        self._pipe.close()  # its program ends when the pipe is closed
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self.kill()


def parents_end() -> Connection:
    """Returns the child's end of the pipe. Called by a program that Child runs, before it does anything.

    The program then outlives signals that a queue or a shell sends to all processes of a run: whoever started
    it may need it until all is saved, and ends it. It outlives a reader of its output too: functions of users
    print.
    """
    keep_going_unread()
    for number in OF_THE_RUN:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs that it starts would inherit
    return Connection(int(sys.argv[1]))
