"""Finds a reward function and binds its settings. It runs in a worker process, and imports users' modules."""

import importlib
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxthd.errors import UserError
from jaxthd.rl.rewards.group import Group, Reward
from jaxthd.rl.rewards.registry import BUILT_IN, RewardSetting

LONGEST = 500
"""Most characters of an error's text in a reason."""


def bound(setting: RewardSetting, folders: Sequence[str]) -> Callable[[Group], Any]:
    """The function with its settings, to be called with a group.

    folders: where users' modules are looked for, after sys.path. Raises UserError for a function that is not
    found, cannot be imported, cannot be called with a group and its settings, or takes no such settings.
    """
    function = BUILT_IN[setting.name] if setting.is_built_in else _imported(setting.name, folders)
    parameters = _parameters(setting.name, function)
    named = [name for name, each in parameters.items() if each.kind != each.VAR_KEYWORD]
    values = {name: setting.defaults[name] for name in named if name in setting.defaults}
    values = values if setting.is_built_in else {}
    for name, text in setting.options.items():
        if name not in named and len(named) == len(parameters):
            close = get_close_matches(name, named)
            raise UserError(
                f"rollout.reward_options has {setting.name}.{name}={text}; {setting.name} has "
                + (f"the settings {', '.join(named)}" if named else "no settings")
                + (f"; perhaps you meant {' or '.join(close)}" if close else "")
                + ": correct rollout.reward_options"
            )
        values[name] = _value(setting.name, name, text, parameters.get(name))
    needed = [name for name in named if parameters[name].default is inspect.Parameter.empty]
    if missing := [name for name in needed if name not in values]:
        raise UserError(
            f"the reward function {setting.name} needs the setting {missing[0]!r}; expected "
            f"{setting.name}.{missing[0]}=VALUE in rollout.reward_options: add it"
        )
    return partial(function, **values)


def reason_of(error: BaseException) -> str:
    """An exception as one line: its type and text, and the line of code that raised it."""
    lines = traceback.format_exception_only(error)
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        lines, frames = lines[-1:], [(error.filename or "?", error.lineno)]
    where = [f" ({Path(name).name}, line {line})" for name, line in frames if not name.startswith("<")]
    return " ".join("".join(lines).split())[:LONGEST] + "".join(where[-1:])


def _imported(name: str, folders: Sequence[str]) -> Any:
    sys.path += [folder for folder in folders if folder not in sys.path]
    module_name, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name and f"{module_name}.".startswith(f"{missing.name}."):
            stems = [path.stem for folder in folders for path in Path(folder).glob("*.py")]
            raise UserError(
                f"rollout.rewards names {name!r}, but there is no module {missing.name!r}; expected "
                f"{missing.name.replace('.', '/')}.py in {' or '.join(folders)}, or an installed package"
                + _perhaps(missing.name, stems)
            ) from missing
        raise _not_importable(name, missing) from missing
    except BaseException as error:  # also SystemExit: users' modules may do anything
        raise _not_importable(name, error) from error
    if not hasattr(module, attribute):
        own = [each for each, f in vars(module).items() if getattr(f, "__module__", "") == module_name]
        functions = [each for each in own if callable(vars(module)[each]) and each[0] != "_"]
        raise UserError(
            f"rollout.rewards names {name!r}, but {module.__file__} has no {attribute!r}; expected one of "
            f"its functions ({', '.join(functions) or 'it has none'})" + _perhaps(attribute, functions)
        )
    function: Reward = getattr(module, attribute)
    if not callable(function):
        raise UserError(
            f"rollout.rewards names {name!r}, which is of type {type(function).__name__}; expected a "
            "function of a group: correct rollout.rewards"
        )
    return function


def _perhaps(name: str, names: Sequence[str]) -> str:
    close = get_close_matches(name, names, n=1)
    return (f"; perhaps you meant {close[0]!r}" if close else "") + ": correct rollout.rewards"


def _not_importable(name: str, error: BaseException) -> UserError:
    return UserError(
        f"rollout.rewards names {name!r}, whose module cannot be imported: {reason_of(error)}; expected one "
        "that can be imported without arguments, a terminal and jax's devices: correct that module"
    )


def _parameters(name: str, function: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters that can be given by name, which are the function's settings. Raises UserError for a
    function that cannot be called with a group alone."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # written in C, without a signature: the first call shows what it takes
        return MappingProxyType({"settings": inspect.Parameter("settings", inspect.Parameter.VAR_KEYWORD)})
    parameters = list(signature.parameters.values())
    takes_group = [each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD) for each in parameters[:1]]
    by_name = {each.name: each for each in parameters[1:] if each.kind != each.VAR_POSITIONAL}
    if takes_group != [True] or any(each.kind == each.POSITIONAL_ONLY for each in by_name.values()):
        raise UserError(
            f"the reward function {name} is declared as {name.rpartition('.')[2]}{signature}; expected a "
            "group as its first argument, and settings that can be given by name, as in "
            "f(group, *, scale=1.0): change its signature"
        )
    return by_name


KINDS: dict[Any, type] = {kind: kind for kind in (str, int, float, bool)}
KINDS |= {kind.__name__: kind for kind in (str, int, float, bool)}  # annotations may be strings


def _value(function: str, name: str, text: str, parameter: inspect.Parameter | None) -> Any:
    """A setting's value, of the type of its annotation or of its default. For any other type: what the text
    is as JSON, or else the text."""
    kind = None
    if parameter is not None:
        annotation = parameter.annotation
        kind = KINDS.get(annotation) if isinstance(annotation, type | str) else None
        kind = kind or KINDS.get(type(parameter.default))
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if kind is not None:
            return kind(text)
    except (ValueError, KeyError) as error:
        raise UserError(
            f"rollout.reward_options has {function}.{name}={text}; expected a value of type "
            f"{getattr(kind, '__name__', kind)}: correct rollout.reward_options"
        ) from error
    try:
        return json.loads(text)
    except ValueError:
        return text
