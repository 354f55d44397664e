"""The built-in tokenizers as the files that a published checkpoint has, and vocabularies compared.

Others can then read them, and a run can tell whether weights trained with one tokenizer mean the same with
another.
"""

import json
import reprlib
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxthd.data.text.byte_pairs import read_tokenizer
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


_LISTED = 3


class Vocabulary(NamedTuple):
    """Tokens by id. text: those that text is made of. added: special and other added ones."""

    text: dict[int, str]
    added: dict[int, str]


def read_vocabulary(name_or_path: str | Path) -> Vocabulary | None:
    """The vocabulary of a tokenizer as data.tokenizer names it; None where no file can be read."""
    if name_or_path == "bytes":
        found = byte_tokenizer()
    else:
        path = tokenizer_file() if name_or_path == "synthetic" else Path(name_or_path)
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            found = read_tokenizer(path)
        except Exception:  # the library raises bare Exception; who uses the tokenizer reports it
            return None
    added = {number: token.content for number, token in found.get_added_tokens_decoder().items()}
    every = {number: token for token, number in found.get_vocab().items()}
    return Vocabulary({n: token for n, token in every.items() if n not in added}, added)


def other_tokens(there: Vocabulary, here: Vocabulary) -> tuple[str, str]:
    """Returns (ids that stand for another token of text here, ids whose tokens differ and are added ones on
    either side), for people; "" for none. An id that one side does not have is no difference."""
    then, now = (x.text | x.added for x in (there, here))
    differing = [n for n in sorted(then.keys() & now.keys()) if then[n] != now[n]]
    added = [n for n in differing if n in there.added or n in here.added]

    def listed(ids: list[int]) -> str:
        """Says what the first of these ids stand for on either side."""
        some = (f"{n} is {reprlib.repr(then[n])} there, {reprlib.repr(now[n])} here" for n in ids[:_LISTED])
        return ", ".join(some) + f" and {len(ids) - _LISTED} more" * (len(ids) > _LISTED)

    text = [n for n in differing if n not in there.added and n not in here.added]
    return listed(text), listed(added)
