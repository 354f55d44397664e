"""Batches that one process of a machine makes for all of its processes that read the same rows.

Processes that share a data rank (its context, pipeline and tensor ranks) read the same rows. On a machine the
first of them runs the loader; it leaves each batch in memory that the others map, so that recordings are
decoded once a machine and the machine holds one copy of a batch.

The memory is a file without a name (memfd_create), which goes with the last process that maps it. Its
descriptor travels over a socket, by messages of 16 bytes: nobody waits for a reader, and nothing stays behind
a process that is killed.
"""

import mmap
import os
import pickle
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxthd.parallel.processes import START_SECONDS, STRANGER_SECONDS, exchange, process_id

_MESSAGE = struct.Struct("<QQ")
"""(generation, bytes of the index at the file's start)."""
_ALIGN = 64
"""Arrays begin at multiples of so many bytes, as NumPy and jax like them."""


class Batches(Protocol):
    """An iterator with a state, as grain's are."""

    def __next__(self) -> Any: ...

    def get_state(self) -> dict[str, Any]:
        """Returns where the next batch starts."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on at that state."""
        ...

    def close(self) -> None:
        """Ends the iterator; one that waits raises."""
        ...


class Sharers(NamedTuple):
    """The processes of this machine that read the same rows.

    leader: the first of them, which makes the batches. number: how many they are. sockets: in the leader
    those to all others, in another process the one to the leader.
    """

    leader: int
    number: int
    sockets: list[socket.socket]

    @property
    def leads(self) -> bool:
        """Whether this process makes the batches."""
        return self.leader == process_id()

    def close(self) -> None:
        """Ends the connections."""
        for each in self.sockets:
            each.close()


def find_sharers(rows: Sequence[int]) -> Sharers:
    """Connects the processes of this machine that read the same rows. All processes of the run call it.

    A process that reads these rows alone on its machine leads itself. Raises OSError where one does not
    connect in time.
    """
    server = socket.socket(socket.AF_UNIX)
    with server:
        name, token = f"jaxthd-{secrets.token_hex()}", secrets.token_hex()
        server.bind(f"\0{name}")  # of no folder: it goes with the socket
        server.listen()
        mine = [_machine(), list(rows)]
        all_processes = exchange([mine, name, token])
        same = [number for number, (theirs, _, _) in enumerate(all_processes) if theirs == mine]
        leader = same[0]
        if leader == process_id():
            return Sharers(leader, len(same), _accepted(server, token, len(same) - 1))
    _, name, token = all_processes[leader]
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"\0{name}")
    connection.sendall(token.encode())
    return Sharers(leader, len(same), [connection])


def _machine() -> str:
    """Names what the processes have in common that reach each other: the kernel, and its network namespace.

    Where there are no files without a name, every process has a machine of its own.
    """
    if not hasattr(os, "memfd_create"):
        return secrets.token_hex()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"


def _accepted(server: socket.socket, token: str, count: int) -> list[socket.socket]:
    """The connections of `count` processes that know the token. Others are dropped."""
    server.settimeout(START_SECONDS)
    found: list[socket.socket] = []
    while len(found) < count:
        connection, _ = server.accept()
        connection.settimeout(STRANGER_SECONDS)
        with suppress(OSError):
            said = connection.recv(len(token), socket.MSG_WAITALL)
            if secrets.compare_digest(said, token.encode()):
                connection.settimeout(None)
                found.append(connection)
                continue
        connection.close()
    return found


class HandedOut(Iterator[Any]):
    """The batches of `batches`, each of which the others of `sharers` get too, with the state after it."""

    def __init__(self, batches: Batches, sharers: Sharers) -> None:
        self._batches, self._sharers, self._generation = batches, sharers, 0

    def __next__(self) -> Any:
        made = next(self._batches)
        file, size = _written((made, self._batches.get_state()))
        try:
            for each in self._sharers.sockets:
                # One that is gone ends the run, and is named (jaxthd.parallel.processes).
                with suppress(OSError):
                    socket.send_fds(each, [_MESSAGE.pack(self._generation, size)], [file])
            return _mapped(file, size)[0]
        finally:
            os.close(file)

    def get_state(self) -> dict[str, Any]:
        """Returns where the next batch starts."""
        return self._batches.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on at that state. The others do the same, and drop what was handed out before."""
        self._generation += 1
        self._batches.set_state(state)

    def close(self) -> None:
        """Ends `batches`."""
        self._batches.close()


class Received(Iterator[Any]):
    """The batches that the leader of `sharers` hands out: in this process, those of HandedOut in the leader.

    next() is called once the leader has its batch. first: the state before the first batch.
    """

    def __init__(self, first: dict[str, Any], sharers: Sharers) -> None:
        self._state, self._sharers, self._generation = first, sharers, 0

    def __next__(self) -> Any:
        while True:
            message, files, _, _ = socket.recv_fds(
                self._sharers.sockets[0], _MESSAGE.size, 1, socket.MSG_CMSG_CLOEXEC
            )
            if not files:
                raise RuntimeError(
                    f"process {self._sharers.leader}, which loads the rows of this process, is gone"
                )
            try:
                generation, size = _MESSAGE.unpack(message)
                if generation == self._generation:
                    batch, self._state = _mapped(files[0], size)
                    return batch
            finally:
                os.close(files[0])

    def get_state(self) -> dict[str, Any]:
        """Returns where the next batch starts."""
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on at that state, as the leader does."""
        self._generation += 1
        self._state = state

    def close(self) -> None:
        """Does nothing: what is on its way goes with the sockets."""


def _written(value: Any) -> tuple[int, int]:
    """(a file in memory, bytes of the index at its start): a pickled value, its arrays beside it."""
    arrays: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(value, pickle.HIGHEST_PROTOCOL, buffer_callback=arrays.append)
    views = [array.raw() for array in arrays]
    index = pickle.dumps((pickled, [view.nbytes for view in views]))
    file = os.memfd_create("jaxthd-batch", os.MFD_CLOEXEC)
    at = _write(file, index, 0)
    for view in views:
        at = _write(file, view, at)
    os.ftruncate(file, at)
    return file, len(index)


def _write(file: int, content: bytes | memoryview, at: int) -> int:
    """Writes at a position of a file; returns where the next array begins."""
    view = memoryview(content)
    while len(view):
        done = os.pwrite(file, view, at)
        at, view = at + done, view[done:]
    return _aligned(at)


def _aligned(at: int) -> int:
    """The first position from here on at which an array may begin."""
    return -(-at // _ALIGN) * _ALIGN


def _mapped(file: int, size: int) -> Any:
    """The value that `_written` wrote. Its arrays are the file's pages, and copies of those written to."""
    memory = memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_COPY))
    pickled, sizes = pickle.loads(memory[:size])
    arrays, at = [], _aligned(size)
    for length in sizes:
        arrays.append(memory[at : at + length])
        at = _aligned(at + length)
    return pickle.loads(pickled, buffers=arrays)
