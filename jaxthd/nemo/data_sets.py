"""The data sets of a NeMo experiment, which input_cfg and the paths beside it name."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxthd.errors import UserError
from jaxthd.nemo.experiment import read_yaml
from jaxthd.nemo.translation import Translation

READ = (
    "nemo",
    "nemo_tarred",
    "lhotse",
    "lhotse_shar",
    "lhotse_as_conversation",
    "multimodal_conversation",
    "share_gpt",
    "sqa_as_conversation",
    "parquet",
)
"""Types of data sets that jaxthd reads."""
_PASSED_DOWN = ("text_field", "lang_field", "reweight_temperature")
_COLUMNS = {"text_field": "text", "audio_field": "audio", "duration_field": "duration"}
"""Keys that name a field -> its name here, which is NeMo's default too."""


class DataSet(NamedTuple):
    """One manifest. where: its entry's path in the experiment. weight: its share; None: by its size.

    tags: of the entry. columns: names of its fields, as data.columns has them.
    """

    where: str
    manifest: str
    weight: float | None
    tags: Mapping[str, Any]
    columns: tuple[str, ...]


def data_sets(translation: Translation, group: Mapping[str, Any], where: str) -> list[DataSet]:
    """The data sets of train_ds, or of a validation set. group: its keys. where: its path in the experiment.

    What is not read is listed as lost. Raises UserError if nothing is left.
    """
    temperatures = group.get("reweight_temperature")
    found = list(_entries(translation, group, where, _Temperatures.of(temperatures)))
    if not found:
        raise UserError(
            f"{where} names no data that jaxthd reads; expected input_cfg with entries of the types "
            f"{', '.join(READ)}: give one"
        )
    return found


class _Temperatures(NamedTuple):
    """reweight_temperature: one number for all levels of groups, or one for each."""

    values: tuple[float, ...]
    for_all: float = 1.0

    @classmethod
    def of(cls, given: Any) -> "_Temperatures":
        """Reads the value of a file; None: 1 for all."""
        if isinstance(given, list):
            return cls(tuple(map(float, given)))
        return cls((), 1.0 if given is None else float(given))

    @property
    def own(self) -> float:
        """The temperature of this level."""
        return self.values[0] if self.values else self.for_all

    @property
    def below(self) -> "_Temperatures":
        """The temperatures of the levels below."""
        return self._replace(values=self.values[1:])


def _entries(
    translation: Translation, entry: Mapping[str, Any], where: str, temperatures: _Temperatures
) -> Iterator[DataSet]:
    """The data sets of an entry, or of a group of entries: each weight is the product of its groups'."""
    entries = entry.get("input_cfg")
    if entries is None:
        yield from _leaf(translation, entry, where)
        return
    if isinstance(entries, str):
        entries = read_yaml(Path(entries).expanduser())
    items = [item for item in entries or [] if isinstance(item, dict)]
    for number, item in enumerate(items):
        share = _share(items, number, temperatures.own)
        passed = {name: entry[name] for name in _PASSED_DOWN if name in entry}
        inner = f"{where}.input_cfg.{number}"
        below = list(_entries(translation, passed | item, inner, temperatures.below))
        for found in below:
            own = 1 / len(below) if found.weight is None else found.weight
            yield found if share is None else found._replace(weight=share * own)


def _share(items: Sequence[Mapping[str, Any]], number: int, temperature: float) -> float | None:
    """The share of an entry among those beside it; None for one alone, which is drawn by its size."""
    if len(items) == 1:
        return None
    weights = [item.get("weight") for item in items]
    if None in weights:
        return 1 / len(items)
    raised = [float(weight) ** temperature for weight in weights if weight is not None]
    return raised[number] / math.fsum(raised)


def _leaf(translation: Translation, entry: Mapping[str, Any], where: str) -> Iterator[DataSet]:
    """The data sets of an entry that names files."""
    kind = entry.get("type", "nemo")
    if kind not in READ:
        translation.lose(f"{where}.type", kind, f"no data of this type is read, but {', '.join(READ)}")
        return
    named = next(((name, entry[name]) for name in _PATHS if entry.get(name) is not None), None)
    if named is None:
        translation.lose(where, dict(entry), f"it names no data by {', '.join(_PATHS)}")
        return
    name, given = named
    columns = tuple(
        f"{ours}={entry[theirs]}" for theirs, ours in _COLUMNS.items() if entry.get(theirs, ours) != ours
    )
    if kind == "sqa_as_conversation":
        columns = ("context=question", "text=answer")
    tags = entry.get("tags") or {}
    paths = _paths(name, given, entry.get("tarred_audio_filepaths"))
    if paths is None:
        translation.lose(f"{where}.{name}", given, "files by field are not read: name the directory")
        return
    total = math.fsum(weight for *_, weight in paths if weight is not None)
    for path, tars, weight in paths:
        if "://" in path:
            translation.lose(f"{where}.{name}", path, "nothing is read from the network: download it")
            continue
        manifest = translation.path(path)
        manifest = f"cuts:{manifest}" if name == "cuts_path" else manifest
        manifest += f"::{translation.path(tars)}" if tars else ""
        yield DataSet(where, manifest, weight and weight / total, tags, columns)


_PATHS = ("shar_path", "cuts_path", "manifest_filepath")
"""Keys that name data, the first that is given counts, as in NeMo."""
_Named = tuple[str, str, float | None]
"""(path, tar files or "", weight)."""


def _paths(name: str, given: Any, tars: Any) -> list[_Named] | None:
    """The files or folders that an entry's value names; None for a mapping of fields.

    It is a path; a list of paths; or a list of [path] or [path, weight]. The tar files are like it.
    """
    if isinstance(given, dict):
        return None
    if not isinstance(given, list):
        return [(str(given), str(tars or ""), None)]
    found: list[_Named] = []
    for number, item in enumerate(given):
        path, *weight = item if isinstance(item, list) else [item]
        beside = tars[number] if isinstance(tars, list) and number < len(tars) else tars
        beside = beside[0] if isinstance(beside, list) else beside
        found.append((str(path), str(beside or ""), float(weight[0]) if weight else None))
    return found
