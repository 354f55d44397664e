"""Several processes of one run: started together, kept in step, ended together.

jax.distributed connects them. What they tell each other goes through its key-value store, not through the
devices: a process that does not come is named, and leaves nobody in a collective. Each has a connection to
process 0, which the kernel closes when the process ends, however that happens: the others hear of it at once,
and end. Where a machine or the network is gone nothing is closed: then jax's heartbeats end the others.

With one process nothing here does anything.
"""

import json
import os
import re
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from itertools import count
from typing import Any, NoReturn, TextIO
from unittest.mock import patch

import jax

# The public interface has neither the key-value store nor barriers that say who is missing.
from jax._src.distributed import _jax, global_state

from jaxthd.errors import UserError

HEARTBEAT_SECONDS = 30
"""A process of which nothing is heard for so long is gone."""
START_SECONDS = 300
"""Most seconds that processes wait for the others to be started."""
PATIENCE_SECONDS = 600
"""Most seconds that processes wait at an exchange for one that is alive: more than compiling takes."""
NOTICE_SECONDS = 5
"""Within so long every process has heard that one is gone."""

_numbers = count()
_names: list[str] = []
_connections: list[socket.socket] = []
"""Process 0's to all others; that of any other to process 0."""
_ending = threading.Lock()
"""Held by the thread that ends this process."""


@contextmanager
def started(coordinator: str | None, processes: int | None, process: int | None) -> Iterator[int]:
    """Joins the processes of this run, if there are several; yields their number.

    coordinator: HOST:PORT, where process 0 listens; processes: their number; process: this one's, from 0. All
        None: as SLURM's srun says, where it has started several tasks; else there is one process.
    Comes before any jax device is used.
    What is raised inside ends this process, and the others, with exit status 1 and a message that names it.
    Only process 0 writes to standard output.
    Where not all have come after START_SECONDS, all end, saying which are missing. Raises UserError where
    only some of the three are given, and where process 0 cannot listen.
    """
    if not _join(coordinator, processes, process):
        yield 1
        return
    try:
        me, number = global_state.process_id, global_state.num_processes
        _names[:] = [f"process {i}" for i in range(number)]
        _names[:] = exchange(f"process {me} (pid {os.getpid()} on {socket.gethostname()})")
        _watch(me, number)
        with open(os.devnull, "w") as nowhere, redirect_stdout(sys.stdout if is_first() else nowhere):
            yield number
        exchange("the end")
        _say(None)
    except BaseException as error:
        _fail(error)
    jax.distributed.shutdown()


def _join(coordinator: str | None, processes: int | None, process: int | None) -> bool:
    """False where there is only one process."""
    given = [x is not None for x in (coordinator, processes, process)]
    if any(given) and not all(given):
        raise UserError(
            f"--coordinator is {coordinator}, --processes {processes} and --process {process}; expected all "
            "three, or none: name process 0's HOST:PORT, the number of processes, and this one's from 0"
        )
    # Of the variables that SLURM sets, this one is only in tasks that srun has started.
    if not any(given) and int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) < 2:
        return False
    if all(given) and not (re.fullmatch(r".+:\d+", str(coordinator)) and process in range(processes or 0)):
        raise UserError(
            f"--coordinator is {coordinator}, --processes {processes} and --process {process}; expected "
            "HOST:PORT, and --process from 0 to one less than --processes: correct them"
        )
    if processes == 1:
        return False
    # It would keep SIGTERM to itself; the run answers it, see jaxthd.run.signals.
    jax.config.update("jax_enable_preemption_service", False)
    # A process whose process 0 is not there learns nothing from jax.
    alone = threading.Timer(START_SECONDS + NOTICE_SECONDS, _give_up)
    alone.start()
    # With this limit, which jax.distributed does not pass on, the service tells all which process is missing.
    service = partial(_jax.get_distributed_runtime_service, cluster_register_timeout=START_SECONDS)
    try:
        with patch.object(_jax, "get_distributed_runtime_service", service):
            jax.distributed.initialize(
                coordinator,
                processes,
                process,
                cluster_detection_method="deactivate" if coordinator else None,
                initialization_timeout=START_SECONDS + 2 * NOTICE_SECONDS,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=HEARTBEAT_SECONDS,
            )
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"process 0 cannot listen at {global_state.coordinator_address} ({error}); expected a free port "
            "of its own machine: choose another for --coordinator"
        ) from error
    finally:
        alone.cancel()
    return True


