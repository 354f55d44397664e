"""Forms of answers: what a published model writes around a transcript, and reads off its own answers.

A form is one class and one line in FORMS; data.answer names it. Sources give transcripts as they are.
"""

import re
from typing import Protocol, runtime_checkable

from jaxthd.data.example import Fields
from jaxthd.errors import UserError

_LANGUAGE_FIELDS = ("language", "lang", "source_lang")
_LANGUAGES = {
    **{"ar": "Arabic", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek", "en": "English"},
    **{"es": "Spanish", "fa": "Persian", "fi": "Finnish", "fil": "Filipino", "fr": "French", "hi": "Hindi"},
    **{"hu": "Hungarian", "id": "Indonesian", "it": "Italian", "ja": "Japanese", "ko": "Korean"},
    **{"mk": "Macedonian", "ms": "Malay", "nl": "Dutch", "pl": "Polish", "pt": "Portuguese"},
    **{"ro": "Romanian", "ru": "Russian", "sv": "Swedish", "th": "Thai", "tr": "Turkish"},
    **{"vi": "Vietnamese", "yue": "Cantonese", "zh": "Chinese"},
}


def language_of(fields: Fields) -> str:
    """The language that a manifest's line gives ("language", "lang" or "source_lang"): of a code such as
    en-US or a name such as English the code "en"; of another name that name in small letters; "": none."""
    given = next((str(fields[name]) for name in _LANGUAGE_FIELDS if fields.get(name)), "").strip().lower()
    codes = {name.lower(): code for code, name in _LANGUAGES.items()}
    code = given.replace("_", "-").partition("-")[0]
    return code if code in _LANGUAGES or len(code) == 2 else codes.get(given, given)


@runtime_checkable
class AnswerForm(Protocol):
    """The form of an answer. changes: whether it differs from the transcript."""

    changes: bool

    def write(self, text: str, fields: Fields) -> str:
        """The answer of a transcript; one that has the form already stays as it is. fields: of the manifest's
        line (Example.fields)."""
        ...

    def read(self, answer: str) -> str:
        """The transcript of an answer; an answer of another form stays as it is."""
        ...


class Plain:
    """The transcript itself."""

    changes = False

    def write(self, text: str, fields: Fields) -> str:
        return text

    def read(self, answer: str) -> str:
        return answer


class Qwen3ASR:
    """Qwen3-ASR's: language NAME<asr_text>TRANSCRIPT. The name is None where the line gives no language
    (language_of)."""

    changes = True
    mark = "<asr_text>"

    def write(self, text: str, fields: Fields) -> str:
        if self.mark in text:
            return text
        code = language_of(fields)
        return f"language {_LANGUAGES.get(code, code.title()) or None}{self.mark}{text}"

    def read(self, answer: str) -> str:
        before, mark, text = answer.partition(self.mark)
        return (text if mark else before).strip()


class AudioFlamingo3:
    """Audio Flamingo 3's: a sentence about what is said. One of the library's other sentences is read too."""

    changes = True
    openings = (
        "The spoken content of the audio is",
        "The transcription of the audio is",
        "The content of the input audio is",
    )

    def write(self, text: str, fields: Fields) -> str:
        return text if text.startswith(self.openings) else f'{self.openings[0]} "{text}".'

    def read(self, answer: str) -> str:
        text = answer.strip()
        opening = next((x for x in self.openings if text.startswith(x)), None)
        if opening is None:
            return text
        text = text.removeprefix(opening).strip().removesuffix(".").strip()
        is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
        return text[1:-1].strip() if is_quoted else text


class Moss:
    """MOSS-Transcribe-Diarize's: [START][S01]TRANSCRIPT[END] of each speaker's segments, in seconds. A
    transcript without times is one segment of the whole recording, where the line gives its duration."""

    changes = True
    segment = re.compile(r"\[[^\[\]]+\]\[S\d+\](.*?)\[[^\[\]]+\]", re.DOTALL)

    def write(self, text: str, fields: Fields) -> str:
        seconds = fields.get("duration")
        if self.segment.search(text) or not isinstance(seconds, int | float):
            return text
        return f"[0.00][S01]{text}[{seconds:.2f}]"

    def read(self, answer: str) -> str:
        return " ".join(x.strip() for x in self.segment.findall(answer)) or answer


FORMS: dict[str, AnswerForm] = {
    "plain": Plain(),
    "qwen3_asr": Qwen3ASR(),
    "audio_flamingo3": AudioFlamingo3(),
    "moss": Moss(),
}
"""The forms by name."""


def answer_form(name: str) -> AnswerForm:
    """The form of this name. Raises UserError for another."""
    if name not in FORMS:
        raise UserError(f"data.answer is {name!r}; expected one of {', '.join(FORMS)}: correct it")
    return FORMS[name]
