"""The files beside config.json and the tensors that NeMo and its vLLM plugin look for in a SALM's folder."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from jaxthd.hf.nemo_llm import BACKBONE, PUBLISHED, named_folders

AUDIO_TAG = "<|audio|>"
"""The text that stands for a recording: the only one that the plugin takes."""


def complete_folder(folder: Path, chat_template: str | None) -> None:
    """Completes an export: the LLM's config.json, a pretrained_llm that can be found, the audio tag among the
    tokenizer's tokens, and a chat template.

    chat_template: in Jinja; it is written where the folder has none. None: there is none to write.
    """
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    backbone = folder / BACKBONE
    backbone.mkdir(exist_ok=True)
    (backbone / "config.json").write_text(json.dumps(fields["llm_config"], indent=2) + "\n")
    named = str(fields.get("pretrained_llm") or "")
    is_found = any((path / "config.json").is_file() for path in named_folders(named, folder)[:1])
    if named not in PUBLISHED and not is_found:
        # The plugin looks nowhere else; NeMo looks into the backbone's folder first.
        fields["pretrained_llm"] = str(backbone.resolve())
        file.write_text(json.dumps(fields, indent=2) + "\n")
    if (folder / "tokenizer.json").is_file():
        _complete_tokenizer(folder, str(fields["audio_locator_tag"]), chat_template)


def _complete_tokenizer(folder: Path, tag: str, chat_template: str | None) -> None:
    path = folder / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    if tokenizer.token_to_id(tag) is None:
        tokenizer.add_special_tokens([tag])
        tokenizer.save(str(path))
    settings_path = folder / "tokenizer_config.json"
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if settings_path.is_file():
        settings = json.loads(settings_path.read_text())
    settings.setdefault("extra_special_tokens", {"audio_token": tag})
    if chat_template is not None and not (folder / "chat_template.jinja").exists():
        settings.setdefault("chat_template", chat_template)
    settings_path.write_text(json.dumps(settings, indent=2) + "\n")
