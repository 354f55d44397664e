"""The settings of Whisper's encoder, its features, and what the rest of the program asks of it. Without jax:
the loader's workers import it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Float32

from jaxthd.config.findings import Finding, multiples
from jaxthd.config.front_end import SAMPLE_RATE, FrontEnd, Piece, register_front_end
from jaxthd.config.values import DERIVED, Index
from jaxthd.files.tensor_names import Table
from jaxthd.models.front_ends.log_mel import HOP
from jaxthd.models.front_ends.whisper.tensors import encoder_table
from jaxthd.models.front_ends.whisper_mel import WINDOW, filter_faults, finish, log_mel

_GROUPS = {"attention": "attention", "up": "feed-forward", "down": "feed-forward"}


@dataclass(frozen=True, kw_only=True)
class Whisper(FrontEnd):
    """Whisper's encoder: two convolutions, which halve the frames, and Transformer blocks.

    A recording is encoded in windows, by themselves. What a window's outputs become, and whether the silence
    that fills the last one counts, differs between speech LLMs.
    """

    title = "Whisper"
    module = "jaxthd.models.front_ends.whisper.module:WhisperEncoder"
    longest_setting = "model.encoder.positions"
    feature_settings = (
        "mel_bands",
        "positions",
        "joined",
        "silence",
        "tail",
        "whole_features",
        "time_marks",
        "windows",
    )
    kind: Annotated[Literal["whisper"], DERIVED] = "whisper"
    mel_bands: int = 128
    """Mel bands of the features."""
    layers: int = 4
    """Transformer blocks."""
    model_dim: int = 128
    """Model dim."""
    heads: int = 4
    """Attention heads."""
    ffn_dim: int = 512
    """Inner dim of the feed-forward module."""
    positions: int = 1500
    """Outputs of the convolutions in a window, each of two mel frames (1500: 30 s)."""
    rope_theta: float = 0.0
    """Base of the rotary position embedding (GLM-ASR: 1e4); 0: a table is added."""
    rope_fraction: float = 0.5
    """Share of a head's features that are rotated, from the first on."""
    stored_positions: bool = True
    """Whether the table is stored, though it does not train; or sines that are computed (Qwen2.5-Omni)."""
    join: Literal["mean", "stack"] = "stack"
    """"mean": an audio token is the mean of outputs, before the last LayerNorm (Qwen2-Audio, Audio Flamingo
    3). "stack": it is outputs side by side, behind it (Voxtral, GLM-ASR)."""
    joined: int = 4
    """Outputs of an audio token."""
    silence: Literal["absent", "hidden", "heard"] = "heard"
    """Whether there is nothing behind the end of a recording (Qwen2.5-Omni); or silence fills the last
    window, whose outputs are hidden from the others (Qwen2-Audio), or encoded like speech (Voxtral, GLM-ASR):
    then every window costs as much as a full one."""
    tail: Literal["floor", "ceil", "window"] = "floor"
    """Audio tokens of the last window: those that the recording fills, those that it begins, or all of the
    window (Voxtral)."""
    whole_features: bool = False
    """Whether features are of the recording as a whole, with one maximum, 80 dB below which they are cut off
    (Voxtral); or of each window by itself."""
    time_marks: Index = 0
    """Seconds after which, again and again, the number of the recording's seconds so far is written between
    its audio tokens (MOSS-Transcribe-Diarize: 2); 0: none."""
    windows: Index = 0
    """Windows of a recording that are heard: what comes behind them is cut off, as the published code does
    (Qwen2-Audio: 1; GLM-ASR: 21); 0: all."""

    @property
    def width(self) -> int:
        return self.mel_bands

    @property
    def bands(self) -> int:
        return self.mel_bands

    @property
    def unit(self) -> tuple[int, int]:
        return 2 * self.joined, 1

    @property
    def positions_per_unit(self) -> int:
        return self.joined

    @property
    def dim(self) -> int:
        return self.model_dim * (self.joined if self.join == "stack" else 1)

    @property
    def longest(self) -> int:
        return self._read(2 * self.positions)

    def heard(self, samples: int) -> int:
        most = 2 * self.positions * HOP * self.windows
        return min(samples, most) if most else samples

    def marks(self, tokens: int) -> list[tuple[int, str]]:
        every = round(self.time_marks * SAMPLE_RATE) // (2 * self.joined * HOP)
        return (
            [(n, str(n // every * self.time_marks)) for n in range(every, tokens + 1, every)] if every else []
        )

    def pieces(self, samples: int) -> list[Piece]:
        found = []
        for run, frames in enumerate(self._frames(samples)):
            outputs = -(-frames // 2)
            outputs = {"floor": outputs, "ceil": outputs + self.joined - 1, "window": self.positions}[
                self.tail
            ]
            found.append(Piece(run, 0, self._read(frames), 0, outputs // self.joined, frames))
        return [piece for piece in found if piece.tokens]

    def features(
        self, samples: Float32[np.ndarray, " S"], dither: np.random.Generator | None
    ) -> list[Float32[np.ndarray, "F W"]]:
        samples = samples[: self.heard(len(samples))]
        windows, window = len(frames := self._frames(len(samples))), 2 * self.positions
        if not self.pieces(len(samples)):
            raise ValueError(
                f"{len(samples)} samples make no audio token; expected {2 * self.joined * HOP} or more"
            )
        if self.whole_features:
            mel = self._mel_of_whole(samples, windows * window)
            if self.silence == "absent":
                mel = mel[: sum(frames)]
            return np.split(mel, range(window, len(mel), window))
        found = []
        for number, read in enumerate(map(self._read, frames)):
            own = samples[number * window * HOP : (number + 1) * window * HOP]
            mel = finish(log_mel(own, self.mel_bands, min(read, window), window * HOP))
            found.append(np.pad(mel, ((0, read - len(mel)), (0, 0))))
        return found

    def _mel_of_whole(self, samples: Float32[np.ndarray, " S"], frames: int) -> Float32[np.ndarray, "F W"]:
        """Where nothing is behind a recording, the maximum is over the silence too that the published code
        fills it up with, until the last of all windows."""
        most = frames
        if self.silence == "absent":
            most = 2 * self.positions * self.windows or frames + WINDOW
        return finish(log_mel(samples, self.mel_bands, min(frames + 2, most), most * HOP))[:frames]

    def _frames(self, samples: int) -> list[int]:
        """Mel frames of the recording in each window."""
        window, frames = 2 * self.positions, -(-self.heard(samples) // HOP)
        return [min(frames - start, window) for start in range(0, frames, window)]

    def _read(self, frames: int) -> int:
        """Frames that a window with so many of the recording reads. Where silence is hidden, the convolutions
        reach two frames beyond; those behind the window's end are zeros."""
        return {"absent": frames, "hidden": frames + 2, "heard": 2 * self.positions}[self.silence]

    def faults(self, where: str) -> Iterator[Finding]:
        """Checks the features, and sizes that are divided."""
        yield from filter_faults(f"{where}.mel_bands", self.mel_bands)
        for whole, size, part, parts in (
            ("model_dim", self.model_dim, "heads", self.heads),
            ("positions", self.positions, "joined", self.joined),
        ):
            if size % parts:
                yield Finding(
                    f"{where}.{whole} is {size} with {part} {parts}",
                    f"a multiple of {parts}",
                    f"set {where}.{whole} to {multiples(size, parts)}, or change {where}.{part}",
                )
        if self.whole_features and self.silence == "hidden":
            yield Finding(
                f'{where}.whole_features is True with silence "hidden"',
                "one or the other, because frames behind a window's end would then be the next one's",
                f"take {where}.whole_features away",
            )
        if self.silence == "absent" and not self.whole_features:
            yield Finding(
                f'{where}.whole_features is False with silence "absent"',
                "features of the whole recording, whose windows have no silence of their own",
                f"set {where}.whole_features to True",
            )
        if self.windows:
            seconds = self.seconds(2 * self.positions * self.windows)
            yield Finding(
                f"{where}.windows is {self.windows}: of a recording {seconds:g} s are heard",
                "recordings of no more, because a transcript of the rest would be learnt without hearing it",
                f"set data.filter.seconds to 0 {seconds:g}, if there are longer ones",
                is_warning=True,
            )

    def tensors(self) -> Table:
        return encoder_table(self.mel_bands, self.model_dim)

    def parameters(self, path: Sequence[str]) -> tuple[str, int]:
        if list(path[:2]) != ["transformer", "blocks"]:
            return ("LayerNorms" if "norm" in path else path[0]), 1
        name = str(path[2])
        return _GROUPS.get(name, "LayerNorms"), self.layers


register_front_end(Whisper)
