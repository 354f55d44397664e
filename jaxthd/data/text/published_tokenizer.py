"""The built-in tokenizers as the files that a published checkpoint has, so that others can read them."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxthd.data.text.synthetic import tokenizer_file
from jaxthd.data.text.tokenizer import ByteTokenizer

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "audio_token": "<audio>"}
"""The special tokens of both, by transformers' names, in the order of their ids from 0."""


def write_tokenizer(name: str, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json of "bytes" or "synthetic" into the folder.

    Ids are those of training. In "bytes" the texts of special tokens, which stand for themselves in training,
    become special.
    """
    text = byte_tokenizer().to_str(pretty=True) if name == "bytes" else tokenizer_file().read_text()
    (folder / "tokenizer.json").write_text(text)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
    settings |= {"clean_up_tokenization_spaces": False, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def byte_tokenizer() -> tokenizers.Tokenizer:
    """ByteTokenizer as a tokenizer of the tokenizers library: a byte-level BPE without merges."""
    vocab = {text: number for number, text in enumerate(SPECIAL.values())}
    vocab |= {sign: ByteTokenizer.first_byte + byte for byte, sign in enumerate(_signs())}
    made = tokenizers.Tokenizer(models.BPE(vocab, []))
    made.add_special_tokens(list(SPECIAL.values()))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def _signs() -> list[str]:
    """The sign that stands for each byte in a byte-level vocabulary.

    A byte that is a printable sign of Latin-1 stands for itself, the others in their order for the signs from
    256 on. Source: GPT-2's encoder, which the tokenizers library follows.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
