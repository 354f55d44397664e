"""The program of a worker process: it makes documents until its pipe closes. jaxthd.data.workers starts it.

It imports what its work needs and no more: no jax, no grain.
"""

import pickle
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from jaxthd.data.child_process import parents_end


def serve(parent: Connection) -> None:
    """Answers every (n, load, items) by ([load(*item) for item in items], "") or (None, what went wrong).

    load: the function number n the first time, None from then on. The first answer, to no request, says that
    the process has started. Requests and answers are pickled. Raises EOFError or OSError once the parent is
    gone.
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
            for item in items:
                found.append(load(*item))
            answer = pickle.dumps((found, ""), pickle.HIGHEST_PROTOCOL)
        except Exception:
            answer = pickle.dumps((None, f"{item!r}: {traceback.format_exc()}"))
        parent.send_bytes(answer)


if __name__ == "__main__":
    with suppress(EOFError, OSError):  # the parent is gone, by a kill -9 too: its end of the pipe is closed
        serve(parents_end())
