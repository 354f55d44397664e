"""The head for word times: its settings, and the labels that it trains on. Without jax."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import tokenizers

from jaxthd.config.front_end import LabelledText
from jaxthd.config.values import Index
from jaxthd.errors import UserError
from jaxthd.files.paths import home_path
from jaxthd.files.tokenizer_files import ALIGNMENT

_SPEAKER = re.compile(r"<spk:(\d+)>", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class WordTimes:
    """A head that finds words in time, by a CTC loss over pieces of words: several frames for each output,
    Transformer blocks, a linear layer. The text does not depend on it."""

    classes: Index = 0
    """Pieces of words, with the blank; 0: the model has no such head."""
    blank: Index = 0
    """The class that is the blank."""
    upsampling: int = 2
    """Frames of the head for each encoder frame."""
    layers: int = 2
    """Transformer blocks."""
    heads: int = 4
    """Attention heads."""
    head_dim: int = 32
    """Dim of a head."""
    ffn_dim: int = 64
    """Inner dim of the feed-forward module."""
    rope_theta: float = 1e4
    """Base of the rotary position embedding."""
    rope_fraction: float = 0.5
    """Share of a head's features that are rotated, from the first on."""
    residual_scale: float = 0.1
    """Factor on what the blocks add to the frames."""
    loss: float = 0.0
    """Weight of the head's CTC loss in training; 0: the head stays as it is."""
    most_labels: int = 400
    """Recordings whose transcripts are more pieces of words do not count in that loss."""


class Labeller:
    """Makes labels of transcripts: each word's pieces, with a space before it, speakers' tags left out.

    The pieces are those of the tokenizer in the folder ALIGNMENT beside data.tokenizer. Raises UserError
    where there is none, or one with more pieces than the head has classes.
    Source: transformers' Nemotron3_5TranscribeProcessor.align_word_timestamps.
    """

    def __init__(self, tokenizer: str, words: WordTimes) -> None:
        folder = home_path(tokenizer)
        file = (folder if folder.is_dir() else folder.parent) / ALIGNMENT / "tokenizer.json"
        if not file.is_file():
            raise UserError(
                f"there is no {file}, the alignment tokenizer of the head for word times; expected that of "
                "the published folder: correct data.tokenizer, or train without the head's loss "
                "(model.encoder.word_times.loss 0)"
            )
        self._tokenizer, self._words = tokenizers.Tokenizer.from_file(str(file)), words
        self.most = words.most_labels, "model.encoder.word_times.most_labels"
        largest = max(self._tokenizer.get_vocab().values())
        if largest >= words.classes:
            raise UserError(
                f"{file} has ids up to {largest}; expected fewer than the head's {words.classes} classes "
                "(model.encoder.word_times.classes): put the model's own tokenizer there"
            )

    def words(self, text: str) -> list[LabelledText]:
        """The words of a text, in order, those without pieces too."""
        found = []
        # A tag's number stands at every second place.
        parts = ["", *_SPEAKER.split(text.replace("\u2014", " "))]
        for speaker, part in zip(parts[::2], parts[1::2], strict=True):
            for word in part.split():
                ids = self._tokenizer.encode(f" {word}", add_special_tokens=False).ids
                found.append(LabelledText(word, [x for x in ids if x != self._words.blank], speaker))
        return found

    def __call__(self, text: str, outputs: int) -> Sequence[int]:
        """The labels of a recording with so many outputs; () for a text without any, or with too many."""
        labels = [label for word in self.words(text) for label in word.labels]
        repeats = sum(x == y for x, y in pairwise(labels))
        fits = len(labels) + repeats <= outputs * self._words.upsampling
        return labels if fits and len(labels) <= self.most[0] else ()
