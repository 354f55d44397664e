"""Several processes of one run: they start together, stay in step, and end together.

jax.distributed connects them. They exchange values through its key-value store, not through the devices. So a
missing process can be named, and the others do not hang in a collective.

Each process has a connection to process 0. The operating system closes it when the process ends, for whatever
reason: the others notice at once, and end. If a machine or the network fails, nothing closes the connection;
then jax's heartbeats end the others.

With one process, nothing here has any effect.
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

# jax's public interface has no key-value store, and no barrier that names the missing processes.
from jax._src.distributed import _jax, global_state

from jaxthd.errors import UserError
from jaxthd.parallel.beats import beat

HEARTBEAT_SECONDS = 30
"""A process whose heartbeats stop for this long is considered gone."""
START_SECONDS = 300
"""Seconds that processes wait for the others to start."""
PATIENCE_SECONDS = 600
"""Seconds that processes wait at an exchange for one that is alive: longer than compiling takes."""
STRANGER_SECONDS = 10
"""Seconds that process 0 gives a connection to say that it is of this run."""
NOTICE_SECONDS = 5
"""Every process has been told within this time that another one is gone."""

_numbers = count()
_names: list[str] = []
_connections: list[socket.socket] = []
"""In process 0, the connections to all others; in any other process, the one to process 0."""
_ending = threading.Lock()
"""Held by the thread that ends this process."""


@contextmanager
def started(coordinator: str | None, processes: int | None, process: int | None) -> Iterator[int]:
    """Joins the processes of this run, if there are several; yields how many there are.

    coordinator: HOST:PORT, where process 0 listens.
    processes: how many processes there are.
    process: the index of this process, from 0.
    If all three are None, SLURM's variables give them where srun has started several tasks; otherwise there
    is one process.

    Call it before any jax device is used. Inside, only process 0 writes to standard output.
    An exception raised inside ends this process and the others, with exit status 1 and a message that names
    this process. If some processes are missing after START_SECONDS, the others name them and end.
    Raises UserError if only some of the three are given, if they are malformed, or if process 0 cannot
    listen.
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
    """Connects this process to the others. Returns False if there is only one process."""
    given = [x is not None for x in (coordinator, processes, process)]
    if any(given) and not all(given):
        raise UserError(
            f"--coordinator is {coordinator}, --processes {processes} and --process {process}; expected all "
            "three, or none: name process 0's HOST:PORT, the number of processes, and this one's from 0"
        )
    # SLURM sets this variable only in tasks that srun has started, unlike its other variables.
    if not any(given) and int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) < 2:
        return False
    if all(given) and not (re.fullmatch(r".+:\d+", str(coordinator)) and process in range(processes or 0)):
        raise UserError(
            f"--coordinator is {coordinator}, --processes {processes} and --process {process}; expected "
            "HOST:PORT, and --process from 0 to one less than --processes: correct them"
        )
    if processes == 1:
        return False
    # jax's preemption service would take SIGTERM for itself; the run handles it (jaxthd.run.signals).
    jax.config.update("jax_enable_preemption_service", False)
    # If process 0 is missing, jax does not tell this process.
    alone = threading.Timer(START_SECONDS + NOTICE_SECONDS, _give_up)
    alone.start()
    # jax.distributed.initialize has no public way to pass cluster_register_timeout, which names the missing
    # process: hence the patch of jax's private module.
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


def process_id() -> int:
    """The index of this process among those of the run."""
    return int(global_state.process_id)


def tell(topic: str, value: Any) -> None:
    """Leaves a value (JSON) where all processes find it, in place of the one before. It waits for
    process 0, which keeps it."""
    if global_state.client is not None:
        with suppress(jax.errors.JaxRuntimeError):  # process 0 is gone, or all end
            key = f"jaxthd-{topic}/{global_state.process_id}"
            global_state.client.key_value_set(key, json.dumps(value), allow_overwrite=True)


def reports(topic: str, *, of_all: bool = True) -> dict[int, Any]:
    """Returns what the processes have told last, by process; {} where there is one.

    of_all: else what process 0 alone has told. It waits for process 0, which has it. Raises what jax raises.
    """
    client = global_state.client
    if client is None:
        return {}
    if not of_all:
        return {0: json.loads(client.key_value_try_get(f"jaxthd-{topic}/0"))}
    found = client.key_value_dir_get(f"jaxthd-{topic}/")
    return {int(key.rpartition("/")[2]): json.loads(text) for key, text in found}


def is_first() -> bool:
    """Whether this is process 0, which writes whatever the run writes only once."""
    return global_state.process_id == 0


def exchange(value: Any) -> list[Any]:
    """Returns the values of all processes, in order of process, after a round trip through JSON.

    All processes must call it, equally often.
    Raises UserError that names the processes that have not called it after PATIENCE_SECONDS.
    """
    beat()
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
    if number and is_first():  # all have read the exchange before
        client.key_value_delete(f"jaxthd/{number - 1}/")
    return [json.loads(found[key]) for key in keys]


def wait_for_all() -> None:
    """Returns once all processes have called it. Raises UserError as `exchange` does."""
    exchange(None)


def require_same(what: str, value: Any) -> None:
    """Raises UserError if values differ; it names the processes whose value is not that of process 0."""
    first, *_ = values = exchange(value)
    others = [name for name, other in zip(_names, values, strict=False) if other != first]
    if others:
        raise UserError(
            f"{what} in {', '.join(others)} is not that in {_names[0]}; expected the same command and the "
            "same files in all processes: correct what differs"
        )


def _watch(me: int, number: int) -> None:
    """Connects every process to process 0. Threads then wait for the end of any process."""
    if is_first():
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        server = socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6)
        server.settimeout(START_SECONDS)
        token = secrets.token_hex()
        exchange([server.getsockname()[1], token])
        while len(_connections) < number - 1:
            connection, _ = server.accept()
            connection.settimeout(STRANGER_SECONDS)
            # A port scanner, for one, is no process of this run: whatever it sends, or nothing, is dropped.
            with suppress(OSError, ValueError):
                said = connection.makefile("r")
                if said.readline(len(token) + 1) == f"{token}\n":
                    _listen(connection, said, int(said.readline(20)))
                    continue
            connection.close()
        server.close()
    else:
        (port, token), *_ = exchange(None)
        host = str(global_state.coordinator_address).rpartition(":")[0].strip("[]")
        connection = socket.create_connection((host, port))
        connection.sendall(f"{token}\n{me}\n".encode())
        _listen(connection, connection.makefile("r"), 0)


def _listen(connection: socket.socket, said: TextIO, process: int) -> None:
    """Waits in a thread for the message of _say from `process`. None comes if that process was killed."""

    def wait() -> None:
        """Reads until the connection closes, and ends this process if the other one did not end well."""
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
    """Sends the last message on every connection: [process that is gone, reason]; None for a normal end."""
    for connection in _connections:
        with suppress(OSError):
            connection.sendall(json.dumps(text).encode())
            connection.shutdown(socket.SHUT_WR)


def _end(gone: int, reason: str) -> NoReturn:
    """Ends this process without cleaning up: open resources are useless now, and others may be gone."""
    _say([gone, reason])
    if is_first():
        time.sleep(1)  # jax's service ends with process 0, and jax then aborts the others
    os._exit(1)


def _fail(error: BaseException) -> NoReturn:
    readable = isinstance(error, UserError | OSError | ImportError)
    if not readable:
        time.sleep(NOTICE_SECONDS)  # usually another process is gone: _listen finds out which
    _ending.acquire()
    if readable:
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
    _end(global_state.process_id, str(error).partition("\n")[0] or type(error).__name__)
