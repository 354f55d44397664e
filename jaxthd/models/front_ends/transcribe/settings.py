"""The settings of the transcribe front end, its features, and what the rest of the program asks of it.

Without jax: the loader's workers import it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Float32

from jaxthd.config.findings import Finding
from jaxthd.config.front_end import Piece, SpeakerSegment, register_front_end
from jaxthd.config.values import DERIVED, Index, Share
from jaxthd.files.tensor_names import Table
from jaxthd.models.front_ends.log_mel import HOP, normalised
from jaxthd.models.front_ends.stacked.settings import Stacked
from jaxthd.models.front_ends.transcribe.labels import Labeller, WordTimes
from jaxthd.models.front_ends.transcribe.tensors import encoder_table


@dataclass(frozen=True, kw_only=True)
class SpeakerCache:
    """The diarizer's memory of a recording beyond a chunk: outputs of its embedding, from the latest
    ones in a queue, and for each speaker the clearest ones of all before, in the cache."""

    queue: int = 40
    """Outputs in the queue."""
    moved: int = 300
    """Outputs that leave the queue for the cache when it overflows, or as many as it has too many."""
    size: int = 188
    """Outputs in the cache."""
    silence: Index = 1
    """Outputs of each speaker's in a full cache that are the learnt silence."""
    least_probability: Share = 0.25
    """Probabilities count as this where they are less, in an output's score."""
    latest_boost: float = 0.05
    """Addition to the scores of outputs that come from the queue."""
    strong_share: float = 0.75
    """Outputs of a speaker whose scores rise by 2 ln 2, over its share of the cache."""
    weak_share: float = 1.5
    """Outputs of a speaker whose scores rise by ln 2, over its share of the cache."""
    positive_share: float = 0.5
    """With as many positive scores of a speaker, over its share of the cache, the others do not count."""

    def share(self, speakers: int) -> int:
        """Outputs of each speaker's in a full cache, but for its silence."""
        return self.size // speakers - self.silence


@dataclass(frozen=True, kw_only=True)
class Diarizer:
    """Says which of the speakers is heard when: stacked frames, Transformer blocks, a head with the frames'
    own rate. It does not train: its answers are yes or no."""

    layers: int = 2
    """Transformer blocks."""
    dim: int = 64
    """Model dim."""
    heads: int = 4
    """Attention heads."""
    head_dim: int = 16
    """Dim of a head; all of it is rotated."""
    ffn_dim: int = 256
    """Inner dim of the feed-forward module."""
    rope_theta: float = 1e4
    """Base of the rotary position embedding."""
    head_inner: int = 32
    """Dim of the layers behind the blocks."""
    speakers: int = 8
    """The most speakers of a recording, in the order in which they are heard first."""
    cache: SpeakerCache = field(default_factory=SpeakerCache)


