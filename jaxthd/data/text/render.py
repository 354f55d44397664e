"""Chat templates are programs that strangers wrote: rendered by jinja2's sandbox, in a process with limits.

The sandbox keeps a template from Python's objects, but not from loops without end or strings without bounds.
Here a render has a few seconds and a gigabyte; what takes more ends the process, and is an error.

This file is also that process's program. It imports what it needs and no more.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from multiprocessing.connection import Connection, Pipe
from typing import Any

SECONDS = 10.0
"""Most that the renders of one request take: a thousand times what those of a long conversation do."""
MEMORY = 1 << 30
"""Most bytes of the process's address space."""
LONGEST = 1 << 24
"""Most characters of a text."""
START_SECONDS = 60.0
LEARNT, LEARNT_END = "\ufdd1", "\ufdd2"
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
        self._process: subprocess.Popen[bytes] | None = None
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
            if self._process is None:
                self._start()
            self._pipe.send_bytes(json.dumps(list(requests)).encode())
            answer = self._receive(self._seconds + START_SECONDS)  # the process ends itself, earlier
        if "error" in answer:
            raise RenderError(answer["error"])
        return answer["texts"]

    def close(self) -> None:
        """Ends the process."""
        if self._end:
            self._end()
        self._process = None

    def _start(self) -> None:
        self._pipe, childs_end = Pipe()
        with childs_end:
            fd = childs_end.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(fd)],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,  # Ctrl-C is for those who wait for it
            )
        # Done once: by close(), when nobody holds this object any more, or as the interpreter exits.
        self._end = weakref.finalize(self, _end, self._process, self._pipe)
        self._pipe.send_bytes(json.dumps([self._source, self._seconds]).encode())
        answer = self._receive(START_SECONDS)
        if "error" in answer:
            self.close()
            raise RenderError(answer["error"])

    def _receive(self, seconds: float) -> Any:
        try:
            if self._pipe.poll(seconds):
                return json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            pass
        process = self._process
        self.close()
        took_long = process is not None and process.returncode in (-signal.SIGALRM, -signal.SIGKILL)
        raise RenderError(
            f"it took more than {self._seconds:g} s" if took_long else "the process that renders it ended"
        )


def _end(process: "subprocess.Popen[bytes]", pipe: Connection) -> None:
    pipe.close()  # the process ends by itself, having nothing to do
    with suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    process.kill()
    process.wait()


def serve(parent: Connection) -> None:
    """Answers [source, seconds] by {} or {"error"}, then lists of variables by {"texts"} or {"error"}.

    Raises EOFError or another OSError once the parent is gone.
    """
    make, (source, seconds) = make_environment().from_string, json.loads(parent.recv_bytes())
    # The sandbox has no way to a file; nor is this process allowed to write one.
    for limit, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_FSIZE, 0)):
        with suppress(ValueError, OSError):
            resource.setrlimit(limit, (most, most))

    def answer(compute: Callable[[], dict[str, Any]]) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends the process, whatever it is doing
        try:
            found = json.dumps(compute())
        except Exception as error:
            found = json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]})
        signal.setitimer(signal.ITIMER_REAL, 0)
        parent.send_bytes(found.encode())

    template: Any = None

    def read() -> dict[str, Any]:
        nonlocal template
        template = make(source)  # which computes what is constant
        return {}

    def render() -> dict[str, Any]:
        texts = [template.render(**variables) for variables in requests]
        longest = max(map(len, texts), default=0)
        if longest > LONGEST:
            raise ValueError(f"a text of {longest} characters; expected at most {LONGEST}")
        return {"texts": texts}

    answer(read)
    while True:
        requests = json.loads(parent.recv_bytes())
        answer(render)


def make_environment() -> Any:
    """jinja2's sandbox with what transformers gives chat templates (utils/chat_template_utils.py)."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension
    from jinja2.ext import loopcontrols as loop_controls
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %}: what the assistant says."""

        tags = {"generation"}  # noqa: RUF012  (as jinja2 has it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        def marked(self, caller: Callable[[], str]) -> str:
            return f"{LEARNT}{caller()}{LEARNT_END}"

    class GuardedNamespace(Namespace):
        """Without names that begin with an underscore, by which some have left the sandbox."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # a variable may be called self
            self, *rest = args
            attributes = dict(*rest, **kwargs)
            for name in attributes:
                GuardedNamespace._check(name)
            Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            GuardedNamespace._check(name)
            super().__setitem__(name, value)

        @staticmethod
        def _check(name: Any) -> None:
            if str(name).startswith("_"):
                raise SecurityError(f"{name!r} on a namespace: its name begins with an underscore")

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Without the escapes of jinja2's own, which are for HTML."""
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loop_controls]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": GuardedNamespace,
    }
    return environment


if __name__ == "__main__":
    with suppress(EOFError, OSError):  # the parent is gone: its end of the pipe is closed
        serve(Connection(int(sys.argv[1])))
