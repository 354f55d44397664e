"""Options that are on or off: --X, --no-X, --X True and --X False, of settings and of a command's own."""

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxthd.config.listing import path_of

_VALUES = ("true", "false")


def is_flag(option: Mapping[str, Any]) -> bool:
    """Whether one of a command's own options, as add_argument takes it, is on or off."""
    return option.get("action") == "store_true"


def add_opposite(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds the option that switches the flag --NAME off; help does not show it."""
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    parser.add_argument(_opposite(f"--{name}"), dest=name.replace("-", "_"), action="store_false", **hidden)


def as_flags(
    words: Sequence[str],
    parser: argparse.ArgumentParser,
    own: Collection[str] = (),
    settings: Mapping[str, bool] | None = None,
) -> tuple[list[str], tuple[str, ...]]:
    """Returns the words with --X True and --X=True as --X, and False as --no-X, for settings of type bool and
    the command's own flags: those are the forms that tyro and argparse read. And the dotted names of the
    settings that the words set. Ends the process for another value.

    own: names of the flags. settings: whether each is of type bool, by its path (of_any_block).
    """
    known = settings or {}
    flags, given, rest = list[str](), dict[str, None](), list(words)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.partition("=")
        option = f"--{path_of(name).replace('_', '-')}"
        group, _, last = option.rpartition(".")
        path = path_of(f"{group}.{last.removeprefix('no-')}")
        is_own = option.removeprefix("--") in own
        if name.startswith("--") and of_any_block(path) in known:
            given[path] = None
        is_setting = known.get(of_any_block(path)) and not last.startswith("no-")
        if not name.startswith("--") or not (is_own or is_setting):
            flags.append(word)
            continue
        following = rest[0] if rest and not has_value else "--"
        # What follows a command's own flag may be its SOURCE.
        if following.lower() in _VALUES or not (is_own or following.startswith("--")):
            has_value, value = "=", rest.pop(0)
        if has_value and value.lower() not in _VALUES:
            opposite = _opposite(option)
            parser.error(f"{option} is {value!r}; expected True or False: {option} True, or {opposite}")
        flags.append(_opposite(option) if value.lower() == "false" else option)
    return flags, tuple(given)


def of_any_block(path: str) -> str:
    """The path of a setting, without the letter of its block: any block may have any letter."""
    return re.sub(r"^(model\.llm\.blocks)\.[^.]+", r"\1", path)


def _opposite(option: str) -> str:
    """The option that says the opposite: --no-json of --json, --mesh.no-fsdp of --mesh.fsdp, --compile of
    --no-compile."""
    group, dot, last = option.removeprefix("--").rpartition(".")
    return f"--{group}{dot}{last.removeprefix('no-') if last.startswith('no-') else f'no-{last}'}"
