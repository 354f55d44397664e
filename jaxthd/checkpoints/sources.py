"""Sources, which a command or a program is told to work with: config files, runs, published checkpoints."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from jaxthd.config import AdaptConfig, Config, DataConfig, ModelConfig
from jaxthd.data.text.special_tokens import read_special_tokens
from jaxthd.errors import UserError
from jaxthd.files import config_file
from jaxthd.files.paths import home_path
from jaxthd.files.run_folder import FILE, is_published, is_run, read_config, source_of
from jaxthd.hf.checkpoint import Checkpoint, model_config, open_checkpoint

LEARNING_RATE = 2e-5
"""Peak learning rate of a published model that is trained further, in place of that of a new one."""


class Settings(NamedTuple):
    """The settings of a source, and where they lie.

    path: the config file, the run's folder, or the published one. run: the run whose settings they are, with
    the @ that it was given with; None for others.
    """

    config: Config
    path: Path
    run: str | None

    @property
    def weights(self) -> list[str]:
        """The run, or the published checkpoint, as a source of weights; [] for a config file."""
        return [self.run] if self.run else [str(self.path)] if is_published(self.path) else []


def open_settings(source: str | Path) -> Settings:
    """Reads a config file (Python), the workdir of a run (also with @best or @STEP), its config.json, or a
    published checkpoint (published_config), from which training then starts.

    Raises FileNotFoundError where there is none of these; UserError as load_config of
    jaxthd/files/config_file.py, read_config and published_config do.
    """
    folder, _ = source_of(source)
    if is_published(folder):
        config = published_config([folder])
        train = replace(config.train, learning_rate=LEARNING_RATE, min_learning_rate=LEARNING_RATE / 10)
        config = replace(config, train=replace(train, init_from=(os.path.abspath(folder),)))
        return Settings(config, folder, None)
    if folder.is_dir():
        if not is_run(folder) and not (folder / FILE).is_file():
            raise UserError(
                f"{folder} holds no run; expected the workdir of one, a published checkpoint, or a config "
                "file: correct the path"
            )
        return Settings(read_config(folder), folder, str(source))
    path = home_path(source)
    if path.name == FILE and path.is_file():
        if is_published(path.parent):
            return open_settings(path.parent)
        return Settings(read_config(path.parent), path.parent, str(path.parent))
    if path.suffix == ".json" and path.is_file():
        return Settings(read_config(path), path, None)
    if not path.exists() and path.suffix != ".py":
        raise FileNotFoundError(
            f"no run at {folder}, and no config file; expected a workdir, a published checkpoint, or a file "
            "such as configs/cp2.py: correct the path"
        )
    return Settings(config_file.load_config(path), path, None)


def load_config(source: str | Path) -> Config:
    """The settings of a Python file with a function config(), of a run, or of a published checkpoint.

    source: "configs/cp2.py"; the workdir of a run, "runs/my", also with @best or @STEP, or its config.json; a
    Hugging Face folder or a .nemo archive (published_config). Relative paths that a file gives are relative
    to its folder. Raises as open_settings.
    """
    return open_settings(source).config


def published_config(sources: Sequence[str | Path], *, adapter_dim: int = 0) -> Config:
    """The settings of the model that published checkpoints make together: the model's, those of its LoRA,
    the tokenizer, and how turns are written.

    sources: Hugging Face folders, .nemo archives. adapter_dim: model.adapter_dim, where none has an adapter.
    If none has an encoder, the model is text-only. All other settings have their defaults.
    Raises UserError where no source has an LLM, and as open_checkpoint and model_config do.
    """
    found = [open_checkpoint(source) for source in sources]
    if not any(checkpoint.covers("head") for checkpoint in found):
        raise UserError(
            f"{', '.join(map(str, sources))}: no weights of an LLM; expected those of a whole model: name "
            "the LLM's checkpoint too"
        )
    has_encoder = any(checkpoint.covers("encoder.") for checkpoint in found)
    if adapter_dim and not has_encoder:
        raise UserError(
            f"--adapter-dim is {adapter_dim} and no source has an encoder; expected 0 for a text-only model: "
            "name an encoder's checkpoint too, or take --adapter-dim away"
        )
    model = ModelConfig(adapter_dim=adapter_dim) if has_encoder else ModelConfig(encoder=None)
    lora = next((checkpoint.lora for checkpoint in found[::-1] if checkpoint.lora), AdaptConfig())
    return Config(model=model_config(*sources, model=model), adapt=lora, data=_data(found))


def _data(found: Sequence[Checkpoint]) -> DataConfig:
    """The checkpoints' tokenizer, and the form of turns that their LLM was trained on."""
    of_llm = [checkpoint for checkpoint in found if checkpoint.covers("head")]
    settings = dict(of_llm[-1].family.data(of_llm[-1].fields))
    # The LLM's tokenizer counts: an encoder's folder may hold that of its CTC head.
    folders = [c.tokenizer for c in (*found, *of_llm) if c.tokenizer]
    if not folders:
        # Those of a template that a tokenizer writes count with it alone.
        of_tokenizer = settings.get("template") in ("chat_template", "mistral", "marks")
        return DataConfig(**{} if of_tokenizer else settings)
    if _hears(folders[-1]):
        settings.pop("template_source", None)
    data = DataConfig(tokenizer=os.path.abspath(folders[-1]), **settings)
    has_template = read_special_tokens(folders[-1]).chat_template is not None
    return replace(data, template="chat_template") if has_template and not settings else data


def _hears(folder: Path) -> bool:
    """Whether a template of the folder's own writes recordings: a processor's, or a tokenizer's that names
    audio. It counts before the family's."""
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and "audio" in str(json.loads(file.read_text()).get("chat_template"))
