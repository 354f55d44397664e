"""The registry of data sources, and the data sets of a run as its settings name them.

A new source is a subclass of jaxthd.data.sources.source.Source. Put it in a file beside this one and list it
in SOURCES; or put it anywhere and register it with register_source, for example in a config's Python file:

    jaxthd.register_source("mine", MySource)
    Config(data=DataConfig(manifest=("mine:what MySource makes of it", "speech.jsonl")))
"""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxthd.config import DataConfig
from jaxthd.config.data import is_held_out, split_tars
from jaxthd.data.example import Example
from jaxthd.data.skipped import Skipped, numbered_key
from jaxthd.data.sources.cuts import CutSource
from jaxthd.data.sources.held_out import Division, held_out_of
from jaxthd.data.sources.huggingface import HuggingFaceSource
from jaxthd.data.sources.lines import expand_braces
from jaxthd.data.sources.manifest import ManifestSource
from jaxthd.data.sources.shar import SharSource
from jaxthd.data.sources.source import Source, SourceSetting
from jaxthd.data.sources.synthetic import SyntheticSource
from jaxthd.errors import UserError
from jaxthd.files.paths import expand_home, path_exists

SOURCES: dict[str, type[Source]] = {
    "manifest": ManifestSource,  # recognises every path
    "cuts": CutSource,
    "shar": SharSource,
    "huggingface": HuggingFaceSource,
    "synthetic": SyntheticSource,
}
"""Sources by name. A path without a name goes to the last source that recognises it."""


def register_source(name: str, source: type[Source]) -> None:
    """Registers a data source. Settings name its data sets as "NAME:PATH", or as a path that it recognises.

    It replaces a source registered earlier under that name. Raises ValueError for a name with other
    characters than letters, digits and underscores.
    """
    if not re.fullmatch(r"\w+", name):
        raise ValueError(f"a data source of the name {name!r}; expected letters, digits and underscores")
    SOURCES[name] = source


def open_source(setting: SourceSetting) -> Source:
    """Opens the data set that a setting names. Raises UserError if the source it names is not registered.

    A path that exists is taken as it is, also one with a colon; ~ is the home folder.
    """
    name, colon, rest = setting.path.partition(":")
    if colon and name in SOURCES and not os.path.exists(setting.path):
        return SOURCES[name](setting._replace(path=expand_home(rest), source=name))
    setting = setting._replace(path=expand_home(setting.path))
    source = next(source for source in reversed(SOURCES.values()) if source.recognises(setting.path))
    files = expand_braces(setting.path)
    if source is ManifestSource and re.match(r"\w+:", setting.path) and not any(map(path_exists, files)):
        raise UserError(
            f"{setting.path} ({setting.field}) is no file, and {name!r} no registered data source; "
            f"expected a path, or one of {', '.join(SOURCES)} before the colon: correct {setting.field}, "
            "or register the source in the config (jaxthd.register_source)"
        )
    return source(setting)


def read_source(source: Source, data: DataConfig, number: int = 0) -> tuple[list[Example], list[Skipped]]:
    """Calls source.read and makes the keys unique in the run. number: the data set's number among the run's.

    Raises UserError if no item can be used, and for a key that does not have the form Source.read describes.
    """
    examples, skipped = source.read(data)
    if not examples:
        raise UserError(f"{source.title} holds nothing that can be used ({len(skipped)} items skipped)")
    items: list[Example | Skipped] = [*examples, *skipped]
    for item in items:
        if not re.match(r"\d+:", item.key):
            raise UserError(
                f"{type(source).__name__} gives an item of {source.title} the key {item.key!r}; expected "
                '"NUMBER:NAME", the number of the item first: correct the source'
            )
    if number:
        examples = [replace(example, key=numbered_key(number, example.key)) for example in examples]
        skipped = [item._replace(key=numbered_key(number, item.key)) for item in skipped]
    return examples, skipped


def training_sources(data: DataConfig, *, prompts: bool = False) -> list[Source]:
    """The data sets of data.manifest. prompts: as in SourceSetting.

    Raises UserError if data.columns is set and none of the data sets reads it.
    """
    more: dict[str, Any] = {"prompts": prompts, "columns": data.columns}
    sources = [
        open_source(SourceSetting(path, "data.manifest", tars, "training", **more))
        for path, tars in map(split_tars, data.manifest)
    ]
    if data.columns and not any(source.reads_columns for source in sources):
        raise UserError(
            f"data.columns is {' '.join(data.columns)}, and the fields of {data.manifest[0]} have their own "
            "names; expected a data set of yours in data.manifest: take data.columns out"
        )
    share = data.held_out_share
    return sources if share == 0 else Division(sources, share, data).training


def validation_sources(
    data: DataConfig, training: Sequence[Source] = (), *, prompts: bool = False
) -> dict[str, Source]:
    """The data sets of data.validation_manifest by name.

    training: training_sources, if these are read too: what is held out of them is then read with them.
    prompts: as in SourceSetting.
    """
    field = "data.validation_manifest"
    more: dict[str, Any] = {"prompts": prompts, "columns": data.columns}
    found: dict[str, Source] = {}
    for each in data.validation_sets:
        if is_held_out(each.path):
            found[each.name] = held_out_of(training or training_sources(data, prompts=prompts))
        else:
            found[each.name] = open_source(SourceSetting(each.path, field, each.tars, "validation", **more))
    return found
