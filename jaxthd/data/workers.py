"""Worker processes of the loader: audio is decoded and features are computed beside the training process.

They are started as commands, not by multiprocessing: a worker imports what reading a document needs and not
the script that trains, hence no jax; and it ends by itself when the training process is gone, however that
ended. What a worker was reading when it died is read again item by item: only what kills a worker alone,
too, is left out.
"""

import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Pipe
from typing import Any

from jaxthd.data.skipped import Skipped
from jaxthd.errors import UserError

ANSWER_SECONDS = 60.0
"""A worker that gives no answer for so long hangs."""


class Workers:
    """`count` worker processes, started when they are needed. Loaders may share them.

    Make each `load` once: a worker keeps every one that it was sent.
    answer_seconds: a worker that gives no answer for so long is killed.
    """

    def __init__(self, count: int, answer_seconds: float = ANSWER_SECONDS) -> None:
        self.count = count
        self._answer_seconds = answer_seconds
        self._threads = ThreadPoolExecutor(count, "workers")
        self._own = threading.local()  # .worker: the process that this thread talks to
        self._running: set[_Worker] = set()
        # Done once: by close(), when nobody holds this object any more, or as the interpreter exits.
        self._end = weakref.finalize(self, _end, self._threads, self._running)

    def close(self) -> None:
        """Kills the processes. What is not computed yet raises, and so does submit."""
        self._end()
        self._threads.shutdown()

    def submit(self, load: Callable[[Any, int], Any], items: Sequence[tuple[Any, int]]) -> Future[list[Any]]:
        """load(item, epoch) of every (item, epoch), computed in a worker; load and items are pickled.

        An item that two workers died of, or hung over, is a Skipped under its attribute `key`.
        The future raises RuntimeError with the worker's traceback where load raised; UserError where no
        worker starts.
        """
        return self._threads.submit(self._compute, load, items)

    def _compute(self, load: Any, items: Sequence[tuple[Any, int]]) -> list[Any]:
        try:
            return self._ask(load, items)
        except _LostError:
            return [self._alone(load, item, epoch) for item, epoch in items]

    def _alone(self, load: Any, item: Any, epoch: int) -> Any:
        try:
            return self._ask(load, [(item, epoch)])[0]
        except _LostError as lost:
            return Skipped(str(getattr(item, "key", item)), f"its worker process died twice: {lost}")

    def _ask(self, load: Any, items: Sequence[tuple[Any, int]]) -> list[Any]:
        worker = getattr(self._own, "worker", None)
        if worker not in self._running:
            worker = self._own.worker = _Worker()
            self._running.add(worker)
        try:
            if self._end.alive:
                return worker.ask(load, items, self._answer_seconds)
        except _LostError:
            self._running.remove(worker)
            if self._end.alive:
                raise
        worker.kill()
        raise RuntimeError("the loader's workers are closed")


def _end(threads: ThreadPoolExecutor, running: set["_Worker"]) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for worker in list(running):
        worker.kill()


class _LostError(Exception):
    """A process died or hung; how."""


class _Worker:
    """One process."""

    def __init__(self) -> None:
        self._pipe, childs_end = Pipe()
        with childs_end:
            fd = childs_end.fileno()
            settings = {
                "PYTHONPATH": os.pathsep.join(sys.path),
                # One thread a process: there are as many processes as cores are to be used.
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            }
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "jaxthd.data.worker", str(fd)],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                env=os.environ | settings,
                start_new_session=True,  # Ctrl-C is for the training process, which ends its workers
            )
        self._sent: dict[int, Any] = {}
        try:
            self._receive(ANSWER_SECONDS)
        except _LostError as lost:
            raise UserError(
                f"a worker process of the loader did not start ({lost}; it may say more above); "
                "correct the Python environment, or set data.workers=0 to do without"
            ) from lost

    def ask(self, load: Any, items: Sequence[tuple[Any, int]], seconds: float) -> list[Any]:
        """[load(*item) for item in items]. Raises RuntimeError for what load raised, _LostError."""
        n = id(load)
        if n not in self._sent:
            self._request((n, load, []), ANSWER_SECONDS)  # it imports what load needs
            self._sent[n] = load  # kept, so that no other object gets this id
        return self._request((n, None, items), seconds)

    def _request(self, request: tuple[int, Any, Sequence[tuple[Any, int]]], seconds: float) -> list[Any]:
        try:
            self._pipe.send(request)
        except OSError as gone:
            raise _LostError(self.kill()) from gone
        found, error = self._receive(seconds)
        if error:
            raise RuntimeError(f"a worker process of the loader could not read {error}")
        return found

    def _receive(self, seconds: float) -> Any:
        try:
            if self._pipe.poll(seconds):
                return self._pipe.recv()
        except (EOFError, OSError) as gone:
            raise _LostError(self.kill()) from gone
        self.kill()
        raise _LostError(f"no answer in {seconds:g} s")

    def kill(self) -> str:
        """Kills the process and returns how it ended, which may have been earlier."""
        self._process.kill()
        status = self._process.wait()
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"
