"""Special tokens of a Hugging Face checkpoint, from its files other than tokenizer.json. Any may be absent.

Source: transformers' tokenization_utils_base and configuration_utils.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxthd.errors import UserError

_AUDIO_ID = ("audio_token_id", "sound_context_token_id", "audio_token_index")
"""Names of audio_id in config.json: in most families; in the first Nemotron-Omni; in Qwen2-Audio."""
_ABOVE = "thinker_config"
"""Key under which the config.json of a model of several parts has the one that hears and writes."""
_TEXT_CONFIG = ("text_config", "llm_config")
"""Keys under which the config.json of a model with an audio encoder has its language model's settings."""


class SpecialTokens(NamedTuple):
    """The special tokens and the chat template of a checkpoint.

    tokens: texts by name ("bos_token" and others), under which chat templates read them.
    bos_id, eos_ids, pad_id, audio_id: from the model's files; eos_ids: all ids that end an answer.
    chat_template: its source; None without one.
    """

    tokens: Mapping[str, str] = {}
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    audio_id: int | None = None
    chat_template: str | None = None


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Reads the checkpoint's files.

    Tokens: tokenizer_config.json, then the older special_tokens_map.json. Ids: generation_config.json, then
    config.json. Chat template: chat_template.jinja, then chat_template in
    tokenizer_config.json, then chat_template.json. If files disagree, the one named first here counts; ids
    that end an answer are taken from both.
    Ids of text beyond config.json's vocabulary are passed over: a library writes those of a published
    tokenizer where a smaller model names none (transformers' Qwen3ASRConfig, GlmAsrConfig).
    Raises UserError for a file that is no JSON object, for an entry that does not have the form transformers
    writes, and for several named chat templates without a "default".
    """
    of_tokenizer, of_map = (
        _object(folder / name) for name in ("tokenizer_config.json", "special_tokens_map.json")
    )
    of_model, of_generation = (_object(folder / name) for name in ("config.json", "generation_config.json"))
    if isinstance(below := of_model.get(_ABOVE), dict):
        of_model = {**below, **of_model}
    inner = (of_model.get(name) for name in _TEXT_CONFIG)
    nested: dict[str, Any] = next((config for config in inner if isinstance(config, dict)), {})
    models = [
        (folder / "generation_config.json", of_generation),
        *((folder / "config.json", c) for c in (of_model, nested)),
    ]

    def ids(name: str) -> list[int]:
        """Returns the ids that the model's files give under a name, generation_config.json's first."""
        return [i for file, config in models for i in _ids(file, name, config.get(name))]

    size = nested.get("vocab_size") or of_model.get("vocab_size")

    def text_ids(name: str) -> list[int]:
        """Returns those ids that the model's vocabulary has."""
        return [i for i in ids(name) if not isinstance(size, int) or i < size]

    audio = next((i for name in _AUDIO_ID for i in ids(name)), None)
    return SpecialTokens(
        tokens={name: text for entries in (of_map, of_tokenizer) for name, text in _tokens(entries)},
        bos_id=next(iter(text_ids("bos_token_id")), None),
        eos_ids=tuple(dict.fromkeys(text_ids("eos_token_id"))),
        pad_id=next(iter(text_ids("pad_token_id")), None),
        audio_id=audio,
        chat_template=_chat_template(folder, of_tokenizer),
    )


def _object(file: Path) -> dict[str, Any]:
    """The file's JSON object; {} without a file."""
    if not file.is_file():
        return {}
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(entries, dict):
            raise ValueError(f"a JSON {type(entries).__name__}, not an object")
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{file} cannot be read ({error}); expected the JSON object that transformers writes: put the "
            "checkpoint's own file there"
        ) from error
    return entries


def _tokens(entries: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of every entry that names a token, and of those in extra_special_tokens."""
    extra = entries.get("extra_special_tokens")
    for name, token in (*(extra.items() if isinstance(extra, dict) else ()), *entries.items()):
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str) and text:
            yield name, text


def _ids(file: Path, name: str, value: Any) -> list[int]:
    found = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in found):
        raise UserError(f"{file}: {name} is {value!r}; expected a token id or several: correct the file")
    return found


def _chat_template(folder: Path, of_tokenizer: Mapping[str, Any]) -> str | None:
    own = folder / "chat_template.jinja"
    if own.is_file():
        try:
            return own.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{own} is no UTF-8 text ({error}): put the checkpoint's own file there"
            ) from error
    for name, entries in (
        ("tokenizer_config.json", of_tokenizer),
        ("chat_template.json", _object(folder / "chat_template.json")),
    ):
        found = entries.get("chat_template")
        if isinstance(found, list):
            found = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        if isinstance(found, dict):
            if "default" not in found:
                raise UserError(
                    f"{folder / name} has chat templates {', '.join(map(repr, found))}; expected one of the "
                    'name "default": put the one to use into chat_template.jinja beside it'
                )
            found = found["default"]
        if found is not None:
            if not isinstance(found, str):
                raise UserError(
                    f"{folder / name}: chat_template is a JSON {type(found).__name__}; expected a string, or "
                    "a list of names and templates: correct the file"
                )
            return found
    return None
