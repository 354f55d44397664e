"""Words of a transcript, and the times that aligned labels give them."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxthd.data.text.joining import WORD
from jaxthd.data.text.tokenizer import TextStream, Tokenizer
from jaxthd.inference.alignment.pauses import between_pauses
from jaxthd.inference.alignment.viterbi import Alignment

_TAG = re.compile(r"<(spk|ev|sty):([^<>]*)>", re.IGNORECASE)
"""Marks in transcripts: of a speaker, whose words follow; of an event or a style, which are no words."""


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
    for tag in [*_TAG.finditer(text), None]:
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
    """The frames of a recording. begins: the frame at which each output of the encoder begins, and the end of
    the last. loudness: of each frame; None where it is not known. seconds: of a frame."""

    begins: Int[np.ndarray, " outputs_and_1"]
    loudness: Float[np.ndarray, " frames"] | None
    seconds: float


def timed_words(
    tokenizer: Tokenizer, labels: Sequence[int], alignment: Alignment, frames: Frames
) -> list[TimedWord]:
    """The words of aligned labels, one for each output of the encoder."""
    text, spans = label_spans(tokenizer, labels)
    starts, ends = np.array(spans, int).reshape(-1, 2).T
    each = []
    for word in word_spans(text):
        (own,) = np.nonzero((starts < word.end) & (ends > word.start) & (ends > starts))
        if len(own):
            each.append((word, own))
    if not each:
        return []
    of_labels = np.stack([frames.begins[alignment.first], frames.begins[alignment.last + 1]], axis=1)
    first, last = (np.stack([of_labels[own[at]] for _, own in each]) for at in (0, -1))
    begin_W, end_W = first[:, 0], last[:, 1]
    if frames.loudness is not None:
        begin_W, end_W = between_pauses(frames.loudness, first, last)
    found = []
    for (word, own), begin, end in zip(each, begin_W.tolist(), end_W.tolist(), strict=True):
        outputs = alignment.last[own] + 1 - alignment.first[own]
        score = float(np.exp((alignment.log_probs[own] * outputs).sum() / outputs.sum()))
        times = begin * frames.seconds, end * frames.seconds
        found.append(TimedWord(text[word.start : word.end], *times, score, word.speaker))
    return found
