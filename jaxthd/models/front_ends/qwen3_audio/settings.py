"""The settings of Qwen3's audio encoder, its features, and what the rest of the program asks of it. Without
jax: the loader's workers import it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Float32

from jaxthd.config.findings import Finding, multiples
from jaxthd.config.front_end import FrontEnd, Piece, register_front_end
from jaxthd.config.values import DERIVED
from jaxthd.files.tensor_names import Arrays, Below, Table
from jaxthd.models.front_ends.log_mel import HOP
from jaxthd.models.front_ends.whisper.tensors import BLOCK
from jaxthd.models.front_ends.whisper_mel import WINDOW, filter_faults, finish, log_mel

CHUNK, OUTPUTS = 100, 13
"""Mel frames of a chunk, which is convolved alone, and the outputs that three halvings leave of them."""
_LEAST = 8000
"""Samples: shorter recordings are filled up with zeros, which count."""
_GROUPS = {"attention": "attention", "up": "feed-forward", "down": "feed-forward"}


def halved(size: Any) -> Any:
    """Frames or bands that three convolutions of stride 2 leave of so many: of an integer, or of an array of
    them."""
    for _ in range(3):
        size = (size + 1) // 2
    return size


@dataclass(frozen=True, kw_only=True)
class Qwen3Audio(FrontEnd):
    """Qwen3's audio encoder: convolutions of each second alone, Transformer blocks over windows of some."""

    title = "Qwen3 audio"
    module = "jaxthd.models.front_ends.qwen3_audio.module:Qwen3AudioEncoder"
    longest_setting = "model.encoder.chunks"
    reads_recordings = True
    feature_settings = ("mel_bands", "chunks", "filled")
    kind: Annotated[Literal["qwen3_audio"], DERIVED] = "qwen3_audio"
    mel_bands: int = 128
    """Mel bands of the features."""
    channels: int = 480
    """Channels of the convolutions."""
    layers: int = 4
    """Transformer blocks."""
    dim: int = 128
    """Model dim."""
    heads: int = 4
    """Attention heads."""
    ffn_dim: int = 512
    """Inner dim of the feed-forward module."""
    chunks: int = 8
    """Seconds of a window, inside which outputs attend to each other. A property of the model, not of the
    mesh."""
    filled: bool = True
    """Whether zeros fill up a recording of less than a second like the last second of others, and one of less
    than half a second to half of one, which counts (Qwen3-ASR). Else nothing is behind it (Qwen3-Omni)."""

    @property
    def width(self) -> int:
        return self.mel_bands

    @property
    def bands(self) -> int:
        return self.mel_bands

    @property
    def unit(self) -> tuple[int, int]:
        return CHUNK, OUTPUTS

    @property
    def longest(self) -> int:
        return CHUNK * self.chunks

    def pieces(self, samples: int) -> list[Piece]:
        frames, found = self._filled(samples) // HOP, []
        for start in range(0, frames, self.longest):
            own = min(frames - start, self.longest)
            tokens = own // CHUNK * OUTPUTS + halved(own % CHUNK)
            found.append(Piece(0, start, own, 0, tokens, min(own, max(samples // HOP - start, 0))))
        return found

    def features(
        self, samples: Float32[np.ndarray, " S"], dither: np.random.Generator | None
    ) -> list[Float32[np.ndarray, "F W"]]:
        size = self._filled(len(samples))
        if not len(samples) or size < WINDOW:
            raise ValueError(f"{len(samples)} samples; expected {1 if self.filled else WINDOW} or more")
        return [finish(log_mel(samples, self.mel_bands, size // HOP, size))]

    def _filled(self, samples: int) -> int:
        return max(samples, _LEAST) if self.filled else samples

    def faults(self, where: str) -> Iterator[Finding]:
        """Checks the features, and sizes that are divided."""
        yield from filter_faults(f"{where}.mel_bands", self.mel_bands)
        if self.dim % self.heads or self.dim % 2:
            yield Finding(
                f"{where}.dim is {self.dim} with {self.heads} heads",
                f"an even multiple of {where}.heads ({self.heads})",
                f"set {where}.dim to {multiples(self.dim, 2 * self.heads)}, or change {where}.heads",
            )

    def tensors(self) -> Table:
        channels, bands = self.channels, halved(self.mel_bands)

        def taps(name: str, inputs: int) -> Arrays:
            """3 x 3 taps, on disk [out, in, bands, frames]; here [frames, bands, in, out]."""
            return Arrays((name,), view=(channels, inputs, 3, 3), order=(3, 2, 1, 0), tail=(inputs, 3, 3))

        flattened = Arrays(
            ("stem.out.w",), view=(self.dim, channels, bands), order=(2, 1, 0), tail=(channels * bands,)
        )
        return {
            "conv2d1.weight": taps("stem.convs.0.w", 1),
            "conv2d1.bias": "stem.convs.0.bias",
            "conv2d2.weight": taps("stem.convs.1.w", channels),
            "conv2d2.bias": "stem.convs.1.bias",
            "conv2d3.weight": taps("stem.convs.2.w", channels),
            "conv2d3.bias": "stem.convs.2.bias",
            "conv_out.weight": flattened,
            "layers.{}.": Below("transformer.blocks.", BLOCK, over="norm1.weight"),
            "ln_post": "transformer.norm",
        }

    def parameters(self, path: Sequence[str]) -> tuple[str, int]:
        if list(path[:2]) != ["transformer", "blocks"]:
            return ("LayerNorms" if "norm" in path else path[0]), 1
        return _GROUPS.get(str(path[2]), "LayerNorms"), self.layers


register_front_end(Qwen3Audio)
