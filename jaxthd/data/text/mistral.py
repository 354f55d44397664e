"""Mistral's tokenizers and the form of its turns, by its own library (pip install 'jaxthd[mistral]').

A folder such as Voxtral's has a tekken.json in place of a tokenizer.json, and no chat template: the library
knows the form of the tokenizer's version. A recording alone is a request for a transcript, whose language may
be named; with text beside it, it is a turn of a chat.
"""

import io
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxthd.config.front_end import SAMPLE_RATE
from jaxthd.data.example import NO_FIELDS, Fields, Turn
from jaxthd.data.text.answers import language_of
from jaxthd.errors import UserError

FILE = "tekken.json"


def _library() -> Any:
    """The library's module of tokenizers. Raises UserError where it is not installed."""
    try:
        from mistral_common.tokens.tokenizers import mistral
    except ImportError as error:
        raise UserError(
            f"{FILE} is read by mistral-common, which cannot be imported ({error}); expected it: "
            "pip install 'jaxthd[mistral]'"
        ) from error
    return mistral


class TekkenTokenizer:
    """A tekken.json, as data/text/tokenizer.py's Tokenizer. Text never makes special tokens.

    Raises UserError for a file that mistral-common cannot read, and for one without tokens for audio.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            own: Any = _library().MistralTokenizer.from_file(str(path))
            self.instruct = own.instruct_tokenizer
            self._own = self.instruct.tokenizer
            self.audio_id = self._own.get_special_token("[AUDIO]")
            self.recording: tuple[int, ...] = (self._own.get_special_token("[BEGIN_AUDIO]"), self.audio_id)
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise UserError(
                f"{path} cannot be used ({error}); expected the tekken.json of a model that hears, such as "
                "Voxtral: copy it anew, or choose another data.tokenizer"
            ) from error
        self.pad_id, self.bos_id, self.eos_id = self._own.pad_id, self._own.bos_id, self._own.eos_id
        self.eos_ids: tuple[int, ...] = (self.eos_id,)
        self.vocab_size = self.text_vocab_size = self._own.n_words

    def encode(self, text: str) -> list[int]:
        """Returns the ids of text."""
        found: list[int] = self._own.encode(text, bos=False, eos=False)
        return found

    encode_marks = encode

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids, without special tokens."""
        return str(self._own.decode(list(ids)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Other processes read the file themselves."""
        return TekkenTokenizer, (self.path,)


class MistralTemplate:
    """Turns as mistral-common writes them.

    Raises UserError for a tokenizer without instructions of a version that hears. When used, raises
    ValueError for turns that the library refuses, such as a system turn beside a recording.
    """

    def __init__(self, tokenizer: TekkenTokenizer) -> None:
        self._tokenizer, self.end_id = tokenizer, tokenizer.eos_id
        self._encode(Turn("user", ("Is it?",)))

    def prompt(self, turns: Sequence[Turn], fields: Fields = NO_FIELDS) -> list[int]:
        """Token ids of the turns, up to where the assistant's answer begins. fields: of the manifest's
        line, which may name the recording's language (language_of)."""
        if _is_transcription(turns):
            return self._transcription(language_of(fields))
        return self._written(turns)[0]

    def written(self, turns: Sequence[Turn], fields: Fields = NO_FIELDS) -> tuple[list[int], list[bool]]:
        """Returns (token ids of the conversation, whether each is supervised)."""
        if not _is_transcription(turns[:-1]):
            return self._written(turns)
        prompt, answer = self._transcription(language_of(fields)), self._encode(turns[-1])
        return prompt + answer, [False] * len(prompt) + [True] * len(answer)

    def _written(self, turns: Sequence[Turn]) -> tuple[list[int], list[bool]]:
        has_audio = any(not isinstance(part, str) for turn in turns for part in turn.parts)
        if has_audio and any(turn.role == "system" for turn in turns):
            raise ValueError("mistral-common allows no system turn beside recordings; take it away")
        ids: list[int] = list(self._tokenizer.instruct.start())
        supervised = [False] * len(ids)
        for number, turn in enumerate(turns):
            new = self._encode(turn, is_first=number == 0, is_last=number >= len(turns) - 2)
            ids += new
            supervised += [turn.role == "assistant"] * len(new)
        return ids, supervised

    def _encode(self, turn: Turn, *, is_first: bool = True, is_last: bool = True) -> list[int]:
        from mistral_common.protocol.instruct import messages
        from mistral_common.protocol.instruct.chunk import AudioChunk, TextChunk

        instruct = self._tokenizer.instruct
        texts = [part if isinstance(part, str) else None for part in turn.parts]
        match turn.role:
            case "assistant":
                if len(texts) != 1 or not (texts[0] or "").strip():
                    raise ValueError("an answer of the assistant is empty, or not one text")
                answer: list[int] = instruct.encode_assistant_message(
                    messages.AssistantMessage(content=texts[0]), False
                )
                return answer
            case "system":
                system = messages.SystemMessage(content="".join(text or "" for text in texts))
                return list(instruct.encode_system_message(system)[0])
        chunks: list[Any] = [
            AudioChunk(input_audio=self._silence) if x is None else TextChunk(text=x) for x in texts
        ]
        found = instruct.encode_user_message(
            messages.UserMessage(content=chunks), [], is_last=is_last, is_first=is_first
        )
        return self._one_placeholder(found[0])

    def _transcription(self, language: str) -> list[int]:
        from mistral_common.protocol.transcription.request import TranscriptionRequest

        try:
            asked: dict[str, Any] = {"audio": self._silence, "language": language or None}
            request = TranscriptionRequest(**asked)
        except ValueError as error:
            raise ValueError(f"mistral-common knows no language {language!r}") from error
        return self._one_placeholder(self._tokenizer.instruct.encode_transcription(request).tokens)

    def _one_placeholder(self, ids: Sequence[int]) -> list[int]:
        """Token ids with one placeholder for each recording."""
        audio_id = self._tokenizer.audio_id
        return [x for i, x in enumerate(ids) if x != audio_id or not i or ids[i - 1] != audio_id]

    @cached_property
    def _silence(self) -> bytes:
        """A recording for the library, which counts its tokens: the encoder's are put in its place."""
        import soundfile

        with io.BytesIO() as file:
            soundfile.write(file, np.zeros(SAMPLE_RATE // 10, np.float32), SAMPLE_RATE, format="WAV")
            return file.getvalue()


def _is_transcription(turns: Sequence[Turn]) -> bool:
    """Whether the turns are a recording alone."""
    return len(turns) == 1 and len(turns[0].parts) == 1 and not isinstance(turns[0].parts[0], str)
