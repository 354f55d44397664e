"""Reward functions that misbehave in every way. Worker processes import this."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxthd.rl.rewards import Group


def misbehave(group: Group) -> Any:
    """Behaves as the group's field "way" says: a name in WAYS; "well" where it says nothing."""
    return WAYS[group.fields.get("way", "well")](group)


def _raise(group: Group) -> None:
    raise ValueError(f"of {group.key}\nin two lines")


def _sleep_in_python(group: Group) -> None:
    while True:
        pass


def _sleep_in_c(group: Group) -> None:
    time.sleep(600)


def _ignore_signals(group: Group) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(600)


def _hold_the_lock(group: Group) -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")  # exponential, and no other thread of Python runs meanwhile


def _leave_a_process(group: Group) -> None:
    child = subprocess.Popen(["sleep", "600"])
    if "file" in group.fields:
        Path(group.fields["file"]).write_text(str(child.pid))
    time.sleep(600)


def _fork(group: Group) -> list[float]:
    os.fork()  # both copies return
    return [float(len(answer)) for answer in group.answers]


def _print(group: Group) -> list[float]:
    print("printed by a reward function", flush=True)
    os.write(1, b"written by a reward function\n")
    return [1.0, 2.0]


WAYS: dict[str, Callable[[Group], Any]] = {
    "well": lambda group: [float(len(answer)) for answer in group.answers],
    "raise": _raise,
    "exit": lambda group: sys.exit(3),
    "nan": lambda group: [0.0, float("nan")],
    "infinite": lambda group: [0.0, float("-inf")],
    "too few": lambda group: [0.0],
    "too many": lambda group: iter(int, 1),  # without an end
    "number": lambda group: 1.0,
    "nothing": lambda group: None,
    "dict": lambda group: {"a": 1.0, "b": 2.0},
    "text": lambda group: "12",
    "texts": lambda group: ["1", "2"],
    "lock": lambda group: [threading.Lock(), 1.0],
    "complex": lambda group: [1.0, 1j],
    "endless loop": _sleep_in_python,
    "sleep": _sleep_in_c,
    "ignore signals": _ignore_signals,
    "hold the lock": _hold_the_lock,
    "leave a process": _leave_a_process,
    "os._exit": lambda group: os._exit(7),
    "segfault": lambda group: ctypes.string_at(0),
    "kill": lambda group: os.kill(os.getpid(), signal.SIGKILL),
    "fork": _fork,
    "print": _print,
    "whole numbers": lambda group: (1, True),
}
"""The ways, by name."""
HANGING = ("endless loop", "sleep", "ignore signals", "hold the lock", "leave a process")
"""Those that do not come back."""
