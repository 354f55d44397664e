"""The settings of FastConformer, its features, and what the rest of the program asks of it. Without jax: the
loader's workers import it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Float32

from jaxthd.config.findings import Finding, multiples
from jaxthd.config.front_end import FrontEnd, Piece, register_front_end
from jaxthd.config.values import DERIVED, Range
from jaxthd.files.tensor_names import Table
from jaxthd.models.front_ends.fastconformer.tensors import encoder_table
from jaxthd.models.front_ends.log_mel import DITHER, HOP, log_mel, mel_filterbank

SUBSAMPLING = 8
"""Mel frames per encoder frame: three stride-2 convolutions, each L -> (L - 1) // 2 + 1. 100 -> 13, 1000 ->
125, 3000 -> 375."""
_GROUPS = {"ffn1": "feed-forward", "ffn2": "feed-forward", "attention": "attention", "conv": "convolution"}


@dataclass(frozen=True, kw_only=True)
class FastConformer(FrontEnd):
    """FastConformer over packed log-mel frames. Each encoder chunk has log-mel features of its own."""

    title = "FastConformer"
    divisible = "frames"
    module = "jaxthd.models.front_ends.fastconformer.module:FastConformerEncoder"
    longest_setting = "model.encoder.chunk_seconds"
    feature_settings = ("chunk_seconds", "num_mels")
    read_with_others = ("chunk_seconds",)
    kind: Annotated[Literal["fastconformer"], DERIVED] = "fastconformer"
    num_mels: int = 80
    """Mel bands of the features."""
    layers: int = 4
    """Conformer blocks."""
    dim: int = 128
    """Model dim."""
    heads: int = 4
    """Attention heads."""
    ffn_dim: int = 512
    """Inner dim of each of the two feed-forward modules."""
    conv_kernel: int = 9
    """Taps of the depthwise convolution; odd."""
    subsampling_channels: int = 64
    """Channels of the stride-2 convolutions."""
    linear_bias: bool = True
    """Biases in attention and feed-forward modules."""
    conv_bias: bool = True
    """Biases in convolution modules."""
    scale_input: bool = True
    """Multiply the subsampled features by sqrt(dim)."""
    chunk_seconds: Annotated[float, Range(0.02)] = 30.0
    """Longer audio is encoded in chunks of this length. A property of the model, not of the mesh."""

    @property
    def width(self) -> int:
        return self.num_mels

    @property
    def bands(self) -> int:
        return self.num_mels

    @property
    def unit(self) -> tuple[int, int]:
        return SUBSAMPLING, 1

    @property
    def longest(self) -> int:
        """A tail of one frame joins the chunk before it."""
        return round(self.chunk_seconds * 100) + 1

    def pieces(self, samples: int) -> list[Piece]:
        frames = [end - start for start, end in _bounds(samples // HOP, round(self.chunk_seconds * 100))]
        return [Piece(run, 0, n, 0, -(-n // SUBSAMPLING)) for run, n in enumerate(frames)]

    def features(
        self, samples: Float32[np.ndarray, " S"], dither: np.random.Generator | None
    ) -> list[Float32[np.ndarray, "F W"]]:
        bounds = _bounds(len(samples) // HOP, round(self.chunk_seconds * 100))
        chunks = np.split(samples, [HOP * end for _, end in bounds[:-1]])
        amplitude = 0.0 if dither is None else DITHER
        return [log_mel(chunk, self.num_mels, dither=amplitude, rng=dither) for chunk in chunks]

    def faults(self, where: str) -> Iterator[Finding]:
        """Checks sizes that the encoder divides."""
        mels, dim, heads, taps = self.num_mels, self.dim, self.heads, self.conv_kernel
        try:
            mel_filterbank(mels)
        except ValueError as error:
            yield Finding(str(error), "bands wide enough for the spectrum", f"set {where}.num_mels to 128")
        if mels % SUBSAMPLING:
            yield Finding(
                f"{where}.num_mels is {mels}",
                f"a multiple of {SUBSAMPLING}, because three convolutions halve the bands",
                f"set {where}.num_mels to {multiples(mels, SUBSAMPLING)}",
            )
        if dim % 2:
            expected = "an even number, because half of the position encoding are sines, half cosines"
            yield Finding(f"{where}.dim is {dim}", expected, f"set {where}.dim to {dim + 1}")
        if dim % heads:
            yield Finding(
                f"{where}.dim is {dim} with {heads} heads",
                f"a multiple of {where}.heads ({heads})",
                f"set {where}.dim to {multiples(dim, heads)}, or change {where}.heads",
            )
        if taps % 2 == 0:
            expected = "an odd number, because there are as many taps before a frame as after it"
            change = f"set {where}.conv_kernel to {taps - 1} or {taps + 1}"
            yield Finding(f"{where}.conv_kernel is {taps}", expected, change)

    def kernel_shapes(self, dtype: str) -> list[Any]:
        """Every rank computes all heads of its own clips."""
        from jaxthd.ops.attention.relative import RelativeShape

        return [RelativeShape(dtype, self.heads, self.dim // self.heads, self.units(self.longest))]

    def tensors(self) -> Table:
        return encoder_table(self.dim, self.subsampling_channels, self.num_mels // SUBSAMPLING)

    def parameters(self, path: Sequence[str]) -> tuple[str, int]:
        if path[0] != "blocks":
            return path[0], 1
        name = str(path[1])
        return _GROUPS.get(name, "LayerNorms" if name.startswith("norm") else name), self.layers

    def keeps_statistics(self, is_trained: Mapping[str, Any]) -> bool:
        """BatchNorms that are frozen normalise by their running statistics, which do not change."""
        return not any(is_trained["blocks"]["conv"]["norm"].values())


def _bounds(frames: int, chunk: int) -> list[tuple[int, int]]:
    """(first frame, the one behind the last) of each encoder chunk. A tail of one frame joins the chunk
    before."""
    ends = [*range(chunk, frames - 1, chunk), frames]
    return list(zip([0, *ends[:-1]], ends, strict=True))


register_front_end(FastConformer)
