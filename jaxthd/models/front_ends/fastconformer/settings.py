"""The settings of FastConformer, its features, and what the rest of the program asks of it. Without jax: the
loader's workers import it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float32

from jaxthd.config.findings import Finding, multiples
from jaxthd.config.front_end import SAMPLE_RATE, FrontEnd, Piece, register_front_end
from jaxthd.config.values import DERIVED, Index, Range
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Table
from jaxthd.models.front_ends.fastconformer.tensors import encoder_table
from jaxthd.models.front_ends.log_mel import DITHER, HOP, log_mel, mel_filterbank

SUBSAMPLING = 8
"""Mel frames per encoder frame: three stride-2 convolutions, each L -> (L - 1) // 2 + 1. 100 -> 13, 1000 ->
125, 3000 -> 375."""
_SHORTEST = 2 * HOP
"""Samples of the shortest chunk: two mel frames, for one has no deviation to be divided by."""
_PROBED = 6000
"""Mel frames of the longest clip that kernels are tried on where recordings are whole."""
_GROUPS = {"ffn1": "feed-forward", "ffn2": "feed-forward", "attention": "attention", "conv": "convolution"}


@dataclass(frozen=True, kw_only=True)
class FastConformer(FrontEnd):
    """FastConformer over packed log-mel frames. Each encoder chunk has log-mel features of its own."""

    title = "FastConformer"
    divisible: ClassVar[Literal["frames", "pieces", "recordings"]] = "frames"
    module = "jaxthd.models.front_ends.fastconformer.module:FastConformerEncoder"
    longest_setting = "model.encoder.chunk_seconds"
    feature_settings: ClassVar[tuple[str, ...]] = ("chunk_seconds", "num_mels")
    read_with_others = ("chunk_seconds",)
    kind: Annotated[Literal["fastconformer"], DERIVED] = "fastconformer"
    num_mels: int = 80
    """Mel bands of the features."""
    bfloat16_filters: bool = False
    """Whether the features' window and mel filters are rounded to bfloat16, as in checkpoints of NeMo that
    store them so."""
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
    output_layers: tuple[Index, ...] = ()
    """Numbers of the blocks, from 0 on, whose outputs are given side by side, in rising order; (): the last
    block's alone. A block may be named twice."""
    chunk_seconds: Annotated[float, Range(0)] = 30.0
    """Longer audio is encoded in chunks of this length, each with features of its own; 0: recordings are
    encoded whole. A property of the model, not of the mesh."""

    def reading(self, blocks: Sequence[int], *, and_last: bool = True) -> "FastConformer":
        """The settings with the outputs of these blocks, and of the last one, in the place of the last one's
        alone (NeMo's target_layer_ids and include_final_output). Blocks behind the last that is read go.

        blocks: numbers from 0 on; negative ones count from the end. Raises UserError for blocks that the
        encoder does not have.
        """
        if not blocks or not all(-self.layers <= block < self.layers for block in blocks):
            raise UserError(
                f"the outputs of blocks {list(blocks)} are asked for (target_layer_ids), of an encoder of "
                f"{self.layers} blocks; expected some of {-self.layers} to {self.layers - 1}: correct them"
            )
        read = (*sorted(block % self.layers for block in blocks), *[self.layers - 1] * and_last)
        return replace(self, output_layers=read, layers=read[-1] + 1)

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
    def output_dim(self) -> int:
        return self.dim * max(len(self.output_layers), 1)

    @property
    def longest(self) -> int | None:
        """The frames of a chunk with the longest tail that joins it."""
        return (self._chunk_samples + _SHORTEST - 1) // HOP if self.chunk_seconds else None

    @property
    def _chunk_samples(self) -> int:
        """Samples of a chunk; 0: recordings are whole."""
        return max(round(self.chunk_seconds * SAMPLE_RATE), _SHORTEST) if self.chunk_seconds else 0

    def _ends(self, samples: int) -> list[int]:
        """The sample behind each chunk's last. A tail too short for features joins the chunk before."""
        chunk = self._chunk_samples or samples + 1
        return [*range(chunk, samples - _SHORTEST + 1, chunk), samples]

    def pieces(self, samples: int) -> list[Piece]:
        ends = self._ends(samples)
        frames = [(end - start) // HOP for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        return [Piece(run, 0, n, 0, -(-n // SUBSAMPLING)) for run, n in enumerate(frames)]

    def features(
        self, samples: Float32[np.ndarray, " S"], dither: np.random.Generator | None
    ) -> list[Float32[np.ndarray, "F W"]]:
        chunks = np.split(samples, self._ends(len(samples))[:-1])
        how: dict[str, Any] = {"dither": 0.0 if dither is None else DITHER, "rng": dither}
        how["rounded"] = self.bfloat16_filters
        return [log_mel(chunk, self.num_mels, **how) for chunk in chunks]

    @property
    def features_identity(self) -> dict[str, Any]:
        """Runs from before that setting go on."""
        return super().features_identity | ({"bfloat16_filters": True} if self.bfloat16_filters else {})

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
        if 0 < self.chunk_seconds < 0.02:
            yield Finding(
                f"{where}.chunk_seconds is {self.chunk_seconds}",
                "0.02 or more, because a chunk needs two frames, or 0 for whole recordings",
                f"set {where}.chunk_seconds to 0.02 or more",
            )
        outputs, last = self.output_layers, self.layers - 1
        if outputs and (sorted(outputs) != list(outputs) or outputs[-1] != last):
            yield Finding(
                f"{where}.output_layers is {outputs} with {self.layers} blocks",
                f"numbers of blocks in rising order, the last of them {last}, because blocks behind it would "
                "have no effect",
                f"set {where}.layers to {max(outputs) + 1}, or correct {where}.output_layers",
            )

    def kernel_shapes(self, dtype: str) -> list[Any]:
        """Every rank computes all heads of its own clips."""
        from jaxthd.ops.attention.relative import RelativeShape

        longest = self.units(self.longest or _PROBED)
        return [RelativeShape(dtype, self.heads, self.dim // self.heads, longest)]

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


register_front_end(FastConformer)