@dataclass(frozen=True, kw_only=True)
class Transcribe(Stacked):
    """A stacked encoder beside a diarizer, whose speakers are added to its outputs (the speech encoder of
    Nemotron 3.5 Transcribe, 2026).

    A frame holds the bands normalised over the recording, which the encoder reads; the bands as they are,
    which the diarizer reads; and the speakers that the data names, if it does. The diarizer goes through a
    recording chunk by chunk, and remembers speakers from one to the next.
    """

    title = "transcribe"
    module = "jaxthd.models.front_ends.transcribe.module:TranscribeEncoder"
    read_with_others = (*Stacked.read_with_others, "float32", "word_times.loss")
    reads_recordings = True
    is_wide = True
    kind: Annotated[Literal["transcribe"], DERIVED] = "transcribe"  # type: ignore[assignment]
    bfloat16_filters: bool = True
    """Whether the window and the mel filters are rounded to bfloat16."""
    diarizer: Diarizer = field(default_factory=Diarizer)
    threshold: Share = 0.5
    """A speaker is heard in an output of which the diarizer gives it a larger probability."""
    word_times: WordTimes = field(default_factory=WordTimes)
    float32: bool = True
    """Whether encoder and adapter compute in float32 where compute.dtype is narrower, as published; the
    diarizer always does."""

    @property
    def width(self) -> int:
        return 2 * self.mel_bands + 1

    def pieces(self, samples: int) -> list[Piece]:
        """A recording of whole outputs has one more, of zeros: the diarizer's convolution reads it."""
        found, frames, right = super().pieces(samples), samples // HOP, self.context_outputs[1]
        outputs = frames // self.stack
        if frames % self.stack:
            return found

        def padded(piece: Piece) -> Piece:
            """The piece, with the zeros if it reaches them."""
            begin = piece.start // self.stack + piece.first
            reaches = begin + self.chunk_outputs + right > outputs
            return piece._replace(frames=piece.frames + 1, padding=1) if reaches else piece

        return [padded(piece) for piece in found]

    def features(
        self, samples: Float32[np.ndarray, " S"], dither: np.random.Generator | None
    ) -> list[Float32[np.ndarray, "F W"]]:
        mel_FM, bands = self.raw_features(samples, dither), self.mel_bands
        padding = int(len(mel_FM) % self.stack == 0)
        found_FW = np.zeros((len(mel_FM) + padding, self.width), np.float32)
        found_FW[: len(mel_FM), :bands] = normalised(mel_FM)
        found_FW[: len(mel_FM), bands:-1] = mel_FM
        found_FW[:, -1] = UNKNOWN
        return [found_FW]

    def with_speakers(
        self, runs: list[Float32[np.ndarray, "F W"]], segments: Sequence[SpeakerSegment]
    ) -> list[Float32[np.ndarray, "F W"]]:
        """Speakers are numbered as they are heard first. An output has a speaker who speaks in more than
        `threshold` of its frames. Raises ValueError for more speakers than the diarizer has."""
        numbers: dict[str, int] = {}
        for segment in sorted(segments):
            numbers.setdefault(segment.speaker, len(numbers))
        if len(numbers) > self.diarizer.speakers:
            raise ValueError(
                f"{len(numbers)} speakers are named; expected at most {self.diarizer.speakers} "
                "(model.encoder.diarizer.speakers)"
            )
        (run_FW,) = runs
        frames, units = len(run_FW), self.units(len(run_FW))
        time_F, heard_FS = self.seconds(1) * np.arange(frames), np.zeros((units * self.stack, len(numbers)))
        for segment in segments:
            is_inside_F = (time_F >= segment.start) & (time_F < segment.end)
            heard_FS[:frames, numbers[segment.speaker]] += is_inside_F
        heard_ES = np.minimum(heard_FS, 1).reshape(units, self.stack, -1).sum(1)
        share_ES = heard_ES / np.minimum(frames - self.stack * np.arange(units), self.stack)[:, None]
        bits_E = ((share_ES > self.threshold) * 2 ** np.arange(len(numbers))).sum(-1)
        named_FW = run_FW.copy()
        named_FW[:, -1] = np.repeat(bits_E, self.stack)[:frames]
        return [named_FW]

    def faults(self, where: str) -> Iterator[Finding]:
        """Checks the blocks of all three parts, and the speaker cache."""
        yield from super().faults(where)
        for name, part in (("diarizer", self.diarizing), ("word_times", self.timing)):
            if part is not None:
                yield from part.faults(f"{where}.{name}")
        cache, speakers, at = self.diarizer.cache, self.diarizer.speakers, f"{where}.diarizer"
        if speakers > MOST_SPEAKERS:
            yield Finding(
                f"{at}.speakers is {speakers}", f"at most {MOST_SPEAKERS}", f"set it to {MOST_SPEAKERS}"
            )
        if cache.size < (1 + cache.silence) * speakers:
            yield Finding(
                f"{at}.cache.size is {cache.size} with {speakers} speakers and {cache.silence} outputs of "
                "silence for each",
                "room for each speaker's silence, and one output of it",
                f"set {at}.cache.size to {(1 + cache.silence) * speakers} or more",
            )
        if self.dim % 2:
            expected = "an even number, because half of a speaker's embedding are sines, half cosines"
            yield Finding(f"{where}.dim is {self.dim}", expected, f"set {where}.dim to {self.dim + 1}")
        words = self.word_times
        if words.classes and words.blank >= words.classes:
            yield Finding(
                f"{where}.word_times.blank is {words.blank} of {words.classes} classes",
                "one of the classes, from 0 on",
                f"correct {where}.word_times.blank",
            )

    @property
    def diarizing(self) -> Stacked:
        """The diarizer's encoder, as one by itself."""
        of = self.diarizer
        return Stacked(
            mel_bands=self.mel_bands,
            stack=self.stack,
            layers=of.layers,
            dim=of.dim,
            heads=of.heads,
            head_dim=of.head_dim,
            ffn_dim=of.ffn_dim,
            rope_theta=of.rope_theta,
            rope_fraction=1.0,
            qk_norm=False,
            chunk_outputs=self.chunk_outputs,
            context_outputs=self.context_outputs,
        )

    @property
    def timing(self) -> Stacked | None:
        """The blocks of the head for word times, as those of an encoder; None without such a head."""
        of = self.word_times
        if not of.classes:
            return None
        return Stacked(
            mel_bands=self.mel_bands,
            layers=of.layers,
            dim=self.dim,
            heads=of.heads,
            head_dim=of.head_dim,
            ffn_dim=of.ffn_dim,
            rope_theta=of.rope_theta,
            rope_fraction=of.rope_fraction,
        )

    @property
    def label_loss(self) -> float:
        return self.word_times.loss if self.word_times.classes else 0.0

    @property
    def labels_per_output(self) -> int:
        return self.word_times.upsampling if self.label_loss else 0

    def labeller(self, tokenizer: str) -> Labeller:
        return Labeller(tokenizer, self.word_times)

    @property
    def aligning(self) -> "Transcribe | None":
        if not self.word_times.classes or self.word_times.loss:
            return self if self.word_times.classes else None
        return replace(self, word_times=replace(self.word_times, loss=1.0))

    def tensors(self) -> Table:
        upsampling = self.word_times.upsampling if self.word_times.classes else 0
        return encoder_table(self.dim, self.diarizer.head_inner, self.stack, upsampling)

    def parameters(self, path: Sequence[str]) -> tuple[str, int]:
        of_part = {"diarizer": self.diarizer.layers, "word_times": self.word_times.layers}
        if path[0] in of_part:
            is_block = "blocks" in path
            return path[0].replace("_", " "), of_part[path[0]] if is_block else 1
        return super().parameters(path)


UNKNOWN = -1
"""Stands in the last number of a frame where the data does not say who speaks; else each speaker's bit is set
there."""
MOST_SPEAKERS = 24
"""The most speakers whose bits a float32 holds."""

register_front_end(Transcribe)
