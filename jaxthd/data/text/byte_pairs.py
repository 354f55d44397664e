"""Tokenizers of vocab.json and merges.txt, which Qwen's authors publish with some models in place of a
tokenizer.json: what transformers' Qwen2Tokenizer makes of them (models/qwen2/tokenization_qwen2.py)."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxthd.errors import UserError
from jaxthd.files.tokenizer_files import BYTE_PAIRS, SETTINGS, has_byte_pairs

_PARTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""Parts of a text, within which bytes are paired."""


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, or of the files beside it where there is none. Raises UserError as
    read_byte_pairs, and what the library raises."""
    if not path.is_file() and has_byte_pairs(path.parent):
        return read_byte_pairs(path.parent)
    return Tokenizer.from_file(str(path))


def read_byte_pairs(folder: Path) -> Tokenizer:
    """The tokenizer of a folder that has BYTE_PAIRS. Raises UserError for files that are not of one."""
    try:
        made = Tokenizer(models.BPE.from_file(*(str(folder / name) for name in BYTE_PAIRS)))
        added = json.loads((folder / SETTINGS).read_text(encoding="utf-8")).get("added_tokens_decoder", {})
        tokens = {int(id): _token(fields) for id, fields in added.items()}
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"the tokenizer of {', '.join(BYTE_PAIRS)} and {SETTINGS} in {folder} cannot be read ({error}); "
            "expected files as transformers writes them: copy them anew"
        ) from error
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_PARTS), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    for id in sorted(tokens):
        made.add_tokens([tokens[id]])
        own = made.token_to_id(tokens[id].content)
        if own != id:
            raise UserError(
                f"{SETTINGS} in {folder} gives {tokens[id].content} the id {id}, and with {BYTE_PAIRS[0]} it "
                f"has {own}; expected files of one checkpoint: copy them anew"
            )
    return made


def _token(fields: dict[str, Any]) -> AddedToken:
    names = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return AddedToken(fields["content"], **{name: bool(fields.get(name)) for name in names})
