"""A config file of jaxthd: Python text of a translated experiment."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from jaxthd.config.listing import kind_at
from jaxthd.nemo.model import ModelText
from jaxthd.nemo.translation import Code, Setting, Translation

_HEAD = '''\
"""{name} as a config of jaxthd, written by `jaxthd import-config`.

Behind a setting stand the keys of NeMo's that it comes from.
"""

from dataclasses import replace
from pathlib import Path

from jaxthd.config import {kinds}
from jaxthd.hf.checkpoint import model_config
from jaxthd.models.front_ends import {front_end}

HERE = Path(__file__).parent
{checkpoints}


def model() -> ModelConfig:
    """The sizes are those of the checkpoints."""
    encoder = {front_end}({encoder})
    found = model_config({read}, model=ModelConfig(encoder=encoder, adapter_bias=True))
    encoder, llm = found.encoder, found.llm
    return replace(found, encoder={reading}, llm={mtp})


def config() -> Config:
    """Relative paths are of this file's folder."""
    return Config(
'''
GROUPS = ("mesh", "data", "compute", "adapt", "train")
"""Groups of settings, in the order of the file."""


def config_text(translation: Translation, model: ModelText) -> str:
    """The file, which runs as it is where the checkpoints and the data are."""
    settings = translation.settings
    groups = [name for name in GROUPS if any(path.startswith(f"{name}.") for path in settings)]
    inner = {path.rpartition(".")[0] for path in settings if path.count(".") > 1}
    kinds = {"Config", "ModelConfig", *(kind_at(name).__name__ for name in (*groups, *inner))}
    names = ["LLM"] + ["ENCODER"] * bool(model.encoder)
    paths = {"LLM": model.llm, "ENCODER": model.encoder}
    lines = [f"    {line}" for name in groups for line in _group(name, settings)]
    lines.insert(_place(groups, lines), "        model=model(),")
    head = _HEAD.format(
        name=translation.experiment.path.name,
        kinds=", ".join(sorted(kinds)),
        checkpoints="\n".join(f"{name} = str(HERE / {_python(paths[name])})" for name in names),
        front_end=type(model.front_end).__name__,
        encoder=", ".join(f"{name}={_python(value)}" for name, value in of_encoder(model).items()),
        read=", ".join(names),
        reading=model.reading,
        mtp=model.mtp,
    )
    return "\n".join([head + "\n".join(lines), "    )", ""])


def of_encoder(model: ModelText) -> dict[str, Any]:
    """The settings of the front end that are not its defaults."""
    given, usual = asdict(model.front_end), asdict(type(model.front_end)())
    return {name: value for name, value in given.items() if value != usual[name]}


def _place(groups: list[str], lines: list[str]) -> int:
    """Where the model stands: behind the data."""
    closing = [number for number, line in enumerate(lines) if line == "        ),"]
    return closing[groups.index("data")] + 1


def _group(path: str, settings: Mapping[str, Setting]) -> Iterator[str]:
    """The lines of a group of settings, with those inside it."""
    name = path.rpartition(".")[2]
    yield f"    {name}={kind_at(path).__name__}("
    own = {key: x for key, x in settings.items() if key.startswith(f"{path}.")}
    inner = dict.fromkeys(key.removeprefix(f"{path}.").partition(".")[0] for key in own)
    for each in inner:
        if f"{path}.{each}" in own:
            setting = own[f"{path}.{each}"]
            source = f"  # {setting.source}" if setting.source else ""
            yield f"        {each}={_python(setting.value)},{source}"
        else:
            yield from (f"    {line}" for line in _group(f"{path}.{each}", settings))
    yield "    ),"


def _python(value: Any) -> str:
    """A value in Python, texts in double quotes."""
    if isinstance(value, tuple):
        inner = ", ".join(map(_python, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, str) and not isinstance(value, Code):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
