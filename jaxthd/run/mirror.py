"""A workdir in an object store: the run works in a folder on its machine, which is sent to the store behind
it.

So no step waits for the store, and a store that does not answer for a while stops no run. What was sent last
is a whole state of the run (jaxthd/files/run_store.py), from which any machine continues it.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import gethostname

from jaxthd.errors import StorageError, UserError
from jaxthd.files.run_store import RunStore
from jaxthd.files.stores import ConflictError, is_url
from jaxthd.parallel.processes import exchange, is_first, wait_for_all

LOOK_SECONDS = 1.0
"""Seconds between two looks at what is new."""
LINES_SECONDS = 30.0
"""Seconds after which lines of metrics are sent although no checkpoint is new."""


@contextmanager
def mirrored(workdir: Path) -> Iterator[Path]:
    """The workdir, or the folder on this machine that stands for one in a store until the end.

    All processes call it; process 0 fetches what the store holds, and sends what is new: each checkpoint as
    soon as it is whole, all that is left at the end. Raises UserError where another run has the workdir,
    where it took it over meanwhile, and for processes of several machines; StorageError where the store does
    not answer.
    """
    if not is_url(workdir):
        yield workdir
        return
    machines = sorted(set(exchange(gethostname())))
    if len(machines) > 1:
        raise UserError(
            f"{workdir} is in a store, and this run has processes on {len(machines)} machines "
            f"({machines[0]}, ...); "
            "expected one machine, whose processes share a folder: mount the store and name the mount, or "
            "choose "
            "a --workdir on a common file system"
        )
    store = RunStore(str(workdir))
    with ExitStack() as stack:
        sender = None
        if is_first():
            stack.enter_context(store.held())
            store.fetch()
            sender = _Sender(store)
            sender.start()
            print(f"{workdir} is kept in {store.folder} on this machine, and sent from there")
        wait_for_all()
        try:
            yield store.folder
        except BaseException:
            if sender:
                sender.end(quiet=True)
            raise
        if sender:
            sender.end()


class _Sender(threading.Thread):
    """Sends what is new. Another run in the same place ends this one, as a signal does."""

    def __init__(self, store: RunStore) -> None:
        super().__init__(name="mirror", daemon=True)
        self._store, self._ended = store, threading.Event()
        self._taken = self._has_failed = False
        try:
            store.claim()
        except ConflictError as error:
            raise UserError(self._taken_text()) from error

    def run(self) -> None:
        """Looks until end()."""
        looks = 0
        while not self._ended.wait(LOOK_SECONDS) and not self._taken:
            looks += 1
            if self._store.has_new_checkpoints() or looks * LOOK_SECONDS >= LINES_SECONDS:
                looks = 0
                self._try()

    def _try(self) -> StorageError | None:
        """Sends; returns the error where the store is the cause."""
        try:
            self._store.push()
        except ConflictError:
            self._taken = True
            os.kill(os.getpid(), signal.SIGTERM)
        except StorageError as error:
            if not self._has_failed:
                print(
                    f"warning: {error}. The run goes on, in {self._store.folder}", file=sys.stderr, flush=True
                )
            self._has_failed = True
            return error
        if self._has_failed and not self._taken:
            print(f"{self._store.url} is written again", file=sys.stderr, flush=True)
            self._has_failed = False
        return None

    def end(self, *, quiet: bool = False) -> None:
        """Sends what is left. quiet: another error is on its way, which this one must not hide."""
        self._ended.set()
        self.join()
        failed = None if self._taken else self._try()
        if self._taken and not quiet:
            raise UserError(self._taken_text())
        if failed and not quiet:
            raise StorageError(
                f"{failed}. The end of the run is in {self._store.folder} alone: the same command on this "
                f"machine "
                "sends it"
            ) from failed

    def _taken_text(self) -> str:
        return (
            f"another run has begun in {self._store.url} meanwhile, and goes on from what was sent; "
            f"expected one "
            "at a time: choose another --workdir, or stop that one and run the same command again"
        )
