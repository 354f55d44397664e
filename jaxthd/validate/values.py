"""Single values: each must have the annotated type, and be within its bounds."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

from jaxthd.config import Block, Blocks, Config
from jaxthd.config.findings import Finding
from jaxthd.config.listing import hints_of
from jaxthd.config.values import Range
from jaxthd.ops.attention import backends as attention_backends
from jaxthd.ops.scan import backends as scan_backends

_SEEDS = ("data.seed", "train.seed")
"""Settings that random generators take as 32 bits; other integers reach arrays of int32."""
_LARGEST_FLOAT = 3.4e38
_WHY_AT_MOST = "because arrays hold numbers in 32 bits"
_NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "compute.attention_backend": lambda: (*attention_backends.BACKENDS, "auto"),
    "compute.scan_backend": lambda: (*scan_backends.BACKENDS, "auto"),
}
"""Settings that take the name of something registered, with the names."""


def faulty_values(config: Config) -> list[Finding]:
    """The faults of single settings."""
    return [finding for path, hint, value in leaves(config) for finding in _check(path, hint, value)]


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, annotation, value) of every setting. A group that is None is a setting itself."""
    for name, hint in hints_of(type(node)).items():
        value = getattr(node, name)
        if isinstance(value, Blocks) and all(isinstance(each, Block) for each in value.values()):
            for letter, block in value.items():
                yield from leaves(block, f"{prefix}{name}.{letter}.")
        elif is_dataclass(value) and _has_type(value, hint):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, hint, value


def _check(path: str, hint: Any, value: Any) -> Iterator[Finding]:
    bounds = [x for x in getattr(hint, "__metadata__", ()) if isinstance(x, Range)]
    kind = hint.__origin__ if get_origin(hint) is Annotated else hint
    expected = ""
    if not _has_type(value, kind):
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        name = kind.__name__ if isinstance(kind, type) else str(kind)
        expected = f"one of {', '.join(map(repr, choices))}" if choices else f"a value of type {name}"
    elif path in _NAMES and value not in (names := tuple(_NAMES[path]())):
        expected = f"one of {', '.join(map(repr, names))}"
    elif kind in (int, float):
        (bound,) = bounds or [Range(1 if kind is int else 0)]
        most = _LARGEST_FLOAT if kind is float else _most(path)
        if not bound.holds(value):
            expected = f"{bound}{', and finite' * (bound.most == math.inf)}"
        elif value > most:
            expected = f"{most} at most, {_WHY_AT_MOST}"
    elif large := [x for x in _integers(value) if abs(x) > _most(path)]:
        value, expected = large[0], f"{_most(path)} at most, {_WHY_AT_MOST}"
    if expected:
        shown = value if kind in (int, float) and not isinstance(value, str) else repr(value)
        yield Finding(f"{path} is {shown}", expected, f"correct {path}")


def _most(path: str) -> int:
    """The largest value of a setting that is an integer."""
    return 2**32 - 1 if path in _SEEDS else 2**31 - 1


def _integers(value: Any) -> Iterator[int]:
    """The integers in a value, or in a tuple, which may be nested."""
    if isinstance(value, tuple):
        for one in value:
            yield from _integers(one)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def _has_type(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Annotated:
        return _has_type(value, hint.__origin__)
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if isinstance(hint, UnionType):
        return any(_has_type(value, one) for one in get_args(hint))
    if get_origin(hint) is dict:
        key, each = get_args(hint)
        return isinstance(value, dict) and all(
            isinstance(x, key) and isinstance(y, each) for x, y in value.items()
        )
    if get_origin(hint) is tuple:
        hints = get_args(hint)
        if not isinstance(value, tuple):
            return False
        if hints[-1] is Ellipsis:
            hints = (hints[0],) * len(value)
        return len(value) == len(hints) and all(map(_has_type, value, hints))
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool) and not math.isnan(value)
    return isinstance(value, hint)
