"""The settings as people read them: every field of Config with its type, its value and its docstring."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from jaxthd.config import Block, Config, FrontEnd
from jaxthd.config.block import block_kinds, usual_blocks
from jaxthd.config.front_end import default_front_end, front_ends
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
    """One dataclass. path: its attribute path in Config. kind: its class. text: its docstring."""

    path: str
    kind: Any
    text: str
    settings: tuple[Setting, ...]


def groups(kind: Any = Config, path: str = "", text: str = "") -> Iterator[Group]:
    """Every dataclass below `kind`, each before those that it holds.

    path: the attribute path of `kind` in Config. text: the docstring of that field, put after the docstring
    of `kind`. Raises ValueError for a field without a docstring under it.
    """
    defaults, sources = kind(), _field_sources(kind)
    settings: list[Setting] = []
    nested: list[tuple[Any, str, str]] = []
    for name, hint in hints_of(kind).items():
        if DERIVED in getattr(hint, "__metadata__", ()):
            continue
        where = f"{path}.{name}" if path else name
        annotation, docstring = sources[name]
        if (inner := dataclass_in(hint)) is FrontEnd:
            nested += [(each, where, docstring) for each in front_ends().values()]
        elif inner:
            nested.append((inner, where, docstring))
        elif hint == dict[str, Block]:
            nested += [(each, f"{where}.{each.letter}", "") for each in block_kinds().values()]
        elif not docstring:
            raise ValueError(
                f"{kind.__module__}: {kind.__name__}.{name} has no docstring; expected what it means, in a "
                "string under the field: write it"
            )
        else:
            bounds = [str(x) for x in getattr(hint, "__metadata__", ()) if isinstance(x, Range)]
            plain = hint.__origin__.__name__ if bounds else annotation
            types, means = tuple(_choices(hint) or [plain]), " ".join(docstring.split())
            settings.append(Setting(where, hint, types, "".join(bounds), getattr(defaults, name), means))
    if settings:
        of_kind = " ".join(f"{inspect.getdoc(kind) or ''} {text}".split())
        yield Group(path, kind, of_kind, tuple(settings))
    for each in nested:
        yield from groups(*each)


def hints_of(kind: Any) -> dict[str, Any]:
    """Field name -> annotation of a dataclass, in the order of its fields."""
    hints = get_type_hints(kind, include_extras=True)
    return {each.name: hints[each.name] for each in fields(kind)}


def kind_at(path: str) -> Any:
    """The dataclass of the group at this attribute path of Config, such as "data.filter"."""
    kind: Any = Config
    for name in path.split("."):
        if kind == dict[str, Block]:
            kind = type(usual_blocks()[name])
        else:
            hint = get_type_hints(_front_end_with(name) if kind is FrontEnd else kind)[name]
            kind = hint if hint == dict[str, Block] else dataclass_in(hint)
    return type(default_front_end()) if kind is FrontEnd else kind


def _front_end_with(name: str) -> type[FrontEnd]:
    """The first kind of front end that has a field of this name, the usual one before others."""
    kinds = (type(default_front_end()), *front_ends().values())
    return next((kind for kind in kinds if name in get_type_hints(kind)), kinds[0])


def value_at(config: Any, path: str) -> Any:
    """The group of settings at this path of a Config; None where the config has none."""
    for name in path.split("."):
        config = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
        if config is None:
            return None
    return config


def path_of(option: str) -> str:
    """The path of a setting in Config from its option, such as --data.max-documents. Letters of blocks
    stay."""
    names = option.removeprefix("--").split(".")
    is_letter = [names[:i] == ["model", "llm", "blocks"] for i in range(len(names))]
    return ".".join(
        name if stays else name.replace("-", "_") for name, stays in zip(names, is_letter, strict=True)
    )


def dataclass_in(hint: Any) -> Any:
    """The dataclass of a field's type, which may be "X | None"; None for other types."""
    inner = () if get_origin(hint) is dict else get_args(hint)
    return next((x for x in (hint, *inner) if is_dataclass(x)), None)


def all_groups() -> tuple[Group, ...]:
    """The groups of Config, with those of all kinds of blocks, each by the letter that it usually has, and of
    front ends."""
    return _groups(len(block_kinds()) + len(front_ends()))


@cache
def _groups(kinds: int) -> tuple[Group, ...]:
    """kinds: of blocks and front ends, of which more may be registered later."""
    return tuple(groups())


def group_names() -> list[str]:
    """The names that help takes: "mesh", "data", ..., each with the groups inside it."""
    return list(dict.fromkeys(group.path.partition(".")[0] for group in all_groups()))


def _field_sources(kind: type) -> dict[str, tuple[str, str]]:
    """Field name -> (its annotation as written, the docstring under it or "")."""
    found = {}
    for each in reversed([x for x in kind.__mro__ if is_dataclass(x)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, below in zip(definition.body, [*definition.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                has_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                text = below.value.value if has_text else ""  # type: ignore[union-attr]
                found[statement.target.id] = ast.unparse(statement.annotation), str(text)
    return found


def _choices(hint: Any) -> list[str]:
    return [repr(choice) for choice in get_args(hint)] if get_origin(hint) is Literal else []
