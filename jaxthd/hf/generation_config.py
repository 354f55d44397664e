"""generation_config.json of an export: the tokens that end an answer, beside the entries it has already."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxthd.errors import UserError
from jaxthd.hf.family import TokenIds
from jaxthd.hf.fields import Fields

FILE = "generation_config.json"
_EOS = "eos_token_id"


def write_generation_config(folder: Path, tokens: TokenIds) -> None:
    """Writes the export's generation_config.json, from which transformers and vLLM take what ends an answer.

    Entries of a file that was copied there (temperature, top_p and others) stay, and so do its tokens for
    start and padding. A file that names the same end tokens is left as it is.
    Raises UserError for a file that holds no JSON object.
    """
    file = folder / FILE
    entries = _read(file)
    if set(_ids(entries.get(_EOS))) == set(tokens.eos_ids):
        return
    usual = {"bos_token_id": tokens.bos_id, "pad_token_id": tokens.pad_id}
    entries = usual | entries | {_EOS: one_or_all(tokens.eos_ids)}
    file.write_text(json.dumps(entries, indent=2) + "\n")


def added_end_tokens(original: Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The entries eos_token_id of `fields`, at any depth, that name other tokens than the original's there.

    original: the config.json that the fields are written over; its other tokens stay as they are.
    """
    found: dict[str, Any] = {}
    for name, value in fields.items():
        inner = original.get({"text_config": "llm_config"}.get(name, "")) or original.get(name) or {}
        if isinstance(value, Mapping):
            below = added_end_tokens(inner if isinstance(inner, Mapping) else {}, value)
            found |= {name: below} if below else {}
        elif name == _EOS and set(_ids(original.get(name))) != set(_ids(value)):
            found[name] = value
    if any(isinstance(value, Mapping) for value in fields.values()) and _EOS in original:
        # A composite model may repeat the ids of its language model at the top.
        found |= added_end_tokens({_EOS: original[_EOS]}, _of_language_model(fields))
    return found


def _of_language_model(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The end tokens of the language model in a composite model's fields."""
    inner = (x[_EOS] for x in fields.values() if isinstance(x, Mapping) and _EOS in x)
    return {_EOS: ids} if (ids := next(inner, None)) is not None else {}


def one_or_all(ids: Sequence[int]) -> int | list[int]:
    """Token ids as transformers writes them: one by itself, several as a list."""
    return ids[0] if len(ids) == 1 else list(ids)


def _ids(value: Any) -> Sequence[int]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _read(file: Path) -> dict[str, Any]:
    """The file's JSON object; {} without a file."""
    if not file.exists():
        return {}
    try:
        entries = json.loads(file.read_text())
        if not isinstance(entries, dict):
            raise ValueError("it is no JSON object")
    except ValueError as error:
        raise UserError(
            f"{file} cannot be read ({error}); expected the JSON object that transformers writes: put the "
            "checkpoint's own file into the folder that the tokenizer comes from"
        ) from error
    return entries
