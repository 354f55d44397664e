"""Connections to process 0 that are of no process of the run."""

import socket
import threading
from queue import SimpleQueue

import pytest

from jaxthd.parallel import processes


def test_strangers_at_the_port_of_a_run_are_dropped(monkeypatch: pytest.MonkeyPatch):
    told: SimpleQueue[tuple[int, str]] = SimpleQueue()
    monkeypatch.setattr(processes, "exchange", told.put)
    monkeypatch.setattr(processes, "STRANGER_SECONDS", 0.2)
    monkeypatch.setattr(processes, "_connections", [])
    thread = threading.Thread(target=processes._watch, args=(0, 2), daemon=True)
    thread.start()
    port, token = told.get(timeout=30)

    def connect(said: bytes) -> socket.socket:
        connection = socket.create_connection(("localhost", port), timeout=30)
        connection.sendall(said)
        return connection

    strangers = [
        connect(said)
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b"x" * 100_000, f"{token}\n".encode())
    ]
    connect(b"").close()
    mine = connect(f"{token}\n1\n".encode())
    thread.join(30)
    assert not thread.is_alive()
    assert [x.getpeername()[1] for x in processes._connections] == [mine.getsockname()[1]]
    mine.sendall(b"null")  # a normal end
    for connection in (*strangers, mine, *processes._connections):
        connection.close()