def _give_up() -> NoReturn:
    print(
        f"error: process {global_state.process_id} has no answer from process 0 at "
        f"{global_state.coordinator_address} after {START_SECONDS} s; expected it to listen there: start it, "
        "and see that the address is right and can be reached",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def is_first() -> bool:
    """Whether this is process 0, which writes what is written once."""
    return global_state.process_id == 0


def exchange(value: Any) -> list[Any]:
    """What every process has given, in their order, as JSON gives it back. All call it, the same times.

    Raises UserError naming the processes that have not come after PATIENCE_SECONDS.
    """
    text, client = json.dumps(value), global_state.client
    if client is None:
        return [json.loads(text)]
    number = next(_numbers)
    keys = [f"jaxthd/{number}/{i}" for i in range(global_state.num_processes)]
    client.key_value_set(keys[global_state.process_id], text)
    try:
        client.wait_at_barrier("jaxthd", PATIENCE_SECONDS * 1000)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        here = dict(client.key_value_dir_get(f"jaxthd/{number}/"))
        missing = [name for name, key in zip(_names, keys, strict=True) if key not in here]
        raise UserError(
            f"{', '.join(missing)} did not come within {PATIENCE_SECONDS} s to where the others wait; "
            "expected all in step: see what it is doing (its output, its disk), and start the run again"
        ) from error
    found = dict(client.key_value_dir_get(f"jaxthd/{number}/"))
    if number and is_first():  # all have read the one before
        client.key_value_delete(f"jaxthd/{number - 1}/")
    return [json.loads(found[key]) for key in keys]


def require_same(what: str, value: Any) -> None:
    """Raises UserError where processes have different values, naming those that differ from process 0."""
    first, *_ = values = exchange(value)
    others = [name for name, other in zip(_names, values, strict=False) if other != first]
    if others:
        raise UserError(
            f"{what} in {', '.join(others)} is not that in {_names[0]}; expected the same command and the "
            "same files in all processes: correct what differs"
        )


def _watch(me: int, number: int) -> None:
    """Connects every process to process 0, and listens in threads for which is gone."""
    if is_first():
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        server = socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6)
        server.settimeout(START_SECONDS)
        token = secrets.token_hex()
        exchange([server.getsockname()[1], token])
        while len(_connections) < number - 1:
            connection, _ = server.accept()
            connection.settimeout(START_SECONDS)
            said = connection.makefile("r")
            if said.readline() == f"{token}\n":  # else it is none of ours
                _listen(connection, said, int(said.readline()))
        server.close()
    else:
        (port, token), *_ = exchange(None)
        host = str(global_state.coordinator_address).rpartition(":")[0].strip("[]")
        connection = socket.create_connection((host, port))
        connection.sendall(f"{token}\n{me}\n".encode())
        _listen(connection, connection.makefile("r"), 0)


def _listen(connection: socket.socket, said: TextIO, process: int) -> None:
    """Takes up the connection to `process`. What comes is _say's; nothing, where the process was killed."""

    def wait() -> None:
        text = ""
        with suppress(OSError):
            text = said.read()
        gone, reason = (json.loads(text) or (None, "")) if text else (process, "it was ended from outside")
        if gone is not None and _ending.acquire(blocking=False):
            print(
                f"error: {_names[gone]} is gone: {reason}. This process ends too", file=sys.stderr, flush=True
            )
            _end(gone, reason)

    connection.settimeout(None)
    _connections.append(connection)
    threading.Thread(target=wait, daemon=True).start()


def _say(text: Any) -> None:
    """The last words on every connection: [process that is gone, reason], or None for an orderly end."""
    for connection in _connections:
        with suppress(OSError):
            connection.sendall(json.dumps(text).encode())
            connection.shutdown(socket.SHUT_WR)


def _end(gone: int, reason: str) -> NoReturn:
    """Without waiting for anything: what is open is of no use, and others may be gone."""
    _say([gone, reason])
    if is_first():
        time.sleep(1)  # with process 0 goes jax's service, and then jax aborts the others
    os._exit(1)


def _fail(error: BaseException) -> NoReturn:
    readable = isinstance(error, UserError | OSError | ImportError)
    if not readable:
        time.sleep(NOTICE_SECONDS)  # mostly another process is gone: meanwhile _listen hears which
    _ending.acquire()
    if readable:
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
    _end(global_state.process_id, str(error).partition("\n")[0] or type(error).__name__)
