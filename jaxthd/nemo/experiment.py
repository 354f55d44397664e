"""A NeMo experiment file (YAML, as Hydra and OmegaConf read it), with overrides and interpolations."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxthd.errors import UserError
from jaxthd.nemo.keys import Place, leaves

MISSING = "???"
"""OmegaConf's mark for a value that must be given."""
_INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
_MOST_ROUNDS = 20
"""Interpolations that lead to interpolations, before it is taken for a circle."""


class _Loader(yaml.SafeLoader):
    """YAML with OmegaConf's numbers: 1e-4 is one, 00:03:50 and dates are texts."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag.rpartition(":")[2] in ("bool", "null", "merge")]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(([0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"
    ),
    list("-+.0123456789"),
)


class Experiment:
    """The values of an experiment file.

    path: the file. overrides: as Hydra has them: KEY=VALUE (also +KEY and ++KEY), and ~KEY, which takes a key
    out. Raises FileNotFoundError; UserError for what is no YAML mapping, for overrides of another form, and
    for interpolations that cannot be resolved.
    """

    def __init__(self, path: Path, overrides: Sequence[str] = ()) -> None:
        self.path = path
        values = read_yaml(path)
        if not isinstance(values, dict) or not {"model", "data"} & values.keys():
            raise UserError(
                f"{path} is no experiment of NeMo's; expected YAML with the groups model, trainer and data, "
                "such as examples/speechlm2/conf/salm.yaml: correct the path"
            )
        if values.get("defaults"):
            raise UserError(
                f"{path} has Hydra's `defaults`, which compose it of other files; expected one whole file: "
                "take exp_config.yaml, which a run of NeMo's writes beside its checkpoints"
            )
        for override in overrides:
            _set(values, override)
        self.values: dict[str, Any] = _resolved(values, values, ())

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a dotted path; the default where there is none, or null."""
        found = _at(self.values, path)
        return default if found is None else found

    def has(self, path: str) -> bool:
        """Whether the file gives a value at the path that is not null."""
        return self.get(path) is not None

    def leaves(self) -> Iterator[tuple[Place, Any]]:
        """(path, value) of all that the table of keys has by itself."""
        return leaves(self.values)

    def require_values(self) -> None:
        """Raises UserError for values that are still to be given (???)."""
        missing = [".".join(map(str, place)) for place, value in self.leaves() if value == MISSING]
        if missing:
            raise UserError(
                f"{self.path}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} {MISSING}; "
                f"expected values: write them into the file, or give {missing[0]}=VALUE behind it"
            )


def read_yaml(path: Path) -> Any:
    """A YAML file. Raises FileNotFoundError; UserError where it is none."""
    if not path.is_file():
        raise FileNotFoundError(
            f"no file at {path}; expected an experiment of NeMo's (YAML): correct the path"
        )
    try:
        return yaml.load(path.read_text(), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} is no YAML ({error}); expected an experiment of NeMo's: correct it"
        ) from error


def _set(values: dict[str, Any], override: str) -> None:
    """Applies an override."""
    key, mark, text = override.partition("=")
    is_deleted = key.startswith("~")
    names = key.lstrip("~+").split(".")
    if not all(names) or (not mark and not is_deleted):
        raise UserError(
            f"{override!r} behind the file; expected KEY=VALUE, such as trainer.devices=8: correct it"
        )
    node: Any = values
    for name in names[:-1]:
        node = _item(node, name)
        if not isinstance(node, dict | list):
            raise UserError(
                f"{override!r}: the file has no group {name!r}; expected one: correct the override"
            )
    try:
        if is_deleted:
            del node[int(names[-1]) if isinstance(node, list) else names[-1]]
        elif isinstance(node, list):
            node[int(names[-1])] = yaml.load(text, _Loader)
        else:
            node[names[-1]] = yaml.load(text, _Loader)
    except (KeyError, IndexError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{override!r} cannot be applied ({error!r}): correct it") from error


def _item(node: Any, name: str) -> Any:
    """An entry of a mapping or of a list; None where there is none. A new group is made in a mapping."""
    if isinstance(node, list):
        return node[int(name)] if name.isdecimal() and int(name) < len(node) else None
    return node.setdefault(name, {}) if isinstance(node, dict) else None


def _at(values: Any, path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    node = values
    for name in path.split(".") if path else ():
        if isinstance(node, list):
            node = node[int(name)] if name.isdecimal() and int(name) < len(node) else None
        else:
            node = node.get(name) if isinstance(node, dict) else None
    return node


def _resolved(node: Any, root: Any, place: tuple[str, ...], depth: int = 0) -> Any:
    """The values with their interpolations replaced. depth: interpolations that have led here."""
    if isinstance(node, dict):
        return {name: _resolved(value, root, (*place, str(name)), depth) for name, value in node.items()}
    if isinstance(node, list):
        return [_resolved(value, root, (*place, str(i)), depth) for i, value in enumerate(node)]
    if depth > _MOST_ROUNDS:
        raise UserError(f"{'.'.join(place)} leads back to itself; expected a value: correct the file")
    while isinstance(node, str) and (found := _INTERPOLATION.search(node)):
        value = _value_of(found[1], root, place, depth)
        node = value if found[0] == node else node.replace(found[0], str(value))
    return node


def _value_of(name: str, root: Any, place: tuple[str, ...], depth: int) -> Any:
    """The value that ${name} stands for, in a value at `place`, itself without interpolations."""
    if name.startswith("oc.env:"):
        variable, has_default, default = name.removeprefix("oc.env:").partition(",")
        if (value := os.environ.get(variable.strip())) is not None:
            return value
        if has_default:
            return default.strip()
    elif ":" not in name:
        dots = len(name) - len(name.lstrip("."))
        path = ".".join((*place[: len(place) - dots], name[dots:])) if dots else name
        if (value := _at(root, path)) is not None:
            return _resolved(value, root, tuple(path.split(".")), depth + 1)
    where = ".".join(place)
    raise UserError(
        f"{where} has ${{{name}}}, which nothing gives; expected a key of the file, or oc.env of a variable: "
        f"give {where}=VALUE behind the file"
    )
