"""The program of a process that renders one chat template; jaxthd.data.text.render starts it.

jinja2's sandbox keeps a template from Python's objects, but neither from loops without end nor from strings
without bounds. Here a render has a few seconds and a gigabyte; what takes more ends the process.
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
"""Most bytes of the process's address space."""
LONGEST = 1 << 24
"""Most characters of a text."""


def serve(parent: Connection) -> None:
    """Answers [source, seconds] by {} or {"error"}, then lists of variables by {"texts"} or {"error"}.

    Raises EOFError or another OSError once the parent is gone.
    """
    environment, (source, seconds) = make_environment(), json.loads(parent.recv_bytes())
    # The sandbox has no way to a file; nor is this process allowed to write one.
    for limit, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_FSIZE, 0)):
        with suppress(ValueError, OSError):
            resource.setrlimit(limit, (most, most))
    # It computes what is constant in the template.
    template, error = timed(partial(environment.from_string, source), seconds)
    parent.send_bytes(error or b"{}")
    while True:
        answer, error = timed(partial(rendered, template, json.loads(parent.recv_bytes())), seconds)
        parent.send_bytes(error or answer)


def timed(compute: Callable[[], Any], seconds: float) -> tuple[Any, bytes]:
    """(its result, b"") or (None, the JSON object of its error). Takes no longer than `seconds`: SIGALRM then
    ends the process, whatever it is doing.
    """
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        result, error = compute(), b""
    except Exception as raised:
        result, error = None, json.dumps({"error": f"{type(raised).__name__}: {raised}"[:1000]}).encode()
    signal.setitimer(signal.ITIMER_REAL, 0)
    return result, error


def rendered(template: Any, requests: Sequence[Mapping[str, Any]]) -> bytes:
    """The JSON object of the template's texts."""
    texts = [template.render(**variables) for variables in requests]
    longest = max(map(len, texts), default=0)
    if longest > LONGEST:
        raise ValueError(f"a text of {longest} characters; expected at most {LONGEST}")
    return json.dumps({"texts": texts}).encode()


def make_environment() -> ImmutableSandboxedEnvironment:
    """jinja2's sandbox with what transformers gives chat templates (utils/chat_template_utils.py)."""
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
    """{% generation %} ... {% endgeneration %}: what the assistant says."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 has it)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller: Callable[[], str]) -> str:
        return f"{SUPERVISED}{caller()}{SUPERVISED_END}"


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
    """JSON without the escapes of jinja2's own filter, which are for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


if __name__ == "__main__":
    with suppress(EOFError, OSError):  # the parent is gone: its end of the pipe is closed
        serve(parents_end())
