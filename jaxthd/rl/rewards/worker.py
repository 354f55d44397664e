"""The program of a process that computes rewards, until its pipe closes; rewarder.py starts it.

Functions of users run here, which may do anything: raise, hang, print, end the process. So this process
decides nothing; whoever started it kills it when its time is over. It ends with whoever started it: a thread
that waits at the pipe ends it at once, also within a function; where the function does not let Python's other
threads run, the alarm does, a second after the time limit.
"""

import json
import math
import os
import pickle
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Set
from itertools import islice
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from jaxthd.data.child_process import parents_end
from jaxthd.errors import UserError
from jaxthd.rl.rewards.find import bound, reason_of
from jaxthd.rl.rewards.group import Group


class WrongRewardsError(Exception):
    """A function returned something else than one number for each answer. The message says what."""


def serve(parent: Connection, receive: Callable[[], bytes]) -> None:
    """Answers requests, one after the other. Before the first one, one answer says that it has started.

    (n, setting, folders, seconds) finds function number n; the answer is {}. (n, group, seconds) computes its
    rewards for the group; the answer is {"values"}, one for each answer. Where that fails it is {"error",
    "kind"}. kind is "settings" for a function that cannot be had so, "call" for one that can never work so,
    "result" for a result of the wrong type or number, and "raised" for anything else. Requests are pickled,
    answers are JSON.
    """
    functions: dict[int, Callable[[Group], Any]] = {}
    process = os.getpid()
    parent.send_bytes(b"{}")
    while True:
        n, what, *rest = pickle.loads(receive())
        signal.setitimer(signal.ITIMER_REAL, rest[-1] + 1.0)
        answer: dict[str, Any] = {}
        try:
            if isinstance(what, Group):
                # What a function draws at random depends on the group alone, not on who computed what before.
                random.seed(what.key)
                answer = {"values": numbers_in(functions[n](what), len(what.answers))}
            else:
                functions[n] = bound(what, rest[0])
        except UserError as error:
            answer = {"error": str(error), "kind": "call" if isinstance(what, Group) else "settings"}
        except WrongRewardsError as error:
            answer = {"error": str(error), "kind": "result"}
        except BaseException as error:  # also SystemExit and KeyboardInterrupt
            is_mistake = isinstance(error, NameError | ImportError) or is_about_group(error)
            answer = {"error": reason_of(error), "kind": "call" if is_mistake else "raised"}
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        if os.getpid() != process:  # a function forked, and this copy would answer a second time
            os._exit(1)
        parent.send_bytes(json.dumps(answer).encode())


def is_about_group(error: BaseException) -> bool:
    """Whether a function asked a group for an attribute that no group has."""
    return isinstance(error, AttributeError) and isinstance(error.obj, Group)


def numbers_in(result: Any, count: int) -> list[float]:
    """A function's result as finite numbers. Raises WrongRewardsError where it is not `count` of them."""
    if not isinstance(result, Iterable) or isinstance(result, str | bytes | Mapping | Set):
        raise WrongRewardsError(f"it returned {_shown(result)}; expected a list of {count} numbers")
    values = list(islice(result, count + 1))
    if len(values) != count:
        found = f"more than {count}" if len(values) > count else str(len(values))
        raise WrongRewardsError(f"it returned {found} values; expected one for each of the {count} answers")
    numbers = []
    for number, value in enumerate(values):
        is_number = hasattr(value, "__float__") and not isinstance(value, str | bytes)
        if not is_number or getattr(value, "shape", ()) != ():
            raise WrongRewardsError(f"for answer {number} it returned {_shown(value)}; expected a number")
        numbers.append(float(value))
        if not math.isfinite(numbers[-1]):
            raise WrongRewardsError(f"for answer {number} it returned {value}; expected a finite number")
    return numbers


def _shown(value: Any) -> str:
    return "None" if value is None else f"{repr(value)[:100]} of type {type(value).__name__}"


def _end_with_parent(parent: Connection, requests: "SimpleQueue[bytes]") -> None:
    """Passes requests on. Once the pipe closes, it ends this process and all that it started."""
    try:
        while True:
            requests.put(parent.recv_bytes())
    except (EOFError, OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)


def main() -> None:
    """Serves the parent process until its pipe closes."""
    parent = parents_end()
    os.set_inheritable(parent.fileno(), False)
    os.dup2(2, 1)  # what functions print goes to stderr: a command's stdout is its own
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    requests: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_end_with_parent, args=(parent, requests), daemon=True).start()
    serve(parent, requests.get)


if __name__ == "__main__":
    main()
