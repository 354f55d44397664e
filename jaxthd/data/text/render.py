"""Chat templates are programs that strangers wrote: rendered in a process with limits (sandbox.py)."""

import json
import signal
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxthd.data.child_process import Child, LostError

SECONDS = 10.0
"""Most that the renders of one request take: a thousand times what those of a long conversation do."""
START_SECONDS = 60.0
"""Most that the process takes to start."""
SUPERVISED, SUPERVISED_END = "\ufdd1", "\ufdd2"
"""Around what a template's generation tags hold, in its text: Unicode assigns them to no character."""


class RenderError(ValueError):
    """What a template raised, or which limit it passed."""


class Renderer:
    """Renders one template. Its process starts when needed, serves until nobody holds this object, and may be
    used by several threads. Pickled, it is the template alone.
    """

    def __init__(self, source: str, seconds: float = SECONDS) -> None:
        self._source, self._seconds = source, seconds
        self._open()

    def _open(self) -> None:
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._end: Callable[[], object] | None = None

    def __getstate__(self) -> tuple[str, float]:
        return self._source, self._seconds

    def __setstate__(self, state: tuple[str, float]) -> None:
        self._source, self._seconds = state
        self._open()

    def __call__(self, requests: Sequence[Mapping[str, Any]]) -> list[str]:
        """The template's text for each set of variables, which are JSON values.

        Raises RenderError for a template that is none, that raises, or that passes a limit.
        """
        with self._lock:
            child = self._child or self._start()
            # The process ends itself, earlier.
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
