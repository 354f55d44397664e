"""The data sources by name, and the data sets of a run as its settings name them.

A new source is a class as jaxthd.data.sources.source.Source describes it, in a file beside this one and in
SOURCES; or anywhere else and registered with register_source, for example in the Python file of a config:

    jaxthd.register_source("mine", MySource)
    Config(data=DataConfig(manifest=("mine:what MySource makes of it", "speech.jsonl")))
"""

import os
import re
from dataclasses import replace

from jaxthd.config import DataConfig
from jaxthd.data.example import Example
from jaxthd.data.skipped import Skipped, numbered_key
from jaxthd.data.sources.lines import expand_braces
from jaxthd.data.sources.manifest import ManifestSource
from jaxthd.data.sources.shar import SharSource
from jaxthd.data.sources.source import Source, SourceSetting
from jaxthd.data.sources.synthetic import SyntheticSource
from jaxthd.errors import UserError

SOURCES: dict[str, type[Source]] = {
    "manifest": ManifestSource,  # recognises everything
    "shar": SharSource,
    "synthetic": SyntheticSource,
}
"""By name. A path without a name goes to the last one that recognises it."""


def register_source(name: str, source: type[Source]) -> None:
    """Makes a data source known: settings name its data sets "NAME:PATH", or any path that it recognises.

    A source registered before under that name is replaced. Raises ValueError for a name that is not letters,
    digits and underscores.
    """
    if not re.fullmatch(r"\w+", name):
        raise ValueError(f"a data source of the name {name!r}; expected letters, digits and underscores")
    SOURCES[name] = source


def open_source(setting: SourceSetting) -> Source:
    """The data set that a setting names. Raises UserError for the name of a source that is not registered."""
    name, colon, rest = setting.path.partition(":")
    if colon and name in SOURCES:
        return SOURCES[name](setting._replace(path=rest, source=name))
    source = next(source for source in reversed(SOURCES.values()) if source.recognises(setting.path))
    files = expand_braces(setting.path)
    if source is ManifestSource and re.match(r"\w+:", setting.path) and not any(map(os.path.exists, files)):
        raise UserError(
            f"{setting.path} ({setting.field}) is no file, and {name!r} no registered data source; "
            f"expected a path, or one of {', '.join(SOURCES)} before the colon: correct {setting.field}, "
            "or register the source in the config (jaxthd.register_source)"
        )
    return source(setting)


def read_source(source: Source, data: DataConfig, number: int = 0) -> tuple[list[Example], list[Skipped]]:
    """What source.read gives, with keys that are unique in the run. number: the data set's, among several.

    Raises UserError where no item can be used, and for a key that is not of the form of Source.read.
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


def training_sources(data: DataConfig) -> list[Source]:
    """The data sets of data.manifest, with data.tarred_audio. Raises UserError where they are not as many."""
    tars = data.tarred_audio or ("",) * len(data.manifest)
    if len(tars) != len(data.manifest):
        raise UserError(
            f"data.tarred_audio names {len(tars)} tar files for {len(data.manifest)} manifests; expected one "
            'for each manifest ("" for one with plain files), or none: correct data.tarred_audio'
        )
    return [
        open_source(SourceSetting(path, "data.manifest", tar, "training"))
        for path, tar in zip(data.manifest, tars, strict=True)
    ]


def validation_sources(data: DataConfig) -> dict[str, Source]:
    """The data sets of data.validation_manifest by name, with data.validation_tarred_audio.

    Raises UserError where they are not as many.
    """
    sets, tars = data.validation_sets, data.validation_tarred_audio
    tars = (tars,) if isinstance(tars, str) else tars
    tars = ("",) * len(sets) if tars in ((), ("",)) else tars
    if len(tars) != len(sets):
        raise UserError(
            f"data.validation_tarred_audio names {len(tars)} tar files for {len(sets)} validation sets; "
            'expected one for each ("" for one with plain files), or none: correct '
            "data.validation_tarred_audio"
        )
    return {
        each.name: open_source(SourceSetting(each.path, "data.validation_manifest", tar, "validation"))
        for each, tar in zip(sets, tars, strict=True)
    }
