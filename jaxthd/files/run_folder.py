"""The folder of a run, as other commands read it: its settings and its tokenizer beside its checkpoints.

config.json holds the settings, with absolute paths; the tokenizer, if it has files, is in tokenizer/. So the
folder may be moved, and a command needs nothing else to use the run's weights.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from jaxthd.config import Block, ComputeConfig, Config, FrontEnd
from jaxthd.config.block import block_kinds
from jaxthd.config.front_end import default_front_end, front_ends
from jaxthd.config.listing import dataclass_in, kind_at
from jaxthd.config.removed import REMOVED, renewed, warn_once
from jaxthd.errors import UserError
from jaxthd.files.atomic import write_atomically
from jaxthd.files.config_file import with_absolute_paths
from jaxthd.files.paths import home_path
from jaxthd.files.run_store import local_copy
from jaxthd.files.stores import is_url
from jaxthd.files.tokenizer_files import BUILT_IN, FOLDER, copy_tokenizer, tokenizer_digest

FILE = "config.json"
EMA = "+ema"


def is_run(folder: Path) -> bool:
    """Whether the folder holds checkpoints of a run."""
    return (folder / "checkpoints").is_dir()


def holds_a_run(folder: Path) -> bool:
    """Whether a run has begun in the folder: it holds a line of metrics or a checkpoint."""
    metrics = folder / "metrics.jsonl"
    checkpoints = (path.name.isdecimal() for path in (folder / "checkpoints").glob("*"))
    return (metrics.exists() and metrics.stat().st_size > 0) or any(checkpoints)


def source_of(source: str | Path) -> tuple[Path, str]:
    """(a source's path, which of a run's checkpoints is meant: "newest", "best" or a step).

    With EMA after it ("best+ema"), the averaged parameters of that checkpoint are meant. Of a run in a store
    the path is that of a copy on this machine. Raises as local_copy.
    """
    path, mark, which = str(source).rpartition("@")
    which = f"newest{EMA}" if which == "ema" else which
    number = which.removesuffix(EMA)
    if mark and (number in ("newest", "best") or number.isdecimal()):
        return _on_disk(path), which
    return _on_disk(str(source)), "newest"


def _on_disk(path: str) -> Path:
    return local_copy(path) if is_url(path) else home_path(path)


def is_published(path: Path) -> bool:
    """Whether the path is that of a published checkpoint: a .nemo archive, or a folder whose config.json is
    not the settings of a run."""
    if path.is_file():
        return path.suffix == ".nemo"
    if is_run(path) or not (path / FILE).is_file():
        return False
    try:
        stored = json.loads((path / FILE).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(stored, dict) and bool(stored) and not {"data", "model", "train"} & stored.keys()


def write_config(folder: Path, config: Config) -> None:
    """Writes config.json, and a copy of the tokenizer's files, unless they are there already.

    Paths that are relative are taken as relative to the working directory.
    """
    config = with_absolute_paths(config, Path.cwd())
    tokenizer, copy = config.data.tokenizer, folder / FOLDER
    if tokenizer not in BUILT_IN and Path(tokenizer).exists():
        if not copy.is_dir() or tokenizer_digest(copy) != tokenizer_digest(tokenizer):
            shutil.rmtree(copy, ignore_errors=True)
            copy_tokenizer(Path(tokenizer), copy)
        config = replace(config, data=replace(config.data, tokenizer=FOLDER))
    write_atomically(folder / FILE, json.dumps(asdict(config), indent=2) + "\n")


class DamagedConfigError(UserError):
    """config.json is missing, or holds no JSON object."""


class Difference(NamedTuple):
    """A field in which two settings differ, by its dotted name. there, here: its values as JSON."""

    name: str
    there: str
    here: str


def read_config(source: Path) -> Config:
    """The settings that `write_config` has written into the folder `source`; or those of the file, a .json.
    Newer fields have their defaults.

    Raises UserError as read_settings does, and for fields that Config does not have.
    """
    file = source if source.suffix == ".json" and source.is_file() else source / FILE
    stored = read_settings(file)
    try:
        # An older jaxthd wrote relative paths, which were of the working directory.
        return with_absolute_paths(_built(Config, stored), file.parent.absolute(), Path.cwd())
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{file} cannot be used ({error}); expected the settings of a run: copy it anew"
        ) from error


def read_settings(file: Path) -> dict[str, Any]:
    """The JSON object in config.json.

    Raises DamagedConfigError if there is none. Removed fields (jaxthd/config/removed.py) are replaced.
    """
    try:
        stored = json.loads(file.read_text())
        if not isinstance(stored, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        raise DamagedConfigError(
            f"{file} cannot be read ({error}); expected the settings of the run beside it: copy it anew"
        ) from error
    _move_to_compute(stored)
    compute = _group(stored, "compute")
    if "remat_llm" in compute and compute.get("remat", "auto") == "auto":
        compute["remat"] = "full"  # it computed all again, unless it says otherwise: so it goes on bit by bit
    for group in REMOVED:
        fields = _group(stored, group)
        present, notes = renewed(group, fields)
        fields.clear()
        fields.update(json.loads(json.dumps(present, default=asdict)))
        for note in notes:
            warn_once(str(file), note)
    return stored


def _move_to_compute(stored: dict[str, Any]) -> None:
    """Moves fields about how a model is computed, which an older jaxthd had in model and train."""
    known = {*get_type_hints(ComputeConfig), *REMOVED["compute"]}
    for group in ("model", "model.llm", "train"):
        fields, own = _group(stored, group), get_type_hints(kind_at(group))
        for name in [name for name in fields if name in known and name not in own]:
            stored.setdefault("compute", {}).setdefault(name, fields.pop(name))


def _group(stored: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The stored fields of a group; {} where there are none."""
    fields: Any = stored
    for name in path.split("."):
        fields = fields.get(name) if isinstance(fields, dict) else None
    return fields if isinstance(fields, dict) else {}


