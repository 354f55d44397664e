"""A Python process of the loader's own, with a pipe to it.

It is started as a command, not by multiprocessing: it imports what its program needs and not the script that
trains, hence no jax. It ends by itself when this process is gone, however that ended: its program reads from
the pipe, which then is closed.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe


class LostError(Exception):
    """The process ended, or gave no answer in time; the message says how."""


class Child:
    """Runs `python PROGRAM... FD`, where FD is the number of its end of the pipe.

    program: arguments of the interpreter. environment: variables besides those of this process.
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
                start_new_session=True,  # Ctrl-C is for this process, which ends the other
            )

    def send(self, message: bytes) -> None:
        """Raises LostError where the process is gone."""
        try:
            self._pipe.send_bytes(message)
        except OSError as gone:
            raise LostError(self.kill()) from gone

    def receive(self, seconds: float) -> bytes:
        """Its next message. Raises LostError where it is gone, or sends none for so long and is killed."""
        try:
            if self._pipe.poll(seconds):
                return self._pipe.recv_bytes()
        except (EOFError, OSError) as gone:
            raise LostError(self.kill()) from gone
        self.kill()
        raise LostError(f"no answer in {seconds:g} s")

    def kill(self) -> str:
        """Kills the process and returns how it ended, which may have been earlier."""
        self._process.kill()
        status = self._process.wait()
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"

    @property
    def status(self) -> int | None:
        """How the process ended: its exit status, or the signal's number below 0. None while it runs."""
        return self._process.returncode

    def end(self) -> None:
        """Lets the process end, within a second."""
        self._pipe.close()  # it has nothing to do then
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self.kill()


def parents_end() -> Connection:
    """In a program that Child runs: its end of the pipe."""
    return Connection(int(sys.argv[1]))
