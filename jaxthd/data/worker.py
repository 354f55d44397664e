"""The program of a worker process, which makes documents until its pipe closes.

jaxthd.data.workers starts it. It imports only what it needs: neither jax nor grain.
"""

import pickle
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from jaxthd.data.child_process import parents_end


def serve(parent: Connection) -> None:
    """Answers each request (n, load, items) with ([load(*item) for item in items], "") or (None, the error).

    load: function number n in the first request that uses it, None afterwards. Before any request, one answer
    is sent to say that the process has started. Requests and answers are pickled. Raises EOFError or OSError
    once the parent has ended.
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
    with suppress(EOFError, OSError):  # the parent has ended, perhaps by kill -9: the pipe is closed
        serve(parents_end())