def differences(folder: Path, config: Config) -> list[Difference]:
    """The fields in which the settings of the run in `folder` differ from `config`.

    Fields that Config does not have differ too. A field that was added after they were written counts as
    stored with its default. Paths differ if they lead elsewhere; tokenizers differ if their files do. Raises
    as read_settings does.
    """
    then = flat(_completed(Config, read_settings(folder / FILE)))
    config = with_absolute_paths(config, Path.cwd())
    now = flat(json.loads(json.dumps(asdict(config))))
    if _same_tokenizer(folder, then["data.tokenizer"], config.data.tokenizer):
        now["data.tokenizer"] = then["data.tokenizer"]

    def text(fields: Mapping[str, Any], name: str) -> str:
        return json.dumps(fields[name]) if name in fields else "unknown"

    names = [name for name in then | now if (name in then, then.get(name)) != (name in now, now.get(name))]
    return [Difference(name, text(then, name), text(now, name)) for name in names]


def _same_tokenizer(folder: Path, stored: str, given: str) -> bool:
    # An older run's path is of the working directory.
    there = folder / stored if stored not in BUILT_IN and (folder / stored).exists() else stored
    try:
        return tokenizer_digest(there) == tokenizer_digest(given)
    except OSError:
        return stored == given


def _completed(kind: Any, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The stored settings, with defaults for missing fields."""
    kinds = get_type_hints(kind)
    defaults = json.loads(json.dumps(asdict(kind())))
    inner = {
        name: _completed(_kind_of(dataclass_in(kinds[name]), value), value)
        for name, value in stored.items()
        if isinstance(value, dict) and name in kinds and dataclass_in(kinds[name])
    }
    if kinds.get("blocks") == dict[str, Block]:
        patterns = {name: stored[name] for name in ("pattern", "mtp_pattern") if name in stored}
        usual = json.loads(json.dumps(asdict(kind(**patterns))))["blocks"]
        given = stored.get("blocks", {})
        inner["blocks"] = usual | {x: _completed(_kind_of(Block, y), y) for x, y in given.items()}
    return defaults | dict(stored) | inner


def _kind_of(kind: Any, stored: Mapping[str, Any]) -> Any:
    """The class of stored settings: of blocks and front ends, that of their kind. Raises ValueError for a
    kind that is not registered."""
    if kind not in (Block, FrontEnd):
        return kind
    kinds: Mapping[str, Any] = block_kinds() if kind is Block else front_ends()
    name = str(stored.get("kind", default_front_end().kind if kind is FrontEnd else ""))
    if name not in kinds:
        what = "block" if kind is Block else "front end"
        raise ValueError(
            f"the kind of {what} {name!r} is not known; expected {', '.join(kinds)}: register it before"
        )
    return kinds[name]


def _built(kind: Any, stored: Mapping[str, Any]) -> Any:
    """Rebuilds the dataclass from `stored`, its asdict form read from JSON."""
    kinds = get_type_hints(kind)
    unknown = sorted(stored.keys() - kinds.keys())
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {', '.join(unknown)}")

    def value_of(name: str, value: Any) -> Any:
        if kinds[name] == dict[str, Block]:
            return {letter: _built(_kind_of(Block, block), block) for letter, block in value.items()}
        inner = dataclass_in(kinds[name])
        if inner and value is not None:
            return _built(_kind_of(inner, value), value)
        return _as_tuples(value)

    return kind(**{name: value_of(name, value) for name, value in stored.items()})


def _as_tuples(value: Any) -> Any:
    """The value with tuples for lists, which are JSON's form of them."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested fields to dotted names. Stage marks, which do not change the model, are removed."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        value = value.replace("|", "") if name == "pattern" and isinstance(value, str) else value
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found
