"""Worker processes of the loader: they decode audio and compute features beside the training process.

A worker runs this file as its program, which makes documents until its pipe closes. So it imports only what
it needs: neither jax nor grain. If a worker dies, the items of its request are computed again one at a time.
An item is skipped only if a second worker dies while it computes that item alone.
"""

import pickle
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from jaxthd.data.child_process import Child, LostError, parents_end
from jaxthd.data.skipped import Skipped
from jaxthd.errors import StorageError, UserError

ANSWER_SECONDS = 60.0
"""A worker that gives no answer for so long is taken to hang."""

_ENVIRONMENT = {
    # One thread a process: the number of processes is the number of cores to use.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # Freed arrays stay with the process (glibc, man 3 mallopt), as in jaxthd.run.startup.keep_freed_memory:
    # arrays of features would come from the system anew for each recording.
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
}


class Workers:
    """`count` worker processes, started when they are needed. Loaders may share them.

    Make each `load` once: a worker keeps every function that it is sent.
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
        """Kills the processes. Unfinished futures raise, and so does submit from then on."""
        self._end()
        self._threads.shutdown()

    def submit(self, load: Callable[[Any, int], Any], items: Sequence[tuple[Any, int]]) -> Future[list[Any]]:
        """Computes load(item, epoch) of every (item, epoch) in a worker; load and items are pickled.

        For an item on which two workers died or hung, the result is a Skipped with the item's `key`.
        The future raises RuntimeError with the worker's traceback if load raised, StorageError if that is
        what it raised, and UserError if no worker starts.
        """
        return self._threads.submit(self._compute, load, items)

    def _compute(self, load: Any, items: Sequence[tuple[Any, int]]) -> list[Any]:
        try:
            return self._ask(load, items)
        except LostError:
            return [self._alone(load, item, epoch) for item, epoch in items]

    def _alone(self, load: Any, item: Any, epoch: int) -> Any:
        try:
            return self._ask(load, [(item, epoch)])[0]
        except LostError as lost:
            return Skipped(str(getattr(item, "key", item)), f"its worker process died twice: {lost}")

    def _ask(self, load: Any, items: Sequence[tuple[Any, int]]) -> list[Any]:
        worker = getattr(self._own, "worker", None)
        if worker not in self._running:
            worker = self._own.worker = _Worker()
            self._running.add(worker)
        try:
            if self._end.alive:
                return worker.ask(load, items, self._answer_seconds)
        except LostError:
            self._running.remove(worker)
            if self._end.alive:
                raise
        worker.kill()
        raise RuntimeError("the loader's workers are closed")


def _end(threads: ThreadPoolExecutor, running: set["_Worker"]) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for worker in list(running):
        worker.kill()


class _Worker:
    """One process, which runs `serve`."""

    def __init__(self) -> None:
        self._child = Child("-m", "jaxthd.data.workers", **_ENVIRONMENT)
        self._sent: dict[int, Any] = {}
        try:
            self._child.receive(ANSWER_SECONDS)
        except LostError as lost:
            raise UserError(
                f"a worker process of the loader did not start ({lost}; it may say more above); "
                "correct the Python environment, or set data.workers=0 to do without"
            ) from lost

    def ask(self, load: Any, items: Sequence[tuple[Any, int]], seconds: float) -> list[Any]:
        """Returns [load(*item) for item in items]. Raises RuntimeError if load raised, and LostError."""
        n = id(load)
        if n not in self._sent:
            self._request((n, load, []), ANSWER_SECONDS)  # the worker imports what load needs
            self._sent[n] = load  # kept, so that no other object gets this id
        return self._request((n, None, items), seconds)

    def kill(self) -> None:
        """Kills the process, unless it has ended."""
        self._child.kill()

    def _request(self, request: tuple[int, Any, Sequence[tuple[Any, int]]], seconds: float) -> list[Any]:
        # A class of the program that runs or of a config file goes along: a worker could not import it.
        self._child.send(cloudpickle.dumps(request))
        found, error = pickle.loads(self._child.receive(seconds))
        if isinstance(error, StorageError):
            raise error
        if error:
            raise RuntimeError(f"a worker process of the loader could not read {error}")
        return found


def serve(parent: Connection) -> None:
    """Answers each request (n, load, items) with ([load(*item) for item in items], "") or (None, the error).

    load: function number n in the first request that uses it, None afterwards. If it has a method `ahead`,
    that is called first, with all items of the request. Before any request, one answer is sent to say that
    the process has started. Requests and answers are pickled. Raises EOFError or OSError once the parent has
    ended.
    """
    loads: dict[int, Any] = {}
    parent.send_bytes(b"")
    while True:
        request = parent.recv_bytes()
        item = None
        try:
            n, load, items = pickle.loads(request)
            load = loads.setdefault(n, load)
            found = []
            if ahead := getattr(load, "ahead", None):
                ahead([item for item, _ in items])
            for item in items:
                found.append(load(*item))
            answer = pickle.dumps((found, ""), pickle.HIGHEST_PROTOCOL)
        except StorageError as error:
            answer = pickle.dumps((None, StorageError(str(error))))
        except Exception:
            answer = pickle.dumps((None, f"{item!r}: {traceback.format_exc()}"))
        parent.send_bytes(answer)


if __name__ == "__main__":
    with suppress(EOFError, OSError):  # the parent has ended, perhaps by kill -9: the pipe is closed
        serve(parents_end())
