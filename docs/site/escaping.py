"""Docstrings are plain text: what is special in Markdown is escaped in them before the site shows them."""

import re


def escaped(docstring: str) -> str:
    """The docstring as Markdown. What is in backticks, or indented by four spaces, is code there too."""
    apart = re.sub(r"^(\S.*)\n(?=    )", r"\1\n\n", docstring, flags=re.M)
    return "\n".join(map(_line, apart.splitlines()))


def _line(line: str) -> str:
    if line.startswith("    "):
        return line
    texts = line.split("`")
    texts[::2] = [re.sub(r"([*\[]|(?<!\w)_)", r"\\\1", text.replace("<", "&lt;")) for text in texts[::2]]
    return "`".join(texts)
