"""Writes docs/configuration.md, the reference of every setting, from the dataclasses in jaxthd/config.py.

python scripts/write_reference.py
"""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from jaxthd import config

REFERENCE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = """\
# Configuration

<!-- Written by scripts/write_reference.py from jaxthd/config.py: change it there, and run that. -->

These are all settings of a run. A [config file](../configs/cp2.py) gives them in Python, for instance as
`DataConfig(max_documents=32)`. Every command that takes `--config` lets you override them by the names below:

    jaxthd train --config configs/cp2.py --data.manifest a.jsonl b.jsonl --mesh.no-fsdp

The defaults are those of the dataclasses; `--config FILE --help` lists the values that FILE gives. Settings
that cannot work are refused before anything is loaded, with what to change (`jaxthd/validate/`).
"""


class Setting(NamedTuple):
    """One field. name: as on the command line. Every string is Markdown."""

    name: str
    type: str
    default: str
    text: str


class Group(NamedTuple):
    """One dataclass. path: its attribute path in Config. kind: its name. text: its docstring, in Markdown."""

    path: str
    kind: str
    text: str
    settings: list[Setting]


def groups(kind: Any = config.Config, path: str = "", text: str = "") -> Iterator[Group]:
    """Every dataclass below `kind`, each before those that it holds.

    path: the attribute path of `kind` in Config. text: the docstring of that field, put after the docstring
    of `kind`. Raises ValueError for a field without a docstring under it.
    """
    defaults, hints, sources = kind(), get_type_hints(kind), _field_sources(kind)
    settings, nested = [], []
    for name, hint in hints.items():
        where = f"{path}.{name}" if path else name
        annotation, docstring = sources[name]
        inner = [each for each in (*get_args(hint), hint) if is_dataclass(each)]
        if inner:
            nested.append((inner[0], where, docstring))
        elif not docstring:
            raise ValueError(
                f"jaxthd/config.py: {kind.__name__}.{name} has no docstring; expected what it means, in a "
                "string under the field: write it"
            )
        else:
            option = f"--{where.replace('_', '-')}"
            default = repr(getattr(defaults, name))
            types = _choices(hint) or [annotation]
            settings.append(
                Setting(_code(option), " or ".join(map(_code, types)), _code(default), _markdown(docstring))
            )
    if settings:
        yield Group(path, kind.__name__, _markdown(f"{inspect.getdoc(kind) or ''} {text}"), settings)
    for each in nested:
        yield from groups(*each)


def _field_sources(kind: type) -> dict[str, tuple[str, str]]:
    """Field name -> (its annotation as written, the docstring under it or "")."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for statement, below in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            has_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            text = below.value.value if has_text else ""  # type: ignore[union-attr]
            found[statement.target.id] = ast.unparse(statement.annotation), str(text)
    return found


def _choices(hint: Any) -> list[str]:
    return [repr(choice) for choice in get_args(hint)] if get_origin(hint) is Literal else []


def _code(text: str) -> str:
    """Code in a table cell, with | escaped because a bare one would end the cell."""
    return f"`{text.replace('|', chr(92) + '|')}`"


def _markdown(text: str) -> str:
    """Plain text as one line of Markdown, with Markdown's own characters escaped."""
    return re.sub(r"([\\`*<|\[])", r"\\\1", " ".join(text.split()))


def reference() -> str:
    """The text of docs/configuration.md."""
    lines = [HEAD]
    for group in groups():
        lines += [
            f"## {group.path}",
            "",
            f"`{group.kind}`. {group.text}",
            "",
            "| setting | type | default | meaning |",
            "|---|---|---|---|",
            *(f"| {' | '.join(setting)} |" for setting in group.settings),
            "",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    REFERENCE.write_text(reference())
    print(REFERENCE)
