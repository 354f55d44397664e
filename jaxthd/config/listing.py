"""The settings as people read them: every field of Config with its type, its value and its docstring."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from jaxthd.config import Config
from jaxthd.config.values import DERIVED, Range


class Setting(NamedTuple):
    """One field. path: its attribute path in Config. hint: its annotation. types: as written, or the values
    that it may have. bounds: of a number, in words, if it has others than usual.

    text: the docstring under it, on one line.
    """

    path: str
    hint: Any
    types: tuple[str, ...]
    bounds: str
    default: Any
    text: str

    @property
    def name(self) -> str:
        """Its name in its group."""
        return self.path.rpartition(".")[2]

    @property
    def option(self) -> str:
        """Its name on the command line."""
        return f"--{self.path.replace('_', '-')}"


class Group(NamedTuple):
    """One dataclass. path: its attribute path in Config. kind: its name. text: its docstring."""

    path: str
    kind: str
    text: str
    settings: tuple[Setting, ...]


def groups(kind: Any = Config, path: str = "", text: str = "") -> Iterator[Group]:
    """Every dataclass below `kind`, each before those that it holds.

    path: the attribute path of `kind` in Config. text: the docstring of that field, put after the docstring
    of `kind`. Raises ValueError for a field without a docstring under it.
    """
    defaults, sources = kind(), _field_sources(kind)
    hints = get_type_hints(kind, include_extras=True)
    settings, nested = [], []
    for name, hint in hints.items():
        if DERIVED in getattr(hint, "__metadata__", ()):
            continue
        where = f"{path}.{name}" if path else name
        annotation, docstring = sources[name]
        if inner := dataclass_in(hint):
            nested.append((inner, where, docstring))
        elif not docstring:
            raise ValueError(
                f"jaxthd/config/: {kind.__name__}.{name} has no docstring; expected what it means, in a "
                "string under the field: write it"
            )
        else:
            bounds = [str(x) for x in getattr(hint, "__metadata__", ()) if isinstance(x, Range)]
            plain = hint.__origin__.__name__ if bounds else annotation
            types, means = tuple(_choices(hint) or [plain]), " ".join(docstring.split())
            settings.append(Setting(where, hint, types, "".join(bounds), getattr(defaults, name), means))
    if settings:
        of_kind = " ".join(f"{inspect.getdoc(kind) or ''} {text}".split())
        yield Group(path, kind.__name__, of_kind, tuple(settings))
    for each in nested:
        yield from groups(*each)


def kind_at(path: str) -> Any:
    """The dataclass of the group at this attribute path of Config, such as "data.filter"."""
    kind: Any = Config
    for name in path.split("."):
        kind = dataclass_in(get_type_hints(kind)[name])
    return kind


def dataclass_in(hint: Any) -> Any:
    """The dataclass of a field's type, which may be "X | None"; None for other types."""
    return next((x for x in (hint, *get_args(hint)) if is_dataclass(x)), None)


@cache
def all_groups() -> tuple[Group, ...]:
    """The groups of Config."""
    return tuple(groups())


def group_names() -> list[str]:
    """The names that help takes: "mesh", "data", ..., each with the groups inside it."""
    return list(dict.fromkeys(group.path.partition(".")[0] for group in all_groups()))


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
