"""Renders chat templates in a process with limits (sandbox.py), since they are untrusted programs."""

import json
import signal
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxthd.data.child_process import Child, LostError

SECONDS = 10.0
"""Time limit for one request: a thousand times what a long conversation takes."""
START_SECONDS = 60.0
"""Time limit for the start of the process."""
SUPERVISED, SUPERVISED_END = "\ufdd1", "\ufdd2"
"""Marks around the text inside generation tags. Unicode assigns them to no character."""


class RenderError(ValueError):
    """A template raised an error or exceeded a limit. The message says which."""


class Renderer:
    """Renders one template in a process of its own.

    The process starts when it is needed and ends when this object is no longer referenced. Several threads
    may use it. Only the template and its time limit are pickled.
    """

    def __init__(self, source: str, seconds: float = SECONDS) -> None:
        self._source, self._seconds = source, seconds
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._end: Callable[[], object] | None = None

    def __reduce__(self) -> tuple[type["Renderer"], tuple[str, float]]:
        return Renderer, (self._source, self._seconds)

    def __call__(self, requests: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns the template's text for each set of variables, which are JSON values.

        Raises RenderError for a template that is invalid, raises an error, or exceeds a limit.
        """
        with self._lock:
            child = self._child or self._start()
            # The process ends itself before this time is over.
            return self._ask(child, list(requests), self._seconds + START_SECONDS)["texts"]

    def close(self) -> None:
        """Ends the process."""
        if self._end:
            self._end()
        self._child = None

    def _start(self) -> Child:
        child = Child("-m", "jaxthd.data.text.sandbox")
        # Done once: by close(), when nobody holds this object any more, or as the interpreter exits.
        self._end = weakref.finalize(self, child.end)
        try:
            self._ask(child, [self._source, self._seconds], START_SECONDS)
        except RenderError:
            self.close()
            raise
        self._child = child
        return child

    def _ask(self, child: Child, request: Any, seconds: float) -> Any:
        try:
            child.send(json.dumps(request).encode())
            answer = json.loads(child.receive(seconds))
        except LostError as lost:
            self.close()
            took_long = child.status in (-signal.SIGALRM, -signal.SIGKILL)
            too_long, ended = f"it took more than {self._seconds:g} s", "the process that renders it ended"
            raise RenderError(too_long if took_long else ended) from lost
        if "error" in answer:
            raise RenderError(answer["error"])
        return answer
