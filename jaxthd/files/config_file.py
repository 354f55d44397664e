"""Config files: Python files that make a Config, and the mistakes in them."""

import dataclasses
import importlib.util
import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

from jaxthd import config as settings
from jaxthd.config import Config
from jaxthd.config.block import block_kinds
from jaxthd.config.data import is_held_out, split_name
from jaxthd.config.front_end import front_ends
from jaxthd.config.listing import dataclass_in, kind_at
from jaxthd.config.removed import REMOVED, renewed, warn_once
from jaxthd.errors import UserError
from jaxthd.files.paths import expand_home


def _kinds() -> dict[str, Any]:
    """The dataclasses of settings, by name."""
    own = [x for name, x in vars(settings).items() if name.endswith("Config") and isinstance(x, type)]
    return {kind.__name__: kind for kind in (*own, *block_kinds().values(), *front_ends().values())}


def load_config(path: str | Path) -> Config:
    """Runs the Python file at `path` and returns what its function config() returns.

    Relative paths in the Config are relative to the file's folder, wherever the command is started. The file
    runs as a fresh module at every call; nothing is added to sys.path. A file that varies another one in its
    folder loads that: replace(load_config(Path(__file__).with_name("cp2.py")), mesh=MeshConfig()).
    jaxthd.load_config reads runs and published checkpoints too.
    Raises FileNotFoundError where there is no such file; UserError where the file is not Python, fails,
    defines no config(), or its config() does not return a Config.
    """
    path = Path(path)
    if path.is_dir() or path.suffix == ".json":
        raise UserError(
            f"{path} is no Python file, which this function (jaxthd.files.config_file.load_config) expects: "
            "call jaxthd.load_config, which reads runs and published checkpoints too"
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"no config at {path}; expected a Python file with a function config() -> Config, "
            "such as configs/cp2.py: correct the path"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is no Python file; expected a name that ends in .py: rename it")
    module = importlib.util.module_from_spec(spec)
    with _removed_accepted(path):
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise _mistake(path, error) from error
        make = getattr(module, "config", None)
        if not callable(make):
            raise UserError(
                f"{path} defines no function config(); expected one that returns a Config: add it"
            )
        try:
            config = make()
        except Exception as error:
            raise _mistake(path, error) from error
    if not isinstance(config, Config):
        raise UserError(
            f"config() in {path} returns {type(config).__name__}; expected jaxthd.config.Config: return that"
        )
    if any("." in name.partition("=")[0] for name in config.rollout.rewards):
        folders = (*config.rollout.reward_folders, ".")
        config = replace(config, rollout=replace(config.rollout, reward_folders=folders))
    return with_absolute_paths(config, path.parent)


@contextmanager
def _removed_accepted(path: Path) -> Iterator[None]:
    """Inside, the dataclasses of settings take removed fields too, and tell what replaced them."""

    def accepting(init: Callable[..., None], group: str) -> Callable[..., None]:
        """The constructor of the settings in `group`, which takes removed fields too."""

        def accept(self: Any, *args: Any, **given: Any) -> None:
            names = [field.name for field in dataclasses.fields(self)]
            given = dict(zip(names, args, strict=False)) | given
            fields, notes = renewed(group, given)
            for note in notes:
                warn_once(str(path), note)
            hints = get_type_hints(kind_at(group))
            groups = {name: dataclass_in(hints[name]) for name, x in fields.items() if isinstance(x, dict)}
            inner = {name: kind(**fields[name]) for name, kind in groups.items() if kind}
            init(self, *args[len(names) :], **fields | inner)

        return accept

    kinds = {group: kind_at(group) for group in REMOVED}
    before = {kind: kind.__init__ for kind in kinds.values()}
    try:
        for group, kind in kinds.items():
            kind.__init__ = accepting(before[kind], group)
        yield
    finally:
        for kind, init in before.items():
            kind.__init__ = init


def _mistake(path: Path, error: Exception) -> Exception:
    """The error of a failed config file: its line, the reason, and for an unknown field what may be meant."""
    if isinstance(error, UserError | OSError):
        return error
    if isinstance(error, SyntaxError):
        return UserError(f"{path}, line {error.lineno}: {error.msg}; expected Python: correct the file")
    frames, name = traceback.extract_tb(error.__traceback__), os.path.abspath(path)
    lines = [frame.lineno for frame in frames if os.path.abspath(frame.filename) == name]
    where = f"{path}, line {lines[-1]}" if lines else str(path)
    unknown = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    kinds = _kinds()
    if not unknown or unknown[1] not in kinds:
        return UserError(f"{where}: {type(error).__name__}: {error}; correct the file")
    fields = {name: [field.name for field in dataclasses.fields(kind)] for name, kind in kinds.items()}
    kind, field = unknown.groups()
    others = [name for name, names in fields.items() if field in names]
    if close := get_close_matches(field, fields[kind]):
        meant = f"perhaps you meant {' or '.join(close)}"
    elif others:
        meant = f"it is a field of {' and '.join(others)}: move it there"
    else:
        meant = f"its fields are {', '.join(fields[kind])}"
    return UserError(f"{where}: {kind} has no field {field!r}; {meant}")


def with_absolute_paths(config: Config, folder: str | Path, *others: str | Path) -> Config:
    """The config with absolute paths: relative ones are taken as relative to `folder`.

    others: folders for what is not in the first one and is in one of these. What exists is taken as it is,
    whatever marks its name has; ~ is the home folder.
    They are those of data sets, noises, rooms, tokenizer, train.init_from and rollout.reward_folders.
    Built-in data and tokenizers ("synthetic", "bytes") and "NAME:..." of a registered source stay as they
    are.
    """

    def places(path: str) -> list[str]:
        """The path in each of the folders, absolute."""
        return [os.path.abspath(os.path.join(place, path)) for place in (folder, *others)]

    def existing(path: str) -> str | None:
        """The first of the places where something is; None if there is none."""
        return next((place for place in places(path) if os.path.exists(place)), None)

    def absolute(path: str) -> str:
        """The path of a data set or a tokenizer, absolute; both parts of AUDIO::TARS."""
        if path in ("", "synthetic", "bytes") or is_held_out(path):
            return path
        if there := existing(path):
            return there
        path, colons, tars = path.partition("::")
        if colons:
            return f"{absolute(path)}::{absolute(tars)}"
        source, colon, rest = path.partition(":")
        if colon and source in ("manifest", "shar", "cuts", "huggingface"):
            return f"{source}:{absolute(rest)}"
        return path if re.match(r"\w+:", path) else places(expand_home(path))[0]

    def of_set(manifest: str) -> str:
        """The path of a validation set, absolute; NAME= before it stays."""
        if manifest and (there := existing(manifest)):
            return absolute(manifest) if manifest == "synthetic" or is_held_out(manifest) else there
        name, mark, path = split_name(manifest)
        return f"{name}={absolute(path)}" if mark else absolute(manifest)

    def each(paths: Any, change: Callable[[str], str]) -> Any:
        """The changed path, or a tuple of the changed paths."""
        return change(paths) if isinstance(paths, str) else tuple(map(change, paths))

    data, train = config.data, config.train
    data = replace(
        data,
        manifest=each(data.manifest, absolute),
        validation_manifest=each(data.validation_manifest, of_set),
        tokenizer=absolute(data.tokenizer),
        augment=replace(
            data.augment,
            noise_manifest=absolute(data.augment.noise_manifest),
            room_manifest=absolute(data.augment.room_manifest),
        ),
    )
    train = replace(train, init_from=each(train.init_from, absolute))
    folders = tuple(dict.fromkeys(each(config.rollout.reward_folders, absolute)))
    return replace(config, data=data, train=train, rollout=replace(config.rollout, reward_folders=folders))
