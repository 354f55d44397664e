"""Vocabularies of tokenizers compared: whether weights trained with one mean the same with the other."""

import reprlib
from pathlib import Path
from typing import NamedTuple

import tokenizers

from jaxthd.data.text.published_tokenizer import byte_tokenizer
from jaxthd.data.text.synthetic import tokenizer_file

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
            found = tokenizers.Tokenizer.from_file(str(path))
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
        some = (f"{n} is {reprlib.repr(then[n])} there, {reprlib.repr(now[n])} here" for n in ids[:_LISTED])
        return ", ".join(some) + f" and {len(ids) - _LISTED} more" * (len(ids) > _LISTED)

    text = [n for n in differing if n not in there.added and n not in here.added]
    return listed(text), listed(added)
