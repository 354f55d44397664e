"""Runs several processes of one command on this machine, as if on several machines.

    python scripts/launch_local.py 2 -- jaxthd train configs/cp2.py

The command finds the address of process 0, the number of processes and its own number in the environment
variables that jaxthd.train reads for --coordinator, --processes and --process. Every line of output is
prefixed with the process's number. Ctrl-C, SIGTERM and the other signals that a run saves at reach every
process. When one process fails, the others are given time to notice, and are then killed. Exits with the
status of the first that failed, or 0.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from jaxthd.data.child_process import OF_THE_RUN
from jaxthd.run.signals import drop_unread_output

GRACE_SECONDS = 60.0
"""Seconds after a failure until the processes that still run are killed."""


def launch(count: int, command: Sequence[str]) -> int:
    """Runs the processes to their end. Returns the exit status."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    processes = []
    for number in range(count):
        own = {
            "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(number),
            "JAX_LOCAL_DEVICE_IDS": str(number),  # one GPU each; a process would take all
        }
        process = subprocess.Popen(
            command, env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        print(f"[{number}] pid {process.pid}", flush=True)
        processes.append(process)
    # The processes get Ctrl-C themselves, since they belong to the terminal's group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in OF_THE_RUN:
        if number != signal.SIGINT and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: _signal_all(processes, number))
    bad: list[int] = []
    threads = [threading.Thread(target=_follow, args=(*pair, bad)) for pair in enumerate(processes)]
    for thread in threads:
        thread.start()
    while not bad and any(thread.is_alive() for thread in threads):
        time.sleep(0.1)
    patience = time.monotonic() + GRACE_SECONDS
    for thread in threads:
        thread.join(max(0.0, patience - time.monotonic()))
    _signal_all(processes, signal.SIGKILL)
    for thread in threads:
        thread.join()
    return 0 if not bad else bad[0] if bad[0] > 0 else 128 - bad[0]


def _signal_all(processes: Sequence[subprocess.Popen[str]], number: int) -> None:
    drop_unread_output()
    for process in processes:
        process.send_signal(number)


def _follow(number: int, process: subprocess.Popen[str], bad: list[int]) -> None:
    """Shows a process's output until it ends; adds its exit status to `bad` if that is not 0."""
    for line in process.stdout or ():
        print(f"[{number}] {line}", end="", flush=True)
    if process.wait():
        bad.append(process.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("count", type=int, help="how many processes")
    parser.add_argument("command", nargs="+", help="what each runs, after --")
    options = parser.parse_args()
    sys.exit(launch(options.count, options.command))


if __name__ == "__main__":
    main()
