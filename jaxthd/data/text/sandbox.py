"""The program of a process that renders one chat template; jaxthd.data.text.render starts it.

jinja2's sandbox keeps a template from Python's objects, but prevents neither endless loops nor unbounded
strings. Here a render may take a few seconds and a gigabyte; if it takes more, the process ends.
"""

import json
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as loop_controls
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from jaxthd.data.child_process import parents_end
from jaxthd.data.text.render import SUPERVISED, SUPERVISED_END

MEMORY = 1 << 30
"""Limit of the process's address space, in bytes."""
LONGEST = 1 << 24
"""Most characters of a rendered text."""


def serve(parent: Connection) -> None:
    """Answers a first request [source, seconds] with {} or {"error"}, later ones with {"texts"} or {"error"}.

    Later requests are lists of variables. Raises EOFError or an OSError once the parent has ended.
    """
    environment, (source, seconds) = make_environment(), json.loads(parent.recv_bytes())
    # The sandbox gives no access to files. Besides, this process may not write any.
    for limit, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_FSIZE, 0)):
        with suppress(ValueError, OSError):
            resource.setrlimit(limit, (most, most))
    # Parsing is timed too, since it evaluates constant expressions.
    template, error = timed(partial(environment.from_string, source), seconds)
    parent.send_bytes(error or b"{}")
    while True:
        answer, error = timed(partial(rendered, template, json.loads(parent.recv_bytes())), seconds)
        parent.send_bytes(error or answer)


def timed(compute: Callable[[], Any], seconds: float) -> tuple[Any, bytes]:
    """Returns (the result, b"") or (None, the error as a JSON object).

    After `seconds` SIGALRM ends the process, whatever it is doing.
    """
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        result, error = compute(), b""
    except Exception as raised:
        result, error = None, json.dumps({"error": f"{type(raised).__name__}: {raised}"[:1000]}).encode()
    signal.setitimer(signal.ITIMER_REAL, 0)
    return result, error


def rendered(template: Any, requests: Sequence[Mapping[str, Any]]) -> bytes:
    """The template's texts as a JSON object."""
    texts = [template.render(**variables) for variables in requests]
    longest = max(map(len, texts), default=0)
    if longest > LONGEST:
        raise ValueError(f"a text of {longest} characters; expected at most {LONGEST}")
    return json.dumps({"texts": texts}).encode()


def make_environment() -> ImmutableSandboxedEnvironment:
    """jinja2's sandbox with the extensions of transformers (utils/chat_template_utils.py)."""
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


class Generation(Extension):
    """The tags {% generation %} ... {% endgeneration %} around the assistant's text."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 has it)

    def parse(self, parser: Any) -> Any:
        """Returns a block whose text `marked` returns."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller: Callable[[], str]) -> str:
        """Returns the block's text between the marks of supervised text."""
        return f"{SUPERVISED}{caller()}{SUPERVISED_END}"


class GuardedNamespace(Namespace):
    """A namespace that refuses names with a leading underscore, which have served to escape the sandbox."""

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
    """Raises TemplateError, as templates do for turns that they do not write."""
    raise TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


if __name__ == "__main__":
    with suppress(EOFError, OSError):  # the parent has ended, so its end of the pipe is closed
        serve(parents_end())
