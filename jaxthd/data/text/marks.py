"""A recording and the words of its text, with two marks behind each: what a model reads whose head tells
times at marks (config.model.MarksConfig; Qwen3's forced aligner).

    <|audio_start|>RECORDING<|audio_end|>turn<timestamp><timestamp>on<timestamp><timestamp>
"""

import re
from collections.abc import Sequence
from typing import NamedTuple
from unicodedata import category

from jaxthd.data.example import NO_FIELDS, Fields, Turn
from jaxthd.data.text.joining import TAG
from jaxthd.data.text.tokenizer import Tokenizer
from jaxthd.errors import UserError

BEGIN, END, MARK = "<|audio_start|>", "<|audio_end|>", "<timestamp>"
_HAN = (
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f"
)
_WORD = re.compile(rf"[{_HAN}]|[^\s{_HAN}]+")


def marked_words(text: str) -> list[str]:
    """The words of a transcript that get marks: what stands between spaces, Han each by itself, of both the
    letters, digits and apostrophes; tags of speakers and events are no words.

    As transformers' processor for Qwen3's forced aligner divides a text of a language that is not told.
    """
    spoken = ("".join(filter(_is_spoken, word[0])) for word in _WORD.finditer(TAG.sub(" ", text)))
    return [word for word in spoken if word]


def _is_spoken(character: str) -> bool:
    return character == "'" or category(character)[0] in "LN"


class Marks(NamedTuple):
    """Token ids. mark: of the mark. recording: those written for a recording, audio_id among them."""

    mark: int
    recording: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Marks":
        """Raises UserError for a tokenizer without such tokens."""
        begin, end, mark = map(tokenizer.encode_marks, (BEGIN, END, MARK))
        if not len(begin) == len(end) == len(mark) == 1:
            raise UserError(
                f'data.template is "marks", and the tokenizer has no tokens {BEGIN}, {END} and {MARK}; '
                "expected that of an aligner: let data.tokenizer be the folder of its checkpoint, with a "
                "tokenizer.json"
            )
        return cls(mark[0], (*begin, tokenizer.audio_id, *end))


class MarksTemplate:
    """Turns -> token ids: the user's recording, then each word of the assistant's text and two marks.

    Raises UserError as Marks.of. When used, raises ValueError for turns other than a recording alone and a
    text, and for a text without words.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._marks, self.end_id = tokenizer, Marks.of(tokenizer), tokenizer.eos_id

    def prompt(self, turns: Sequence[Turn], fields: Fields = NO_FIELDS) -> list[int]:
        """Token ids of the recording. fields: not used."""
        if len(turns) != 1 or [isinstance(part, str) for part in turns[0].parts] != [False]:
            raise ValueError(
                'data.template "marks" writes a recording and its text; expected a recording alone from the '
                "user, and a text from the assistant: set data.prompt to the placeholder alone, and take "
                "other turns away"
            )
        return list(self._marks.recording)

    def written(self, turns: Sequence[Turn], fields: Fields = NO_FIELDS) -> tuple[list[int], list[bool]]:
        """Returns (token ids of the conversation, which of them are marks)."""
        ids, text = self.prompt(turns[:-1]), "".join(str(part) for part in turns[-1].parts)
        words = marked_words(text)
        if turns[-1].role != "assistant" or not words:
            raise ValueError("its text has no word; expected one with letters or digits")
        mark = self._marks.mark
        for word in words:
            ids += [*self._tokenizer.encode(word), mark, mark]
        return ids, [token == mark for token in ids]
