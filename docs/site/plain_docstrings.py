"""Docstrings as the site shows them: they are plain text, so what is special in Markdown is escaped."""

import re
from typing import Any

import griffe


class PlainDocstrings(griffe.Extension):
    """Escapes asterisks, <, [ and leading underscores outside of code (in backticks, or indented)."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n".join(map(escaped, obj.docstring.value.splitlines()))


def escaped(line: str) -> str:
    if line.startswith("    "):
        return line
    texts = line.split("`")
    texts[::2] = [re.sub(r"([*\[]|(?<!\w)_)", r"\\\1", text.replace("<", "&lt;")) for text in texts[::2]]
    return "`".join(texts)
