"""Texts between a recording's audio tokens (FrontEnd.marks), as tokens."""

from collections.abc import Iterable

from jaxthd.config.front_end import FrontEnd
from jaxthd.data.text.tokenizer import Tokenizer


def mark_ids(
    front_end: FrontEnd, tokenizer: Tokenizer, audio_tokens: Iterable[int]
) -> list[list[tuple[int, list[int]]]]:
    """(the number of audio tokens before it, its token ids) of each mark of each recording. audio_tokens: of
    each."""
    return [
        [(before, tokenizer.encode(text)) for before, text in front_end.marks(tokens)]
        for tokens in audio_tokens
    ]
