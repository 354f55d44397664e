"""config.json: the settings of a run, kept beside its checkpoints."""

import json
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, get_args, get_type_hints

from jaxthd.config import ComputeConfig, Config, ModelConfig
from jaxthd.errors import UserError
from jaxthd.files.atomic import write_atomically

FILE = "config.json"
_COMPUTE = frozenset(ComputeConfig.__dataclass_fields__)
_RENAMED = {"mamba_chunk": "scan_chunk"}


def write_config(folder: Path, config: Config) -> None:
    write_atomically(folder / FILE, json.dumps(asdict(config), indent=2) + "\n")


def read_config(folder: Path) -> Config:
    """The settings that were written into `folder`. A field that was added since then has its default.

    Raises UserError where config.json is missing or damaged, and where it has fields that Config has not.
    """
    file = folder / FILE
    try:
        stored = json.loads(file.read_text())
        if not isinstance(stored, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read ({error}); expected the settings of the run beside it: copy it anew"
        ) from error
    refuse_older(file, stored)
    try:
        return _built(Config, stored)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{file} does not hold the settings of a run ({error}); expected what jaxthd wrote there: copy it "
            "anew"
        ) from error


def refuse_older(file: Path, stored: dict[str, Any]) -> None:
    """Raises UserError if config.json has settings of an older jaxthd, in places where they are no more.

    How a model is computed was once said in model.* and train.*; it is now said in compute.*.
    """
    older = {}
    for section in ("model", "train"):
        fields = stored.get(section)
        for name in fields if isinstance(fields, dict) else ():
            new = _RENAMED.get(name, name)
            if new in _COMPUTE and name not in _fields(section):
                older[f"{section}.{name}"] = f"compute.{new}"
    if older:
        moved = "".join(f"\n  {name}: now {new}" for name, new in older.items())
        raise UserError(
            f"{file} was written by an older jaxthd; expected the settings under the names they have now. "
            f"Fields of the older one:{moved}\n"
            "To use the run's weights or to continue it, move these fields in config.json; or go on with the "
            "jaxthd that wrote it; or start a new run in another --workdir"
        )


def _fields(section: str) -> Iterable[str]:
    return get_type_hints(get_type_hints(Config)[section])


def _built(kind: Any, fields: Any) -> Any:
    """A dataclass from its JSON object."""
    kinds = get_type_hints(kind)
    unknown = sorted(fields.keys() - kinds.keys())
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {', '.join(unknown)}")
    return kind(**{name: _value(kinds[name], value) for name, value in fields.items()})


def _value(kind: Any, value: Any) -> Any:
    """kind: a field's type, such as EncoderConfig | None."""
    for one in (kind, *get_args(kind)):
        if is_dataclass(one) and value is not None:
            return _built(one, value)
    return tuple(value) if isinstance(value, list) else value


def compare_models(path: Path, there: ModelConfig, here: ModelConfig) -> None:
    """Raises UserError where weights in `path`, of the model `there`, do not fit the model `here`.

    Multi-token prediction may be missing on one side. Weights that all depths share fit any number of depths.
    """
    then, now = (flat(asdict(model), "model.") for model in (there, here))
    free = []
    if not (there.llm.mtp_pattern and here.llm.mtp_pattern):
        free.append("model.llm.mtp_*")
    elif there.llm.mtp_shared and here.llm.mtp_shared:
        free.append("model.llm.mtp_depths")
    differing = [
        f"\n  {name}: {then.get(name)} there, {now.get(name)} here"
        for name in now | then
        if now.get(name) != then.get(name) and not any(fnmatch(name, pattern) for pattern in free)
    ]
    if differing:
        raise UserError(
            f"{path} holds weights of another model:{''.join(differing)}\n"
            "Set these fields as they are there (of published checkpoints jaxthd.hf.checkpoint.model_config "
            "reads them), or choose other weights"
        )


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested fields by dotted names. A block pattern loses its stage marks, which do not change the model."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        value = value.replace("|", "") if name == "pattern" and isinstance(value, str) else value
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found
