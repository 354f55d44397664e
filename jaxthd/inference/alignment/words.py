"""Words of a transcript, and the times that aligned labels give them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxthd.config.front_end import LabelledText
from jaxthd.data.text.joining import TAG, WORD
from jaxthd.data.text.tokenizer import TextStream, Tokenizer
from jaxthd.inference.alignment.pauses import between_pauses
from jaxthd.inference.alignment.viterbi import Alignment


class TimedWord(NamedTuple):
    """A word of a recording. start, end: seconds. score: its likelihood in its frames, the geometric mean.
    speaker: the tag before it; "" without."""

    text: str
    start: float
    end: float
    score: float
    speaker: str = ""

    def line(self) -> dict[str, Any]:
        """The word as JSON."""
        found = {"word": self.text, "start": round(self.start, 3), "end": round(self.end, 3)}
        found["score"] = round(self.score, 4)
        return found | ({"speaker": self.speaker} if self.speaker else {})


class WordSpan(NamedTuple):
    """A word in a text. start, end: characters. speaker: as in TimedWord."""

    start: int
    end: int
    speaker: str


def word_spans(text: str) -> list[WordSpan]:
    """The words of a transcript, with the speakers that its tags name."""
    found, speaker, at = [], "", 0
    for tag in [*TAG.finditer(text), None]:
        end = len(text) if tag is None else tag.start()
        found += [WordSpan(*word.span(), speaker) for word in WORD.finditer(text, at, end)]
        if tag is not None:
            at = tag.end()
            speaker = tag[2] if tag[1].lower() == "spk" else speaker
    return found


def label_spans(tokenizer: Tokenizer, labels: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """(The text of token ids, the characters of each). An id with a part of a character has all of it, one
    without text none."""
    stream, text, waiting = TextStream(tokenizer), "", 0
    spans: list[tuple[int, int]] = []
    for number, label in enumerate(labels, 1):
        new, start = stream.push(label), len(text)
        if number == len(labels):
            new += stream.finish()
        if new:
            # Ids before it without text of their own are parts of its first character.
            spans += [(start, start + 1)] * waiting + [(start, start + len(new))]
            text, waiting = text + new, 0
        elif tokenizer.decode([label]):
            waiting += 1
        else:
            spans.append((start, start))
    return text, spans + [(len(text), len(text))] * waiting


class Frames(NamedTuple):
    """The audio frames of a recording. begins: the one at which each frame of CTC begins, and the end of the
    last. loudness: of each frame; None where it is not known. seconds: of a frame."""

    begins: Int[np.ndarray, " F_and_1"]
    loudness: Float[np.ndarray, " frames"] | None
    seconds: float


class LabelledWord(NamedTuple):
    """A word of a text. labels: the numbers of its labels among the text's. speaker: as in TimedWord."""

    text: str
    labels: Int[np.ndarray, " labels"]
    speaker: str


def words_of_tokens(tokenizer: Tokenizer, labels: Sequence[int]) -> list[LabelledWord]:
    """The words of a text whose tokens are its labels; those with a label."""
    text, spans = label_spans(tokenizer, labels)
    starts, ends = np.array(spans, int).reshape(-1, 2).T
    found = []
    for word in word_spans(text):
        (own,) = np.nonzero((starts < word.end) & (ends > word.start) & (ends > starts))
        if len(own):
            found.append(LabelledWord(text[word.start : word.end], own, word.speaker))
    return found


def words_in_order(words: Sequence[LabelledText]) -> list[LabelledWord]:
    """The words that have labels of their own, whose labels are the text's."""
    ends = np.cumsum([len(word.labels) for word in words], dtype=int)
    return [
        LabelledWord(word.text, np.arange(end - len(word.labels), end), word.speaker)
        for word, end in zip(words, ends.tolist(), strict=True)
        if word.labels
    ]


def timed_words(words: Sequence[LabelledWord], alignment: Alignment, frames: Frames) -> list[TimedWord]:
    """Words in time. alignment: of all labels, with frames as `frames` counts them."""
    if not words:
        return []
    of_labels = np.stack([frames.begins[alignment.first], frames.begins[alignment.last + 1]], axis=1)
    first, last = (np.stack([of_labels[word.labels[at]] for word in words]) for at in (0, -1))
    begin_W, end_W = first[:, 0], last[:, 1]
    if frames.loudness is not None:
        begin_W, end_W = between_pauses(frames.loudness, first, last)
    found = []
    for word, begin, end in zip(words, begin_W.tolist(), end_W.tolist(), strict=True):
        own = word.labels
        outputs = alignment.last[own] + 1 - alignment.first[own]
        score = float(np.exp((alignment.log_probs[own] * outputs).sum() / outputs.sum()))
        times = begin * frames.seconds, end * frames.seconds
        found.append(TimedWord(word.text, *times, score, word.speaker))
    return found
