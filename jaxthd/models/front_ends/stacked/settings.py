"""The settings of the stacked front end, its features, and what the rest of the program asks of it. Without
jax: the loader's workers import it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from jaxtyping import Float32, Float64

from jaxthd.config.findings import Finding, multiples
from jaxthd.config.front_end import FrontEnd, Piece, register_front_end
from jaxthd.config.values import DERIVED
from jaxthd.models.front_ends.log_mel import DITHER, HOP, mel_filterbank, normalised, raw_log_mel


@dataclass(frozen=True, kw_only=True)
class Stacked(FrontEnd):
    """Mel frames, stacked, a linear layer, Transformer blocks (the speech encoder of Nemotron Transcribe,
    2026).

    Log-mel features are normalised over the recording. Longer recordings are encoded in chunks; a chunk reads
    some outputs' frames of its neighbours too, and gives its own outputs alone.
    """

    title = "stacked"
    divisible = "frames"
    module = "jaxthd.models.front_ends.stacked.module:StackedEncoder"
    longest_setting = "model.encoder.chunk_outputs"
    feature_settings = ("mel_bands", "stack", "chunk_outputs", "context_outputs", "bfloat16_filters")
    read_with_others: ClassVar[tuple[str, ...]] = ("chunk_outputs", "context_outputs")
    kind: Annotated[Literal["stacked"], DERIVED] = "stacked"
    mel_bands: int = 128
    """Mel bands of the features."""
    stack: int = 8
    """Mel frames of an output, side by side."""
    layers: int = 4
    """Transformer blocks."""
    dim: int = 128
    """Model dim."""
    heads: int = 4
    """Attention heads."""
    head_dim: int = 32
    """Dim of a head."""
    ffn_dim: int = 512
    """Inner dim of the feed-forward module."""
    rope_theta: float = 1e4
    """Base of the rotary position embedding; positions count from the first output that a chunk reads."""
    rope_fraction: float = 0.5
    """Share of a head's features that are rotated, from the first on."""
    qk_norm: bool = True
    """Whether queries and keys have a LayerNorm, each head by itself, before they are rotated."""
    chunk_outputs: int = 500
    """Outputs of a chunk (500: 40 s). A property of the model, not of the mesh."""
    context_outputs: tuple[int, int] = (50, 50)
    """Outputs that a chunk reads before and after its own."""
    bfloat16_filters: bool = False
    """Whether the window and the mel filters are rounded to bfloat16."""

    @property
    def width(self) -> int:
        return self.mel_bands

    @property
    def bands(self) -> int:
        return self.mel_bands

    @property
    def unit(self) -> tuple[int, int]:
        return self.stack, 1

    @property
    def longest(self) -> int:
        return (self.chunk_outputs + sum(self.context_outputs)) * self.stack

    def pieces(self, samples: int) -> list[Piece]:
        frames, (left, right) = samples // HOP, self.context_outputs
        outputs = -(-frames // self.stack)
        found = []
        for begin in range(0, outputs, self.chunk_outputs):
            end = min(begin + self.chunk_outputs, outputs)
            first = max(begin - left, 0)
            start, stop = first * self.stack, min((end + right) * self.stack, frames)
            owned = min(end * self.stack, frames) - begin * self.stack
            found.append(Piece(0, start, stop - start, begin - first, end - begin, owned))
        return found

    def features(
        self, samples: Float32[np.ndarray, " S"], dither: np.random.Generator | None
    ) -> list[Float32[np.ndarray, "F W"]]:
        return [normalised(self.raw_features(samples, dither)).astype(np.float32)]

    def raw_features(
        self, samples: Float32[np.ndarray, " S"], dither: np.random.Generator | None
    ) -> Float64[np.ndarray, "F M"]:
        """Log-mel features of a recording before they are normalised. Raises ValueError as `features`."""
        amplitude = 0.0 if dither is None else DITHER
        return raw_log_mel(samples, self.mel_bands, amplitude, dither, rounded=self.bfloat16_filters)

    def faults(self, where: str) -> Iterator[Finding]:
        """Checks the features, and the rotated part of a head."""
        try:
            mel_filterbank(self.mel_bands)
        except ValueError as error:
            yield Finding(str(error), "bands wide enough for the spectrum", f"set {where}.mel_bands to 128")
        if min(self.context_outputs) < 0:
            yield Finding(
                f"{where}.context_outputs is {self.context_outputs}",
                "two numbers of outputs, 0 or more",
                f"correct {where}.context_outputs",
            )
        rotated = int(self.head_dim * self.rope_fraction)
        # Of an odd number one more is rotated, as in transformers.
        if not 0 < rotated + rotated % 2 <= self.head_dim or self.rope_theta <= 1:
            yield Finding(
                f"{where}.rope_fraction is {self.rope_fraction}, {rotated} of {self.head_dim} features, and "
                f"rope_theta {self.rope_theta:g}",
                f"pairs of features, of 2 to {self.head_dim}, and a base above 1",
                f"change {where}.rope_fraction, or set {where}.head_dim to {multiples(self.head_dim, 4)}",
            )

    def parameters(self, path: Sequence[str]) -> tuple[str, int]:
        if path[0] != "blocks":
            return path[0], 1
        name = str(path[1])
        return "LayerNorms" if name.startswith("norm") else name, self.layers


register_front_end(Stacked)
